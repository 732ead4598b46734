// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * module_profile NAME VECTORS ATTACH-ERRNO COPIES [OFFSET | memory | bells | stores]: what the first endpoint with this profile is able to do. With OFFSET,
 * where in BAR 2 the kernel writes length (+0) and address (+8) of its rings, 16 bytes each; with "memory", a channel in its own memory, too. Where the
 * doorbells are mere memory: with "bells", each in a page of its own, which may be mapped; with "stores" the last one is rung, once.
 * $RING_MS is how long a ring may take, $GENERATION that in which the endpoint has to be.
 */
#define _GNU_SOURCE
#include "module.h"

/* The device's registers as an administrator sees them, on a kernel that was told to let him (iomem=relaxed). */
static int read_bar2(const char *address, unsigned long offset, uint64_t *words)
{
	char path[128];

	snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/resource2", address);
	int memory = open(path, O_RDWR | O_SYNC | O_CLOEXEC);
	uint8_t *at = memory < 0 ? NULL : map(memory, 4096, PROT_READ, offset & ~0xfffUL);

	if (!at) {
		printf("# %s is not mapped: %s\n", path, strerror(errno));
		return 0;
	}
	memcpy(words, at + (offset & 0xfff), 16 * 4);
	munmap(at, 4096);
	close(memory);
	return 1;
}

static int tells_rings(int fd, uint32_t channel, unsigned long offset, const char *address)
{
	uint64_t told[8] = { 0 }, after[8] = { 1 };

	if (!read_bar2(address, offset, told) || !gives(fd, PCIEIPC_IOCTL_CHANNEL_DESTROY, CALL(pcieipc_channel, .channel = channel), 0) ||
	    !read_bar2(address, offset, after))
		return 0;
	printf("# told a ring of %u bytes%s; %u after it was destroyed\n", (uint32_t)told[0], told[1] ? " with an address" : "", (uint32_t)after[0]);
	return (uint32_t)told[0] == 65536 && told[1] && told[1] % 4096 == 0 && !told[2] && !told[3] && !(uint32_t)after[0] && !after[1];
}

/* A channel in the endpoint's memory: clear at first, and what its writer stores is what its reader sees, in each of its pages. */
static int has_memory(int fd)
{
	struct pcieipc_channel_create create = { .size = sizeof(create), .flags = PCIEIPC_CHANNEL_DEVICE_MEMORY, .data_bytes = 65536 };
	struct pcieipc_channel_fd export = { .size = sizeof(export) };

	if (!gives(fd, PCIEIPC_IOCTL_CHANNEL_CREATE, &create, 0))
		return 0;
	export.channel = create.channel;
	if (!gives(fd, PCIEIPC_IOCTL_CHANNEL_EXPORT, &export, 0))
		return 0;
	volatile uint64_t *writer = map(export.fd, 65536, PROT_READ | PROT_WRITE, create.data_offset);
	volatile uint64_t *reader = map(fd, 65536, PROT_READ, create.data_offset);

	if (!writer || !reader)
		return 0;
	int clear = 1, same = 1;

	for (int i = 0; i < 8192; i++)
		clear &= !reader[i];
	for (uint64_t i = 0; i < 8192; i++)
		writer[i] = i * 0x9e3779b97f4a7c15 + 1;
	__sync_synchronize();
	for (uint64_t i = 0; i < 8192; i++)
		same &= reader[i] == i * 0x9e3779b97f4a7c15 + 1;
	printf("# its memory was %sclear, and is %sthe same on both sides\n", clear ? "" : "not ", same ? "" : "not ");
	return clear && same;
}

