/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/**
 * DOC: /dev/pcieipc
 *
 * The only truth about the ABI between pcieipc.ko and user space. Both sides compile their view of it from this file.
 *
 * An *endpoint* is a PCIe function that the module drives. A *session* is one open file of /dev/pcieipc; it attaches to at
 * most one endpoint. A *channel* is a one-writer one-reader ring in memory that the module owns, plus the doorbell that
 * wakes its reader. The reader makes it on its own endpoint; exporting it gives a file descriptor, the writer's capability,
 * to be passed with SCM_RIGHTS. A *generation* counts the lives of endpoints; generations are module-wide, so no two lives
 * ever share one.
 *
 * Every call takes a pointer to a structure whose first field is its size, as the caller compiled it. A module that knows
 * a shorter structure refuses a longer one unless the part it does not know is zero (E2BIG); one that knows a longer
 * structure reads the missing part as zero and writes back no more than the caller has. A structure shorter than that of
 * version 1, unknown flags and non-zero padding are refused (EINVAL). A 32-bit program needs _FILE_OFFSET_BITS=64, because
 * offsets for mmap are 64 bits wide.
 *
 * Errors of all calls: ENOTTY unknown call; E2BIG unknown tail; EINVAL bad value; EFAULT bad pointer; ENOENT no object
 * with that id; EOPNOTSUPP not on this endpoint; EIO the endpoint is recovering or does not answer; ESTALE the endpoint lives in a newer
 * generation than the session attached to (see PCIEIPC_IOCTL_RECOVER); ENODEV the endpoint is gone or dead; ENOTCONN the
 * session is not attached; EBUSY taken; EPERM the caller's process or privilege does not allow it; ENOMEM no memory or
 * over RLIMIT_MEMLOCK (the kernel log names which limit); ENOSPC over a limit of the module; EAGAIN the rate limit of
 * doorbells. No structure holds a physical or bus address.
 */
/**
 * DOC: Errors of each call
 *
 * Every call with a structure may give EFAULT, EINVAL and E2BIG, every call, read() and mmap() of a session EPERM to another process
 * than the one that opened it, and an unknown call ENOTTY. Beside these each call gives what stands here and nothing else; a test reads
 * this table and provokes all of it. A call that failed has done nothing, but for a COPY that began, and RECOVER, which may have
 * been done when the answer is EFAULT and gives the same when it is called again. Calls without an answer only read their structure.
 * COPY also ends with EINTR when its process is being killed, which then sees no answer; mmap() of a doorbell page is charged a
 * page, so it is refused as CHANNEL_CREATE where a limit is reached. CHANNEL_EXPORT and CHANNEL_DMABUF give ENFILE, as every call that makes a
 * descriptor, when the system has too many files and the caller is no administrator.
 *
 *   QUERY            EPROTO
 *   ENUMERATE        ENOMEM
 *   ENDPOINT_INFO    ENOENT
 *   DISTANCE         ENOENT
 *   ATTACH           ENOENT EBUSY ESTALE EIO ENODEV EPERM
 *   RECOVER          ENOTCONN EIO ENODEV
 *   STATE            ENOTCONN
 *   CHANNEL_CREATE   ENOTCONN ESTALE EIO ENODEV EOPNOTSUPP ENOSPC ENOMEM
 *   CHANNEL_DESTROY  ENOTCONN ENOENT
 *   CHANNEL_EXPORT   ENOTCONN ESTALE EIO ENODEV ENOENT EBUSY EMFILE ENOMEM
 *   CHANNEL_IMPORT   ENOTCONN ESTALE EIO ENODEV EBADF EOPNOTSUPP ENOSPC ENOMEM
 *   CHANNEL_FREED    ENOTCONN ESTALE EIO ENODEV ENOENT
 *   CHANNEL_DMABUF   ENOTCONN ESTALE EIO ENODEV ENOENT EOPNOTSUPP EBUSY EMFILE ENOMEM
 *   COPY             ENOTCONN ESTALE EIO ENODEV ENOENT EOPNOTSUPP EBUSY EAGAIN ETIMEDOUT EREMOTEIO
 *   VECTOR_EVENTFD   ENOTCONN ENODEV EBADF
 *   RING             ENOTCONN ESTALE EIO ENODEV EAGAIN
 *   DOORBELL_MAP     ENOTCONN ESTALE EIO ENODEV EOPNOTSUPP EPERM
 *   ADMIN            ENOENT EBUSY EOPNOTSUPP EPERM ENOMEM
 *   EXPORT_INFO
 *   EXPORT_RING      ESTALE EIO ENODEV EAGAIN
 *   EXPORT_EVENTFD   EBADF
 *   EXPORT_DOORBELL  ESTALE EIO ENODEV EOPNOTSUPP EPERM
 *   open             ENODEV ENOMEM ENOSPC
 *   read             EINVAL EFAULT EAGAIN EINTR
 *   mmap             EINVAL EACCES ENOENT ENOTCONN ESTALE EIO ENODEV EOPNOTSUPP EPERM ENOMEM ENOSPC
 *   poll
 */
