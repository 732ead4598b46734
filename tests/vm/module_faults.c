// SPDX-License-Identifier: MIT OR Apache-2.0
/* What the module does when an endpoint misbehaves: errors, resets, death and return, a slow engine, storms, a worse link. */
#define _GNU_SOURCE
#include "module.h"

#define BYTES (1 << 20)

struct side {
	int session, export, bell;
	uint32_t endpoint, channel;
	uint64_t generation;
	volatile struct pcieipc_status *status;
	volatile uint8_t *data, *out;
};

static int open_side(struct side *side, uint32_t endpoint)
{
	side->session = open_node();
	side->endpoint = endpoint;
	struct pcieipc_attach attach = { .size = sizeof(attach), .endpoint = endpoint };
	struct pcieipc_channel_create create = { .size = sizeof(create), .data_bytes = BYTES, .vector = 1 };

	if (!gives(side->session, PCIEIPC_IOCTL_ATTACH, &attach, 0) || !gives(side->session, PCIEIPC_IOCTL_CHANNEL_CREATE, &create, 0))
		return 0;
	side->generation = attach.generation;
	side->channel = create.channel;
	struct pcieipc_channel_fd export = { .size = sizeof(export), .channel = create.channel };

	if (!gives(side->session, PCIEIPC_IOCTL_CHANNEL_EXPORT, &export, 0))
		return 0;
	side->export = export.fd;
	side->status = map(side->session, 4096, PROT_READ, attach.status_offset);
	side->data = map(side->session, BYTES, PROT_READ, create.data_offset);
	side->out = map(side->export, BYTES, PROT_READ | PROT_WRITE, 0);
	side->bell = eventfd(0, EFD_NONBLOCK);
	return side->status && side->data && side->out &&
	       gives(side->session, PCIEIPC_IOCTL_VECTOR_EVENTFD, CALL(pcieipc_vector_eventfd, .vector = 1, .fd = side->bell), 0);
}

static int rings(struct side *side)
{
	uint64_t count;

	while (read(side->bell, &count, 8) == 8)
		;
	return gives(side->export, PCIEIPC_IOCTL_EXPORT_RING, CALL(pcieipc_ring), 0) && wait_for(side->bell, POLLIN, 2000) == POLLIN;
}

/* The engine of `side` moves bytes within its own channel. */
static int copies(struct side *side, uint8_t value)
{
	memset((void *)side->out, value, 4096);
	memset((void *)(side->out + 8192), 0, 4096);
	struct pcieipc_copy copy = { .size = sizeof(copy), .from = side->channel, .to = side->channel, .to_offset = 8192, .bytes = 4096, .timeout_ms = 3000 };

	return gives(side->session, PCIEIPC_IOCTL_COPY, &copy, 0) && side->data[8192] == value && side->data[12287] == value;
}

static void recovers(struct side *side, const char *what, const char *stale, const char *works)
{
	struct pcieipc_event event;
	struct pcieipc_recover recover = { .size = sizeof(recover) };

	promise(await_state(side->session, side->endpoint, PCIEIPC_STATE_RECOVERING, 5000, &event) &&
		await_state(side->session, side->endpoint, PCIEIPC_STATE_LIVE, 10000, &event) && event.generation > side->generation, what);
	promise(gives(side->session, PCIEIPC_IOCTL_RING, CALL(pcieipc_ring, .vector = 1), ESTALE) &&
		gives(side->export, PCIEIPC_IOCTL_EXPORT_RING, CALL(pcieipc_ring), ESTALE) && wait_for(side->bell, POLLIN, 0), stale);
	promise(gives(side->session, PCIEIPC_IOCTL_RECOVER, &recover, 0) && recover.generation == event.generation && rings(side) &&
		copies(side, (uint8_t)recover.generation), works);
	side->generation = recover.generation;
}

/* What /dev/aer_inject takes. */
struct aer_error {
	uint8_t bus, device, function;
	uint32_t uncorrectable, correctable, header[4], domain;
};

static int inject(const struct pcieipc_endpoint_info *info, uint32_t uncorrectable, uint32_t correctable)
{
	struct aer_error error = { .bus = info->address >> 8 & 0xff, .device = info->address >> 3 & 0x1f, .function = info->address & 7,
				   .uncorrectable = uncorrectable, .correctable = correctable, .domain = info->address >> 16 };
	int fd = open("/dev/aer_inject", O_WRONLY);
	int done = fd >= 0 && write(fd, &error, sizeof(error)) == sizeof(error);

	if (fd >= 0)
		close(fd);
	return done;
}