/* Each writer maps the page of its own reader's doorbell and no other; the endpoint's session all of them. */
static int has_bells_apart(int fd, int vectors)
{
	struct pcieipc_doorbell all = { .size = sizeof(all) };
	uint64_t first;

	if (!gives(fd, PCIEIPC_IOCTL_DOORBELL_MAP, &all, 0))
		return 0;
	first = all.map_offset;
	for (int own = 0; own < vectors; own++) {
		struct pcieipc_channel_create create = { .size = sizeof(create), .data_bytes = 4096, .vector = (uint32_t)own };

		if (!gives(fd, PCIEIPC_IOCTL_CHANNEL_CREATE, &create, 0))
			return 0;
		struct pcieipc_channel_fd export = { .size = sizeof(export), .channel = create.channel };
		struct pcieipc_doorbell bell = { .size = sizeof(bell) };

		if (!gives(fd, PCIEIPC_IOCTL_CHANNEL_EXPORT, &export, 0) || !gives(export.fd, PCIEIPC_IOCTL_EXPORT_DOORBELL, &bell, 0))
			return 0;
		for (int page = 0; page <= vectors; page++) {
			uint64_t offset = first + (uint64_t)page * 4096;
			volatile uint32_t *writer = map(export.fd, 4096, PROT_READ | PROT_WRITE, offset);
			int error = writer ? 0 : errno;
			volatile uint32_t *session = map(fd, 4096, PROT_READ, offset);

			printf("# writer of vector %d, page %d: %s\n", own, page, writer ? "mapped" : strerror(error));
			if (!session != (page == vectors) || error != (page == own ? 0 : EINVAL) || (page == own && offset != bell.map_offset))
				return 0;
			if (!writer)
				continue;
			writer[bell.page_offset / 4] = 0x1000 + own;
			if (session[bell.page_offset / 4] != 0x1000u + own)
				return 0;
		}
	}
	return 1;
}

int main(int argc, char **argv)
{
	uint32_t ids[16], count, endpoint = 0;
	struct pcieipc_endpoint_info info;

	if (argc < 5)
		return 2;
	const char *limit = getenv("RING_MS"), *generation = getenv("GENERATION");
	int vectors = atoi(argv[2]), refused = atoi(argv[3]), copies = atoi(argv[4]);
	int fd = open_node();

	count = enumerate(fd, ids, 16);
	for (uint32_t i = 0; i < count && !endpoint; i++) {
		address_of(fd, ids[i], &info);
		if (!strcmp(info.profile, argv[1]))
			endpoint = ids[i];
	}
	printf("# %s: endpoint %u vectors %u flags %#x\n", argv[1], endpoint, info.vectors, info.ep_flags);
	if (!endpoint || (int)info.vectors != vectors)
		return 1;
	struct pcieipc_attach attach = { .size = sizeof(attach), .endpoint = endpoint, .generation = generation ? strtoull(generation, NULL, 0) : 0 };

	if (!gives(fd, PCIEIPC_IOCTL_ATTACH, &attach, refused))
		return 1;
	if (refused)
		return 0;
	if (argc > 5 && !strcmp(argv[5], "bells"))
		return !has_bells_apart(fd, vectors);
	if (argc > 5 && !strcmp(argv[5], "stores"))
		return !gives(fd, PCIEIPC_IOCTL_RING, CALL(pcieipc_ring, .vector = (uint32_t)vectors - 1), 0);
	struct pcieipc_channel_create create = { .size = sizeof(create), .data_bytes = 65536, .vector = (uint32_t)vectors - 1 };

	if (!gives(fd, PCIEIPC_IOCTL_CHANNEL_CREATE, &create, 0))
		return 1;
	struct pcieipc_channel_fd export = { .size = sizeof(export), .channel = create.channel };
	int bell = eventfd(0, EFD_NONBLOCK);

	if (!gives(fd, PCIEIPC_IOCTL_CHANNEL_EXPORT, &export, 0) ||
	    !gives(fd, PCIEIPC_IOCTL_VECTOR_EVENTFD, CALL(pcieipc_vector_eventfd, .vector = create.vector, .fd = bell), 0))
		return 1;
	for (int i = 0; i < 20; i++) {
		uint64_t signals;

		if (!gives(export.fd, PCIEIPC_IOCTL_EXPORT_RING, CALL(pcieipc_ring), 0) || !wait_for(bell, POLLIN, limit ? atoi(limit) : 30000) ||
		    read(bell, &signals, 8) != 8) {
			printf("# ring %d did not wake\n", i);
			return 1;
		}
	}
	if (argc > 5 && !strcmp(argv[5], "memory"))
		return !has_memory(fd);
	if (argc > 5 && !tells_rings(fd, create.channel, strtoul(argv[5], NULL, 0), address_of(fd, endpoint, &info)))
		return 1;
	if (argc > 5)
		return 0;
	uint8_t *data = map(export.fd, 65536, PROT_READ | PROT_WRITE, 0);
	struct pcieipc_copy copy = { .size = sizeof(copy), .from = 1, .to = 1, .to_offset = 32768, .bytes = 32768, .timeout_ms = 10000 };

	if (!data)
		return 1;
	memset(data, 0x3c, 32768);
	if (!gives(fd, PCIEIPC_IOCTL_COPY, &copy, copies ? 0 : EOPNOTSUPP))
		return 1;
	if (copies && memcmp(data, data + 32768, 32768))
		return 1;
	return 0;
}
