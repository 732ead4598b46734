// SPDX-License-Identifier: MIT OR Apache-2.0
//! Offsets and bits of the registers, as docs/soft-endpoint.md defines them.

/// Vendor id: QEMU's unofficial one.
pub const VENDOR: u16 = 0x1234;
/// Device id, not assigned to anybody.
pub const DEVICE: u16 = 0x7069;
/// Class code: processing accelerator.
pub const CLASS: u32 = 0x12_0000;

/// MSI-X vectors, and doorbells.
pub const VECTORS: usize = 8;
/// Slots of the ring table.
pub const RING_SLOTS: usize = 64;

/// Bytes of BAR 0, the registers.
pub const BAR0_BYTES: u64 = 0x4000;
/// Bytes of BAR 2, the endpoint's own memory.
pub const BAR2_BYTES: u64 = 0x40_0000;
/// Bytes of BAR 4, the MSI-X table and its pending bits.
pub const BAR4_BYTES: u64 = 0x1000;
/// Where the pending bits start in BAR 4.
pub const PBA_OFFSET: u64 = 0x800;

/// First byte of the ring table in BAR 0.
pub const RING_TABLE: u64 = 0x1000;
/// Bytes of one slot of the ring table.
pub const RING_SLOT_BYTES: u64 = 32;
/// First doorbell in BAR 0.
pub const DOORBELL_PAGE: u64 = 0x3000;

/// "PIPC"
pub const MAGIC: u64 = 0x000;
/// 1
pub const VERSION: u64 = 0x004;
/// Vectors, ring slots, engine, peer memory.
pub const FEATURES: u64 = 0x008;
/// Ready and busy.
pub const STATUS: u64 = 0x00c;
/// Engine enable and reset.
pub const CONTROL: u64 = 0x010;
/// Device serial number.
pub const SERIAL: u64 = 0x018;
/// Power-ups and function resets.
pub const LIFE: u64 = 0x020;
/// Doorbell stores seen.
pub const DOORBELLS: u64 = 0x040;
/// MSI-X messages sent.
pub const INTERRUPTS: u64 = 0x048;
/// Bytes moved by the engine.
pub const DMA_BYTES: u64 = 0x050;
/// Descriptors that failed.
pub const DMA_ERRORS: u64 = 0x058;
/// Source of the copy.
pub const DMA_SRC: u64 = 0x100;
/// Destination of the copy.
pub const DMA_DST: u64 = 0x108;
/// Bytes of the copy.
pub const DMA_LEN: u64 = 0x110;
/// See the `FLAG_` constants.
pub const DMA_FLAGS: u64 = 0x114;
/// Vector for [`FLAG_INTERRUPT`].
pub const DMA_VECTOR: u64 = 0x118;
/// 1 starts the engine.
pub const DMA_START: u64 = 0x11c;
/// See the `RESULT_` constants.
pub const DMA_RESULT: u64 = 0x120;
/// Why the last copy failed.
pub const DMA_ERROR: u64 = 0x124;
/// Bus address for [`FLAG_BELL`].
pub const DMA_BELL: u64 = 0x128;
/// What is stored there.
pub const DMA_BELL_VALUE: u64 = 0x130;
/// 1 stops the engine.
pub const DMA_STOP: u64 = 0x134;

/// Value of [`MAGIC`].
pub const MAGIC_VALUE: u32 = 0x4350_4950;
/// Value of [`VERSION`].
pub const VERSION_VALUE: u32 = 1;
/// Value of [`FEATURES`].
pub const FEATURES_VALUE: u32 = VECTORS as u32 | (RING_SLOTS as u32) << 8 | 1 << 16 | 1 << 17;
/// In [`STATUS`]: the endpoint answers.
pub const STATUS_READY: u32 = 1 << 0;
/// In [`STATUS`]: the engine works.
pub const STATUS_BUSY: u32 = 1 << 1;
/// In [`CONTROL`]: the engine may be started.
pub const CONTROL_ENGINE: u32 = 1 << 0;
/// In [`CONTROL`]: ring table and engine as after power-up.
pub const CONTROL_RESET: u32 = 1 << 1;

/// Longest copy in bytes.
pub const DMA_MAX_BYTES: u32 = 0x40_0000;
/// In [`DMA_FLAGS`]: the source is an offset into BAR 2.
pub const FLAG_SOURCE_OWN: u32 = 1 << 0;
/// In [`DMA_FLAGS`]: the destination is an offset into BAR 2.
pub const FLAG_DESTINATION_OWN: u32 = 1 << 1;
/// In [`DMA_FLAGS`]: raise a vector at the end.
pub const FLAG_INTERRUPT: u32 = 1 << 2;
/// In [`DMA_FLAGS`]: ring a bell after the data.
pub const FLAG_BELL: u32 = 1 << 3;
/// In [`DMA_FLAGS`]: do not look at the ring table.
pub const FLAG_ARBITRARY: u32 = 1 << 4;

/// In [`DMA_RESULT`]: never started.
pub const RESULT_NONE: u32 = 0;
/// In [`DMA_RESULT`]: busy.
pub const RESULT_BUSY: u32 = 1;
/// In [`DMA_RESULT`]: done.
pub const RESULT_DONE: u32 = 2;
/// In [`DMA_RESULT`]: failed, see [`DMA_ERROR`].
pub const RESULT_ERROR: u32 = 3;

/// Which doorbell a 4-byte store at this offset of BAR 0 rings.
pub fn doorbell_at(offset: u64) -> Option<usize> {
    let index = usize::try_from(offset.checked_sub(DOORBELL_PAGE)? / 4).ok()?;
    (offset % 4 == 0 && index < VECTORS).then_some(index)
}
