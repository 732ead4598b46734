// SPDX-License-Identifier: MIT OR Apache-2.0
/* module_race SECONDS: every call from several threads while endpoints are unbound, bound, reset, removed and found again. */
#define _GNU_SOURCE
#include "module.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>

#define THREADS 3

static atomic_int over;
static atomic_ulong calls, good;

static int call(int fd, unsigned long request, void *arg)
{
	int result = ioctl(fd, request, arg);

	calls++;
	if (result == 0)
		good++;
	return result;
}

/* Rings by a doorbell page that is mapped for as long as that takes. */
static void ring_mapped(int fd, unsigned long request)
{
	struct pcieipc_doorbell doorbell = { .size = sizeof(doorbell) };

	if (call(fd, request, &doorbell))
		return;
	volatile uint8_t *page = map(fd, 4096, PROT_READ | PROT_WRITE, doorbell.map_offset);

	if (!page)
		return;
	for (int i = 0; i < 20; i++)
		*(volatile uint32_t *)(page + doorbell.page_offset) = (uint32_t)doorbell.value;
	munmap((void *)page, 4096);
}

/* One session's life, cut short wherever the dice say. */
static void live(unsigned int *seed, int all)
{
	uint32_t ids[16], count = enumerate(all, ids, 16);
	int fd = open(PCIEIPC_NODE, O_RDWR | O_CLOEXEC | O_NONBLOCK), exported = -1;

	if (fd < 0 || !count) {
		usleep(2000);
		goto out;
	}
	struct pcieipc_attach attach = { .size = sizeof(attach), .endpoint = ids[rand_r(seed) % (count > 16 ? 16 : count)] };

	if (call(fd, PCIEIPC_IOCTL_ATTACH, &attach))
		goto out;
	int bell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	int device = rand_r(seed) % 4 == 0;
	size_t bytes = 4096UL << rand_r(seed) % 6;
	struct pcieipc_channel_create create = { .size = sizeof(create), .data_bytes = bytes, .flags = device ? PCIEIPC_CHANNEL_DEVICE_MEMORY : 0 };
	struct pcieipc_channel_create second = { .size = sizeof(second), .data_bytes = bytes };
	struct pcieipc_channel_fd import = { .size = sizeof(import) };
	volatile uint8_t *data = NULL, *out = NULL;

	call(fd, PCIEIPC_IOCTL_VECTOR_EVENTFD, CALL(pcieipc_vector_eventfd, .vector = 0, .fd = bell));
	if (!call(fd, PCIEIPC_IOCTL_CHANNEL_CREATE, &create) && !call(fd, PCIEIPC_IOCTL_CHANNEL_CREATE, &second)) {
		struct pcieipc_channel_fd export = { .size = sizeof(export), .channel = create.channel };

		if (!call(fd, PCIEIPC_IOCTL_CHANNEL_EXPORT, &export)) {
			struct pcieipc_export_info info = { .size = sizeof(info) };

			exported = export.fd;
			if (!call(exported, PCIEIPC_IOCTL_EXPORT_INFO, &info))
				out = map(exported, bytes, PROT_READ | PROT_WRITE, info.data_offset);
		}
		data = map(fd, bytes, PROT_READ, create.data_offset);
		for (int i = rand_r(seed) % 40; i > 0 && !over; i--) {
			struct pcieipc_event event;

			if (out)
				out[rand_r(seed) % bytes] = 1;
			if (data)
				(void)data[rand_r(seed) % bytes];
			switch (rand_r(seed) % 18) {
			case 0:
				call(exported, PCIEIPC_IOCTL_EXPORT_RING, CALL(pcieipc_ring));
				break;
			case 1:
				call(fd, PCIEIPC_IOCTL_RING, CALL(pcieipc_ring, .vector = (uint32_t)rand_r(seed) % 8));
				break;
			case 2:
				call(fd, PCIEIPC_IOCTL_COPY, CALL(pcieipc_copy, .from = create.channel, .to = second.channel, .bytes = 4096, .timeout_ms = 500));
				break;
			case 3:
				call(fd, PCIEIPC_IOCTL_RECOVER, CALL(pcieipc_recover));
				break;
			case 4:
				calls++;
				if (read(fd, &event, sizeof(event)) == sizeof(event))
					good++;
				break;
			case 5:
				call(fd, PCIEIPC_IOCTL_STATE, CALL(pcieipc_session_state));
				break;
			case 6:
				call(fd, PCIEIPC_IOCTL_CHANNEL_FREED, CALL(pcieipc_channel, .channel = create.channel));
				wait_for(exported, POLLOUT, 0);
				break;
			case 7:
				import.fd = exported;
				call(fd, PCIEIPC_IOCTL_CHANNEL_IMPORT, &import);
				break;
			case 9:
				for (uint32_t from = 0; from < count && from < 16; from++)
					for (uint32_t to = 0; to < count && to < 16; to++)
						call(fd, PCIEIPC_IOCTL_DISTANCE, CALL(pcieipc_distance, .from = ids[from], .to = ids[to]));
				break;
			case 10:
				call(fd, PCIEIPC_IOCTL_COPY, CALL(pcieipc_copy, .flags = PCIEIPC_COPY_RING, .from = second.channel,
								  .to = rand_r(seed) % 2 ? import.channel : create.channel, .bytes = 4096,
								  .timeout_ms = 500));
				break;
			case 8:
				if (out)
					madvise((void *)out, bytes, MADV_DONTNEED);
				break;
			case 11:
				call(fd, PCIEIPC_IOCTL_QUERY, CALL(pcieipc_query, .user_version = 1, .user_oldest = 1));
				call(fd, PCIEIPC_IOCTL_ENDPOINT_INFO, CALL(pcieipc_endpoint_info, .endpoint = attach.endpoint));
				break;
			case 12:
				call(fd, PCIEIPC_IOCTL_VECTOR_EVENTFD, CALL(pcieipc_vector_eventfd, .flags = PCIEIPC_VECTOR_MASK, .fd = -2));
				call(fd, PCIEIPC_IOCTL_VECTOR_EVENTFD, CALL(pcieipc_vector_eventfd, .fd = rand_r(seed) % 2 ? bell : -1));
				break;
			case 13:
				ring_mapped(fd, PCIEIPC_IOCTL_DOORBELL_MAP);
				break;
			case 14:
				ring_mapped(exported, PCIEIPC_IOCTL_EXPORT_DOORBELL);
				break;
			case 15:
				call(exported, PCIEIPC_IOCTL_EXPORT_EVENTFD, CALL(pcieipc_export_eventfd, .fd = bell));
				break;
			case 16: {
				struct pcieipc_channel_fd shared = { .size = sizeof(shared), .channel = create.channel };

				if (!call(fd, PCIEIPC_IOCTL_CHANNEL_DMABUF, &shared))
					close(shared.fd);
				break;
			}
			case 17:
				/* A reset of whoever it is, by the worker; one at a time for all. */
				if (rand_r(seed) % 8 == 0)
					call(fd, PCIEIPC_IOCTL_ADMIN, CALL(pcieipc_admin, .action = PCIEIPC_ADMIN_RESET, .endpoint = attach.endpoint));
				break;
			}
		}
		if (rand_r(seed) % 2)
			call(fd, PCIEIPC_IOCTL_CHANNEL_DESTROY, CALL(pcieipc_channel, .channel = create.channel));
	}
	close(bell);
	close(fd);
	fd = -1;
	if (out)
		out[0] = 2;
	if (data)
		munmap((void *)data, bytes);
	if (out)
		munmap((void *)out, bytes);
out:
	if (fd >= 0)
		close(fd);
	if (exported >= 0)
		close(exported);
}