#ifndef _UAPI_PCIEIPC_H
#define _UAPI_PCIEIPC_H

#include <linux/types.h>
#include <linux/ioctl.h>

/* The newest version of the ABI that this header describes, and the oldest that it is compatible with. */
#define PCIEIPC_ABI_VERSION		1
#define PCIEIPC_ABI_OLDEST		1

#define PCIEIPC_NODE			"/dev/pcieipc"
/* The node of one endpoint, by id: a session opened through it sees that endpoint alone. For containers. */
#define PCIEIPC_ENDPOINT_NODE		"/dev/pcieipc%u"

#define PCIEIPC_IOC_MAGIC		0xE9
#define PCIEIPC_IO(nr)			_IO(PCIEIPC_IOC_MAGIC, (nr))

/* Calls on a session. */
#define PCIEIPC_IOCTL_QUERY		PCIEIPC_IO(0x00)
#define PCIEIPC_IOCTL_ENUMERATE		PCIEIPC_IO(0x01)
#define PCIEIPC_IOCTL_ENDPOINT_INFO	PCIEIPC_IO(0x02)
#define PCIEIPC_IOCTL_DISTANCE		PCIEIPC_IO(0x03)
#define PCIEIPC_IOCTL_ATTACH		PCIEIPC_IO(0x04)
#define PCIEIPC_IOCTL_RECOVER		PCIEIPC_IO(0x05)
#define PCIEIPC_IOCTL_STATE		PCIEIPC_IO(0x06)
#define PCIEIPC_IOCTL_CHANNEL_CREATE	PCIEIPC_IO(0x10)
#define PCIEIPC_IOCTL_CHANNEL_DESTROY	PCIEIPC_IO(0x11)
#define PCIEIPC_IOCTL_CHANNEL_EXPORT	PCIEIPC_IO(0x12)
#define PCIEIPC_IOCTL_CHANNEL_IMPORT	PCIEIPC_IO(0x13)
#define PCIEIPC_IOCTL_CHANNEL_FREED	PCIEIPC_IO(0x14)
#define PCIEIPC_IOCTL_COPY		PCIEIPC_IO(0x15)
#define PCIEIPC_IOCTL_CHANNEL_DMABUF	PCIEIPC_IO(0x16)
#define PCIEIPC_IOCTL_VECTOR_EVENTFD	PCIEIPC_IO(0x20)
#define PCIEIPC_IOCTL_RING		PCIEIPC_IO(0x21)
#define PCIEIPC_IOCTL_DOORBELL_MAP	PCIEIPC_IO(0x22)
/* For CAP_SYS_ADMIN; done later by a worker, the outcome is an event for sessions that are attached to no other endpoint. */
#define PCIEIPC_IOCTL_ADMIN		PCIEIPC_IO(0x30)
/* Calls on an exported file descriptor. */
#define PCIEIPC_IOCTL_EXPORT_INFO	PCIEIPC_IO(0x40)
#define PCIEIPC_IOCTL_EXPORT_RING	PCIEIPC_IO(0x41)
#define PCIEIPC_IOCTL_EXPORT_EVENTFD	PCIEIPC_IO(0x42)
#define PCIEIPC_IOCTL_EXPORT_DOORBELL	PCIEIPC_IO(0x43)

/* Capabilities of the module, in struct pcieipc_query.caps. */
#define PCIEIPC_CAP_COPY		(1ULL << 0) /* PCIEIPC_IOCTL_COPY */
#define PCIEIPC_CAP_DOORBELL_MAP	(1ULL << 1) /* doorbell pages can be mapped (module parameter) */
#define PCIEIPC_CAP_UNSAFE_NOIOMMU	(1ULL << 2) /* loaded with allow_unsafe_noiommu=1 */
#define PCIEIPC_CAP_PROFILES		(1ULL << 3) /* profiles through configfs */
#define PCIEIPC_CAP_ERROR_RECOVERY	(1ULL << 4) /* AER callbacks and reset are followed */
#define PCIEIPC_CAP_ADMIN		(1ULL << 5) /* PCIEIPC_IOCTL_ADMIN */
#define PCIEIPC_CAP_DEVICE_MEMORY	(1ULL << 6) /* PCIEIPC_CHANNEL_DEVICE_MEMORY and PCIEIPC_COPY_RING */
#define PCIEIPC_CAP_DMABUF		(1ULL << 7) /* PCIEIPC_IOCTL_CHANNEL_DMABUF */

