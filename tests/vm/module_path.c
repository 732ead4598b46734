// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * The whole path through the module, from a C program that knows nothing but uapi/pcieipc.h: find, attach, create, map, export,
 * ring, wake, copy, and a device that is unbound under live mappings.
 */
#define _GNU_SOURCE
#include "module.h"

#include <sys/wait.h>

int main(void)
{
	size_t bytes = 1 << 20;
	uint32_t ids[16];

	setvbuf(stdout, NULL, _IOLBF, 0);
	int a = open_node(), b = open_node();
	struct pcieipc_query query = { .size = sizeof(query), .user_version = PCIEIPC_ABI_VERSION, .user_oldest = PCIEIPC_ABI_OLDEST };

	promise(gives(a, PCIEIPC_IOCTL_QUERY, &query, 0) && query.version == 1 && query.page_size == 4096, "query_answers");
	query.user_oldest = 99;
	promise(gives(a, PCIEIPC_IOCTL_QUERY, &query, EPROTO) && query.version == 1, "versions_that_exclude_each_other_are_told");

	struct pcieipc_enumerate list = { .size = sizeof(list), .ids = (uintptr_t)ids, .count = 16 };

	promise(gives(a, PCIEIPC_IOCTL_ENUMERATE, &list, 0) && list.count >= 2, "two_endpoints_are_there");
	struct pcieipc_endpoint_info info = { .size = sizeof(info), .endpoint = ids[0] };

	promise(gives(a, PCIEIPC_IOCTL_ENDPOINT_INFO, &info, 0) && info.vendor == 0x1234 && info.device == 0x7069 &&
		info.state == PCIEIPC_STATE_LIVE && info.vectors == 7 && info.serial && !strcmp(info.profile, "soft"),
		"an_endpoint_tells_about_itself");
	printf("# %08x iommu %u group %d link %u x%u of %u x%u memory %llu\n", info.address, info.iommu, info.iommu_group, info.link_speed,
	       info.link_width, info.link_speed_max, info.link_width_max, (unsigned long long)info.memory_bytes);
	promise(gives(a, PCIEIPC_IOCTL_ENDPOINT_INFO, CALL(pcieipc_endpoint_info, .endpoint = 9999), ENOENT), "an_unknown_endpoint_is_enoent");
	promise(gives(a, PCIEIPC_IOCTL_ENDPOINT_INFO, CALL(pcieipc_endpoint_info, .endpoint = ids[0], .flags = 1), EINVAL), "unknown_flags_are_einval");
	promise(gives(a, PCIEIPC_IO(0x7f), &info, ENOTTY), "an_unknown_call_is_enotty");
	promise(gives(a, PCIEIPC_IOCTL_RING, CALL(pcieipc_ring), ENOTCONN), "a_session_without_endpoint_is_enotconn");

	/* Attach. */
	struct pcieipc_attach attach_a = { .size = sizeof(attach_a), .endpoint = ids[0] };
	struct pcieipc_attach attach_b = { .size = sizeof(attach_b), .endpoint = ids[1] };

	promise(gives(a, PCIEIPC_IOCTL_ATTACH, &attach_a, 0) && attach_a.generation && attach_a.vectors == 7, "a_session_attaches");
	promise(gives(b, PCIEIPC_IOCTL_ATTACH, CALL(pcieipc_attach, .endpoint = ids[0]), EBUSY), "a_second_session_is_ebusy");
	promise(gives(b, PCIEIPC_IOCTL_ATTACH, CALL(pcieipc_attach, .endpoint = ids[1], .generation = 12345), ESTALE), "another_generation_is_estale");
	promise(gives(b, PCIEIPC_IOCTL_ATTACH, &attach_b, 0), "another_session_attaches_to_another_endpoint");
	struct pcieipc_status *status = map(a, 4096, PROT_READ, attach_a.status_offset);

	promise(status && PCIEIPC_STATUS_STATE(status->word) == PCIEIPC_STATE_LIVE &&
		PCIEIPC_STATUS_GENERATION(status->word) == attach_a.generation, "the_status_page_tells_state_and_generation");
	promise(!map(a, 4096, PROT_READ | PROT_WRITE, attach_a.status_offset) && errno == EACCES, "the_status_page_is_read_only");

	/* A channel of A; B's process would be its writer. */
	struct pcieipc_channel_create create = { .size = sizeof(create), .data_bytes = bytes, .vector = 2 };

	promise(gives(a, PCIEIPC_IOCTL_CHANNEL_CREATE, CALL(pcieipc_channel_create, .data_bytes = 12288), EINVAL), "a_size_that_is_no_power_of_two_is_einval");
	promise(gives(a, PCIEIPC_IOCTL_CHANNEL_CREATE, CALL(pcieipc_channel_create, .data_bytes = 4096, .vector = 7), EINVAL), "a_vector_that_is_not_there_is_einval");
	promise(gives(a, PCIEIPC_IOCTL_CHANNEL_CREATE, CALL(pcieipc_channel_create, .data_bytes = 1ULL << 62), ENOSPC), "a_channel_over_the_limit_is_enospc");
	promise(gives(a, PCIEIPC_IOCTL_CHANNEL_CREATE, &create, 0) && create.channel == 1 && create.segments >= 1, "a_channel_is_made");
	printf("# %u segments\n", create.segments);
	volatile uint8_t *data = map(a, bytes, PROT_READ, create.data_offset);
	volatile uint64_t *head = map(a, 4096, PROT_READ | PROT_WRITE, create.head_offset);
	volatile uint64_t *tail = map(a, 4096, PROT_READ, create.tail_offset);

	promise(data && head && tail, "the_reader_maps_data_head_and_tail");
	promise(!map(a, bytes, PROT_READ | PROT_WRITE, create.data_offset) && errno == EACCES, "the_reader_cannot_write_data");
	promise(!map(a, bytes + 4096, PROT_READ, create.data_offset) && errno == EINVAL, "nothing_beyond_the_end_is_mapped");
	promise(mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, a, (off_t)create.data_offset) == MAP_FAILED && errno == EINVAL, "private_mappings_are_einval");
	promise(mprotect((void *)data, 4096, PROT_READ | PROT_WRITE) < 0 && errno == EACCES, "mprotect_does_not_make_data_writable");

	struct pcieipc_channel_fd export = { .size = sizeof(export), .channel = create.channel };

	promise(gives(a, PCIEIPC_IOCTL_CHANNEL_EXPORT, &export, 0) && export.fd >= 0, "a_channel_is_exported");
	promise(gives(a, PCIEIPC_IOCTL_CHANNEL_EXPORT, CALL(pcieipc_channel_fd, .channel = 1), EBUSY), "a_second_export_is_ebusy");
	struct pcieipc_export_info writer = { .size = sizeof(writer) };

	promise(gives(export.fd, PCIEIPC_IOCTL_EXPORT_INFO, &writer, 0) && writer.data_bytes == bytes && writer.vector == 2, "the_descriptor_tells_about_itself");
	promise(gives(export.fd, PCIEIPC_IOCTL_QUERY, &query, ENOTTY), "the_descriptor_does_nothing_else");
	volatile uint8_t *out = map(export.fd, bytes, PROT_READ | PROT_WRITE, writer.data_offset);
	volatile uint64_t *out_tail = map(export.fd, 4096, PROT_READ | PROT_WRITE, writer.tail_offset);
	volatile uint64_t *out_head = map(export.fd, 4096, PROT_READ, writer.head_offset);

	promise(out && out_tail && out_head && map(export.fd, 4096, PROT_READ, writer.status_offset), "the_writer_maps_data_tail_head_and_status");
	promise(!map(export.fd, 4096, PROT_READ | PROT_WRITE, writer.head_offset) && errno == EACCES, "the_writer_cannot_write_the_head");
	out[0] = 0x5a;
	out[bytes - 1] = 0xa5;
	*out_tail = 77;
	*head = 33;
	promise(data[0] == 0x5a && data[bytes - 1] == 0xa5 && *tail == 77 && *out_head == 33, "both_see_the_same_memory");

	/* Doorbell to eventfd. */
	int bell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	uint64_t count = 0;

	promise(gives(a, PCIEIPC_IOCTL_VECTOR_EVENTFD, CALL(pcieipc_vector_eventfd, .vector = 2, .fd = bell), 0), "an_eventfd_is_attached");
	promise(gives(export.fd, PCIEIPC_IOCTL_EXPORT_RING, CALL(pcieipc_ring), 0) && wait_for(bell, POLLIN, 2000) &&
		read(bell, &count, 8) == 8 && count == 1, "ringing_wakes_the_reader");
	promise(status->interrupts >= 1, "the_status_page_counts_interrupts");
	promise(gives(a, PCIEIPC_IOCTL_VECTOR_EVENTFD, CALL(pcieipc_vector_eventfd, .flags = PCIEIPC_VECTOR_MASK, .vector = 2, .fd = -2), 0) &&
		gives(a, PCIEIPC_IOCTL_RING, CALL(pcieipc_ring, .vector = 2), 0) && !wait_for(bell, POLLIN, 300), "a_masked_vector_does_not_wake");
	promise(gives(a, PCIEIPC_IOCTL_VECTOR_EVENTFD, CALL(pcieipc_vector_eventfd, .vector = 2, .fd = -2), 0) && wait_for(bell, POLLIN, 1000) &&
		read(bell, &count, 8) == 8, "unmasking_tells_what_was_missed");

	/* Room given back. */
	int room = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);

	promise(gives(export.fd, PCIEIPC_IOCTL_EXPORT_EVENTFD, CALL(pcieipc_export_eventfd, .fd = room), 0) && !wait_for(export.fd, POLLOUT, 0),
		"a_writer_waits_for_room");
	promise(gives(a, PCIEIPC_IOCTL_CHANNEL_FREED, CALL(pcieipc_channel, .channel = 1), 0) && wait_for(room, POLLIN, 1000) &&
		read(room, &count, 8) == 8 && wait_for(export.fd, POLLOUT, 0) == POLLOUT, "room_wakes_the_writer");

	/* B's engine writes into A's ring, which B imported. */
	struct pcieipc_channel_create staging = { .size = sizeof(staging), .data_bytes = bytes };

	promise(gives(b, PCIEIPC_IOCTL_CHANNEL_CREATE, &staging, 0), "b_makes_a_channel");
	struct pcieipc_channel_fd staging_fd = { .size = sizeof(staging_fd), .channel = staging.channel };

	promise(gives(b, PCIEIPC_IOCTL_CHANNEL_EXPORT, &staging_fd, 0), "b_exports_it");
	uint8_t *source = map(staging_fd.fd, bytes, PROT_READ | PROT_WRITE, 0);

	for (size_t i = 0; source && i < bytes; i++)
		source[i] = (uint8_t)(i * 7 + i / 4096);
	struct pcieipc_channel_fd import = { .size = sizeof(import), .fd = export.fd };

	promise(gives(b, PCIEIPC_IOCTL_CHANNEL_IMPORT, CALL(pcieipc_channel_fd, .fd = bell), EINVAL), "a_foreign_descriptor_is_not_imported");
	promise(gives(b, PCIEIPC_IOCTL_CHANNEL_IMPORT, &import, 0) && import.channel == 2, "b_imports_a_channel_of_a");
	struct pcieipc_copy copy = { .size = sizeof(copy), .from = staging.channel, .to = import.channel, .from_offset = 4096, .to_offset = 65536,
				     .bytes = 300000, .timeout_ms = 5000 };

	promise(gives(b, PCIEIPC_IOCTL_COPY, &copy, 0) && source && !memcmp((void *)(data + 65536), source + 4096, 300000), "the_engine_of_b_writes_into_the_ring_of_a");
	copy.bytes = (uint32_t)bytes;
	promise(gives(b, PCIEIPC_IOCTL_COPY, &copy, EINVAL), "a_copy_beyond_the_end_is_einval");
	copy.from_offset = UINT64_MAX - 10;
	copy.bytes = 100;
	promise(gives(b, PCIEIPC_IOCTL_COPY, &copy, EINVAL), "a_copy_whose_end_wraps_is_einval");
	copy.from_offset = 0;
	promise(gives(b, PCIEIPC_IOCTL_CHANNEL_DESTROY, CALL(pcieipc_channel, .channel = import.channel), 0) &&
		gives(b, PCIEIPC_IOCTL_COPY, &copy, ENOENT), "a_destroyed_import_is_enoent");
	info.endpoint = ids[1];
	promise(gives(a, PCIEIPC_IOCTL_ENDPOINT_INFO, &info, 0) && info.dma_bytes == 300000, "the_bytes_moved_are_counted");

	/* Another process. */
	pid_t child = fork();

	if (!child)
		_exit(!(gives(a, PCIEIPC_IOCTL_STATE, CALL(pcieipc_session_state), EPERM) &&
			gives(export.fd, PCIEIPC_IOCTL_EXPORT_RING, CALL(pcieipc_ring), 0)));
	int code = 1;

	waitpid(child, &code, 0);
	promise(code == 0, "another_process_may_ring_but_not_use_the_session");
	read(bell, &count, 8);

	/* The device goes, under live mappings and a blocked reader. */
	char path[128], address[32];

	info.endpoint = ids[0];
	gives(a, PCIEIPC_IOCTL_ENDPOINT_INFO, &info, 0);
	snprintf(address, sizeof(address), "%04x:%02x:%02x.%x", info.address >> 16, info.address >> 8 & 0xff, info.address >> 3 & 0x1f, info.address & 7);
	struct pcieipc_event event;

	child = fork();
	if (!child) {
		usleep(200000);
		write_file("/sys/bus/pci/drivers/pcieipc/unbind", address);
		_exit(0);
	}
	int got_state = 0;

	while (!got_state && read(a, &event, sizeof(event)) == sizeof(event))
		got_state = event.kind == PCIEIPC_EVENT_STATE && event.detail[1] == PCIEIPC_STATE_GONE && event.endpoint == ids[0];
	promise(got_state, "a_blocked_reader_is_told_that_the_endpoint_is_gone");
	waitpid(child, NULL, 0);
	promise(PCIEIPC_STATUS_STATE(status->word) == PCIEIPC_STATE_GONE, "the_status_page_says_gone");
	promise(wait_for(a, POLLIN, 0) & POLLHUP && wait_for(export.fd, POLLOUT, 0) & POLLHUP, "session_and_descriptor_hang_up");
	promise(read(bell, &count, 8) == 8 && read(room, &count, 8) == 8, "all_eventfds_are_signalled");
	promise(gives(a, PCIEIPC_IOCTL_RING, CALL(pcieipc_ring, .vector = 2), ENODEV) &&
		gives(export.fd, PCIEIPC_IOCTL_EXPORT_RING, CALL(pcieipc_ring), ENODEV) &&
		gives(a, PCIEIPC_IOCTL_CHANNEL_CREATE, CALL(pcieipc_channel_create, .data_bytes = 4096), ENODEV) &&
		gives(a, PCIEIPC_IOCTL_RECOVER, CALL(pcieipc_recover), ENODEV), "calls_are_enodev");
	promise(read(a, &event, sizeof(event)) == 0, "the_end_of_events_is_the_end_of_file");
	madvise((void *)out, bytes, MADV_DONTNEED);
	for (size_t i = 0; i < bytes; i += 4096)
		out[i] = (uint8_t)(i >> 12);
	size_t wrong = 0;

	for (size_t i = 0; i < bytes; i += 4096)
		wrong += data[i] != (uint8_t)(i >> 12);
	promise(!wrong, "mappings_stay_memory");
	list.count = 16;
	promise(gives(b, PCIEIPC_IOCTL_ENUMERATE, &list, 0) && ids[0] == attach_b.endpoint, "the_endpoint_is_not_listed_any_more");
	promise(gives(a, PCIEIPC_IOCTL_CHANNEL_DESTROY, CALL(pcieipc_channel, .channel = 1), 0) && out[4096] == 1, "a_channel_without_device_is_destroyed");
	promise(system("rmmod pcieipc 2>/dev/null") != 0, "the_module_stays_while_it_is_used");

	/* It returns. */
	write_file("/sys/bus/pci/drivers/pcieipc/bind", address);
	int added = 0;

	while (wait_for(b, POLLIN, 2000) & POLLIN && read(b, &event, sizeof(event)) == sizeof(event))
		if (event.kind == PCIEIPC_EVENT_ADDED && event.detail[1] == attach_a.endpoint) {
			added = 1;
			break;
		}
	promise(added && event.endpoint > attach_b.endpoint && event.generation > attach_b.generation, "a_returned_device_is_known_by_its_former_id");
	close(a);
	int c = open_node();

	promise(gives(c, PCIEIPC_IOCTL_ATTACH, CALL(pcieipc_attach, .endpoint = event.endpoint), 0), "a_new_session_attaches_to_it");
	promise(gives(export.fd, PCIEIPC_IOCTL_EXPORT_RING, CALL(pcieipc_ring), ENODEV) && (out[0] = 9) == 9 && data[0] == 9,
		"the_old_descriptor_stays_dead_and_its_memory_alive");

	/* The node of one endpoint. */
	snprintf(path, sizeof(path), "/dev/pcieipc%u", attach_b.endpoint);
	close(b);
	int d = open(path, O_RDWR | O_CLOEXEC);

	list.count = 16;
	promise(d >= 0 && gives(d, PCIEIPC_IOCTL_ENUMERATE, &list, 0) && list.count == 1 && ids[0] == attach_b.endpoint, "an_endpoints_node_lists_it_alone");
	promise(gives(d, PCIEIPC_IOCTL_ENDPOINT_INFO, CALL(pcieipc_endpoint_info, .endpoint = event.endpoint), ENOENT) &&
		gives(d, PCIEIPC_IOCTL_ATTACH, CALL(pcieipc_attach, .endpoint = event.endpoint), ENOENT) &&
		gives(d, PCIEIPC_IOCTL_ADMIN, CALL(pcieipc_admin, .action = PCIEIPC_ADMIN_RESET, .endpoint = attach_b.endpoint), EPERM) &&
		gives(d, PCIEIPC_IOCTL_ATTACH, CALL(pcieipc_attach, .endpoint = attach_b.endpoint), 0), "and_reaches_no_other");
	snprintf(path, sizeof(path), "/dev/pcieipc%u", attach_a.endpoint);
	promise(open(path, O_RDWR) < 0 && errno == ENOENT, "the_node_of_a_past_endpoint_is_gone");
	return finish();
}
