// SPDX-License-Identifier: MIT OR Apache-2.0
/* Functions of one card, as a partitioned accelerator has them: endpoints apart from each other. */
#define _GNU_SOURCE
#include "module.h"

#define BYTES 65536

struct side {
	uint32_t endpoint;
	int session, out, bell;
	struct pcieipc_channel_create create;
	volatile uint8_t *in, *to;
	struct pcieipc_endpoint_info info;
};

static int set_up(struct side *side)
{
	struct pcieipc_attach attach = { .size = sizeof(attach), .endpoint = side->endpoint };
	struct pcieipc_export_info info = { .size = sizeof(info) };

	side->session = open_node();
	side->create = (struct pcieipc_channel_create){ .size = sizeof(side->create), .data_bytes = BYTES, .vector = 2 };
	if (!gives(side->session, PCIEIPC_IOCTL_ATTACH, &attach, 0) || !gives(side->session, PCIEIPC_IOCTL_CHANNEL_CREATE, &side->create, 0))
		return 0;
	struct pcieipc_channel_fd export = { .size = sizeof(export), .channel = side->create.channel };

	side->bell = eventfd(0, EFD_NONBLOCK);
	if (!gives(side->session, PCIEIPC_IOCTL_CHANNEL_EXPORT, &export, 0) || !gives(export.fd, PCIEIPC_IOCTL_EXPORT_INFO, &info, 0) ||
	    !gives(side->session, PCIEIPC_IOCTL_VECTOR_EVENTFD, CALL(pcieipc_vector_eventfd, .vector = 2, .fd = side->bell), 0))
		return 0;
	side->out = export.fd;
	side->in = map(side->session, BYTES, PROT_READ, side->create.data_offset);
	side->to = map(side->out, BYTES, PROT_READ | PROT_WRITE, info.data_offset);
	return side->in && side->to;
}

static uint64_t signals(int bell, int ms)
{
	uint64_t count = 0;

	return wait_for(bell, POLLIN, ms) & POLLIN && read(bell, &count, 8) == 8 ? count : 0;
}

static int rings(struct side *side)
{
	return gives(side->out, PCIEIPC_IOCTL_EXPORT_RING, CALL(pcieipc_ring), 0) && signals(side->bell, 30000) == 1;
}

int main(int argc, char **argv)
{
	uint32_t ids[16], found = 0;
	struct side sides[3] = { 0 };
	struct pcieipc_event event;
	int all = open_node(), kept = 1;

	setvbuf(stdout, NULL, _IOLBF, 0);
	for (uint32_t i = 0, count = enumerate(all, ids, 16); i < count && found < 3; i++) {
		address_of(all, ids[i], &sides[found].info);
		if (argc > 1 && !strcmp(sides[found].info.profile, argv[1]))
			sides[found++].endpoint = ids[i];
	}
	promise(found == 3 && sides[0].info.address >> 3 == sides[1].info.address >> 3 && sides[1].info.address >> 3 == sides[2].info.address >> 3 &&
		sides[0].info.address != sides[1].info.address && sides[0].info.serial != sides[1].info.serial, "three_functions_of_one_card_are_three_endpoints");
	for (int i = 0; i < 3; i++)
		kept &= set_up(&sides[i]);
	promise(kept, "each_has_a_session_and_a_channel_of_its_own");
	if (failed)
		return finish();
	struct pcieipc_distance far = { .size = sizeof(far), .from = sides[0].endpoint, .to = sides[1].endpoint };

	promise(gives(all, PCIEIPC_IOCTL_DISTANCE, &far, 0) && far.reasons & PCIEIPC_FAR_SAME_FUNCTION_CARD && !(far.reasons & PCIEIPC_FAR_HOST_BRIDGE),
		"the_distance_tells_that_they_share_a_card");
	for (int i = 0; i < 3; i++) {
		kept &= rings(&sides[i]);
		for (int other = 0; other < 3; other++)
			kept &= !signals(sides[other].bell, 0);
	}
	promise(kept, "each_rings_alone");

	struct pcieipc_channel_fd import = { .size = sizeof(import), .fd = sides[1].out };

	memset((void *)sides[0].to, 0x4d, BYTES);
	promise(gives(sides[0].session, PCIEIPC_IOCTL_CHANNEL_IMPORT, &import, 0) &&
		gives(sides[0].session, PCIEIPC_IOCTL_COPY, CALL(pcieipc_copy, .from = sides[0].create.channel, .to = import.channel, .bytes = BYTES, .timeout_ms = 10000), 0) &&
		!memcmp((void *)sides[1].in, (void *)sides[0].in, BYTES), "the_engine_of_one_writes_into_the_ring_of_another");

	char address[32];

	snprintf(address, sizeof(address), "%s", address_of(all, sides[0].endpoint, &sides[0].info));
	promise(!run("echo 1 > /sys/bus/pci/devices/%s/reset", address) && await_state(all, sides[0].endpoint, PCIEIPC_STATE_LIVE, 60000, &event), "one_is_reset");
	promise(rings(&sides[1]) && rings(&sides[2]), "the_others_never_noticed_the_reset");
	promise(!run("echo %s > /sys/bus/pci/drivers/pcieipc/unbind", address) && await_state(all, sides[0].endpoint, PCIEIPC_STATE_GONE, 60000, &event), "one_is_unbound");
	sides[2].to[7] = 0x7e;
	promise(rings(&sides[1]) && rings(&sides[2]) && sides[2].in[7] == 0x7e, "the_others_go_on_without_it");
	return finish();
}
