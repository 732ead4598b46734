/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Made by cbindgen from the library's source: change it there, then run scripts/build-capi. */

#ifndef PCIEIPC_H
#define PCIEIPC_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

// What ranks do together.
typedef enum pcieipc_collective {
  // As pcieipc_all_reduce_into, or in place on `to` when `from` is NULL.
  PCIEIPC_COLLECTIVE_ALL_REDUCE = 1,
  // As pcieipc_reduce_scatter.
  PCIEIPC_COLLECTIVE_REDUCE_SCATTER = 2,
  // As pcieipc_all_gather.
  PCIEIPC_COLLECTIVE_ALL_GATHER = 3,
  // As pcieipc_reduce to the root `rank`.
  PCIEIPC_COLLECTIVE_REDUCE = 4,
  // As pcieipc_broadcast of `to` from the root `rank`.
  PCIEIPC_COLLECTIVE_BROADCAST = 5,
  // As pcieipc_all_to_all.
  PCIEIPC_COLLECTIVE_ALL_TO_ALL = 6,
  // As pcieipc_send of `from` to `rank`.
  PCIEIPC_COLLECTIVE_SEND = 7,
  // As pcieipc_receive to `to` from `rank`.
  PCIEIPC_COLLECTIVE_RECEIVE = 8,
  // As pcieipc_barrier.
  PCIEIPC_COLLECTIVE_BARRIER = 9,
} pcieipc_collective;

// Which paths calls on CUDA memory may take.
typedef enum pcieipc_cuda_path {
  // Peer memory for each pair of devices where it is proved to work, host memory for the others.
  PCIEIPC_CUDA_PATH_AUTO = 0,
  // Peer memory for all, or an error.
  PCIEIPC_CUDA_PATH_PEER = 1,
  // Host memory for all.
  PCIEIPC_CUDA_PATH_HOST = 2,
  // Peer memory between ranks that share a device, host memory between devices.
  PCIEIPC_CUDA_PATH_DEVICE = 3,
} pcieipc_cuda_path;

// How elements are combined.
typedef enum pcieipc_op {
  // Integers wrap; 16-bit floats add in f32 and round once.
  PCIEIPC_OP_SUM = 0,
  PCIEIPC_OP_PROD = 1,
  // NaN if any is NaN.
  PCIEIPC_OP_MIN = 2,
  // NaN if any is NaN.
  PCIEIPC_OP_MAX = 3,
  // The sum divided by the number of ranks.
  PCIEIPC_OP_AVERAGE = 4,
} pcieipc_op;

// What a call answered.
typedef enum pcieipc_status {
  // The result is right.
  PCIEIPC_STATUS_OK = 0,
  // The deadline passed while the peer was alive.
  PCIEIPC_STATUS_TIMEOUT = 1,
  // A peer's process has ended.
  PCIEIPC_STATUS_PEER_DIED = 2,
  // An endpoint is recovering from a PCIe error.
  PCIEIPC_STATUS_ENDPOINT_RECOVERING = 3,
  // An endpoint was removed, unbound or is dead.
  PCIEIPC_STATUS_ENDPOINT_GONE = 4,
  // A link trained below what it was.
  PCIEIPC_STATUS_LINK_DEGRADED = 5,
  // Ranks disagree on size, type, operation or configuration.
  PCIEIPC_STATUS_MISMATCH = 6,
  // A record or an index from a peer broke the protocol.
  PCIEIPC_STATUS_CORRUPT = 7,
  // Somebody called abort.
  PCIEIPC_STATUS_ABORTED = 8,
  // The arguments can not be served.
  PCIEIPC_STATUS_ARGUMENT = 9,
  // The group could not meet.
  PCIEIPC_STATUS_MEETING = 10,
  // The module or an endpoint refused.
  PCIEIPC_STATUS_DEVICE = 11,
  // A system call failed.
  PCIEIPC_STATUS_SYSTEM = 12,
  // A bug in the library; please report it.
  PCIEIPC_STATUS_INTERNAL = 13,
} pcieipc_status;

// How the ranks of a group reach each other.
typedef enum pcieipc_transport {
  // Shared memory: no module, no hardware.
  PCIEIPC_TRANSPORT_SHM = 0,
  // Channels of /dev/pcieipc, one endpoint a rank.
  PCIEIPC_TRANSPORT_KMOD = 1,
} pcieipc_transport;

