// SPDX-License-Identifier: MIT OR Apache-2.0
/* Where DMA goes through bounce buffers, a ring would not be shared memory: it is refused, and nothing stays charged. */
#define _GNU_SOURCE
#include "module.h"

int main(void)
{
	uint32_t ids[16];
	int session = open_node();
	struct pcieipc_session_state state = { .size = sizeof(state) };
	int kept = 1;

	setvbuf(stdout, NULL, _IOLBF, 0);
	promise(enumerate(session, ids, 16) == 1 && gives(session, PCIEIPC_IOCTL_ATTACH, CALL(pcieipc_attach, .endpoint = ids[0]), 0), "the_endpoint_is_there");
	for (uint64_t bytes = 4096; bytes <= 8 << 20; bytes *= 4)
		kept &= gives(session, PCIEIPC_IOCTL_CHANNEL_CREATE, CALL(pcieipc_channel_create, .data_bytes = bytes), EIO);
	promise(kept, "rings_of_every_size_are_eio");
	promise(gives(session, PCIEIPC_IOCTL_STATE, &state, 0) && !state.locked_bytes && !state.channels, "nothing_stays_charged");
	promise(gives(session, PCIEIPC_IOCTL_RING, CALL(pcieipc_ring), 0), "what_needs_no_memory_works");
	return finish();
}
