// SPDX-License-Identifier: MIT OR Apache-2.0
/* QEMU's ivshmem-doorbell devices as endpoints: interrupts without DMA, and a memory that all of them share. */
#define _GNU_SOURCE
#include "module.h"

#define BYTES 65536
#define VECTORS 8

struct side {
	int session, out;
	struct pcieipc_channel_create create;
	volatile uint64_t *in, *to;
	int bells[VECTORS];
};

static int set_up(struct side *side, uint32_t endpoint)
{
	struct pcieipc_attach attach = { .size = sizeof(attach), .endpoint = endpoint };

	side->session = open_node();
	side->create = (struct pcieipc_channel_create){ .size = sizeof(side->create), .flags = PCIEIPC_CHANNEL_DEVICE_MEMORY, .data_bytes = BYTES, .vector = 5 };
	if (!gives(side->session, PCIEIPC_IOCTL_ATTACH, &attach, 0) || attach.vectors != VECTORS ||
	    !gives(side->session, PCIEIPC_IOCTL_CHANNEL_CREATE, &side->create, 0))
		return 0;
	struct pcieipc_channel_fd export = { .size = sizeof(export), .channel = side->create.channel };
	struct pcieipc_export_info info = { .size = sizeof(info) };

	if (!gives(side->session, PCIEIPC_IOCTL_CHANNEL_EXPORT, &export, 0) || !gives(export.fd, PCIEIPC_IOCTL_EXPORT_INFO, &info, 0))
		return 0;
	side->out = export.fd;
	side->in = map(side->session, BYTES, PROT_READ, side->create.data_offset);
	side->to = map(side->out, BYTES, PROT_READ | PROT_WRITE, info.data_offset);
	for (uint32_t vector = 0; vector < VECTORS; vector++) {
		side->bells[vector] = eventfd(0, EFD_NONBLOCK);
		if (!gives(side->session, PCIEIPC_IOCTL_VECTOR_EVENTFD, CALL(pcieipc_vector_eventfd, .vector = vector, .fd = side->bells[vector]), 0))
			return 0;
	}
	return side->in && side->to;
}

static uint64_t signals(int bell, int ms)
{
	uint64_t count = 0;

	return wait_for(bell, POLLIN, ms) & POLLIN && read(bell, &count, 8) == 8 ? count : 0;
}

int main(void)
{
	uint32_t ids[16], endpoints[2], found = 0;
	struct pcieipc_endpoint_info info;
	struct pcieipc_event event;
	struct side a = { 0 }, b = { 0 };
	int all = open_node(), kept = 1;

	setvbuf(stdout, NULL, _IOLBF, 0);
	uint32_t count = enumerate(all, ids, 16);

	for (uint32_t i = 0; i < count && found < 2; i++) {
		address_of(all, ids[i], &info);
		if (!strcmp(info.profile, "ivshmem-doorbell"))
			endpoints[found++] = ids[i];
	}
	promise(found == 2 && info.vectors == VECTORS && info.memory_bytes == 4 << 20 &&
		(info.ep_flags & (PCIEIPC_EP_MEMORY | PCIEIPC_EP_DMA_ENGINE | PCIEIPC_EP_DOORBELL_PAGE)) == PCIEIPC_EP_MEMORY,
		"two_such_devices_are_endpoints_with_memory_and_without_engine");
	promise(set_up(&a, endpoints[0]) && set_up(&b, endpoints[1]), "sessions_attach_and_have_channels_in_the_shared_memory");
	if (failed)
		return finish();
	for (uint32_t vector = 0; vector < VECTORS; vector++) {
		kept &= gives(a.session, PCIEIPC_IOCTL_RING, CALL(pcieipc_ring, .vector = vector), 0) && signals(a.bells[vector], 30000) == 1;
		for (uint32_t other = 0; other < VECTORS; other++)
			kept &= !signals(a.bells[other], 0) && !signals(b.bells[other], 0);
	}
	promise(kept, "each_doorbell_wakes_its_vector_and_nobody_else");
	*a.to = 0x6976736d656d;
	promise(gives(a.out, PCIEIPC_IOCTL_EXPORT_RING, CALL(pcieipc_ring), 0) && signals(a.bells[5], 30000) == 1 && *a.in == 0x6976736d656d,
		"a_writer_writes_rings_and_the_reader_reads");
	/* Both channels are the first of their endpoint, so they lie at the same place of the shared memory. */
	promise(*b.in == 0x6976736d656d, "the_memory_is_the_devices_and_shared_by_them");
	promise(gives(a.session, PCIEIPC_IOCTL_COPY, CALL(pcieipc_copy, .from = 1, .to = 1, .to_offset = 4096, .bytes = 8, .timeout_ms = 1000), EOPNOTSUPP),
		"it_has_no_engine_to_copy_with");
	promise(!run("echo %s > /sys/bus/pci/drivers/pcieipc/unbind", address_of(all, endpoints[0], &info)) &&
		await_state(all, endpoints[0], PCIEIPC_STATE_GONE, 30000, &event), "one_is_unbound");
	*b.to = 7;
	promise(*a.in != 7 && (*a.to = 9) == 9 && *b.in == 7, "its_mappings_are_no_device_memory_any_more");
	promise(gives(b.session, PCIEIPC_IOCTL_RING, CALL(pcieipc_ring, .vector = 5), 0) && signals(b.bells[5], 30000) == 1, "the_other_goes_on");
	return finish();
}
