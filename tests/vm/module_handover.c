// SPDX-License-Identifier: MIT OR Apache-2.0
/* module_handover: an endpoint passes from one session to the next, and from one binding to the next, while something is under way. */
#define _GNU_SOURCE
#include "module.h"

#include <pthread.h>
#include <stdatomic.h>

#define VECTORS 7
#define PASSES 300

static uint32_t endpoint;

static int attach(int fd)
{
	struct pcieipc_attach call = { .size = sizeof(call), .endpoint = endpoint };

	return ioctl(fd, PCIEIPC_IOCTL_ATTACH, &call) ? errno : 0;
}

/* Takes the endpoint as soon as it is free, and is woken by its own doorbell. Gives the session, or -1. */
static int take_over(void)
{
	int fd = open_node(), bell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), error;
	double end = now() + 5;
	uint64_t count;

	do
		error = attach(fd);
	while (error == EBUSY && now() < end);
	int woken = !error &&
		    gives(fd, PCIEIPC_IOCTL_VECTOR_EVENTFD, CALL(pcieipc_vector_eventfd, .vector = VECTORS - 1, .fd = bell), 0);

	/* The session before may still be ending. */
	usleep(1000);
	woken = woken && gives(fd, PCIEIPC_IOCTL_RING, CALL(pcieipc_ring, .vector = VECTORS - 1), 0) && wait_for(bell, POLLIN, 2000) &&
		read(bell, &count, 8) == 8;
	close(bell);
	if (woken)
		return fd;
	printf("# attach %s\n", strerror(error));
	close(fd);
	return -1;
}

static void *successor(void *fd)
{
	*(int *)fd = take_over();
	return NULL;
}

/* Every vector has an eventfd that only its session holds, so that ending the session takes its time. */
static void hold_vectors(int fd)
{
	for (uint32_t vector = 0; vector < VECTORS; vector++) {
		int bell = eventfd(0, EFD_CLOEXEC);

		ioctl(fd, PCIEIPC_IOCTL_VECTOR_EVENTFD, CALL(pcieipc_vector_eventfd, .vector = vector, .fd = bell));
		close(bell);
	}
}

/* What /dev/aer_inject takes. */
struct aer_error {
	uint8_t bus, device, function;
	uint32_t uncorrectable, correctable, header[4], domain;
};

static atomic_int over;
static atomic_uint injected;

static void *inject(void *error)
{
	while (!over) {
		int fd = open("/dev/aer_inject", O_WRONLY);

		if (fd >= 0 && write(fd, error, sizeof(struct aer_error)) == sizeof(struct aer_error))
			injected++;
		if (fd >= 0)
			close(fd);
	}
	return NULL;
}

int main(void)
{
	struct pcieipc_endpoint_info info;
	char address[32];
	uint32_t ids[16];
	pthread_t thread;
	int passes = 0;

	setvbuf(stdout, NULL, _IOLBF, 0);
	int all = open_node();

	if (!enumerate(all, ids, 16))
		return 1;
	endpoint = ids[0];
	snprintf(address, sizeof(address), "%s", address_of(all, endpoint, &info));
	int held = take_over();

	for (; held >= 0 && passes < PASSES; passes++) {
		int next = -1;

		hold_vectors(held);
		if (pthread_create(&thread, NULL, successor, &next))
			break;
		usleep(500);
		close(held);
		pthread_join(thread, NULL);
		held = next;
	}
	promise(passes == PASSES && held >= 0, "a_session_that_takes_over_keeps_the_eventfds_that_it_sets");
	close(held);

	struct aer_error error = { .bus = info.address >> 8 & 0xff, .device = info.address >> 3 & 0x1f, .function = info.address & 7,
				   .correctable = 0x40, .domain = info.address >> 16 };
	int bound = !pthread_create(&thread, NULL, inject, &error);

	for (int i = 0; i < 30 && bound; i++)
		bound = !run("echo %s > /sys/bus/pci/drivers/pcieipc/unbind", address) &&
			!run("echo %s > /sys/bus/pci/drivers/pcieipc/bind", address);
	over = 1;
	pthread_join(thread, NULL);
	printf("# %u errors injected\n", injected);
	promise(bound && injected > 30, "correctable_errors_race_unbind");
	uint32_t count = enumerate(all, ids, 16);

	endpoint = count ? ids[count - 1] : 0;
	held = take_over();
	promise(held >= 0, "the_endpoint_works_after_that");
	close(held);
	return finish();
}
