// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * A mapped ring registered with a network card: another process, which has no descriptor of the ring, writes records into it and rings by RDMA; the
 * reader sees them in its own read-only mapping, with no copy. The card is soft-RoCE.
 */
#define _GNU_SOURCE
#define RDMA_STATIC_PROVIDERS rxe
#include <infiniband/verbs.h>

#include "module.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/wait.h>

#define DATA_BYTES 65536u
#define RECORD 4096u
#define SLOTS (DATA_BYTES / RECORD)
#define ROUNDS 200u
/* A bound for hangs, not for speed. */
#define PATIENCE_MS 60000

/* What the two sides tell each other over a socket. */
struct side {
	union ibv_gid gid;
	uint32_t qp, data_key, tail_key, head_key;
	uint64_t data, tail, head;
};

struct card {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_comp_channel *bell;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	union ibv_gid gid;
	int gid_index;
};

static int open_card(struct card *card)
{
	int count = 0;
	struct ibv_device **list = ibv_get_device_list(&count);

	if (!list || !count || !(card->context = ibv_open_device(list[0])))
		return 0;
	ibv_free_device_list(list);
	/* The address of the interface becomes an identifier of the card a moment later. */
	for (double end = now() + PATIENCE_MS * patience() / 1e3; now() < end; usleep(10000))
		for (card->gid_index = 0; card->gid_index < 16; card->gid_index++)
			if (!ibv_query_gid(card->context, 1, card->gid_index, &card->gid) && card->gid.raw[10] == 0xff && card->gid.raw[11] == 0xff)
				goto found;
	return 0;
found:
	card->pd = ibv_alloc_pd(card->context);
	card->bell = ibv_create_comp_channel(card->context);
	card->cq = card->pd && card->bell ? ibv_create_cq(card->context, 64, NULL, card->bell, 0) : NULL;
	struct ibv_qp_init_attr make = { .send_cq = card->cq, .recv_cq = card->cq, .cap = { 32, 32, 1, 1, 0 }, .qp_type = IBV_QPT_RC };

	card->qp = card->cq ? ibv_create_qp(card->pd, &make) : NULL;
	return card->qp != NULL;
}

static int connect_card(struct card *card, const struct side *other)
{
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };
	struct ibv_qp_attr receive = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = other->qp, .max_dest_rd_atomic = 1,
		.min_rnr_timer = 12, .ah_attr = { .is_global = 1, .port_num = 1,
		.grh = { .dgid = other->gid, .sgid_index = (uint8_t)card->gid_index, .hop_limit = 64 } } };
	/* A time-out of 4 s, seven times: a busy machine is slow, and a lost packet is not what is tested. */
	struct ibv_qp_attr send = { .qp_state = IBV_QPS_RTS, .timeout = 20, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1 };

	return !ibv_modify_qp(card->qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) &&
	       !ibv_modify_qp(card->qp, &receive, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
			      IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) &&
	       !ibv_modify_qp(card->qp, &send, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
			      IBV_QP_MAX_QP_RD_ATOMIC);
}

/* Waits for one completion and says whether it was a success. */
static int completed(struct card *card, struct ibv_wc *done)
{
	for (double end = now() + PATIENCE_MS * patience() / 1e3; now() < end; usleep(200)) {
		int count = ibv_poll_cq(card->cq, 1, done);

		if (count < 0)
			return 0;
		if (count) {
			if (done->status)
				printf("# completion: %s\n", ibv_wc_status_str(done->status));
			return !done->status;
		}
	}
	return 0;
}

static int order(struct card *card, enum ibv_wr_opcode what, struct ibv_mr *local, size_t offset, uint32_t bytes, uint64_t there, uint32_t key)
{
	struct ibv_sge piece = { (uintptr_t)local->addr + offset, bytes, local->lkey };
	struct ibv_send_wr wr = { .sg_list = &piece, .num_sge = 1, .opcode = what, .send_flags = IBV_SEND_SIGNALED, .wr.rdma = { there, key } }, *bad;
	struct ibv_wc done;

	return !ibv_post_send(card->qp, &wr, &bad) && completed(card, &done);
}

static uint8_t content(uint32_t round, uint32_t at)
{
	return (uint8_t)(round * 37 + at * 3 + 1);
}

