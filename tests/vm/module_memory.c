// SPDX-License-Identifier: MIT OR Apache-2.0
/* A channel in an endpoint's own memory, written and rung by another endpoint's engine; what becomes of it at reset and removal. */
#define _GNU_SOURCE
#include "module.h"

#define BYTES (1 << 20)

int main(void)
{
	uint32_t ids[16];
	struct pcieipc_endpoint_info info;
	struct pcieipc_event event;

	setvbuf(stdout, NULL, _IOLBF, 0);
	int a = open_node(), b = open_node(), c = open_node();

	promise(enumerate(a, ids, 16) >= 3 && gives(a, PCIEIPC_IOCTL_ATTACH, CALL(pcieipc_attach, .endpoint = ids[0]), 0) &&
		gives(b, PCIEIPC_IOCTL_ATTACH, CALL(pcieipc_attach, .endpoint = ids[1]), 0) &&
		gives(c, PCIEIPC_IOCTL_ATTACH, CALL(pcieipc_attach, .endpoint = ids[2]), 0), "three_sessions_attach");

	/* One user's data are not the next one's, wherever in the endpoint's memory and whatever the size of the channel. */
	uint64_t *seen = NULL, left = 0, looked = 0;

	for (int user = 0; user < 3; user++) {
		struct pcieipc_channel_create made = { .size = sizeof(made), .flags = PCIEIPC_CHANNEL_DEVICE_MEMORY, .data_bytes = user == 1 ? BYTES / 2 : BYTES };
		struct pcieipc_channel_fd out = { .size = sizeof(out) };
		uint64_t *all = NULL;

		if (gives(c, PCIEIPC_IOCTL_CHANNEL_CREATE, &made, 0) && (out.channel = made.channel) && gives(c, PCIEIPC_IOCTL_CHANNEL_EXPORT, &out, 0)) {
			seen = map(c, made.data_bytes, PROT_READ, made.data_offset);
			all = map(out.fd, made.data_bytes, PROT_READ | PROT_WRITE, made.data_offset);
		}
		for (uint64_t i = 0; seen && all && i < made.data_bytes / 8; i++, looked++)
			left += seen[i] != 0;
		for (uint64_t i = 0; all && i < made.data_bytes / 8; i++)
			all[i] = 0x5ec5ec5ec5ec5ecULL + i;
		if (seen && all && (seen[77] != 0x5ec5ec5ec5ec5ecULL + 77 || munmap(seen, made.data_bytes) || munmap(all, made.data_bytes)))
			looked = 0;
		close(out.fd);
		close(c);
		c = open_node();
		gives(c, PCIEIPC_IOCTL_ATTACH, CALL(pcieipc_attach, .endpoint = ids[2]), 0);
	}
	printf("# %llu words looked at, %llu left\n", (unsigned long long)looked, (unsigned long long)left);
	promise(looked == 5 * BYTES / 2 / 8 && !left, "device_memory_is_cleared_between_users");

	/* B reads from its own memory. */
	struct pcieipc_channel_create create = { .size = sizeof(create), .flags = PCIEIPC_CHANNEL_DEVICE_MEMORY, .data_bytes = BYTES, .vector = 3 };
	struct pcieipc_channel_create small = { .size = sizeof(small), .flags = PCIEIPC_CHANNEL_DEVICE_MEMORY, .data_bytes = 65536 };

	promise(gives(b, PCIEIPC_IOCTL_CHANNEL_CREATE, CALL(pcieipc_channel_create, .flags = PCIEIPC_CHANNEL_DEVICE_MEMORY, .data_bytes = 8 << 20), ENOSPC),
		"more_than_the_endpoint_has_is_enospc");
	promise(gives(b, PCIEIPC_IOCTL_CHANNEL_CREATE, &small, 0) && gives(b, PCIEIPC_IOCTL_CHANNEL_CREATE, &create, 0), "channels_are_made_in_device_memory");
	struct pcieipc_channel_fd export = { .size = sizeof(export), .channel = create.channel };
	struct pcieipc_export_info writer = { .size = sizeof(writer) };
	struct pcieipc_session_state state = { .size = sizeof(state) };

	promise(gives(b, PCIEIPC_IOCTL_STATE, &state, 0) && state.locked_bytes == 6 * 4096, "only_what_is_in_host_memory_is_charged");
	promise(gives(b, PCIEIPC_IOCTL_CHANNEL_EXPORT, &export, 0) && gives(export.fd, PCIEIPC_IOCTL_EXPORT_INFO, &writer, 0) && writer.data_bytes == BYTES,
		"such_a_channel_is_exported");
	volatile uint8_t *data = map(b, BYTES, PROT_READ, create.data_offset);
	volatile uint8_t *out = map(export.fd, BYTES, PROT_READ | PROT_WRITE, writer.data_offset);

	promise(data && out && map(b, 4096, PROT_READ | PROT_WRITE, create.head_offset), "it_is_mapped");
	promise(!map(b, BYTES, PROT_READ | PROT_WRITE, create.data_offset) && errno == EACCES, "the_reader_cannot_write_it");
	promise(!map(b, BYTES + 4096, PROT_READ, create.data_offset) && errno == EINVAL &&
		!map(export.fd, 4096, PROT_READ | PROT_WRITE, small.data_offset) && errno == EINVAL, "nothing_beside_it_is_mapped");
	if (!data || !out)
		return finish();
	for (int i = 0; i < 4096; i++)
		out[i] = (uint8_t)(i * 3);
	int wrong = 0;

	for (int i = 0; i < 4096; i++)
		wrong += data[i] != (uint8_t)(i * 3);
	promise(!wrong, "a_processor_writes_and_reads_it");
	run("grep -i write-combining /sys/kernel/debug/x86/pat_memtype_list | sed 's/^/# /'");
	promise(!run("grep -qi write-combining /sys/kernel/debug/x86/pat_memtype_list"), "its_pages_are_write_combining");

	/* A's engine writes it and rings B. */
	struct pcieipc_channel_create staging = { .size = sizeof(staging), .data_bytes = BYTES };
	struct pcieipc_channel_fd staging_fd = { .size = sizeof(staging_fd) }, import = { .size = sizeof(import), .fd = export.fd };
	int bell = eventfd(0, EFD_NONBLOCK);
	uint64_t count;

	promise(gives(a, PCIEIPC_IOCTL_CHANNEL_CREATE, &staging, 0) && (staging_fd.channel = staging.channel) &&
		gives(a, PCIEIPC_IOCTL_CHANNEL_EXPORT, &staging_fd, 0) && gives(a, PCIEIPC_IOCTL_CHANNEL_IMPORT, &import, 0), "a_imports_it");
	uint8_t *source = map(staging_fd.fd, BYTES, PROT_READ | PROT_WRITE, 0);

	for (int i = 0; source && i < BYTES; i++)
		source[i] = (uint8_t)(i * 7 + i / 4096);
	gives(b, PCIEIPC_IOCTL_VECTOR_EVENTFD, CALL(pcieipc_vector_eventfd, .vector = 3, .fd = bell), 0);
	struct pcieipc_copy copy = { .size = sizeof(copy), .flags = PCIEIPC_COPY_RING, .from = staging.channel, .to = import.channel, .bytes = BYTES,
				     .timeout_ms = 5000 };

	promise(gives(a, PCIEIPC_IOCTL_COPY, &copy, 0) && wait_for(bell, POLLIN, 2000) == POLLIN && read(bell, &count, 8) == 8 && count == 1,
		"the_engine_itself_rings_the_reader");
	wrong = 0;
	for (int i = 0; i < BYTES; i++)
		wrong += data[i] != (uint8_t)(i * 7 + i / 4096);
	promise(!wrong, "the_engine_wrote_the_other_endpoints_memory");
	copy.flags = 2;
	promise(gives(a, PCIEIPC_IOCTL_COPY, &copy, EINVAL), "unknown_flags_of_a_copy_are_einval");

	/* B's own engine, from its memory to host memory and back. */
	struct pcieipc_channel_create host = { .size = sizeof(host), .data_bytes = 65536 };

	promise(gives(b, PCIEIPC_IOCTL_CHANNEL_CREATE, &host, 0), "b_makes_a_channel_in_host_memory");
	volatile uint8_t *landed = map(b, 65536, PROT_READ, host.data_offset);

	copy = (struct pcieipc_copy){ .size = sizeof(copy), .from = create.channel, .to = host.channel, .from_offset = 8192, .bytes = 65536, .timeout_ms = 5000 };
	promise(gives(b, PCIEIPC_IOCTL_COPY, &copy, 0) && landed && landed[0] == data[8192] && landed[65535] == data[8192 + 65535], "the_own_engine_reads_it");

	/* Too far. */
	promise(gives(c, PCIEIPC_IOCTL_CHANNEL_IMPORT, CALL(pcieipc_channel_fd, .fd = export.fd), EOPNOTSUPP), "an_endpoint_behind_another_switch_is_refused");
	run("dmesg | grep 'does not reach' | tail -1 | sed 's/^/# /'");

	/* Reset. */
	char address[32];

	snprintf(address, sizeof(address), "%s", address_of(a, ids[1], &info));
	promise(!run("echo 1 > /sys/bus/pci/devices/%s/reset", address) && await_state(b, ids[1], PCIEIPC_STATE_LIVE, 5000, &event), "the_reader_is_reset");
	out[100] = 0xee;
	promise(data[100] == 0xee && gives(a, PCIEIPC_IOCTL_COPY, CALL(pcieipc_copy, .flags = PCIEIPC_COPY_RING, .from = staging.channel, .to = import.channel,
								     .bytes = 4096, .timeout_ms = 1000), ESTALE), "its_mappings_are_ordinary_memory_until_it_recovers");
	copy = (struct pcieipc_copy){ .size = sizeof(copy), .from = staging.channel, .to = import.channel, .bytes = 4096, .timeout_ms = 1000 };
	promise(gives(a, PCIEIPC_IOCTL_COPY, &copy, ESTALE), "no_engine_writes_it_until_then");
	struct pcieipc_copy back = { .size = sizeof(back), .from = import.channel, .to = staging.channel, .bytes = 4096, .timeout_ms = 1000 };

	promise(gives(a, PCIEIPC_IOCTL_COPY, &back, ESTALE), "nor_reads_it");
	promise(gives(b, PCIEIPC_IOCTL_RECOVER, CALL(pcieipc_recover), 0), "the_reader_recovers");
	promise(gives(a, PCIEIPC_IOCTL_COPY, &copy, 0) && gives(a, PCIEIPC_IOCTL_COPY, &back, 0), "and_then_engines_reach_it_again");
	out[100] = 0x6b;
	promise(data[100] == 0x6b && gives(b, PCIEIPC_IOCTL_COPY, CALL(pcieipc_copy, .from = create.channel, .to = host.channel, .bytes = 4096,
								     .timeout_ms = 3000), 0) && landed && landed[100] == 0x6b,
		"after_recovery_it_is_device_memory_again");

	/* Removal. */
	promise(!run("echo 1 > /sys/bus/pci/devices/%s/remove", address) && await_state(b, ids[1], PCIEIPC_STATE_GONE, 5000, &event), "the_reader_is_removed");
	out[200] = 0xdd;
	promise(data[200] == 0xdd, "its_mappings_are_ordinary_memory");
	promise(gives(a, PCIEIPC_IOCTL_COPY, CALL(pcieipc_copy, .from = staging.channel, .to = import.channel, .bytes = 4096, .timeout_ms = 1000), ENOENT),
		"no_engine_writes_to_where_it_was");
	return finish();
}