/**
 * struct pcieipc_query - PCIEIPC_IOCTL_QUERY: versions, limits and capabilities
 * @size: in: sizeof(struct pcieipc_query)
 * @flags: in: 0
 * @user_version: in: PCIEIPC_ABI_VERSION of the caller
 * @user_oldest: in: the oldest module ABI that the caller accepts
 * @version: out: the module's PCIEIPC_ABI_VERSION
 * @oldest: out: the oldest caller that the module accepts
 * @caps: out: PCIEIPC_CAP_*
 * @max_channel_bytes: out: largest data area of one channel
 * @max_session_bytes: out: largest sum of data areas of one session
 * @max_total_bytes: out: largest sum of what all sessions' channels are charged for: data, head and tail
 * @max_channels: out: most channels of one session, made and imported
 * @max_copy_bytes: out: most bytes of one PCIEIPC_IOCTL_COPY
 * @max_endpoints: out: most endpoints
 * @event_queue: out: events that a session's queue holds before one is lost
 * @doorbells_per_second: out: rate limit of ring calls of one session, 0 for none
 * @page_size: out: bytes of a page; head, tail and status areas are one page each
 * @correctable_per_second: out: most correctable-error events of one endpoint
 * @link_sample_ms: out: how often link speed and width are sampled
 * @max_sessions: out: most sessions of one user; 0 from a module that has no such limit
 * @storm_interrupts: out: interrupts of a vector within a tenth of a second above which it is silenced for a while; 0 for never
 *
 * Errors: EPROTO the versions exclude each other (the structure is filled in all the same).
 */
struct pcieipc_query {
	__u32 size;
	__u32 flags;
	__u32 user_version;
	__u32 user_oldest;
	__u32 version;
	__u32 oldest;
	__aligned_u64 caps;
	__aligned_u64 max_channel_bytes;
	__aligned_u64 max_session_bytes;
	__aligned_u64 max_total_bytes;
	__u32 max_channels;
	__u32 max_copy_bytes;
	__u32 max_endpoints;
	__u32 event_queue;
	__u32 doorbells_per_second;
	__u32 page_size;
	__u32 correctable_per_second;
	__u32 link_sample_ms;
	/* A caller may know no more than what is above: 88 bytes. */
	__u32 max_sessions;
	__u32 storm_interrupts;
};

/**
 * struct pcieipc_enumerate - PCIEIPC_IOCTL_ENUMERATE: the ids of all endpoints
 * @size: in: sizeof(struct pcieipc_enumerate)
 * @flags: in: 0
 * @ids: in: pointer to an array of __u32, may be 0 when @count is 0
 * @count: in: how many ids fit; out: how many endpoints there are
 * @__reserved: 0
 *
 * Ids count up and are never used again. When more endpoints exist than fit, the first @count are written.
 */
struct pcieipc_enumerate {
	__u32 size;
	__u32 flags;
	__aligned_u64 ids;
	__u32 count;
	__u32 __reserved;
};

/**
 * enum pcieipc_state - states of an endpoint
 * @PCIEIPC_STATE_LIVE: usable
 * @PCIEIPC_STATE_RECOVERING: in error recovery or reset, or it does not answer and it is not known why; calls answer EIO
 * @PCIEIPC_STATE_DEAD: recovery failed; only removal helps
 * @PCIEIPC_STATE_GONE: unbound or removed, or it did not answer for longer than the module parameter missing_ms says
 */
enum pcieipc_state {
	PCIEIPC_STATE_LIVE = 1,
	PCIEIPC_STATE_RECOVERING = 2,
	PCIEIPC_STATE_DEAD = 3,
	PCIEIPC_STATE_GONE = 4,
};

/* The status word: the state in the low 8 bits, the generation above. Stored with release before any waiter is woken. */
#define PCIEIPC_STATUS_STATE(word)	((word) & 0xff)
#define PCIEIPC_STATUS_GENERATION(word)	((word) >> 8)