// The type of an element.
typedef enum pcieipc_type {
  PCIEIPC_TYPE_F64 = 0,
  PCIEIPC_TYPE_F32 = 1,
  PCIEIPC_TYPE_F16 = 2,
  PCIEIPC_TYPE_BF16 = 3,
  PCIEIPC_TYPE_I8 = 4,
  PCIEIPC_TYPE_I16 = 5,
  PCIEIPC_TYPE_I32 = 6,
  PCIEIPC_TYPE_I64 = 7,
  PCIEIPC_TYPE_U8 = 8,
  PCIEIPC_TYPE_U16 = 9,
  PCIEIPC_TYPE_U32 = 10,
  PCIEIPC_TYPE_U64 = 11,
} pcieipc_type;

// A registered buffer. It may outlive the group, but can then no more be reduced.
typedef struct pcieipc_buffer pcieipc_buffer;

// One rank's part in all-reduces of CUDA memory. Not for use by two threads at once.
typedef struct pcieipc_cuda pcieipc_cuda;

// One rank's membership in a group. Not for use by two threads at once.
typedef struct pcieipc_group pcieipc_group;

// A call that was started. It may outlive the group.
typedef struct pcieipc_request pcieipc_request;

// Who and what an error is about. Set everything to zero, then `size` to `sizeof(struct pcieipc_error)`: fields that later versions add
// are found by `size`.
typedef struct pcieipc_error {
  // Bytes of this struct.
  size_t size;
  // The pcieipc_status that the call answered.
  uint32_t status;
  // The rank that it is about (that died, is late, disagrees, called abort), or -1.
  int32_t rank;
  // The module's id of the endpoint that it is about, or -1.
  int64_t endpoint;
  // The life of that endpoint that was in use, or 0.
  uint64_t generation;
} pcieipc_error;

// What a rank brings to a communicator of CUDA devices; the same on all ranks but for `rank`, `device` and the times. Set everything to zero,
// then `size` to `sizeof(struct pcieipc_cuda_options)`, then what you need: fields that later versions add are found by `size`.
typedef struct pcieipc_cuda_options {
  // Bytes of this struct.
  size_t size;
  // The directory in which the ranks meet, not that of another group; made with mode 0700 if it is not there. Required.
  const char *directory;
  // This rank, from 0.
  uint32_t rank;
  // How many ranks there are, 1 to 16.
  uint32_t ranks;
  // The driver's number of this rank's device, in this process. Its primary context is used. Ranks may share a device.
  uint32_t device;
  // A pcieipc_cuda_path.
  uint32_t path;
  // How long a call waits for the others on the device, in milliseconds; 0 for the default of 30 s.
  uint32_t deadline_ms;
  // How long the meeting and each step of the start may take, in milliseconds; 0 for the default of 180 s. Compiling is one of them.
  uint32_t setup_timeout_ms;
  // The types whose kernels are loaded at the start, one bit for each pcieipc_type; 0 for all. Others are loaded at their first call.
  uint32_t types;
  // Most blocks of a call; 0 for the default.
  uint32_t blocks;
  // Not 0: after each call all ranks compare their results; a difference is PCIEIPC_STATUS_CORRUPT.
  uint32_t checked;
  // Always 0.
  uint32_t reserved;
} pcieipc_cuda_options;

// What a rank brings to a meeting. Set everything to zero, then `size` to `sizeof(struct pcieipc_options)`, then what you need:
// fields that later versions add are found by `size`.
typedef struct pcieipc_options {
  // Bytes of this struct.
  size_t size;
  // The directory in which the ranks meet; made with mode 0700 if it is not there. Required.
  const char *directory;
  // This rank, from 0.
  uint32_t rank;
  // How many ranks there are, 1 to 16.
  uint32_t ranks;
  // A pcieipc_transport.
  uint32_t transport;
  // With PCIEIPC_TRANSPORT_KMOD: the module's id of this rank's endpoint plus 1, or 0 for the rank-th free one.
  uint32_t endpoint;
  // Data area of each ring in bytes, a power of two; 0 for the default.
  size_t ring_bytes;
  // How long the meeting may take, in milliseconds; 0 for the default of 30 s.
  uint32_t meeting_timeout_ms;
  // 0 for the default choice, otherwise a number of the library's algorithms: 1 one-shot, 2 two-shot, 3 star, 4 ring,
  // 5 recursive doubling, 6 hierarchical.
  uint32_t algorithm;
  // Not 0: a thread of the group goes on with started calls while the caller computes.
  uint32_t helper_thread;
  // Not 0: choose algorithms by what was measured of this machine, at first use (about two seconds); the same on all ranks.
  uint32_t tuned;
  // Not 0: a checksum in every record, compared on the bytes that are combined; the same on all ranks.
  uint32_t checked;
  // With PCIEIPC_TRANSPORT_KMOD, not 0: a link that trains down is PCIEIPC_STATUS_LINK_DEGRADED instead of a slower call.
  uint32_t degraded_link_is_error;
} pcieipc_options;

