// SPDX-License-Identifier: MIT OR Apache-2.0
/* QEMU's edu as an endpoint: one doorbell, and an engine that takes its time and cannot be stopped, only be kept off memory. */
#define _GNU_SOURCE
#include "module.h"

#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

#define BYTES 65536u

static uint32_t endpoint;

struct copier {
	int session, result;
	struct pcieipc_copy copy;
};

static void *copying(void *arg)
{
	struct copier *copier = arg;

	copier->result = ioctl(copier->session, PCIEIPC_IOCTL_COPY, &copier->copy) ? errno : 0;
	return NULL;
}

/* Attaches and makes a channel; gives the session. */
static int attach(struct pcieipc_channel_create *create, volatile uint8_t **out)
{
	int session = open_node();
	struct pcieipc_export_info info = { .size = sizeof(info) };

	*create = (struct pcieipc_channel_create){ .size = sizeof(*create), .data_bytes = BYTES };
	if (!gives(session, PCIEIPC_IOCTL_ATTACH, CALL(pcieipc_attach, .endpoint = endpoint), 0) ||
	    !gives(session, PCIEIPC_IOCTL_CHANNEL_CREATE, create, 0))
		return -1;
	struct pcieipc_channel_fd export = { .size = sizeof(export), .channel = create->channel };

	if (!gives(session, PCIEIPC_IOCTL_CHANNEL_EXPORT, &export, 0) || !gives(export.fd, PCIEIPC_IOCTL_EXPORT_INFO, &info, 0))
		return -1;
	*out = map(export.fd, BYTES, PROT_READ | PROT_WRITE, info.data_offset);
	return *out ? session : -1;
}

static uint64_t moved(int fd)
{
	struct pcieipc_endpoint_info info;

	address_of(fd, endpoint, &info);
	return info.dma_bytes;
}

static int until_moved(int fd, uint64_t more_than)
{
	for (double end = now() + 60 * patience(); now() < end; usleep(1000))
		if (moved(fd) > more_than)
			return 1;
	return 0;
}

static void fill(volatile uint8_t *at, uint32_t bytes, uint32_t seed)
{
	for (uint32_t i = 0; i < bytes; i++)
		at[i] = (uint8_t)(i * 7 + seed + (i >> 8));
}

static int is_filled(volatile uint8_t *at, uint32_t bytes, uint32_t seed)
{
	for (uint32_t i = 0; i < bytes; i++)
		if (at[i] != (uint8_t)(i * 7 + seed + (i >> 8)))
			return 0;
	return 1;
}

/* Lines of the kernel log about accesses that the IOMMU refused. */
static int faults(void)
{
	FILE *lines = popen("dmesg | grep -c 'fault addr'", "r");
	int count = -1;

	if (lines && fscanf(lines, "%d", &count) != 1)
		count = -1;
	if (lines)
		pclose(lines);
	return count;
}

/* The IOMMU tells them by an interrupt of its own. */
static int faults_after(int seen)
{
	for (double end = now() + 10 * patience(); now() < end; usleep(20000))
		if (faults() > seen)
			return 1;
	return 0;
}

/* Without a driver, and by hand: the engine writes its buffer to a bus address. */
static int aims_at(volatile uint64_t *registers, uint64_t address)
{
	registers[0x80 / 8] = 0x40000;
	registers[0x88 / 8] = address;
	registers[0x90 / 8] = 4096;
	registers[0x98 / 8] = 3;
	for (double end = now() + 60 * patience(); now() < end; usleep(1000))
		if (!(registers[0x98 / 8] & 1))
			return 1;
	return 0;
}