/**
 * struct pcieipc_status - the status page, read-only for user space, written by the kernel only
 * @word: state and generation, see PCIEIPC_STATUS_STATE
 * @interrupts: interrupts that the endpoint raised, all lives of this binding
 * @link: the link as last sampled: speed in steps of 2.5 GT/s code (1-6) in the low 8 bits, width in the next 8
 * @__reserved: 0
 */
struct pcieipc_status {
	__aligned_u64 word;
	__aligned_u64 interrupts;
	__u32 link;
	__u32 __reserved;
};

/* In struct pcieipc_endpoint_info.iommu */
#define PCIEIPC_IOMMU_NONE		0 /* no IOMMU in front of the endpoint */
#define PCIEIPC_IOMMU_IDENTITY		1 /* an IOMMU that passes addresses through */
#define PCIEIPC_IOMMU_TRANSLATING	2 /* an IOMMU that translates and protects */

/* In struct pcieipc_endpoint_info.ep_flags */
#define PCIEIPC_EP_ATTACHED		(1U << 0) /* a session is attached */
#define PCIEIPC_EP_DMA_ENGINE		(1U << 1) /* PCIEIPC_IOCTL_COPY works */
#define PCIEIPC_EP_RING_REGISTERS	(1U << 2) /* the endpoint is told addresses and lengths of its rings */
#define PCIEIPC_EP_DOORBELL_PAGE	(1U << 3) /* doorbells have a page of their own that can be mapped */
#define PCIEIPC_EP_MEMORY		(1U << 4) /* has a memory BAR */
#define PCIEIPC_EP_USER_DMA		(1U << 5) /* its user can aim its DMA; needs a translating IOMMU */

/**
 * struct pcieipc_endpoint_info - PCIEIPC_IOCTL_ENDPOINT_INFO: one endpoint
 * @size: in: sizeof(struct pcieipc_endpoint_info)
 * @flags: in: 0
 * @endpoint: in: id
 * @state: out: enum pcieipc_state
 * @generation: out: this life
 * @serial: out: Device Serial Number, 0 when it has none
 * @address: out: PCI address as domain << 16 | bus << 8 | devfn
 * @vendor: out: vendor id
 * @device: out: device id
 * @numa_node: out: -1 when unknown
 * @iommu: out: PCIEIPC_IOMMU_*
 * @iommu_group: out: -1 when it has none
 * @ep_flags: out: PCIEIPC_EP_*
 * @vectors: out: interrupt vectors that sessions may use
 * @link_speed: out: now, code 1-6, 0 when unknown
 * @link_width: out: now, lanes
 * @link_speed_max: out: best of the endpoint
 * @link_width_max: out: best of the endpoint
 * @memory_bytes: out: size of the memory BAR of the profile
 * @doorbells: out: doorbells rung through the module, all lives of this binding
 * @interrupts: out: interrupts taken
 * @events_lost: out: events that full queues lost
 * @dma_bytes: out: bytes that the endpoint's engine moved for PCIEIPC_IOCTL_COPY
 * @correctable: out: correctable errors reported to the module
 * @profile: out: name of the profile, NUL-terminated
 */
struct pcieipc_endpoint_info {
	__u32 size;
	__u32 flags;
	__u32 endpoint;
	__u32 state;
	__aligned_u64 generation;
	__aligned_u64 serial;
	__u32 address;
	__u16 vendor;
	__u16 device;
	__s32 numa_node;
	__u32 iommu;
	__s32 iommu_group;
	__u32 ep_flags;
	__u32 vectors;
	__u8 link_speed;
	__u8 link_width;
	__u8 link_speed_max;
	__u8 link_width_max;
	__aligned_u64 memory_bytes;
	__aligned_u64 doorbells;
	__aligned_u64 interrupts;
	__aligned_u64 events_lost;
	__aligned_u64 dma_bytes;
	__aligned_u64 correctable;
	char profile[32];
};

/* In struct pcieipc_distance.reasons: what makes two endpoints far from each other. */
#define PCIEIPC_FAR_SAME_FUNCTION_CARD	(1U << 0) /* near: functions of one card */
#define PCIEIPC_FAR_SAME_SWITCH		(1U << 1) /* near: peer traffic stays below a common switch */
#define PCIEIPC_FAR_HOST_BRIDGE		(1U << 2) /* crosses the host bridge */
#define PCIEIPC_FAR_ACS_REDIRECT	(1U << 3) /* ACS sends it up to the root */
#define PCIEIPC_FAR_SOCKETS		(1U << 4) /* crosses NUMA nodes */
#define PCIEIPC_FAR_IOMMU		(1U << 5) /* an IOMMU translates on the way */