/* The other process. It has neither session nor descriptor, only what the reader told it of its registered memory. */
static int writer(int socket)
{
	struct card card = { 0 };
	struct side mine = { 0 }, other;
	static _Alignas(4096) uint8_t memory[3 * 4096];

	if (!open_card(&card))
		return 10;
	struct ibv_mr *local = ibv_reg_mr(card.pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE);

	mine.gid = card.gid;
	mine.qp = card.qp->qp_num;
	if (!local || write(socket, &mine, sizeof(mine)) != sizeof(mine) || read(socket, &other, sizeof(other)) != sizeof(other) ||
	    !connect_card(&card, &other) || write(socket, "c", 1) != 1)
		return 11;
	for (uint32_t round = 0;; round++) {
		char go;

		/* The reader says how many more rounds there are, one by one, only after the first: those of the ring need no word. */
		if (round >= ROUNDS && (read(socket, &go, 1) != 1 || go != 'g'))
			return 0;
		uint64_t *head = (uint64_t *)(memory + 8192), *tail = (uint64_t *)(memory + 4096);

		for (double end = now() + PATIENCE_MS * patience() / 1e3;; usleep(500)) {
			if (!order(&card, IBV_WR_RDMA_READ, local, 8192, 8, other.head, other.head_key))
				return 12;
			if (round - *head < SLOTS)
				break;
			if (now() > end)
				return 13;
		}
		for (uint32_t i = 0; i < RECORD; i++)
			memory[i] = content(round, i);
		*tail = round + 1;
		if (!order(&card, IBV_WR_RDMA_WRITE, local, 0, RECORD, other.data + round % SLOTS * RECORD, other.data_key) ||
		    /* The tail, and with it the ring: an immediate value is an event at the reader's card. */
		    !order(&card, IBV_WR_RDMA_WRITE_WITH_IMM, local, 4096, 8, other.tail, other.tail_key))
			return 14;
	}
}

struct reader {
	struct card card;
	int poller;
	const uint8_t *data;
	volatile const uint64_t *tail;
	volatile uint64_t *head;
	uint32_t seen;
	unsigned wakes;
};

static int post_receive(struct card *card)
{
	struct ibv_recv_wr wr = { 0 }, *bad;

	return !ibv_post_recv(card->qp, &wr, &bad);
}

/* Sleeps until rung, then takes all records that are there; 0 when nothing came in time or a record is wrong. */
static int take(struct reader *reader, uint32_t until)
{
	while (reader->seen < until) {
		struct epoll_event event;
		struct ibv_wc done;
		struct ibv_cq *cq;
		void *context;

		if (__atomic_load_n(reader->tail, __ATOMIC_ACQUIRE) == reader->seen) {
			if (epoll_wait(reader->poller, &event, 1, PATIENCE_MS * patience()) != 1)
				return 0;
			reader->wakes++;
			if (ibv_get_cq_event(reader->card.bell, &cq, &context))
				return 0;
			ibv_ack_cq_events(cq, 1);
			if (ibv_req_notify_cq(cq, 0))
				return 0;
			while (ibv_poll_cq(cq, 1, &done) == 1)
				if (done.status || done.opcode != IBV_WC_RECV_RDMA_WITH_IMM || !post_receive(&reader->card)) {
					printf("# receive: %s\n", ibv_wc_status_str(done.status));
					return 0;
				}
		}
		for (; reader->seen < __atomic_load_n(reader->tail, __ATOMIC_ACQUIRE); reader->seen++) {
			const uint8_t *record = reader->data + reader->seen % SLOTS * RECORD;

			for (uint32_t i = 0; i < RECORD; i++)
				if (record[i] != content(reader->seen, i)) {
					printf("# record %u: byte %u is %u, not %u\n", reader->seen, i, record[i], content(reader->seen, i));
					return 0;
				}
			__atomic_store_n(reader->head, reader->seen + 1, __ATOMIC_RELEASE);
		}
	}
	return 1;
}

