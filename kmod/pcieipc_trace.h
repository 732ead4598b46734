/* SPDX-License-Identifier: GPL-2.0 */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM pcieipc

#if !defined(_PCIEIPC_TRACE_H) || defined(TRACE_HEADER_MULTI_READ)
#define _PCIEIPC_TRACE_H

#include <linux/tracepoint.h>

DECLARE_EVENT_CLASS(pcieipc_vector,
	TP_PROTO(u32 endpoint, u32 vector),
	TP_ARGS(endpoint, vector),
	TP_STRUCT__entry(
		__field(u32, endpoint)
		__field(u32, vector)
	),
	TP_fast_assign(
		__entry->endpoint = endpoint;
		__entry->vector = vector;
	),
	TP_printk("endpoint=%u vector=%u", __entry->endpoint, __entry->vector)
);

/* A doorbell rung by a call; stores to a mapped doorbell are not seen. */
DEFINE_EVENT(pcieipc_vector, pcieipc_doorbell,
	TP_PROTO(u32 endpoint, u32 vector),
	TP_ARGS(endpoint, vector)
);

/* An interrupt taken. */
DEFINE_EVENT(pcieipc_vector, pcieipc_interrupt,
	TP_PROTO(u32 endpoint, u32 vector),
	TP_ARGS(endpoint, vector)
);

/* An event, before sessions' queues number it. */
TRACE_EVENT(pcieipc_event,
	TP_PROTO(u32 endpoint, u32 kind, u64 generation, u64 detail0, u64 detail1),
	TP_ARGS(endpoint, kind, generation, detail0, detail1),
	TP_STRUCT__entry(
		__field(u32, endpoint)
		__field(u32, kind)
		__field(u64, generation)
		__field(u64, detail0)
		__field(u64, detail1)
	),
	TP_fast_assign(
		__entry->endpoint = endpoint;
		__entry->kind = kind;
		__entry->generation = generation;
		__entry->detail0 = detail0;
		__entry->detail1 = detail1;
	),
	TP_printk("endpoint=%u kind=%s generation=%llu detail=%llu,%llu", __entry->endpoint,
		  __print_symbolic(__entry->kind, { 0, "lost" }, { 1, "state" }, { 2, "error" }, { 3, "correctable" }, { 4, "link" },
				   { 5, "added" }, { 6, "admin" }, { 7, "storm" }),
		  __entry->generation, __entry->detail0, __entry->detail1)
);

/* A change of an endpoint's state. */
TRACE_EVENT(pcieipc_state,
	TP_PROTO(u32 endpoint, u32 from, u32 to, u64 generation),
	TP_ARGS(endpoint, from, to, generation),
	TP_STRUCT__entry(
		__field(u32, endpoint)
		__field(u32, from)
		__field(u32, to)
		__field(u64, generation)
	),
	TP_fast_assign(
		__entry->endpoint = endpoint;
		__entry->from = from;
		__entry->to = to;
		__entry->generation = generation;
	),
	TP_printk("endpoint=%u from=%s to=%s generation=%llu", __entry->endpoint,
		  __print_symbolic(__entry->from, { 1, "live" }, { 2, "recovering" }, { 3, "dead" }, { 4, "gone" }),
		  __print_symbolic(__entry->to, { 1, "live" }, { 2, "recovering" }, { 3, "dead" }, { 4, "gone" }),
		  __entry->generation)
);

#endif

#undef TRACE_INCLUDE_PATH
#define TRACE_INCLUDE_PATH .
#undef TRACE_INCLUDE_FILE
#define TRACE_INCLUDE_FILE pcieipc_trace
#include <trace/define_trace.h>
