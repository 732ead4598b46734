// SPDX-License-Identifier: MIT OR Apache-2.0
/* Who holds something last, closes something first, or takes more than his share: nothing breaks, and all comes back. */
#define _GNU_SOURCE
#include "module.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>

#define BYTES (1 << 20)
#define PATIENCE_MS 60000

static long pages_held(void)
{
	char line[128] = "";
	FILE *state = fopen("/sys/kernel/debug/pcieipc/state", "r");
	long pages = -1;

	if (state && fgets(line, sizeof(line), state))
		pages = strtol(line + 6, NULL, 10);
	if (state)
		fclose(state);
	return pages;
}

static void send_fd(int socket, int fd)
{
	char byte = 0, control[CMSG_SPACE(sizeof(int))] = { 0 };
	struct iovec piece = { &byte, 1 };
	struct msghdr message = { .msg_iov = &piece, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control) };
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);

	*header = (struct cmsghdr){ .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int)) };
	memcpy(CMSG_DATA(header), &fd, sizeof(fd));
	if (sendmsg(socket, &message, 0) != 1)
		_exit(3);
}

static int receive_fd(int socket)
{
	char byte, control[CMSG_SPACE(sizeof(int))];
	struct iovec piece = { &byte, 1 };
	struct msghdr message = { .msg_iov = &piece, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control) };
	int fd = -1;

	if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC) == 1 && CMSG_FIRSTHDR(&message))
		memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(fd));
	return fd;
}

static int attach(uint32_t endpoint)
{
	int session = open_node();

	return gives(session, PCIEIPC_IOCTL_ATTACH, CALL(pcieipc_attach, .endpoint = endpoint), 0) ? session : -1;
}

static int wait_for_endpoints(int all, uint32_t *ids, uint32_t count)
{
	for (double end = now() + PATIENCE_MS * patience() / 1e3; now() < end; usleep(1000))
		if (enumerate(all, ids, 16) == count)
			return 1;
	return 0;
}

/* Session, process and device are gone; a descriptor in another process is all that is left. */
static void last_reference(int all, uint32_t endpoint)
{
	struct pcieipc_endpoint_info info;
	struct pcieipc_event event;
	char address[32];
	int sockets[2], status, before = (int)pages_held();

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets))
		exit(2);
	pid_t child = fork();

	if (!child) {
		int session = attach(endpoint);
		struct pcieipc_channel_create create = { .size = sizeof(create), .data_bytes = BYTES };

		if (session < 0 || !gives(session, PCIEIPC_IOCTL_CHANNEL_CREATE, &create, 0))
			_exit(1);
		struct pcieipc_channel_fd export = { .size = sizeof(export), .channel = create.channel };

		if (!gives(session, PCIEIPC_IOCTL_CHANNEL_EXPORT, &export, 0))
			_exit(2);
		send_fd(sockets[1], export.fd);
		pause();
	}
	int out = receive_fd(sockets[0]);

	promise(out >= 0 && pages_held() - before >= BYTES / 4096, "a_descriptor_comes_from_another_process");
	snprintf(address, sizeof(address), "%s", address_of(all, endpoint, &info));
	promise(!run("echo 1 > /sys/bus/pci/devices/%s/remove", address) && await_state(all, endpoint, PCIEIPC_STATE_GONE, PATIENCE_MS, &event) &&
		!kill(child, SIGKILL) && waitpid(child, &status, 0) == child, "device_session_and_process_are_gone");
	volatile uint64_t *data = map(out, BYTES, PROT_READ | PROT_WRITE, 0);
	int kept = data != NULL;

	for (int i = 0; i < BYTES / 8 && kept; i++)
		data[i] = (uint64_t)i * 3;
	for (int i = 0; i < BYTES / 8 && kept; i++)
		kept = data[i] == (uint64_t)i * 3;
	promise(kept, "its_memory_is_there_all_the_same");
	promise(gives(out, PCIEIPC_IOCTL_EXPORT_RING, CALL(pcieipc_ring), ENODEV) && wait_for(out, POLLOUT, 0) & POLLHUP, "it_says_that_the_endpoint_is_gone");
	close(out);
	promise(data && data[7] == 21, "a_mapping_outlives_the_descriptor");
	munmap((void *)data, BYTES);
	for (double end = now() + PATIENCE_MS * patience() / 1e3; now() < end && pages_held() - before > 0; usleep(1000))
		;
	printf("# pages held by the module: %d before, %ld now\n", before, pages_held());
	promise(pages_held() - before <= 0, "the_last_reference_gives_everything_back");
	run("echo 1 > /sys/bus/pci/rescan");
}

