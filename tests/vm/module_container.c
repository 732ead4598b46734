// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * module_container UID: a container with user, mount, pid, network and (where the kernel has them) ipc namespaces of its own, whose /dev holds one endpoint's node and whose
 * device cgroup allows only that. Its root uses that endpoint and finds no other.
 */
#define _GNU_SOURCE
#include "module.h"

#include <linux/bpf.h>
#include <sched.h>
#include <stddef.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>

/* What a container's runtime does: no device of this cgroup but one. */
static int allow_only(const char *cgroup, dev_t device)
{
	/* R1 is the context; R2, R3 the numbers asked for; 1 in R0 allows. */
	struct bpf_insn program[] = {
		{ BPF_LDX | BPF_MEM | BPF_W, BPF_REG_2, BPF_REG_1, offsetof(struct bpf_cgroup_dev_ctx, major), 0 },
		{ BPF_LDX | BPF_MEM | BPF_W, BPF_REG_3, BPF_REG_1, offsetof(struct bpf_cgroup_dev_ctx, minor), 0 },
		{ BPF_ALU64 | BPF_MOV | BPF_K, BPF_REG_0, 0, 0, 0 },
		{ BPF_JMP | BPF_JNE | BPF_K, BPF_REG_2, 0, 2, (int)major(device) },
		{ BPF_JMP | BPF_JNE | BPF_K, BPF_REG_3, 0, 1, (int)minor(device) },
		{ BPF_ALU64 | BPF_MOV | BPF_K, BPF_REG_0, 0, 0, 1 },
		{ BPF_JMP | BPF_EXIT, 0, 0, 0, 0 },
	};
	union bpf_attr load = { .prog_type = BPF_PROG_TYPE_CGROUP_DEVICE, .insns = (uintptr_t)program, .insn_cnt = sizeof(program) / sizeof(program[0]),
		.license = (uintptr_t)"GPL" };
	int loaded = (int)syscall(SYS_bpf, BPF_PROG_LOAD, &load, sizeof(load));
	int group = open(cgroup, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	union bpf_attr attach = { .target_fd = (uint32_t)group, .attach_bpf_fd = (uint32_t)loaded, .attach_type = BPF_CGROUP_DEVICE };

	return loaded >= 0 && group >= 0 && !syscall(SYS_bpf, BPF_PROG_ATTACH, &attach, sizeof(attach));
}

static int count_nodes(const char *folder)
{
	char command[128], line[16] = "";

	snprintf(command, sizeof(command), "ls %s | grep -c ^pcieipc", folder);
	FILE *listing = popen(command, "r");

	if (listing && !fgets(line, sizeof(line), listing))
		line[0] = 0;
	if (listing)
		pclose(listing);
	return atoi(line);
}

/* The container's first process. */
static int contained(const char *node, uint32_t mine, uint32_t other, dev_t others)
{
	uint32_t ids[16];

	/* Root of a namespace, and of nothing else. */
	promise(getpid() == 1 && getuid() == 0, "it_is_root_in_namespaces_of_its_own");
	promise(count_nodes("/dev") == 1, "its_dev_holds_one_node");
	promise(open(PCIEIPC_NODE, O_RDWR) < 0 && errno == ENOENT, "the_node_of_all_endpoints_is_not_there");
	errno = 0;
	promise(mknod("/dev/other", S_IFCHR | 0600, others) < 0 && errno == EPERM, "it_makes_no_node_of_another_endpoint");
	int fd = open(node, O_RDWR | O_CLOEXEC);

	promise(fd >= 0, "its_own_node_opens");
	if (fd < 0)
		return finish();
	promise(enumerate(fd, ids, 16) == 1 && ids[0] == mine, "it_sees_its_endpoint_and_no_other");
	promise(gives(fd, PCIEIPC_IOCTL_ENDPOINT_INFO, CALL(pcieipc_endpoint_info, .endpoint = other), ENOENT) &&
		gives(fd, PCIEIPC_IOCTL_ATTACH, CALL(pcieipc_attach, .endpoint = other), ENOENT) &&
		gives(fd, PCIEIPC_IOCTL_DISTANCE, CALL(pcieipc_distance, .from = mine, .to = other), ENOENT), "no_call_reaches_another_endpoint");
	int kept = 1;

	for (uint32_t id = 0; id < 64; id++)
		if (id != mine)
			kept &= gives(fd, PCIEIPC_IOCTL_ATTACH, CALL(pcieipc_attach, .endpoint = id), ENOENT);
	promise(kept, "no_guessed_id_is_an_endpoint");

	/* Its own works in full. */
	struct pcieipc_attach attach = { .size = sizeof(attach), .endpoint = mine };
	struct pcieipc_channel_create create = { .size = sizeof(create), .data_bytes = 65536, .vector = 1 };

	promise(gives(fd, PCIEIPC_IOCTL_ATTACH, &attach, 0) && gives(fd, PCIEIPC_IOCTL_CHANNEL_CREATE, &create, 0), "its_endpoint_is_attached_and_has_a_channel");
	struct pcieipc_channel_fd export = { .size = sizeof(export), .channel = create.channel };
	struct pcieipc_export_info writer = { .size = sizeof(writer) };
	int bell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	uint64_t signals = 0;

	promise(gives(fd, PCIEIPC_IOCTL_CHANNEL_EXPORT, &export, 0) && gives(export.fd, PCIEIPC_IOCTL_EXPORT_INFO, &writer, 0) &&
		gives(fd, PCIEIPC_IOCTL_VECTOR_EVENTFD, CALL(pcieipc_vector_eventfd, .vector = 1, .fd = bell), 0), "the_channel_is_exported");
	volatile uint64_t *out = map(export.fd, 65536, PROT_READ | PROT_WRITE, writer.data_offset), *in = map(fd, 65536, PROT_READ, create.data_offset);

	if (out)
		*out = 0x636f6e7461696e65;
	promise(out && in && *in == 0x636f6e7461696e65 && gives(export.fd, PCIEIPC_IOCTL_EXPORT_RING, CALL(pcieipc_ring), 0) && wait_for(bell, POLLIN, 30000) &&
		read(bell, &signals, 8) == 8 && signals == 1, "it_writes_rings_and_wakes");

	/* Privileges of its own user namespace are none over the machine. */
	promise(gives(fd, PCIEIPC_IOCTL_ADMIN, CALL(pcieipc_admin, .action = PCIEIPC_ADMIN_RESET, .endpoint = mine), EPERM) &&
		gives(fd, PCIEIPC_IOCTL_ADMIN, CALL(pcieipc_admin, .action = PCIEIPC_ADMIN_RESCAN, .endpoint = other), EPERM),
		"its_root_administers_nothing");
	return finish();
}

static void write_map(pid_t child, const char *file, unsigned id)
{
	char path[64], text[64];

	snprintf(path, sizeof(path), "/proc/%d/%s", child, file);
	snprintf(text, sizeof(text), "0 %u 1\n", id);
	write_file(path, text);
}

int main(int argc, char **argv)
{
	uint32_t ids[16];
	char node[64], others[64], in_dev[64];
	struct stat mine, other;
	int all = open_node(), gate[2], back[2], status = -1;
	unsigned user = argc > 1 ? (unsigned)atoi(argv[1]) : 65534;
	char byte = 0;

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (enumerate(all, ids, 16) < 2 || pipe(gate) || pipe(back))
		return 2;
	snprintf(node, sizeof(node), PCIEIPC_ENDPOINT_NODE, ids[0]);
	snprintf(others, sizeof(others), PCIEIPC_ENDPOINT_NODE, ids[1]);
	if (stat(node, &mine) || stat(others, &other))
		return 3;
	promise(mine.st_rdev != other.st_rdev, "each_endpoint_has_a_number_of_its_own");

	/* As a runtime: the node is the user's, in a folder that becomes the container's /dev, and the cgroup allows it alone. */
	mkdir("/run/box", 0755);
	mkdir("/run/box/dev", 0755);
	snprintf(in_dev, sizeof(in_dev), "/run/box/dev/%s", strrchr(node, '/') + 1);
	promise(!mkdir("/sys/fs/cgroup/box", 0755) && allow_only("/sys/fs/cgroup/box", mine.st_rdev), "a_device_cgroup_allows_one_endpoint");
	if (mknod(in_dev, S_IFCHR | 0600, mine.st_rdev) || chown(in_dev, user, user) || chown("/run/box/dev", user, user))
		return 4;

	pid_t child = fork();

	if (!child) {
		close(all);
		write_file("/sys/fs/cgroup/box/cgroup.procs", "0");
		/* Before the namespaces, and with every right: the cgroup holds for root, too. */
		promise(open(others, O_RDWR) < 0 && errno == EPERM && open(PCIEIPC_NODE, O_RDWR) < 0 && errno == EPERM, "the_device_cgroup_refuses_the_others_even_to_root");
		if (failed || setresgid(user, user, user) || setresuid(user, user, user) || prctl(PR_SET_DUMPABLE, 1) ||
		    unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | (access("/proc/self/ns/ipc", F_OK) ? 0 : CLONE_NEWIPC)))
			_exit(5);
		if (write(back[1], "u", 1) != 1 || read(gate[0], &byte, 1) != 1 || setresgid(0, 0, 0) || setresuid(0, 0, 0))
			_exit(6);
		if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) || mount("/run/box/dev", "/dev", NULL, MS_BIND, NULL))
			_exit(7);
		pid_t first = fork();

		if (!first) {
			int code = contained(node, ids[0], ids[1], other.st_rdev);

			fflush(stdout);
			_exit(code);
		}
		if (waitpid(first, &status, 0) != first || !WIFEXITED(status))
			_exit(8);
		_exit(WEXITSTATUS(status));
	}
	/* So that its end is seen when it ends without a word. */
	close(back[1]);
	if (read(back[0], &byte, 1) == 1) {
		write_map(child, "uid_map", user);
		write_map(child, "gid_map", user);
		if (write(gate[1], "g", 1) != 1)
			return 9;
	}
	close(gate[1]);
	if (waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status)) {
		printf("# the container ended with %#x\n", status);
		return 1;
	}
	/* What it had is free again, and the other endpoint never noticed. */
	int session = open_node();

	if (!gives(session, PCIEIPC_IOCTL_ATTACH, CALL(pcieipc_attach, .endpoint = ids[0]), 0))
		return 1;
	return 0;
}