// What all ranks that are left learn alike. Ranks are those of the meeting, one bit each. Set everything to zero, then `size` to
// `sizeof(struct pcieipc_agreement)`: fields that later versions add are found by `size`.
typedef struct pcieipc_agreement {
  // Bytes of this struct.
  size_t size;
  // Not 0: every one of them said so.
  uint32_t ok;
  // Members that can not go on: died, left, did not answer in time, or have an endpoint that is not live.
  uint32_t failed;
  // Ranks that are not in the group now and ask to be taken back.
  uint32_t returned;
  // Always 0.
  uint32_t reserved;
} pcieipc_agreement;

// A call to start. Set everything to zero, then `size` to `sizeof(struct pcieipc_call)`, then what the collective needs: fields that later
// versions add are found by `size`.
typedef struct pcieipc_call {
  // Bytes of this struct.
  size_t size;
  // A pcieipc_collective.
  uint32_t collective;
  // A pcieipc_type.
  uint32_t element;
  // A pcieipc_op, where something is combined.
  uint32_t operation;
  // The root, or the other rank of a message.
  uint32_t rank;
  // What is read. It must not overlap `to`.
  const void *from;
  // What is stored to.
  void *to;
  // Elements, as in the function of the collective.
  size_t count;
  // How long the whole call may take, from its start on, in milliseconds.
  uint32_t timeout_ms;
} pcieipc_call;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Makes a buffer of `count` elements, all zero, that the other ranks can read where it lies; all ranks call it in the same order with the
// same arguments. Stores it behind `out`. `element` is a pcieipc_type.
enum pcieipc_status pcieipc_buffer_register(struct pcieipc_group *of,
                                            size_t count,
                                            uint32_t element,
                                            uint32_t timeout_ms,
                                            struct pcieipc_buffer **out);

// Where its elements lie; NULL for a NULL buffer. They are this process's to read and write between collectives.
void *pcieipc_buffer_data(struct pcieipc_buffer *buffer);

// Like pcieipc_all_reduce on the whole buffer, without a copy through rings.
enum pcieipc_status pcieipc_buffer_all_reduce(struct pcieipc_group *of,
                                              struct pcieipc_buffer *buffer,
                                              uint32_t operation,
                                              uint32_t timeout_ms);

// Frees the buffer; NULL is allowed. The peers' views of its memory stay valid until they free theirs.
void pcieipc_buffer_free(struct pcieipc_buffer *buffer);

// Combines `count` elements of all ranks, in place. `element` is a pcieipc_type, `operation` a pcieipc_op. After an error the buffer may
// be half overwritten.
enum pcieipc_status pcieipc_all_reduce(struct pcieipc_group *of,
                                       void *buffer,
                                       size_t count,
                                       uint32_t element,
                                       uint32_t operation,
                                       uint32_t timeout_ms);

// Like pcieipc_all_reduce, from `from` to `to`, which must not overlap; `from` stays as it is.
enum pcieipc_status pcieipc_all_reduce_into(struct pcieipc_group *of,
                                            const void *from,
                                            void *to,
                                            size_t count,
                                            uint32_t element,
                                            uint32_t operation,
                                            uint32_t timeout_ms);

// `from` holds `count` elements for each rank, `to` gets this rank's `count` of the combination.
enum pcieipc_status pcieipc_reduce_scatter(struct pcieipc_group *of,
                                           const void *from,
                                           void *to,
                                           size_t count,
                                           uint32_t element,
                                           uint32_t operation,
                                           uint32_t timeout_ms);