/* The module holds the eventfd, whoever closes it. */
static void closed_eventfds(uint32_t endpoint)
{
	int session = attach(endpoint), kept = session >= 0;
	struct pcieipc_channel_create create = { .size = sizeof(create), .data_bytes = 4096 };

	kept &= gives(session, PCIEIPC_IOCTL_CHANNEL_CREATE, &create, 0);
	struct pcieipc_channel_fd export = { .size = sizeof(export), .channel = create.channel };

	kept &= gives(session, PCIEIPC_IOCTL_CHANNEL_EXPORT, &export, 0);
	for (int round = 0; round < 200 && kept; round++) {
		int bell = eventfd(0, EFD_NONBLOCK), room = eventfd(0, EFD_NONBLOCK), again = round % 3;

		kept &= gives(session, PCIEIPC_IOCTL_VECTOR_EVENTFD, CALL(pcieipc_vector_eventfd, .vector = (uint32_t)round % 4, .fd = bell), 0) &&
			gives(export.fd, PCIEIPC_IOCTL_EXPORT_EVENTFD, CALL(pcieipc_export_eventfd, .fd = room), 0);
		if (again == 0)
			kept &= gives(session, PCIEIPC_IOCTL_RING, CALL(pcieipc_ring, .vector = (uint32_t)round % 4), 0);
		close(bell);
		close(room);
		kept &= gives(session, PCIEIPC_IOCTL_RING, CALL(pcieipc_ring, .vector = (uint32_t)round % 4), 0) &&
			gives(session, PCIEIPC_IOCTL_CHANNEL_FREED, CALL(pcieipc_channel, .channel = create.channel), 0);
		/* What took the numbers of the closed ones is somebody else's, and is not signalled. */
		int other = eventfd(0, EFD_NONBLOCK);

		kept &= other == bell && !wait_for(other, POLLIN, 1);
		close(other);
	}
	promise(kept, "eventfds_closed_under_the_module_harm_nobody");
	close(session);
	close(export.fd);
}

/* Each life of a device has a number of its own, so a node that somebody kept never opens another device. */
static void numbers(int all, uint32_t *ids)
{
	dev_t seen[64];
	int count = 0, kept = 1;
	struct pcieipc_endpoint_info info;
	char node[64], address[32];
	struct stat status;

	for (int round = 0; round < 12; round++) {
		uint32_t listed = enumerate(all, ids, 16);

		for (uint32_t i = 0; i < listed && count < 64; i++) {
			snprintf(node, sizeof(node), PCIEIPC_ENDPOINT_NODE, ids[i]);
			kept &= !stat(node, &status) && S_ISCHR(status.st_mode);
			for (int other = 0; i == 0 && other < count; other++)
				kept &= seen[other] != status.st_rdev;
			if (i == 0)
				seen[count++] = status.st_rdev;
		}
		snprintf(address, sizeof(address), "%s", address_of(all, ids[0], &info));
		if (round == 0)
			kept &= !mknod("/tmp/kept", S_IFCHR | 0600, seen[0]);
		kept &= !run("echo %s > /sys/bus/pci/drivers/pcieipc/unbind && echo %s > /sys/bus/pci/drivers/pcieipc/bind", address, address) &&
			wait_for_endpoints(all, ids, listed);
	}
	promise(kept, "device_numbers_are_not_used_again");
	promise(open("/tmp/kept", O_RDWR) < 0 && (errno == ENODEV || errno == ENXIO), "a_node_that_was_kept_opens_nothing");
}

/* The page that takes a doorbell's place is paid for like any other. */
static void doorbells_are_charged(uint32_t endpoint)
{
	int status;
	pid_t child = fork();

	if (!child) {
		struct rlimit limit = { 64 << 10, 64 << 10 };
		int session = attach(endpoint), count = 0;
		struct pcieipc_doorbell bell = { .size = sizeof(bell) };
		void *pages[64];

		if (session < 0 || !gives(session, PCIEIPC_IOCTL_DOORBELL_MAP, &bell, 0) || setrlimit(RLIMIT_MEMLOCK, &limit) || setresuid(65534, 65534, 65534))
			_exit(1);
		for (int round = 0; round < 3; round++) {
			for (count = 0; count < 64 && (pages[count] = map(session, 4096, PROT_READ | PROT_WRITE, bell.map_offset)); count++)
				;
			if (count < 8 || count > 16 || errno != ENOMEM) {
				printf("# %d doorbell pages within 64 KiB, then %s\n", count, strerror(errno));
				_exit(2);
			}
			while (count)
				munmap(pages[--count], 4096);
		}
		_exit(0);
	}
	promise(waitpid(child, &status, 0) == child && !status, "mapped_doorbells_are_charged_and_given_back");
}

int main(void)
{
	uint32_t ids[16];
	int all = open_node();

	setvbuf(stdout, NULL, _IOLBF, 0);
	uint32_t count = enumerate(all, ids, 16);

	promise(count >= 2, "endpoints_are_there");
	closed_eventfds(ids[0]);
	doorbells_are_charged(ids[0]);
	last_reference(all, ids[1]);
	promise(wait_for_endpoints(all, ids, count), "the_device_comes_back");
	numbers(all, ids);
	return finish();
}