static void *player(void *argument)
{
	unsigned int seed = (unsigned int)(uintptr_t)argument;
	int all = open_node();

	while (!over)
		live(&seed, all);
	close(all);
	return NULL;
}

int main(int argc, char **argv)
{
	int seconds = argc > 1 ? atoi(argv[1]) : 10;
	pthread_t threads[THREADS];
	uint32_t ids[16];
	struct pcieipc_endpoint_info info;
	char addresses[16][32];

	setvbuf(stdout, NULL, _IOLBF, 0);
	int all = open_node();
	int count = (int)enumerate(all, ids, 16), rounds = 0;

	for (int i = 0; i < count; i++)
		snprintf(addresses[i], sizeof(addresses[i]), "%s", address_of(all, ids[i], &info));
	for (uintptr_t i = 0; i < THREADS; i++)
		pthread_create(&threads[i], NULL, player, (void *)(i + 1));
	unsigned int seed = 99;

	/* On a slow machine as much longer as a race takes. */
	double end = now() + seconds, limit = now() + 60 * patience();

	for (; now() < end || (now() < limit && (rounds <= 10 || calls <= 1000)); rounds++) {
		const char *address = addresses[rand_r(&seed) % count];

		switch (rand_r(&seed) % 4) {
		case 0:
		case 1:
			run("echo %s >/sys/bus/pci/drivers/pcieipc/unbind; echo %s >/sys/bus/pci/drivers/pcieipc/bind", address, address);
			break;
		case 2:
			run("echo 1 >/sys/bus/pci/devices/%s/reset", address);
			break;
		case 3:
			run("echo 1 >/sys/bus/pci/devices/%s/remove; echo 1 >/sys/bus/pci/rescan", address);
			break;
		}
		usleep(rand_r(&seed) % 20000);
	}
	over = 1;
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	printf("# %d rounds, %lu calls, %lu of them successful\n", rounds, calls, good);
	promise(rounds > 10 && good > calls / 10 && calls > 1000, "calls_race_unbind_reset_and_removal");
	uint32_t left = enumerate(all, ids, 16);

	promise((int)left == count, "all_endpoints_are_there_at_the_end");
	close(all);
	usleep(200000);
	promise(!run("grep -q '^channel bytes 0$' /sys/kernel/debug/pcieipc/state"), "no_memory_is_left_charged");
	run("head -2 /sys/kernel/debug/pcieipc/state | sed 's/^/# /'");
	return finish();
}