/**
 * struct pcieipc_distance - PCIEIPC_IOCTL_DISTANCE: how far two endpoints are from each other, and why
 * @size: in: sizeof(struct pcieipc_distance)
 * @flags: in: 0
 * @from: in: endpoint id
 * @to: in: endpoint id
 * @hops: out: ports between them, as pci_p2pdma_distance counts; through the host bridge: up to the root and down
 * @reasons: out: PCIEIPC_FAR_*
 * @p2p: out: 1 when the kernel lets the one reach the other's memory directly
 * @__reserved: 0
 */
struct pcieipc_distance {
	__u32 size;
	__u32 flags;
	__u32 from;
	__u32 to;
	__u32 hops;
	__u32 reasons;
	__u32 p2p;
	__u32 __reserved;
};

/**
 * struct pcieipc_attach - PCIEIPC_IOCTL_ATTACH: this session takes an endpoint
 * @size: in: sizeof(struct pcieipc_attach)
 * @flags: in: 0
 * @endpoint: in: id
 * @vectors: out: interrupt vectors of the session, 0 to @vectors - 1
 * @generation: in: 0 for any, otherwise the life that is meant (ESTALE when it is another); out: this life
 * @status_offset: out: where to mmap the status page
 *
 * Errors: EBUSY the endpoint has a session, or this session has an endpoint. EPERM without a translating IOMMU for an
 * endpoint whose user can aim its DMA.
 */
struct pcieipc_attach {
	__u32 size;
	__u32 flags;
	__u32 endpoint;
	__u32 vectors;
	__aligned_u64 generation;
	__aligned_u64 status_offset;
};

/**
 * struct pcieipc_recover - PCIEIPC_IOCTL_RECOVER: go on in the endpoint's present generation
 * @size: in: sizeof(struct pcieipc_recover)
 * @flags: in: 0
 * @generation: out: the generation that the session now belongs to
 *
 * Channels keep their memory, ids, mappings and exported descriptors; they are mapped for DMA and told to the endpoint
 * again. Errors: EIO still recovering; ENODEV dead or gone.
 */
struct pcieipc_recover {
	__u32 size;
	__u32 flags;
	__aligned_u64 generation;
};

/**
 * struct pcieipc_session_state - PCIEIPC_IOCTL_STATE: what has become of this session
 * @size: in: sizeof(struct pcieipc_session_state)
 * @flags: in: 0
 * @endpoint: out: id
 * @state: out: enum pcieipc_state of the endpoint
 * @generation: out: of the endpoint
 * @attached_generation: out: of the session
 * @locked_bytes: out: charged to RLIMIT_MEMLOCK for this session's channels that still live
 * @doorbells: out: rung by this session
 * @events_lost: out: by this session's queue
 * @channels: out: made and imported
 * @events: out: waiting to be read
 */
struct pcieipc_session_state {
	__u32 size;
	__u32 flags;
	__u32 endpoint;
	__u32 state;
	__aligned_u64 generation;
	__aligned_u64 attached_generation;
	__aligned_u64 locked_bytes;
	__aligned_u64 doorbells;
	__aligned_u64 events_lost;
	__u32 channels;
	__u32 events;
};

/* Flags of struct pcieipc_channel_create */
#define PCIEIPC_CHANNEL_DEVICE_MEMORY	(1U << 0) /* the data area is in the endpoint's own memory */

/**
 * struct pcieipc_channel_create - PCIEIPC_IOCTL_CHANNEL_CREATE: a channel whose reader is this session
 * @size: in: sizeof(struct pcieipc_channel_create)
 * @flags: in: PCIEIPC_CHANNEL_DEVICE_MEMORY or 0
 * @data_bytes: in: size of the data area, a power of two, at least a page
 * @vector: in: the vector that wakes the reader
 * @channel: out: id within the session, counted from 1, not used again
 * @data_offset: out: where to mmap the data, read-only for the reader
 * @tail_offset: out: where to mmap the writer's page, read-only for the reader
 * @head_offset: out: where to mmap the reader's page, read and write
 * @segments: out: pieces of contiguous bus addresses, 1 when the device sees one range
 * @__reserved: 0
 *
 * The kernel writes the addresses and lengths of the data area into the endpoint's ring registers, where it has any.
 * Errors: ENOSPC over a limit or no ring register left; ENOMEM no memory or over RLIMIT_MEMLOCK; EIO memory that the
 * device could only reach through bounce buffers.
 *
 * With PCIEIPC_CHANNEL_DEVICE_MEMORY the data area is a part of the endpoint's memory BAR, mapped write-combining, for another endpoint's engine
 * to write without passing host memory; head, tail and status stay in host memory. It does not outlive the device: at reset, error, removal and
 * destruction its mappings turn into ordinary pages that nobody reads, and after PCIEIPC_IOCTL_RECOVER they are the device's memory again, with
 * whatever it holds then. get_user_pages() does not work on it. One page is charged for the data area instead of its size. Errors: EOPNOTSUPP no memory BAR; ENOSPC it is used up.
 */
