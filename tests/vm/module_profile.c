// SPDX-License-Identifier: MIT OR Apache-2.0
/* module_profile NAME VECTORS ATTACH-ERRNO COPIES: what the first endpoint with this profile is able to do. */
#define _GNU_SOURCE
#include "module.h"

int main(int argc, char **argv)
{
	uint32_t ids[16], count, endpoint = 0;
	struct pcieipc_endpoint_info info;

	if (argc < 5)
		return 2;
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
	struct pcieipc_attach attach = { .size = sizeof(attach), .endpoint = endpoint };

	if (!gives(fd, PCIEIPC_IOCTL_ATTACH, &attach, refused))
		return 1;
	if (refused)
		return 0;
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

		if (!gives(export.fd, PCIEIPC_IOCTL_EXPORT_RING, CALL(pcieipc_ring), 0) || !wait_for(bell, POLLIN, 2000) ||
		    read(bell, &signals, 8) != 8) {
			printf("# ring %d did not wake\n", i);
			return 1;
		}
	}
	uint8_t *data = map(export.fd, 65536, PROT_READ | PROT_WRITE, 0);
	struct pcieipc_copy copy = { .size = sizeof(copy), .from = 1, .to = 1, .to_offset = 32768, .bytes = 32768, .timeout_ms = 3000 };

	if (!data)
		return 1;
	memset(data, 0x3c, 32768);
	if (!gives(fd, PCIEIPC_IOCTL_COPY, &copy, copies ? 0 : EOPNOTSUPP))
		return 1;
	if (copies && memcmp(data, data + 32768, 32768))
		return 1;
	return 0;
}