int main(void)
{
	uint32_t ids[16];
	struct pcieipc_endpoint_info info;
	struct pcieipc_channel_create create, two = { .size = sizeof(two), .data_bytes = BYTES };
	struct pcieipc_event event;
	volatile uint8_t *out;
	char address[32], path[128];
	int all = open_node();

	setvbuf(stdout, NULL, _IOLBF, 0);
	for (uint32_t i = 0, count = enumerate(all, ids, 16); i < count; i++) {
		address_of(all, ids[i], &info);
		if (!strcmp(info.profile, "edu"))
			endpoint = ids[i];
	}
	snprintf(address, sizeof(address), "%s", address_of(all, endpoint, &info));
	promise(endpoint && info.vectors == 1 && info.ep_flags & PCIEIPC_EP_DMA_ENGINE, "edu_is_an_endpoint_with_an_engine");
	int session = attach(&create, &out), bell = eventfd(0, EFD_NONBLOCK);

	promise(session >= 0 && gives(session, PCIEIPC_IOCTL_CHANNEL_CREATE, &two, 0) &&
		gives(session, PCIEIPC_IOCTL_VECTOR_EVENTFD, CALL(pcieipc_vector_eventfd, .fd = bell), 0), "a_session_attaches_and_has_channels");
	if (failed)
		return finish();
	volatile uint8_t *in = map(session, BYTES, PROT_READ, two.data_offset);
	struct pcieipc_copy copy = { .size = sizeof(copy), .from = create.channel, .to = two.channel, .from_offset = 256, .to_offset = 8192, .bytes = 10000,
		.timeout_ms = 10000 };
	uint64_t count = 0;

	fill(out, BYTES, 1);
	promise(gives(session, PCIEIPC_IOCTL_COPY, &copy, 0) && !memcmp((void *)(in + 8192), (void *)(out + 256), 10000) && !in[8191] && !in[18192],
		"its_engine_copies_exactly_what_it_is_told");
	promise(moved(all) == 10000, "the_bytes_are_counted");
	promise(!wait_for(bell, POLLIN, 0), "the_end_of_a_copy_is_no_doorbell");
	promise(gives(session, PCIEIPC_IOCTL_RING, CALL(pcieipc_ring), 0) && wait_for(bell, POLLIN, 30000) && read(bell, &count, 8) == 8 && count == 1,
		"its_doorbell_wakes_the_reader_once");
	copy.flags = PCIEIPC_COPY_RING;
	promise(gives(session, PCIEIPC_IOCTL_COPY, &copy, EOPNOTSUPP), "it_rings_nobody_behind_a_copy");
	copy.flags = 0;
	copy.timeout_ms = 1;
	promise(gives(session, PCIEIPC_IOCTL_COPY, &copy, ETIMEDOUT), "a_copy_that_takes_too_long_is_etimedout");
	/* Its buffer is a page, so this takes 16 pieces of two orders each, a tenth of a second every one: 3.2 s, and none as long as the whole may. */
	copy.timeout_ms = 700;
	copy.bytes = BYTES;
	copy.from_offset = copy.to_offset = 0;
	double began = now();
	int late = gives(session, PCIEIPC_IOCTL_COPY, &copy, ETIMEDOUT);
	double took = now() - began;

	printf("# a copy that may take 700 ms ended after %.0f\n", took * 1e3);
	promise(late && took < 2.5, "the_time_is_that_of_the_whole_copy_however_many_pieces_it_has");
	copy.timeout_ms = 10000;
	copy.bytes = 64;
	promise(gives(session, PCIEIPC_IOCTL_COPY, &copy, 0), "and_the_next_one_works");

	/* A ring is destroyed under the engine. */
	struct copier copier = { .session = session, .copy = { .size = sizeof(copy), .from = create.channel, .to = two.channel, .bytes = BYTES,
		.timeout_ms = 10000 } };
	pthread_t thread;
	uint64_t before = moved(all);

	pthread_create(&thread, NULL, copying, &copier);
	promise(until_moved(all, before) && gives(session, PCIEIPC_IOCTL_CHANNEL_DESTROY, CALL(pcieipc_channel, .channel = create.channel), 0) &&
		!pthread_join(thread, NULL) && copier.result == ENOENT, "a_ring_destroyed_under_a_copy_ends_it");
	/* A mapping holds the session like a descriptor. */
	munmap((void *)in, BYTES);
	close(session);

	/* The process is killed in the middle of a copy that has a while to go. */
	int ready[2];
	char byte;

	before = moved(all);
	if (pipe(ready))
		return 2;
	pid_t child = fork();

	if (!child) {
		volatile uint8_t *mine;
		int own = attach(&create, &mine);
		struct pcieipc_copy long_copy = { .size = sizeof(long_copy), .from = 1, .to = 1, .to_offset = BYTES / 2, .bytes = BYTES / 2, .timeout_ms = 10000 };

		if (own < 0 || write(ready[1], "r", 1) != 1)
			_exit(1);
		ioctl(own, PCIEIPC_IOCTL_COPY, &long_copy);
		_exit(2);
	}
	close(ready[1]);
	int status = 0;
	int killed = read(ready[0], &byte, 1) == 1 && until_moved(all, before) && !kill(child, SIGKILL) && waitpid(child, &status, 0) == child &&
		WIFSIGNALED(status);
	uint64_t after = moved(all) - before;

	printf("# killed after %llu of %u bytes\n", (unsigned long long)after, BYTES / 2);
	promise(killed && after < BYTES / 2, "a_process_that_copies_can_be_killed");

	/* Unbound under the engine, which cannot be stopped. */
	session = attach(&create, &out);
	copier = (struct copier){ .session = session, .copy = { .size = sizeof(copy), .from = 1, .to = 1, .to_offset = BYTES / 2, .bytes = BYTES / 2,
		.timeout_ms = 10000 } };
	promise(session >= 0, "a_new_session_attaches");
	fill(out, BYTES, 2);
	before = moved(all);
	pthread_create(&thread, NULL, copying, &copier);
	promise(until_moved(all, before) && !run("echo %s > /sys/bus/pci/drivers/pcieipc/unbind", address), "it_is_unbound_under_a_copy");
	fill(out, BYTES, 3);
	promise(await_state(all, endpoint, PCIEIPC_STATE_GONE, 30000, &event) && !pthread_join(thread, NULL) && copier.result == ENODEV, "the_copy_says_so");
	usleep(500000);
	promise(is_filled(out, BYTES, 3), "no_byte_lands_after_unbind");

	/* With the hands of an administrator, who may do anything: its old address and others, from an engine that is on the bus. */
	snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/config", address);
	int config = open(path, O_RDWR);
	uint16_t command = 0;
	int mastering = pread(config, &command, 2, 4) == 2 && (command |= 6, pwrite(config, &command, 2, 4) == 2);

	run("echo 1 > /sys/bus/pci/devices/%s/enable", address);
	snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/resource0", address);
	volatile uint64_t *registers = map(open(path, O_RDWR | O_SYNC), 4096, PROT_READ | PROT_WRITE, 0);

	promise(mastering && registers, "its_registers_are_reached_by_hand");
	if (failed)
		return finish();
	uint64_t source = registers[0x80 / 8], target = registers[0x88 / 8], old = source == 0x40000 ? target : source;
	int seen = faults();

	promise(old != 0x40000 && aims_at(registers, old), "it_writes_to_its_old_ring");
	promise(faults_after(seen) && is_filled(out, BYTES, 3), "the_old_address_faults_after_unbind");
	seen = faults();
	promise(aims_at(registers, 0x100000) && faults_after(seen), "dma_outside_of_rings_faults");
	command &= (uint16_t)~4;
	promise(pwrite(config, &command, 2, 4) == 2, "it_is_off_the_bus_again");
	return finish();
}
