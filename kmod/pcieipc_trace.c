// SPDX-License-Identifier: GPL-2.0
/* Tracepoints: the kernel's Rust macro for them does not work outside of the tree. */
#include <linux/types.h>

#define CREATE_TRACE_POINTS
#include "pcieipc_trace.h"

void pcieipc_trace_doorbell(u32 endpoint, u32 vector);
void pcieipc_trace_doorbell(u32 endpoint, u32 vector)
{
	trace_pcieipc_doorbell(endpoint, vector);
}

void pcieipc_trace_interrupt(u32 endpoint, u32 vector);
void pcieipc_trace_interrupt(u32 endpoint, u32 vector)
{
	trace_pcieipc_interrupt(endpoint, vector);
}

void pcieipc_trace_event(u32 endpoint, u32 kind, u64 generation, u64 detail0, u64 detail1);
void pcieipc_trace_event(u32 endpoint, u32 kind, u64 generation, u64 detail0, u64 detail1)
{
	trace_pcieipc_event(endpoint, kind, generation, detail0, detail1);
}

void pcieipc_trace_state(u32 endpoint, u32 from, u32 to, u64 generation);
void pcieipc_trace_state(u32 endpoint, u32 from, u32 to, u64 generation)
{
	trace_pcieipc_state(endpoint, from, to, generation);
}