struct pcieipc_channel_create {
	__u32 size;
	__u32 flags;
	__aligned_u64 data_bytes;
	__u32 vector;
	__u32 channel;
	__aligned_u64 data_offset;
	__aligned_u64 tail_offset;
	__aligned_u64 head_offset;
	__u32 segments;
	__u32 __reserved;
};

/**
 * struct pcieipc_channel - PCIEIPC_IOCTL_CHANNEL_DESTROY and PCIEIPC_IOCTL_CHANNEL_FREED
 * @size: in: sizeof(struct pcieipc_channel)
 * @flags: in: 0
 * @channel: in: id
 * @__reserved: 0
 *
 * DESTROY: clears the endpoint's ring registers, unmaps the memory from the device; mappings that users still have stay
 * valid memory, exported descriptors poll EPOLLHUP. Works on imported channels too.
 * FREED: the reader has given room back; wakes a writer that sleeps in poll or on its eventfd.
 */
struct pcieipc_channel {
	__u32 size;
	__u32 flags;
	__u32 channel;
	__u32 __reserved;
};

/**
 * struct pcieipc_channel_fd - PCIEIPC_IOCTL_CHANNEL_EXPORT, PCIEIPC_IOCTL_CHANNEL_IMPORT and PCIEIPC_IOCTL_CHANNEL_DMABUF
 * @size: in: sizeof(struct pcieipc_channel_fd)
 * @flags: in: 0
 * @channel: EXPORT and DMABUF in, IMPORT out: id
 * @fd: EXPORT out, IMPORT in: the writer's descriptor; DMABUF out: a dma-buf; opened O_CLOEXEC
 *
 * EXPORT: the descriptor can map data and tail for writing, head and status for reading, ring, wait for space and for the
 * end of reader or endpoint, and nothing else. A channel has one descriptor at a time (EBUSY). poll() on it says EPOLLOUT when the
 * reader has given room back (FREED) since the last EXPORT_RING call or since the export, EPOLLHUP when the channel was destroyed or the
 * endpoint is gone or dead, EPOLLPRI while the endpoint recovers or until the reader has recovered.
 * IMPORT: makes the channel of another session a destination for this session's own engine (PCIEIPC_IOCTL_COPY); seven times at most (ENOSPC); its
 * memory is mapped for this session's endpoint, until it is destroyed here or there. One in device memory can be imported only where peer
 * traffic stays below a common switch (EOPNOTSUPP otherwise; see PCIEIPC_IOCTL_DISTANCE), and is let go when its endpoint is unbound.
 * DMABUF: the data area of a channel in device memory as a dma-buf, for drivers of other devices (EOPNOTSUPP for other channels, and where the
 * kernel has no peer traffic). It cannot be mapped by a process. Only drivers that take memory without struct pages and let go of it when
 * they are told may attach, and only devices that the kernel lets reach the endpoint. They are told at reset, error, removal and the channel's
 * end, and until PCIEIPC_IOCTL_RECOVER may neither attach nor map it. A channel has one dma-buf at a time (EBUSY); the memory is in use until it is closed.
 */
struct pcieipc_channel_fd {
	__u32 size;
	__u32 flags;
	__u32 channel;
	__s32 fd;
};

/* Flags of struct pcieipc_copy */
#define PCIEIPC_COPY_RING		(1U << 0) /* then the engine itself rings the reader of @to, behind the data */

