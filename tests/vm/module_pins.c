// SPDX-License-Identifier: MIT OR Apache-2.0
/* Ring memory works with whatever takes user pages: direct I/O, io_uring's registered buffers, vmsplice, process_vm_readv; pins outlive all. */
#define _GNU_SOURCE
#include "module.h"

#include <linux/io_uring.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#define BYTES (1 << 20)

static int ring_of(void)
{
	struct io_uring_params parameters = { 0 };

	return (int)syscall(SYS_io_uring_setup, 4, &parameters);
}

static int registers_buffer(int ring, volatile void *at, size_t bytes)
{
	struct iovec buffer = { (void *)at, bytes };

	return (int)syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, &buffer, 1);
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

	int direct = open("/dev/vda", O_RDONLY | O_DIRECT), buffered = open("/dev/vda", O_RDONLY);

	promise(pread(direct, out + 8192, 65536, 4096) == 65536 && pread(buffered, plain, 65536, 4096) == 65536 && !memcmp(data + 8192, plain, 65536),
		"a_direct_read_lands_in_the_ring");
	promise(pread(direct, data, 4096, 0) < 0 && errno == EFAULT, "a_direct_read_into_a_read_only_mapping_is_refused");

	int ring = ring_of();

	promise(ring >= 0 && registers_buffer(ring, out, BYTES) == 0, "io_uring_registers_the_ring");
	int refusing = ring_of();

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
