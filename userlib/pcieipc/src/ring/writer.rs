// SPDX-License-Identifier: MIT OR Apache-2.0
//! The side that writes records.

use std::ptr::NonNull;

use super::{
    LINE, Memory, Notice, RECORD_HEADER_BYTES, Stop, Violation, max_record, record,
    slot::{self, SLOT_PAYLOAD, SLOTS},
    sync::{Ordering, full_fence},
};
use crate::link::{RecordHeader, SharedMut};

/// Longer records are streamed past the cache, or copied for longer than it takes to get their lines.
const SOON: u64 = 1088;

/// Asks the cache for a line to store to; has no effect on what is read or written.
fn prefetch(line: NonNull<u8>) {
    #[cfg(all(target_arch = "x86_64", not(loom), not(miri)))]
    // SAFETY: it never faults, and changes nothing but caches; processors without it take it for nothing.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) line.as_ptr(), options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(all(target_arch = "x86_64", not(loom), not(miri))))]
    let _ = line;
}

/// Of so many records that find no slot free, one asks the reader's page what it gave back.
const LOOKS_AT_HEAD: u64 = if cfg!(loom) { 2 } else { 16 };

/// The one writer of a ring and of the slots beside it.
#[derive(Debug)]
pub struct Writer<M: Memory> {
    memory: M,
    capacity: u64,
    /// Where the next record goes: the truth, of which the tail page has a copy for the reader.
    tail: u64,
    /// The reader's index as last seen and checked.
    head: u64,
    reserved: Option<Reserved>,
    /// The reader's closing was seen, so it is no news any more.
    closed: bool,
    /// The sleeper's number that was rung last.
    rung: u32,
    /// The number of our own next sleep.
    sleep: u32,
    /// Whether tiny payloads lie in the header's line.
    shorts: bool,
    /// Whether short records take slots.
    slots: bool,
    /// Records sent; the number of the next one.
    number: u64,
    /// Records that the reader gave back, as last heard and checked.
    freed: u64,
    /// What to tell of the ring in the other direction.
    given_back: u64,
}

#[derive(Debug, Clone, Copy)]
struct Reserved {
    /// What is left over before it in the ring; nothing where it is in a slot.
    skip: Option<u64>,
    payload: usize,
    len: usize,
}

impl<M: Memory> Writer<M> {
    /// A writer on a ring that nobody has used, both of whose pages are zero.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// assert!(writer.try_reserve(100)?.is_some());
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn new(memory: M) -> Self {
        Self::starting_at(memory, 0)
    }

    /// A writer whose indices start at `index`, a multiple of 64; the reader must start there too, and neither may be used
    /// before both are made.
    ///
    /// ```
    /// # use pcieipc::ring::{Private, Reader, Writer};
    /// let (a, b) = Private::pair(1 << 14);
    /// let (mut writer, reader) = (Writer::starting_at(a, 1 << 20), Reader::starting_at(b, 1 << 20));
    /// assert_eq!(writer.reserved_offset(), None);
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn starting_at(memory: M, index: u64) -> Self {
        let index = index & !(LINE as u64 - 1);
        let capacity = memory.data_bytes() as u64;
        memory.tail().publish(index);
        Self {
            memory,
            capacity,
            tail: index,
            head: index,
            reserved: None,
            closed: false,
            rung: 0,
            sleep: 0,
            shorts: true,
            slots: true,
            number: 0,
            freed: 0,
            given_back: 0,
        }
    }

    /// The longest payload of one record.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// assert_eq!(writer.max_record(), (1 << 13) - 64);
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn max_record(&self) -> usize {
        max_record(self.memory.data_bytes())
    }

