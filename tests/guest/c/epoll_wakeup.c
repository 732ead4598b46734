// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * A C program that knows nothing of the module but uapi/pcieipc.h: two processes, a channel between them, and the
 * reader asleep in epoll until the writer rings.
 */
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pcieipc.h"

enum { ROUNDS = 20, BYTES = 65536, LIMIT_MS = 10000 };

static void check(int good, const char *what)
{
	if (good)
		return;
	printf("not ok 1 a_c_program_is_woken_in_epoll\n# %s: %s\n", what, strerror(errno));
	exit(1);
}

static void *map(int fd, uint64_t offset, size_t bytes, int protection)
{
	void *address = mmap(NULL, bytes, protection, MAP_SHARED, fd, (off_t)offset);

	check(address != MAP_FAILED, "mmap");
	return address;
}

/* The writer's whole world is the exported descriptor. */
static int write_rounds(int exported)
{
	struct pcieipc_export_info info = { .size = sizeof(info) };
	struct pcieipc_ring ring = { .size = sizeof(ring) };
	_Atomic uint64_t *data, *tail, *head;

	check(!ioctl(exported, PCIEIPC_IOCTL_EXPORT_INFO, &info), "EXPORT_INFO");
	check(info.data_bytes == BYTES, "data_bytes");
	data = map(exported, info.data_offset, info.data_bytes, PROT_READ | PROT_WRITE);
	tail = map(exported, info.tail_offset, (size_t)getpagesize(), PROT_READ | PROT_WRITE);
	head = map(exported, info.head_offset, (size_t)getpagesize(), PROT_READ);
	for (uint64_t round = 1; round <= ROUNDS; round++) {
		for (size_t word = 0; word < BYTES / 8; word++)
			data[word] = round * 1000003 + word;
		tail[0] = round;
		check(!ioctl(exported, PCIEIPC_IOCTL_EXPORT_RING, &ring), "EXPORT_RING");
		for (int waited = 0; head[0] != round; waited++) {
			check(waited < LIMIT_MS, "the reader does not answer");
			usleep(1000);
		}
	}
	return 0;
}

int main(void)
{
	struct pcieipc_query query = {
		.size = sizeof(query), .user_version = PCIEIPC_ABI_VERSION, .user_oldest = PCIEIPC_ABI_OLDEST,
	};
	__u32 id = 0;
	struct pcieipc_enumerate list = { .size = sizeof(list), .ids = (uintptr_t)&id, .count = 1 };
	struct pcieipc_attach attach = { .size = sizeof(attach) };
	struct pcieipc_channel_create create = { .size = sizeof(create), .data_bytes = BYTES, .vector = 2 };
	struct pcieipc_vector_eventfd vector = { .size = sizeof(vector), .vector = 2 };
	struct pcieipc_channel_fd export = { .size = sizeof(export) };
	struct epoll_event event = { .events = EPOLLIN };
	const _Atomic uint64_t *data, *tail;
	_Atomic uint64_t *head;
	int node, epoll, status;
	pid_t writer;

	printf("KTAP version 1\n1..1\n");
	fflush(stdout);
	node = open(PCIEIPC_NODE, O_RDWR | O_CLOEXEC);
	check(node >= 0, PCIEIPC_NODE);
	check(!ioctl(node, PCIEIPC_IOCTL_QUERY, &query), "QUERY");
	check(!ioctl(node, PCIEIPC_IOCTL_ENUMERATE, &list) && list.count >= 1, "ENUMERATE");
	attach.endpoint = id;
	check(!ioctl(node, PCIEIPC_IOCTL_ATTACH, &attach), "ATTACH");
	check(!ioctl(node, PCIEIPC_IOCTL_CHANNEL_CREATE, &create), "CHANNEL_CREATE");
	data = map(node, create.data_offset, BYTES, PROT_READ);
	tail = map(node, create.tail_offset, (size_t)getpagesize(), PROT_READ);
	head = map(node, create.head_offset, (size_t)getpagesize(), PROT_READ | PROT_WRITE);
	vector.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	check(vector.fd >= 0, "eventfd");
	check(!ioctl(node, PCIEIPC_IOCTL_VECTOR_EVENTFD, &vector), "VECTOR_EVENTFD");
	epoll = epoll_create1(EPOLL_CLOEXEC);
	check(epoll >= 0 && !epoll_ctl(epoll, EPOLL_CTL_ADD, vector.fd, &event), "epoll");
	export.channel = create.channel;
	check(!ioctl(node, PCIEIPC_IOCTL_CHANNEL_EXPORT, &export), "CHANNEL_EXPORT");

	writer = fork();
	check(writer >= 0, "fork");
	if (writer == 0)
		_exit(write_rounds(export.fd));
	for (uint64_t round = 1; round <= ROUNDS; round++) {
		uint64_t rung = 0;

		check(epoll_wait(epoll, &event, 1, LIMIT_MS) == 1, "epoll_wait");
		check(read(vector.fd, &rung, sizeof(rung)) == sizeof(rung) && rung == 1, "one interrupt for one doorbell");
		check(tail[0] == round, "the tail is there before the doorbell");
		for (size_t word = 0; word < BYTES / 8; word++)
			check(data[word] == round * 1000003 + word, "the data is there before the doorbell");
		head[0] = round;
	}
	check(waitpid(writer, &status, 0) == writer && WIFEXITED(status) && WEXITSTATUS(status) == 0, "the writer");
	printf("ok 1 a_c_program_is_woken_in_epoll\n");
	return 0;
}
