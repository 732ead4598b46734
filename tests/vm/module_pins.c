// SPDX-License-Identifier: MIT OR Apache-2.0
/* Ring memory works with whatever takes user pages: direct I/O, io_uring's registered buffers, vmsplice, process_vm_readv; pins outlive all. */
#define _GNU_SOURCE
#include "module.h"

#include <linux/io_uring.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#define BYTES (1 << 20)

static int ring_of(struct io_uring_params *parameters)
{
	*parameters = (struct io_uring_params){ 0 };
	return (int)syscall(SYS_io_uring_setup, 4, parameters);
}

static int registers_buffer(int ring, volatile void *at, size_t bytes)
{
	struct iovec buffer = { (void *)at, bytes };

	return (int)syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, &buffer, 1);
}

/* One read of a file into the registered buffer, with no copy of ours; gives the bytes read or a negative errno. */
static int fixed_read(int ring, const struct io_uring_params *parameters, int file, void *into, uint32_t bytes, uint64_t offset)
{
	/* Both rings are one mapping, and which of them ends last is the kernel's choice. */
	size_t completions = parameters->cq_off.cqes + parameters->cq_entries * sizeof(struct io_uring_cqe);
	size_t entries = parameters->sq_entries * sizeof(struct io_uring_sqe);
	size_t submissions = parameters->sq_off.array + parameters->sq_entries * sizeof(uint32_t);
	size_t both = completions > submissions ? completions : submissions;
	uint8_t *rings = mmap(NULL, both, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQ_RING);
	struct io_uring_sqe *entry = mmap(NULL, entries, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQES);

	if (rings == MAP_FAILED || (void *)entry == MAP_FAILED)
		return -errno;
	uint32_t *tail = (uint32_t *)(rings + parameters->sq_off.tail), mask = *(uint32_t *)(rings + parameters->sq_off.ring_mask);
	uint32_t *head = (uint32_t *)(rings + parameters->cq_off.head);

	entry[0] = (struct io_uring_sqe){ .opcode = IORING_OP_READ_FIXED, .fd = file, .off = offset, .addr = (uintptr_t)into, .len = bytes };
	((uint32_t *)(rings + parameters->sq_off.array))[*tail & mask] = 0;
	__atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
	if (syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) != 1)
		return -errno;
	struct io_uring_cqe *done = (struct io_uring_cqe *)(rings + parameters->cq_off.cqes) + (*head & *(uint32_t *)(rings + parameters->cq_off.ring_mask));
	int result = done->res;

	__atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
	/* A mapping holds the ring, and the ring the pin. */
	munmap(rings, both);
	munmap(entry, entries);
	return result;
}

static long pages_held(void)
{
	char line[128] = "";
	FILE *state = fopen("/sys/kernel/debug/pcieipc/state", "r");
	long pages = -1;

	if (state && fgets(line, sizeof(line), state))
		pages = strtol(line + 6, NULL, 10);
	if (state)
		fclose(state);
	return pages;
}

static long cgroup_bytes(void)
{
	char line[64] = "";
	FILE *file = fopen("/sys/fs/cgroup/rings/memory.current", "r");

	if (file && fgets(line, sizeof(line), file)) {
		fclose(file);
		return strtol(line, NULL, 10);
	}
	return -1;
}