    /// The ring's memory.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// use pcieipc::ring::Memory;
    /// assert_eq!(writer.memory().data_bytes(), 1 << 14);
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// The payload of a record of `len` bytes, or `None` when there is no room for it yet. A reservation that was not
    /// published is forgotten.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// let mut room = writer.try_reserve(8)?.unwrap();
    /// // SAFETY: eight bytes are there.
    /// unsafe { room.as_mut_ptr().write_bytes(7, 8) };
    /// assert!(writer.try_reserve(1 << 20).is_err(), "longer than any record");
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    ///
    /// # Errors
    /// What the reader's error word says; a reader's index that is impossible; a `len` that never fits.
    pub fn try_reserve(&mut self, len: usize) -> Result<Option<SharedMut<'_>>, Stop> {
        self.reserved = None;
        let max = self.max_record();
        if len > max {
            return Err(Stop::TooLong { len, max });
        }
        self.closed = self.memory.head().check()?;
        if self.slots && len <= SLOT_PAYLOAD && self.has_slot()? {
            let payload = slot::payload_at(len);
            self.reserved = Some(Reserved { skip: None, payload, len });
            let payload = self.memory.tail().slot(self.number).payload(payload);
            // SAFETY: `len` bytes from there lie inside the slot, whose last record the reader gave back (I) or there was none. It stays
            // mapped while `memory` lives, and this writer is the only one.
            return Ok(Some(unsafe { SharedMut::new(payload, len) }));
        }
        let payload = record::payload_at(len, self.shorts);
        let span = record::span(payload, len);
        let to_wrap = self.capacity - self.place(self.tail);
        let skip = if span > to_wrap { to_wrap } else { 0 };
        if self.free() < span + skip {
            self.refresh()?;
            if self.free() < span + skip {
                return Ok(None);
            }
        }
        self.reserved = Some(Reserved { skip: Some(skip), payload, len });
        let payload = self.at(self.tail.wrapping_add(skip), payload);
        // SAFETY: `span` bytes from the record's start lie before the wrap and are free: the reader gave them back (B) or
        // never had them. They stay mapped while `memory` lives, and this writer is the only one in the ring.
        Ok(Some(unsafe { SharedMut::new(payload, len) }))
    }

    /// Says that a mover writes the records: from now on header line and payload are apart, however short the payload is.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// writer.keep_apart();
    /// assert_eq!(writer.try_reserve(8)?.unwrap().as_mut_ptr() as usize % 64, 0);
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn keep_apart(&mut self) {
        self.shorts = false;
        self.slots = false;
    }

    /// Puts all records into the ring, short ones too.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// writer.without_slots();
    /// writer.try_reserve(8)?;
    /// let _ = writer.commit(RecordHeader::default(), 8); // true: ring the reader
    /// reader.try_receive()?;
    /// assert!(!reader.is_by_slot());
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn without_slots(&mut self) {
        self.slots = false;
    }

    /// What the next record in a slot tells its reader: how many records this side has given back of the ring in the other direction.
    /// See [`Reader::given_back`](super::Reader::given_back).
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// writer.acknowledge(7);
    /// writer.try_reserve(8)?;
    /// let _ = writer.commit(RecordHeader::default(), 8); // true: ring the reader
    /// reader.try_receive()?;
    /// assert_eq!(reader.heard(), 7);
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn acknowledge(&mut self, given_back: u64) {
        self.given_back = given_back;
    }

    /// Takes in how many records of this ring its reader says it has given back ([`Reader::heard`](super::Reader::heard) of the other direction), so that nobody
    /// needs to look at its page for that. What is older than what is known already changes nothing.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// assert!(writer.hear(1).is_err(), "nothing was sent");
    /// writer.try_reserve(8)?;
    /// let _ = writer.commit(RecordHeader::default(), 8); // true: ring the reader
    /// writer.hear(1)?;
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    ///
    /// # Errors
    /// More than was sent.
    #[inline]
    pub fn hear(&mut self, given_back: u64) -> Result<(), Stop> {
        let news = given_back.wrapping_sub(self.freed);
        if news as i64 > 0 {
            if news > self.number.wrapping_sub(self.freed) {
                let (index, from, to) = (given_back, self.freed, self.number);
                return Err(Violation::IndexOutOfRange { index, from, to }.into());
            }
            self.freed = given_back;
        }
        Ok(())
    }

    /// Whether the slot for the next record is free.
    #[inline]
    fn has_slot(&mut self) -> Result<bool, Stop> {
        let in_use = |writer: &Self| writer.number.wrapping_sub(writer.freed) >= SLOTS as u64;
        if in_use(self) && self.number % LOOKS_AT_HEAD == 0 {
            // SYNC POINT (I): pairs with the Release store in `Reader::release`.
            self.hear(self.memory.head().records())?;
        }
        Ok(!in_use(self))
    }

    /// Where in the data area the reserved record starts, header included; `None` without a reservation there.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// writer.without_slots();
    /// writer.try_reserve(8)?;
    /// assert_eq!(writer.reserved_offset(), Some(0));
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn reserved_offset(&self) -> Option<u64> {
        self.reserved.and_then(|r| Some(self.place(self.tail.wrapping_add(r.skip?))))
    }

    /// Whether room is reserved.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// assert!(!writer.is_reserved());
    /// writer.try_reserve(8)?;
    /// assert!(writer.is_reserved());
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn is_reserved(&self) -> bool {
        self.reserved.is_some()
    }

    /// The header line of the reserved record, for a mover that writes header and payload itself; see [`Writer::publish`].
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// writer.keep_apart();
    /// assert!(writer.header_line(RecordHeader::default(), 8).is_none(), "nothing is reserved");
    /// writer.try_reserve(8)?;
    /// assert_eq!(&writer.header_line(RecordHeader::default(), 8).unwrap()[..4], b"CPIP");
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn header_line(&self, header: RecordHeader, len: usize) -> Option<[u8; RECORD_HEADER_BYTES]> {
        let reserved = self.reserved?;
        let mut line = [0; RECORD_HEADER_BYTES];
        let words = record::encode(self.tail.wrapping_add(reserved.skip?), header, reserved.payload, len.min(reserved.len));
        for (to, word) in line.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        Some(line)
    }

    /// Writes the header of the reserved record and publishes it with the first `len` bytes of its payload. Says whether the
    /// reader sleeps and has to be rung. Without a reservation nothing happens.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// writer.try_reserve(8)?;
    /// let _ = writer.commit(RecordHeader::default(), 8); // true: ring the reader
    /// assert_eq!(reader.try_receive()?.unwrap().1.len(), 8);
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    #[must_use = "a sleeping reader has to be rung"]
    pub fn commit(&mut self, header: RecordHeader, len: usize) -> bool {
        if !self.commit_only(header, len) {
            return false;
        }
        full_fence();
        self.must_ring()
    }

    /// As [`Writer::commit`], but leaves the question whether the reader sleeps to [`Writer::must_ring`], behind a fence that other rings may
    /// share: it waits until all stores are seen, which a short message has something better to do for. Says whether there was a reservation.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// writer.try_reserve(8)?;
    /// assert!(writer.commit_only(RecordHeader::default(), 8));
    /// pcieipc::ring::full_fence();
    /// assert!(!writer.must_ring(), "the reader does not sleep");
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    #[must_use = "without a reservation nothing was sent"]
    pub fn commit_only(&mut self, header: RecordHeader, len: usize) -> bool {
        let Some(reserved) = self.reserved.take() else { return false };
        let len = len.min(reserved.len);
        let number = self.number;
        self.number = number.wrapping_add(1);
        let Some(skip) = reserved.skip else {
            let entry = slot::Entry { header, payload: reserved.payload, len, given_back: self.given_back };
            self.memory.tail().slot(number).publish(number, entry);
            return true;
        };
        let start = self.tail.wrapping_add(skip);
        let end = start.wrapping_add(record::span(reserved.payload, len));
        // What lies where the next header will be is an old payload, which may look like anything. Only free room is the writer's to clear.
        let cleared = self.capacity - end.wrapping_sub(self.head) >= LINE as u64;
        if cleared {
            self.memory.position(self.place(end)).store(0, Ordering::Relaxed);
        }
        // All stores to this line one after the other: the reader looks at it again and again, and would take it away between them.
        // SAFETY: the reserved room starts with a header line; it is 64-byte aligned and writable.
        unsafe { record::store(self.at(start, 0), record::encode(start, header, reserved.payload, len)) };
        let next = if cleared { record::NEXT_CLEARED } else { 0 };
        self.memory.position(self.place(start)).store((start | record::COMPLETE | next).to_le(), Ordering::Release);
        if skip > 0 {
            // The record behind it is in place.
            self.skip(skip, record::COMPLETE | record::NEXT_CLEARED);
        }
        self.advance(end);
        self.expect(end.wrapping_sub(start));
        true
    }

    /// Whether the reader sleeps and was not rung yet; asked after a [`full_fence`] behind the last record.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// reader.arm();
    /// pcieipc::ring::full_fence();
    /// assert!(writer.must_ring());
    /// assert!(!writer.must_ring(), "once for each sleep");
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    #[must_use = "a sleeping reader has to be rung"]
    pub fn must_ring(&mut self) -> bool {
        let sleeper = self.memory.head().asleep();
        if sleeper == 0 || sleeper == self.rung {
            return false;
        }
        self.rung = sleeper;
        true
    }

    /// Asks for the lines in which the next record will lie, if it is like the last one: its reader had them last, and to take them back
    /// one by one when it is stored would cost more than all the rest of a short message.
    fn expect(&self, span: u64) {
        let to_wrap = self.capacity - self.place(self.tail);
        if span > SOON || span + LINE as u64 > self.free().min(to_wrap) {
            return;
        }
        // The first one was cleared, and the reader looks at it; the last one is the header after the next.
        for line in 1..=span / LINE as u64 {
            prefetch(self.at(self.tail, line as usize * LINE));
        }
    }

    /// Publishes the reserved record, whose header and payload are in place already. Says whether the reader has to be rung.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// writer.keep_apart();
    /// writer.try_reserve(8)?;
    /// let line = writer.header_line(RecordHeader::default(), 8).unwrap();
    /// // ... an engine moves the line and the payload to `reserved_offset` of the data area ...
    /// # use pcieipc::ring::Memory;
    /// # // SAFETY: the line at the start of the data area.
    /// # unsafe { writer.memory().data().cast::<[u8; 64]>().write(line) };
    /// let _ = writer.publish(8);
    /// assert!(reader.try_receive()?.is_some());
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    #[must_use = "a sleeping reader has to be rung"]
    pub fn publish(&mut self, len: usize) -> bool {
        let Some(Reserved { skip: Some(skip), payload, len: most }) = self.reserved.take() else { return false };
        self.number = self.number.wrapping_add(1);
        if skip > 0 {
            self.skip(skip, 0);
        }
        let span = record::span(payload, len.min(most));
        self.advance(self.tail.wrapping_add(skip + span));
        full_fence();
        self.must_ring()
    }

    /// Stores a skip from the tail to the wrap.
    fn skip(&self, span: u64, flags: u64) {
        // SAFETY: the room up to the wrap is reserved too, is at least one line, and is 64-byte aligned and writable.
        unsafe { record::store(self.at(self.tail, 0), record::encode_skip(self.tail, span)) };
        self.memory.position(self.place(self.tail)).store((self.tail | flags).to_le(), Ordering::Release);
    }

    /// Publishes everything up to `tail`.
    fn advance(&mut self, tail: u64) {
        self.tail = tail;
        self.memory.tail().publish(self.tail);
    }

    /// The bell was not rung after all: the next record asks for it again.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// writer.unrung(); // the reader's bell is broken: the next record asks for it again
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn unrung(&mut self) {
        self.rung = 0;
    }

    /// Tells the reader that this side sleeps until there is room; [`Writer::try_reserve`] must be asked once more after this.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// writer.arm();
    /// if writer.try_reserve(100)?.is_none() {
    ///     // ... sleep until the bell ...
    /// }
    /// writer.disarm();
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn arm(&mut self) {
        self.sleep = self.sleep.wrapping_add(1).max(1);
        self.memory.tail().arm(self.sleep);
    }

    /// Tells the reader that this side is awake.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// writer.arm();
    /// writer.disarm(); // awake again: nobody needs to ring
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn disarm(&mut self) {
        self.memory.tail().disarm();
    }

    /// Whether the reader had left in order when it was last asked for. What it did before that was seen too.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// reader.post(Notice::Closed, "");
    /// writer.try_reserve(8)?;
    /// assert!(writer.is_closed());
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// What the reader says in its error word.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// reader.post(Notice::Closed, "");
    /// assert_eq!(writer.peer_notice()?, Some(Notice::Closed));
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    ///
    /// # Errors
    /// The word is not one of the protocol's.
    pub fn peer_notice(&self) -> Result<Option<Notice>, Violation> {
        self.memory.head().notice()
    }

    /// The text that the reader put beside its error word.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// reader.post(Notice::Aborted { by: 1 }, "enough");
    /// assert_eq!(writer.peer_reason(), "enough");
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn peer_reason(&self) -> String {
        self.memory.head().reason()
    }

    /// Ends the ring; the reader has to be rung.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// writer.post(Notice::Closed, "");
    /// assert_eq!(reader.peer_notice()?, Some(Notice::Closed));
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn post(&mut self, notice: Notice, reason: &str) {
        self.memory.tail().post(notice, reason);
    }

    /// Whether the reader has given back everything.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// writer.try_reserve(8)?;
    /// let _ = writer.commit(RecordHeader::default(), 8); // true: ring the reader
    /// assert!(!writer.is_drained()?);
    /// reader.try_receive()?;
    /// let _ = reader.release();
    /// assert!(writer.is_drained()?);
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Writer::try_reserve`].
    pub fn is_drained(&mut self) -> Result<bool, Stop> {
        self.refresh()?;
        self.hear(self.memory.head().records())?;
        Ok(self.head == self.tail && self.freed == self.number)
    }

    fn free(&self) -> u64 {
        self.capacity - self.tail.wrapping_sub(self.head)
    }

    fn refresh(&mut self) -> Result<(), Violation> {
        let index = self.memory.head().index();
        if index % LINE as u64 != 0 {
            return Err(Violation::Misaligned { index });
        }
        if index.wrapping_sub(self.head) > self.tail.wrapping_sub(self.head) {
            return Err(Violation::IndexOutOfRange { index, from: self.head, to: self.tail });
        }
        self.head = index;
        Ok(())
    }

    fn place(&self, index: u64) -> u64 {
        index & (self.capacity - 1)
    }

    fn at(&self, index: u64, offset: usize) -> NonNull<u8> {
        // SAFETY: `place` is below the size of the data area, and callers ask for offsets within a record that ends before
        // the wrap.
        unsafe { self.memory.data().add(self.place(index) as usize + offset) }
    }
}