int main(void)
{
	uint32_t ids[16];
	struct side a, b;
	struct pcieipc_event event;
	struct pcieipc_endpoint_info info;
	char address[32];

	setvbuf(stdout, NULL, _IOLBF, 0);
	int all = open_node();
	uint32_t endpoints = enumerate(all, ids, 16);

	promise(endpoints >= 3 && open_side(&a, ids[0]) && open_side(&b, ids[1]), "two_sessions_have_channels");
	promise(rings(&a) && copies(&a, 0x11), "an_endpoint_works");
	snprintf(address, sizeof(address), "%s", address_of(all, ids[0], &info));

	/* Distance. */
	struct pcieipc_distance far = { .size = sizeof(far), .from = ids[0], .to = ids[1] };

	promise(gives(all, PCIEIPC_IOCTL_DISTANCE, &far, 0) && far.hops == 4, "distance_counts_ports");
	printf("# same switch: hops %u reasons %#x p2p %u\n", far.hops, far.reasons, far.p2p);
	far.to = ids[2];
	promise(gives(all, PCIEIPC_IOCTL_DISTANCE, &far, 0) && far.reasons & PCIEIPC_FAR_HOST_BRIDGE, "distance_tells_the_host_bridge");
	printf("# other switch: hops %u reasons %#x p2p %u\n", far.hops, far.reasons, far.p2p);

	/* A mapped doorbell. */
	struct pcieipc_doorbell bell = { .size = sizeof(bell) };
	volatile uint32_t *page = NULL;
	uint64_t count;

	if (gives(a.export, PCIEIPC_IOCTL_EXPORT_DOORBELL, &bell, 0))
		page = map(a.export, 4096, PROT_READ | PROT_WRITE, bell.map_offset);
	while (read(a.bell, &count, 8) == 8)
		;
	if (page)
		page[bell.page_offset / 4] = (uint32_t)bell.value;
	promise(page && wait_for(a.bell, POLLIN, 2000) == POLLIN, "a_store_to_a_mapped_doorbell_wakes_the_reader");
	promise(!map(a.export, 8192, PROT_READ | PROT_WRITE, bell.map_offset) && errno == EINVAL, "nothing_beside_a_doorbell_page_is_mapped");
	promise(!map(b.export, 4096, PROT_READ | PROT_WRITE, bell.map_offset) && errno == EINVAL, "a_doorbell_of_another_endpoint_is_not_mapped");

	/* A reset from sysfs. */
	run("cat /sys/bus/pci/devices/%s/reset_method | sed 's/^/# reset methods: /'", address);
	promise(!run("echo 1 > /sys/bus/pci/devices/%s/reset", address), "sysfs_resets_the_function");
	if (page)
		page[bell.page_offset / 4] = (uint32_t)bell.value;
	recovers(&a, "a_reset_begins_a_new_generation", "calls_of_the_old_generation_are_estale", "the_session_recovers_from_a_reset");
	promise(copies(&b, 0x22), "the_other_endpoint_never_noticed");

	/* AER. */
	promise(inject(&info, 0x4000, 0), "a_nonfatal_error_is_injected");
	promise(await_event(a.session, PCIEIPC_EVENT_ERROR, 1, 5000, &event), "a_nonfatal_error_is_an_event");
	recovers(&a, "recovery_from_a_nonfatal_error_is_followed", "calls_before_recover_are_estale", "the_session_recovers_from_a_nonfatal_error");
	promise(inject(&info, 0x40000, 0), "a_fatal_error_is_injected");
	promise(await_event(a.session, PCIEIPC_EVENT_ERROR, 2, 5000, &event), "a_fatal_error_is_an_event");
	recovers(&a, "recovery_from_a_fatal_error_is_followed", "calls_before_recover_are_estale_again", "the_session_recovers_from_a_fatal_error");
	promise(inject(&info, 0, 0x40) && await_event(a.session, PCIEIPC_EVENT_CORRECTABLE, 1, 5000, &event) && event.detail[1] == 1,
		"a_correctable_error_is_an_event");
	/* One that was injected is not injected again before it was handled. */
	for (unsigned int i = 2; i < 12; i++) {
		inject(&info, 0, 0x40);
		for (int j = 0; j < 50 && address_of(all, ids[0], &info) && info.correctable < i; j++)
			usleep(5000);
	}
	int told = 0;
	uint64_t since = 1;

	while (await_event(a.session, PCIEIPC_EVENT_CORRECTABLE, -1, 1500, &event))
		told++, since += event.detail[0];
	printf("# %d events for %llu correctable errors\n", told, (unsigned long long)info.correctable);
	address_of(all, ids[0], &info);
	promise(info.correctable >= 6 && told >= 1 && told < (int)info.correctable - 1 && since == info.correctable,
		"correctable_errors_are_counted_and_their_events_limited");

	/* The link. */
	promise(!run("host softdev '{\"cmd\":\"link\",\"endpoint\":0,\"speed\":1,\"width\":1}' >/dev/null") &&
		await_event(a.session, PCIEIPC_EVENT_LINK, -1, 3000, &event) && event.detail[1] == 0x101 && event.detail[0] != 0x101, "a_worse_link_is_an_event");
	promise(a.status->link == 0x101, "the_status_page_shows_the_link");

	/* The engine. */
	struct pcieipc_copy copy = { .size = sizeof(copy), .from = b.channel, .to = b.channel, .to_offset = BYTES / 2, .bytes = BYTES / 2, .timeout_ms = 200 };
	double start = now();

	promise(!run("host softdev '{\"cmd\":\"slow\",\"endpoint\":1,\"bytes_per_s\":100000}' >/dev/null") &&
		gives(b.session, PCIEIPC_IOCTL_COPY, &copy, ETIMEDOUT) && now() - start < 3, "a_slow_copy_ends_in_its_time");
	promise(!run("host softdev '{\"cmd\":\"slow\",\"endpoint\":1,\"bytes_per_s\":0}' >/dev/null") && copies(&b, 0x33), "after_a_timeout_the_engine_works");

	/* Death: nobody tells the module. */
	start = now();
	promise(!run("host softdev '{\"cmd\":\"die\",\"endpoint\":1}' >/dev/null") && await_state(b.session, ids[1], PCIEIPC_STATE_GONE, 5000, &event),
		"a_dead_endpoint_is_noticed");
	printf("# after %.3f s\n", now() - start);
	promise(gives(b.session, PCIEIPC_IOCTL_COPY, &copy, ENODEV) && gives(b.export, PCIEIPC_IOCTL_EXPORT_RING, CALL(pcieipc_ring), ENODEV) &&
		wait_for(b.export, POLLOUT, 0) & POLLHUP && PCIEIPC_STATUS_STATE(b.status->word) == PCIEIPC_STATE_GONE, "calls_on_a_dead_endpoint_are_enodev");
	b.out[5] = 0x77;
	promise(b.data[5] == 0x77, "its_rings_stay_memory");

	/* Remove and rescan by the administrator's call. */
	promise(!run("host softdev '{\"cmd\":\"revive\",\"endpoint\":1}' >/dev/null") &&
		gives(all, PCIEIPC_IOCTL_ADMIN, CALL(pcieipc_admin, .action = PCIEIPC_ADMIN_REMOVE, .endpoint = ids[1]), 0) &&
		await_event(all, PCIEIPC_EVENT_ADMIN, PCIEIPC_ADMIN_REMOVE, 10000, &event) && event.detail[1] == 0, "an_administrator_removes_an_endpoint");
	promise(gives(all, PCIEIPC_IOCTL_ADMIN, CALL(pcieipc_admin, .action = PCIEIPC_ADMIN_RESCAN, .endpoint = ids[1]), 0), "an_administrator_rescans");
	promise(await_event(all, PCIEIPC_EVENT_ADDED, -1, 10000, &event) && event.detail[1] == ids[1] && event.endpoint > ids[endpoints - 1],
		"the_endpoint_returns_under_a_new_id");
	uint32_t returned = event.endpoint;

	close(b.session);
	promise(open_side(&b, returned) && rings(&b) && copies(&b, 0x44), "a_session_attaches_to_the_returned_endpoint");
	promise(gives(all, PCIEIPC_IOCTL_ADMIN, CALL(pcieipc_admin, .action = PCIEIPC_ADMIN_RESET, .endpoint = returned), 0), "an_administrator_resets");
	recovers(&b, "the_reset_begins_a_new_generation", "and_old_calls_are_estale", "and_the_session_recovers");

	/* Removal with a mapped doorbell; the mapping was made before resets, so it is already a dummy. */
	bell = (struct pcieipc_doorbell){ .size = sizeof(bell) };
	page = NULL;
	if (gives(a.export, PCIEIPC_IOCTL_EXPORT_DOORBELL, &bell, 0))
		page = map(a.export, 4096, PROT_READ | PROT_WRITE, bell.map_offset);
	if (page)
		page[bell.page_offset / 4] = (uint32_t)bell.value;
	promise(page && !run("echo 1 > /sys/bus/pci/devices/%s/remove", address) && await_state(a.session, ids[0], PCIEIPC_STATE_GONE, 5000, &event),
		"an_endpoint_with_a_mapped_doorbell_is_removed");
	if (page)
		page[bell.page_offset / 4] = 1;
	a.out[9] = 9;
	promise(a.data[9] == 9 && page && page[bell.page_offset / 4] == 1, "doorbell_and_ring_are_ordinary_memory_then");
	run("cat /sys/kernel/debug/pcieipc/state | sed 's/^/# /'; cat /proc/%d/fdinfo/%d | sed 's/^/# /'", getpid(), b.session);
	close(a.session);
	close(a.export);
	close(b.session);
	close(b.export);
	close(all);
	return finish();
}
