/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* What the C programs that test the module share: promises in the form that the rig reads, and calls with the errno they must give. */
#ifndef MODULE_H
#define MODULE_H

#include "pcieipc.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static int number, failed;

static inline void promise(int kept, const char *name)
{
	printf("%sok %d %s%s%s\n", kept ? "" : "not ", ++number, name, kept ? "" : " # errno ", kept ? "" : strerror(errno));
	failed |= !kept;
}

/* The last line of a program. */
static inline int finish(void)
{
	printf("1..%d\n", number);
	return failed;
}

/* A call and the errno that it must give, 0 for success. */
static inline int gives(int fd, unsigned long call, void *arg, int expected)
{
	int result = ioctl(fd, call, arg);
	int got = result < 0 ? errno : 0;

	if (got != expected)
		printf("# call %#lx gave %d (%s), not %d\n", call, got, strerror(got), expected);
	errno = got;
	return got == expected;
}

#define CALL(type, ...) (&(struct type){ .size = sizeof(struct type), __VA_ARGS__ })

static inline int open_node(void)
{
	int fd = open(PCIEIPC_NODE, O_RDWR | O_CLOEXEC);

	if (fd < 0) {
		printf("Bail out! cannot open %s: %s\n", PCIEIPC_NODE, strerror(errno));
		exit(1);
	}
	return fd;
}

static inline void *map(int fd, size_t bytes, int protection, uint64_t offset)
{
	void *at = mmap(NULL, bytes, protection, MAP_SHARED, fd, (off_t)offset);

	return at == MAP_FAILED ? NULL : at;
}

/* By how much bounds are longer here than on a quiet host: the rig says so. All that wait here multiply by it themselves. */
static inline int patience(void)
{
	const char *text = getenv("PATIENCE");
	int times = text ? atoi(text) : 1;

	return times > 0 ? times : 1;
}

static inline short wait_for(int fd, short events, int ms)
{
	struct pollfd poller = { .fd = fd, .events = events };

	return poll(&poller, 1, ms * patience()) == 1 ? poller.revents : 0;
}

static inline int write_file(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY);
	int written = fd >= 0 && write(fd, text, strlen(text)) >= 0;

	if (!written)
		printf("# cannot write %s: %s\n", path, strerror(errno));
	if (fd >= 0)
		close(fd);
	return written;
}

static inline int run(const char *format, ...)
{
	char command[512];
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(command, sizeof(command), format, arguments);
	va_end(arguments);
	return system(command);
}

static inline double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

/* The endpoints' ids; returns how many. */
static inline uint32_t enumerate(int fd, uint32_t *ids, uint32_t room)
{
	struct pcieipc_enumerate list = { .size = sizeof(list), .ids = (uintptr_t)ids, .count = room };

	return ioctl(fd, PCIEIPC_IOCTL_ENUMERATE, &list) ? 0 : list.count;
}

/* An endpoint's PCI address as sysfs writes it. */
static inline const char *address_of(int fd, uint32_t endpoint, struct pcieipc_endpoint_info *info)
{
	static char text[32];

	*info = (struct pcieipc_endpoint_info){ .size = sizeof(*info), .endpoint = endpoint };
	ioctl(fd, PCIEIPC_IOCTL_ENDPOINT_INFO, info);
	snprintf(text, sizeof(text), "%04x:%02x:%02x.%x", info->address >> 16, info->address >> 8 & 0xff, info->address >> 3 & 0x1f, info->address & 7);
	return text;
}

/* Reads events until one of this kind (and first detail, unless it is -1) comes; 0 when none came in time. */
static inline int await_event(int fd, uint32_t kind, int64_t detail, int ms, struct pcieipc_event *event)
{
	double end = now() + ms * patience() / 1e3;

	while (now() < end)
		if (wait_for(fd, POLLIN, 100) & POLLIN && read(fd, event, sizeof(*event)) == sizeof(*event)) {
			printf("# event %llu kind %u endpoint %u generation %llu: %llu %llu\n", (unsigned long long)event->sequence, event->kind,
			       event->endpoint, (unsigned long long)event->generation, (unsigned long long)event->detail[0],
			       (unsigned long long)event->detail[1]);
			if (event->kind == kind && (detail < 0 || event->detail[0] == (uint64_t)detail))
				return 1;
		}
	return 0;
}

/* Waits for a change of an endpoint into this state. */
static inline int await_state(int fd, uint32_t endpoint, uint32_t state, int ms, struct pcieipc_event *event)
{
	double end = now() + ms * patience() / 1e3;

	while (now() < end)
		if (await_event(fd, PCIEIPC_EVENT_STATE, -1, (int)((end - now()) * 1e3 / patience()), event) && event->endpoint == endpoint &&
		    event->detail[1] == state)
			return 1;
	return 0;
}

#endif