// `from` holds `count` elements, `to` gets those of all ranks, in rank order.
enum pcieipc_status pcieipc_all_gather(struct pcieipc_group *of,
                                       const void *from,
                                       void *to,
                                       size_t count,
                                       uint32_t element,
                                       uint32_t timeout_ms);

// `count` elements for each rank on both sides: block p of `from` goes to rank p, which finds it as the block of this rank.
enum pcieipc_status pcieipc_all_to_all(struct pcieipc_group *of,
                                       const void *from,
                                       void *to,
                                       size_t count,
                                       uint32_t element,
                                       uint32_t timeout_ms);

// The root's `to` gets the combination of all ranks' `from`; elsewhere `to` may be NULL.
enum pcieipc_status pcieipc_reduce(struct pcieipc_group *of,
                                   const void *from,
                                   void *to,
                                   size_t count,
                                   uint32_t element,
                                   uint32_t operation,
                                   uint32_t root,
                                   uint32_t timeout_ms);

// Every rank's buffer gets what the root's holds.
enum pcieipc_status pcieipc_broadcast(struct pcieipc_group *of,
                                      void *buffer,
                                      size_t count,
                                      uint32_t element,
                                      uint32_t root,
                                      uint32_t timeout_ms);

// Sends `count` elements to one rank, which must call pcieipc_receive.
enum pcieipc_status pcieipc_send(struct pcieipc_group *of,
                                 const void *from,
                                 size_t count,
                                 uint32_t element,
                                 uint32_t to,
                                 uint32_t timeout_ms);

// Receives `count` elements from one rank, which must call pcieipc_send.
enum pcieipc_status pcieipc_receive(struct pcieipc_group *of,
                                    void *to,
                                    size_t count,
                                    uint32_t element,
                                    uint32_t from,
                                    uint32_t timeout_ms);

// Waits until all ranks have called it.
enum pcieipc_status pcieipc_barrier(struct pcieipc_group *of, uint32_t timeout_ms);

// Meets the other ranks, finds and proves the paths between their devices, and stores the communicator behind `out`. Without a driver or a device
// it is PCIEIPC_STATUS_SYSTEM.
enum pcieipc_status pcieipc_cuda_make(const struct pcieipc_cuda_options *given,
                                      struct pcieipc_cuda **out);

// Enqueues on `stream` (a CUstream of the device) the combination of all ranks' `from` into `to`, which may be the same but not overlap it
// otherwise, and returns. Both are memory of this rank's device, valid until the stream has run the call, and in every replay of a graph that
// it is captured in. The stream must live until a call on another one was enqueued, or the communicator is freed. An error is what an earlier
// call came to; what became of this one, pcieipc_cuda_check and later calls say. The first call of a type that was not named at the start loads
// its kernels and waits for the calls before; it can not be captured.
enum pcieipc_status pcieipc_cuda_all_reduce(struct pcieipc_cuda *of,
                                            const void *from,
                                            void *to,
                                            size_t count,
                                            uint32_t element,
                                            uint32_t operation,
                                            void *stream);

// What the calls that have run came to: the first failure, if there was one. It does not wait; synchronize the stream first to know about all.
enum pcieipc_status pcieipc_cuda_check(struct pcieipc_cuda *of);

// Stores to `out`, which has room for `room` of them, how each rank is reached: 0 this rank itself, 1 host memory, 2 peer memory over PCIe,
// 3 peer memory within a device or over NVLink.
enum pcieipc_status pcieipc_cuda_paths(struct pcieipc_cuda *of, uint32_t *out, size_t room);

// Makes the calls of all ranks that run, and all later ones, fail with PCIEIPC_STATUS_ABORTED and this reason.
enum pcieipc_status pcieipc_cuda_abort(struct pcieipc_cuda *of, const char *why);

// Waits for this rank's calls as long as their deadlines allow, leaves the others and frees the communicator; NULL is allowed.
void pcieipc_cuda_free(struct pcieipc_cuda *of);

// Meets the other ranks; stores the group behind `out`.
enum pcieipc_status pcieipc_group_meet(const struct pcieipc_options *given,
                                       struct pcieipc_group **out);

// Takes the place of a rank whose process has ended, in a group that has met already; the others must call pcieipc_group_recover meanwhile.
// The options are those of the rank; its meeting timeout bounds the wait.
enum pcieipc_status pcieipc_group_rejoin(const struct pcieipc_options *given,
                                         struct pcieipc_group **out);