int main(void)
{
	uint32_t ids[16];
	struct pcieipc_endpoint_info info;
	struct pcieipc_event event;
	static uint8_t plain[65536];

	setvbuf(stdout, NULL, _IOLBF, 0);
	int all = open_node(), session = open_node();
	long before = pages_held(), charged = cgroup_bytes();
	struct pcieipc_channel_create create = { .size = sizeof(create), .data_bytes = BYTES };

	promise(enumerate(all, ids, 16) >= 1 && gives(session, PCIEIPC_IOCTL_ATTACH, CALL(pcieipc_attach, .endpoint = ids[0]), 0) &&
		gives(session, PCIEIPC_IOCTL_CHANNEL_CREATE, &create, 0), "a_channel_is_made");
	printf("# memory of the cgroup %ld -> %ld\n", charged, cgroup_bytes());
	promise(charged >= 0 && cgroup_bytes() - charged >= BYTES, "the_memory_cgroup_is_charged");
	struct pcieipc_channel_fd export = { .size = sizeof(export), .channel = create.channel };

	gives(session, PCIEIPC_IOCTL_CHANNEL_EXPORT, &export, 0);
	uint8_t *out = map(export.fd, BYTES, PROT_READ | PROT_WRITE, 0);
	uint8_t *data = map(session, BYTES, PROT_READ, create.data_offset);

	promise(out && data, "it_is_mapped");
	if (!out || !data)
		return finish();

	/* Open files of the node, before they are attached to anything. */
	enum { SESSIONS = 200 };
	static int sessions[SESSIONS];
	long unopened = cgroup_bytes();
	int opened = 0;

	while (opened < SESSIONS && (sessions[opened] = open(PCIEIPC_NODE, O_RDWR | O_CLOEXEC)) >= 0)
		opened++;
	struct pcieipc_query limits = { .size = sizeof(limits), .user_version = PCIEIPC_ABI_VERSION, .user_oldest = PCIEIPC_ABI_OLDEST };

	gives(all, PCIEIPC_IOCTL_QUERY, &limits, 0);
	/* What each must have: its queue of events. */
	long queues = (long)opened * limits.event_queue * (long)sizeof(struct pcieipc_event);

	printf("# %d sessions: memory of the cgroup %ld -> %ld, their queues %ld\n", opened, unopened, cgroup_bytes(), queues);
	promise(opened == SESSIONS && cgroup_bytes() - unopened >= queues, "sessions_are_charged_to_the_memory_cgroup");
	while (opened)
		close(sessions[--opened]);

	int direct = open("/dev/vda", O_RDONLY | O_DIRECT), buffered = open("/dev/vda", O_RDONLY);

	promise(pread(direct, out + 8192, 65536, 4096) == 65536 && pread(buffered, plain, 65536, 4096) == 65536 && !memcmp(data + 8192, plain, 65536),
		"a_direct_read_lands_in_the_ring");
	promise(pread(direct, data, 4096, 0) < 0 && errno == EFAULT, "a_direct_read_into_a_read_only_mapping_is_refused");

	struct io_uring_params parameters, other;
	int ring = ring_of(&parameters);

	promise(ring >= 0 && registers_buffer(ring, out, BYTES) == 0, "io_uring_registers_the_ring");
	memset(out + 8192, 0, 65536);
	promise(fixed_read(ring, &parameters, direct, out + 8192, 65536, 4096) == 65536 && !memcmp(data + 8192, plain, 65536),
		"a_direct_read_into_the_registered_buffer_lands_in_the_ring");
	int refusing = ring_of(&other);

	promise(registers_buffer(refusing, data, 4096) < 0 && errno == EFAULT, "io_uring_refuses_a_read_only_mapping");
	close(refusing);
	int ends[2];
	struct iovec piece = { out, 4096 };
	struct iovec into = { plain, 4096 };

	out[5] = 0x42;
	promise(!pipe(ends) && vmsplice(ends[1], &piece, 1, 0) == 4096 && read(ends[0], plain, 4096) == 4096 && plain[5] == 0x42, "vmsplice_reads_the_ring");
	plain[5] = 0;
	piece.iov_base = data;
	promise(process_vm_readv(getpid(), &into, 1, &piece, 1, 0) == 4096 && plain[5] == 0x42, "process_vm_readv_reads_the_ring");

	/* The device, the session, the descriptor and the mappings go; the pin stays. */
	char address[32];

	snprintf(address, sizeof(address), "%s", address_of(all, ids[0], &info));
	promise(!run("echo 1 > /sys/bus/pci/devices/%s/remove", address) && await_state(all, ids[0], PCIEIPC_STATE_GONE, 5000, &event), "the_device_is_removed");
	promise(pread(direct, out + 8192, 65536, 4096) == 65536, "direct_reads_go_on_without_the_device");
	close(session);
	close(export.fd);
	promise(data[5] == 0x42 && (out[6] = 7) == 7 && data[6] == 7, "the_memory_is_there_without_session_and_descriptor");
	munmap(out, BYTES);
	munmap(data, BYTES);
	close(all);
	usleep(200000);
	printf("# pages held by the module: %ld before, %ld now; cgroup %ld\n", before, pages_held(), cgroup_bytes());
	promise(pages_held() < before && cgroup_bytes() - charged >= BYTES / 2, "the_module_let_go_and_the_pin_did_not");
	close(ring);
	for (int i = 0; i < 50 && cgroup_bytes() - charged > BYTES / 2; i++)
		usleep(100000);
	promise(cgroup_bytes() - charged < BYTES / 2, "the_last_pin_frees_the_memory");
	return finish();
}