/**
 * struct pcieipc_copy - PCIEIPC_IOCTL_COPY: the endpoint's engine copies between channels of this session
 * @size: in: sizeof(struct pcieipc_copy)
 * @flags: in: PCIEIPC_COPY_RING or 0
 * @from: in: channel id
 * @to: in: channel id, made or imported by this session
 * @from_offset: in: bytes into the data area
 * @to_offset: in: bytes into the data area
 * @bytes: in: how many, 1 to max_copy_bytes; both ranges must lie inside, and must not overlap
 * @timeout_ms: in: 1 to 10000
 * @__reserved: 0
 *
 * Returns when the engine has finished. A copy to or from an imported channel in device memory ends with what the state of that channel's
 * endpoint says, too: EIO from its reset on, ESTALE until its session has recovered, ENODEV; once that endpoint is unbound the import is
 * gone: ENOENT. Other errors: ETIMEDOUT (the engine is stopped and reset), EREMOTEIO the engine reported
 * an error, EBUSY the engine copies for another thread of this session, EINTR the process is being killed (the engine is stopped and reset).
 * With PCIEIPC_COPY_RING: EOPNOTSUPP where the engine does not reach the reader's doorbell below a common switch; EAGAIN, and nothing is
 * copied, where the channel's writers have rung more often than doorbells_per_second (EXPORT_RING and this count together).
 */
struct pcieipc_copy {
	__u32 size;
	__u32 flags;
	__u32 from;
	__u32 to;
	__aligned_u64 from_offset;
	__aligned_u64 to_offset;
	__u32 bytes;
	__u32 timeout_ms;
	__aligned_u64 __reserved;
};

/* Flags of struct pcieipc_vector_eventfd */
#define PCIEIPC_VECTOR_MASK		(1U << 0) /* count, but do not signal */

/**
 * struct pcieipc_vector_eventfd - PCIEIPC_IOCTL_VECTOR_EVENTFD: who is woken by an interrupt vector
 * @size: in: sizeof(struct pcieipc_vector_eventfd)
 * @flags: in: PCIEIPC_VECTOR_MASK
 * @vector: in: 0 to vectors - 1
 * @fd: in: an eventfd, or -1 for none; with PCIEIPC_VECTOR_MASK or to unmask, -2 leaves the eventfd as it is
 *
 * Unmasking signals once if the vector fired while it was masked. The eventfds of all vectors are signalled too when the
 * endpoint changes its state.
 */
struct pcieipc_vector_eventfd {
	__u32 size;
	__u32 flags;
	__u32 vector;
	__s32 fd;
};

/**
 * struct pcieipc_ring - PCIEIPC_IOCTL_RING and PCIEIPC_IOCTL_EXPORT_RING: ring a doorbell
 * @size: in: sizeof(struct pcieipc_ring)
 * @flags: in: 0
 * @vector: in: RING: vector of the own endpoint; EXPORT_RING: 0, the channel knows its vector
 * @__reserved: 0
 */
struct pcieipc_ring {
	__u32 size;
	__u32 flags;
	__u32 vector;
	__u32 __reserved;
};

/**
 * struct pcieipc_doorbell - PCIEIPC_IOCTL_DOORBELL_MAP and PCIEIPC_IOCTL_EXPORT_DOORBELL: ring without a system call
 * @size: in: sizeof(struct pcieipc_doorbell)
 * @flags: in: 0
 * @vector: in: as in struct pcieipc_ring
 * @width: out: bytes of the store, 4 or 8
 * @map_offset: out: where to mmap the page
 * @page_offset: out: where in the page to store
 * @value: out: what to store
 *
 * Only where the profile keeps doorbells alone on their pages (EOPNOTSUPP otherwise). A mapped doorbell has no rate limit,
 * so the module parameter doorbell_map must allow it (EPERM). At error, reset and removal the mapping turns into an
 * ordinary page that nobody reads; each mapping is charged one page for it.
 */
struct pcieipc_doorbell {
	__u32 size;
	__u32 flags;
	__u32 vector;
	__u32 width;
	__aligned_u64 map_offset;
	__aligned_u64 page_offset;
	__aligned_u64 value;
};

/**
 * enum pcieipc_admin_action - what an administrator asks for
 * @PCIEIPC_ADMIN_RESET: reset the function
 * @PCIEIPC_ADMIN_REMOVE: remove the function from the bus
 * @PCIEIPC_ADMIN_RESCAN: scan the bus that the function is or was on
 */
enum pcieipc_admin_action {
	PCIEIPC_ADMIN_RESET = 1,
	PCIEIPC_ADMIN_REMOVE = 2,
	PCIEIPC_ADMIN_RESCAN = 3,
};