// Leaves the group in order and frees it; NULL is allowed.
void pcieipc_group_leave(struct pcieipc_group *group);

// This rank in the group as it is now.
enum pcieipc_status pcieipc_group_rank(struct pcieipc_group *of, uint32_t *out);

// How many ranks the group has now.
enum pcieipc_status pcieipc_group_ranks(struct pcieipc_group *of, uint32_t *out);

// Stores the numbers that the present ranks had when they met, in order, to `out`, which has room for `room` of them.
enum pcieipc_status pcieipc_group_members(struct pcieipc_group *of,
                                          uint32_t *out,
                                          size_t room);

// Goes on without the ranks that are lost; all that are left call it.
enum pcieipc_status pcieipc_group_shrink(struct pcieipc_group *of, uint32_t timeout_ms);

// Says to all ranks whether this one's last call was good (`ok` not 0), and stores to `out` what all that are left learn alike; all of
// them call it at the same point. The group stays as it is.
enum pcieipc_status pcieipc_group_agree(struct pcieipc_group *of,
                                        uint32_t ok,
                                        uint32_t timeout_ms,
                                        struct pcieipc_agreement *out);

// Waits until all ranks that met are there again (endpoints that recovered or were put back, processes that were replaced, ranks that had been
// left out), and goes on with all of them; all that are left call it. When not all come in time, all get an error, and may call it
// again or shrink.
enum pcieipc_status pcieipc_group_recover(struct pcieipc_group *of, uint32_t timeout_ms);

// Makes the calls of all ranks fail with PCIEIPC_STATUS_ABORTED and this reason.
enum pcieipc_status pcieipc_group_abort(struct pcieipc_group *of, const char *why);

// Starts a call and returns at once; stores a request behind `out`. The buffers are the library's until the request is done. Calls run in the
// order in which they were started, several at once; all ranks start the same ones in the same order, and blocking calls queue behind them.
// They go on in pcieipc_request_test and _wait, in pcieipc_group_progress, in blocking calls, and in the group's own thread with
// options.helper_thread. When one fails, all in flight end with the same error.
enum pcieipc_status pcieipc_start(struct pcieipc_group *of,
                                  const struct pcieipc_call *call,
                                  struct pcieipc_request **out);

// Whether the request's call is over, well or not; true for NULL. May be asked by any thread at any time before the request is freed, but not
// during pcieipc_request_wait or _test on it; makes no progress by itself.
bool pcieipc_request_is_done(const struct pcieipc_request *request);

// Goes on with the calls in flight without waiting, and stores behind `done` whether this one is over. When it is, the status is the call's.
enum pcieipc_status pcieipc_request_test(struct pcieipc_group *of,
                                         struct pcieipc_request *request,
                                         bool *done);

// Waits until the call is over, for `at_most_ms` milliseconds at most, or with 0 until the call's own timeout. The status is the call's;
// PCIEIPC_STATUS_TIMEOUT with pcieipc_request_is_done false says that `at_most_ms` was over first: the call goes on. A request that is done
// gives the same answer again.
enum pcieipc_status pcieipc_request_wait(struct pcieipc_group *of,
                                         struct pcieipc_request *request,
                                         uint32_t at_most_ms);

// Goes on with the calls in flight without waiting; stores how many are left behind `in_flight`, which may be NULL.
enum pcieipc_status pcieipc_group_progress(struct pcieipc_group *of,
                                           size_t *in_flight);

// Frees the request; NULL is allowed. A call that is not over goes on and keeps its buffers until it is; its answer is not heard.
void pcieipc_request_free(struct pcieipc_request *request);

// The text of this thread's last error; valid until its next call of this library. Never NULL.
const char *pcieipc_last_error(void);

// Stores to `out` who and what this thread's last error is about. Its own failure is not remembered.
enum pcieipc_status pcieipc_last_error_detail(struct pcieipc_error *out);

// The name of a status, such as "PeerDied"; "Unknown" for a number that is none. Never NULL, never freed.
const char *pcieipc_status_name(uint32_t status);

// The library's version, such as "0.1.0".
const char *pcieipc_version(void);

#ifdef __cplusplus
} // extern "C"
#endif // __cplusplus

#endif /* PCIEIPC_H */
