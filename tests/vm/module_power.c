// SPDX-License-Identifier: MIT OR Apache-2.0
/* module_power COMMAND [same]: an attached endpoint goes through a sleep of the machine that the command makes; with "same" no device is put to sleep. */
#define _GNU_SOURCE
#include "module.h"

#define BYTES 65536

int main(int argc, char **argv)
{
	uint32_t ids[16];
	int all = open_node(), session = open_node(), bell = eventfd(0, EFD_NONBLOCK), same = argc > 2;
	struct pcieipc_channel_create create = { .size = sizeof(create), .data_bytes = BYTES };
	struct pcieipc_event event;
	uint64_t count = 0;

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc < 2 || !enumerate(all, ids, 16))
		return 2;
	struct pcieipc_attach attach = { .size = sizeof(attach), .endpoint = ids[0] };

	promise(gives(session, PCIEIPC_IOCTL_ATTACH, &attach, 0) && gives(session, PCIEIPC_IOCTL_CHANNEL_CREATE, &create, 0) &&
		gives(session, PCIEIPC_IOCTL_VECTOR_EVENTFD, CALL(pcieipc_vector_eventfd, .fd = bell), 0), "a_session_has_a_channel");
	struct pcieipc_channel_fd export = { .size = sizeof(export), .channel = create.channel };
	struct pcieipc_copy copy = { .size = sizeof(copy), .from = create.channel, .to = create.channel, .to_offset = BYTES / 2, .bytes = BYTES / 2,
		.timeout_ms = 10000 };

	gives(session, PCIEIPC_IOCTL_CHANNEL_EXPORT, &export, 0);
	volatile uint8_t *data = map(export.fd, BYTES, PROT_READ | PROT_WRITE, 0);
	volatile struct pcieipc_status *status = map(session, 4096, PROT_READ, attach.status_offset);

	promise(data && status && gives(session, PCIEIPC_IOCTL_COPY, &copy, 0), "the_channel_works");
	if (failed)
		return finish();
	memset((void *)data, 0x5e, BYTES / 2);
	promise(!run("%s", argv[1]), same ? "tasks_are_frozen_and_go_on" : "the_machine_sleeps_and_wakes");
	uint64_t word = status->word;

	promise(PCIEIPC_STATUS_STATE(word) == PCIEIPC_STATE_LIVE && (PCIEIPC_STATUS_GENERATION(word) == attach.generation) == same,
		same ? "a_sleep_of_tasks_alone_is_no_new_life" : "a_sleep_of_the_device_is_a_new_life");
	if (!same) {
		promise(await_state(session, ids[0], PCIEIPC_STATE_RECOVERING, 30000, &event) && await_state(session, ids[0], PCIEIPC_STATE_LIVE, 30000, &event),
			"both_changes_are_told");
		promise(wait_for(bell, POLLIN, 30000) && read(bell, &count, 8) == 8 && gives(session, PCIEIPC_IOCTL_RING, CALL(pcieipc_ring), ESTALE) &&
			gives(session, PCIEIPC_IOCTL_COPY, &copy, ESTALE), "the_session_is_woken_and_stale");
		promise(gives(session, PCIEIPC_IOCTL_RECOVER, CALL(pcieipc_recover), 0), "it_recovers");
	}
	promise(gives(session, PCIEIPC_IOCTL_COPY, &copy, 0) && !memcmp((void *)data, (void *)(data + BYTES / 2), BYTES / 2), "memory_and_engine_are_there");
	promise(gives(session, PCIEIPC_IOCTL_RING, CALL(pcieipc_ring), 0) && wait_for(bell, POLLIN, 30000) && read(bell, &count, 8) == 8 && count == 1,
		"interrupts_are_there");
	return finish();
}