int main(void)
{
	int sockets[2], status = -1;
	uint32_t ids[16];
	struct pcieipc_endpoint_info info;
	struct pcieipc_event event;

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets))
		return 2;
	pid_t child = fork();

	if (!child) {
		close(sockets[0]);
		_exit(writer(sockets[1]));
	}
	close(sockets[1]);

	int all = open_node(), session = open_node();
	struct pcieipc_channel_create create = { .size = sizeof(create), .data_bytes = DATA_BYTES };

	promise(enumerate(all, ids, 16) >= 1 && gives(session, PCIEIPC_IOCTL_ATTACH, CALL(pcieipc_attach, .endpoint = ids[0]), 0) &&
		gives(session, PCIEIPC_IOCTL_CHANNEL_CREATE, &create, 0), "a_channel_is_made");
	struct pcieipc_channel_fd export = { .size = sizeof(export), .channel = create.channel };
	struct pcieipc_export_info out = { .size = sizeof(out) };

	gives(session, PCIEIPC_IOCTL_CHANNEL_EXPORT, &export, 0);
	gives(export.fd, PCIEIPC_IOCTL_EXPORT_INFO, &out, 0);
	void *data_out = map(export.fd, DATA_BYTES, PROT_READ | PROT_WRITE, out.data_offset);
	void *tail_out = map(export.fd, 4096, PROT_READ | PROT_WRITE, out.tail_offset);
	struct reader reader = { .data = map(session, DATA_BYTES, PROT_READ, create.data_offset), .tail = map(session, 4096, PROT_READ, create.tail_offset),
		.head = map(session, 4096, PROT_READ | PROT_WRITE, create.head_offset), .poller = epoll_create1(EPOLL_CLOEXEC) };
	struct card *card = &reader.card;

	promise(open_card(card), "there_is_a_card");
	promise(data_out && tail_out && reader.data && reader.tail && reader.head, "the_ring_is_mapped");
	if (failed)
		return finish();

	/* Registration pins the pages, as a GPU's does. */
	struct ibv_mr *data = ibv_reg_mr(card->pd, data_out, DATA_BYTES, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	struct ibv_mr *tail = ibv_reg_mr(card->pd, tail_out, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	struct ibv_mr *head = ibv_reg_mr(card->pd, (void *)reader.head, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);

	promise(data && tail && head, "a_mapped_ring_is_registered_with_a_network_card");
	errno = 0;
	promise(!ibv_reg_mr(card->pd, (void *)reader.data, DATA_BYTES, IBV_ACCESS_LOCAL_WRITE) && errno == EFAULT,
		"the_readers_mapping_is_not_registered_for_writing");
	struct ibv_mr *readable = ibv_reg_mr(card->pd, (void *)reader.data, DATA_BYTES, IBV_ACCESS_REMOTE_READ);

	promise(readable != NULL, "the_readers_mapping_is_registered_for_reading");
	struct pcieipc_doorbell bell = { .size = sizeof(bell) };

	gives(session, PCIEIPC_IOCTL_DOORBELL_MAP, &bell, 0);
	void *page = map(session, 4096, PROT_READ | PROT_WRITE, bell.map_offset);

	promise(page && !ibv_reg_mr(card->pd, page, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE), "a_doorbell_page_is_no_memory_and_not_registered");

	struct side mine = { .gid = card->gid, .qp = card->qp->qp_num, .data_key = data ? data->rkey : 0, .tail_key = tail ? tail->rkey : 0,
		.head_key = head ? head->rkey : 0, .data = (uintptr_t)data_out, .tail = (uintptr_t)tail_out, .head = (uintptr_t)reader.head };
	struct side other;
	char connected;
	int ready = read(sockets[0], &other, sizeof(other)) == sizeof(other) && connect_card(card, &other) && !ibv_req_notify_cq(card->cq, 0);

	for (unsigned i = 0; i < 2 * SLOTS && ready; i++)
		ready = post_receive(card);
	struct epoll_event rung = { .events = EPOLLIN };

	ready = ready && !epoll_ctl(reader.poller, EPOLL_CTL_ADD, card->bell->fd, &rung) && write(sockets[0], &mine, sizeof(mine)) == sizeof(mine) &&
		read(sockets[0], &connected, 1) == 1;
	promise(ready, "another_process_connects");
	if (!ready)
		return finish();
	promise(take(&reader, ROUNDS), "another_process_writes_records_into_the_ring_by_rdma_and_the_reader_reads_them_in_place");
	printf("# %u records, %u times asleep until rung by rdma\n", reader.seen, reader.wakes);
	promise(reader.wakes > 0, "it_rings_by_rdma");
	promise(reader.head[0] == ROUNDS && reader.tail[0] == ROUNDS, "room_is_given_back_through_the_readers_page");

	/* The device goes; the registration pins memory that the module owns, so both go on. */
	char address[32];

	snprintf(address, sizeof(address), "%s", address_of(all, ids[0], &info));
	promise(!run("echo 1 > /sys/bus/pci/devices/%s/remove", address) && await_state(all, ids[0], PCIEIPC_STATE_GONE, PATIENCE_MS, &event),
		"the_endpoint_is_removed");
	promise(write(sockets[0], "g", 1) == 1 && take(&reader, ROUNDS + 1), "rdma_goes_on_in_the_memory_of_a_removed_endpoint");
	close(session);
	close(export.fd);
	promise(write(sockets[0], "g", 1) == 1 && take(&reader, ROUNDS + 2), "and_after_session_and_descriptor_are_closed");
	promise(write(sockets[0], "e", 1) == 1 && waitpid(child, &status, 0) == child && status == 0, "the_other_process_saw_no_error");
	if (status)
		printf("# the other process ended with %#x\n", status);
	promise(!ibv_dereg_mr(data) && !ibv_dereg_mr(tail) && !ibv_dereg_mr(head) && !ibv_dereg_mr(readable), "the_registrations_end");
	return finish();
}