/**
 * struct pcieipc_admin - PCIEIPC_IOCTL_ADMIN
 * @size: in: sizeof(struct pcieipc_admin)
 * @flags: in: 0
 * @action: in: enum pcieipc_admin_action
 * @endpoint: in: id; for RESCAN also of an endpoint that is gone
 *
 * Queued; the answer only says that it was accepted. Errors: EPERM without CAP_SYS_ADMIN; EBUSY one is queued already.
 */
struct pcieipc_admin {
	__u32 size;
	__u32 flags;
	__u32 action;
	__u32 endpoint;
};

/**
 * struct pcieipc_export_info - PCIEIPC_IOCTL_EXPORT_INFO: what this exported descriptor is
 * @size: in: sizeof(struct pcieipc_export_info)
 * @flags: in: 0
 * @endpoint: out: the reader's endpoint
 * @vector: out: the vector that wakes the reader
 * @generation: out: of the reader's session
 * @data_bytes: out: size of the data area
 * @data_offset: out: where to mmap the data, read and write
 * @tail_offset: out: where to mmap the writer's page, read and write
 * @head_offset: out: where to mmap the reader's page, read-only
 * @status_offset: out: where to mmap the status page of the reader's endpoint, read-only
 */
struct pcieipc_export_info {
	__u32 size;
	__u32 flags;
	__u32 endpoint;
	__u32 vector;
	__aligned_u64 generation;
	__aligned_u64 data_bytes;
	__aligned_u64 data_offset;
	__aligned_u64 tail_offset;
	__aligned_u64 head_offset;
	__aligned_u64 status_offset;
};

/**
 * struct pcieipc_export_eventfd - PCIEIPC_IOCTL_EXPORT_EVENTFD: signalled when the reader frees space or anything ends
 * @size: in: sizeof(struct pcieipc_export_eventfd)
 * @flags: in: 0
 * @fd: in: an eventfd, or -1 for none
 * @__reserved: 0
 */
struct pcieipc_export_eventfd {
	__u32 size;
	__u32 flags;
	__s32 fd;
	__u32 __reserved;
};

/**
 * enum pcieipc_event_kind - what an event tells
 * @PCIEIPC_EVENT_LOST: detail[0] events were lost before this one
 * @PCIEIPC_EVENT_STATE: detail[0] the old state, detail[1] the new one
 * @PCIEIPC_EVENT_ERROR: an uncorrectable error; detail[0] 1 non-fatal, 2 fatal, 3 the device is lost
 * @PCIEIPC_EVENT_CORRECTABLE: detail[0] correctable errors since the last such event, detail[1] in all
 * @PCIEIPC_EVENT_LINK: detail[0] speed and width before, detail[1] now, as in struct pcieipc_status.link
 * @PCIEIPC_EVENT_ADDED: an endpoint was bound; detail[0] its serial number, detail[1] the id of the endpoint that it
 *	was before (same serial number, or else same slot), 0 when it is new
 * @PCIEIPC_EVENT_ADMIN: an administrator's action ended; detail[0] the action, detail[1] a positive errno or 0
 * @PCIEIPC_EVENT_STORM: a vector was masked because it fired too often; detail[0] the vector
 */
enum pcieipc_event_kind {
	PCIEIPC_EVENT_LOST = 0,
	PCIEIPC_EVENT_STATE = 1,
	PCIEIPC_EVENT_ERROR = 2,
	PCIEIPC_EVENT_CORRECTABLE = 3,
	PCIEIPC_EVENT_LINK = 4,
	PCIEIPC_EVENT_ADDED = 5,
	PCIEIPC_EVENT_ADMIN = 6,
	PCIEIPC_EVENT_STORM = 7,
};

/**
 * struct pcieipc_event - one record of read() on a session
 * @sequence: counts events of this session, lost ones included
 * @generation: of the endpoint, when it happened
 * @time_ns: CLOCK_MONOTONIC
 * @kind: enum pcieipc_event_kind
 * @endpoint: id, 0 for none
 * @detail: see enum pcieipc_event_kind
 *
 * A session that is attached reads the events of its endpoint and all ADDED and STATE events of others; one that is not
 * attached reads the events of all endpoints. read() gives whole records only; a buffer shorter than one is EINVAL.
 * poll() says EPOLLIN when there is one, EPOLLHUP when the attached endpoint is gone or dead.
 */
struct pcieipc_event {
	__aligned_u64 sequence;
	__aligned_u64 generation;
	__aligned_u64 time_ns;
	__u32 kind;
	__u32 endpoint;
	__aligned_u64 detail[4];
};

#endif /* _UAPI_PCIEIPC_H */
