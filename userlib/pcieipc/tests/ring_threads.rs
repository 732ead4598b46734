// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ring between two threads that sleep and wake each other.

use std::{
    sync::mpsc::{Receiver, SyncSender, sync_channel},
    time::Duration,
};

use pcieipc::{
    link::RecordHeader,
    ring::{Private, Reader, Writer},
};

/// How long a sleeper waits before the test calls its wake-up lost.
const LOST: Duration = Duration::from_secs(20);

/// A bell that remembers one ring, like an eventfd.
fn bell() -> (SyncSender<()>, Receiver<()>) {
    sync_channel(1)
}

fn send(writer: &mut Writer<Private>, number: u32, reader_bell: &SyncSender<()>, writer_bell: &Receiver<()>) {
    let len = (number as usize * 37) % 700;
    loop {
        if let Some(mut payload) = writer.try_reserve(len).unwrap() {
            // SAFETY: the reserved payload has `len` bytes.
            unsafe { payload.as_mut_ptr().write_bytes(number as u8, len) };
            break;
        }
        // As the library sleeps: who has said so looks again by the same call.
        writer.arm();
        if writer.try_reserve(len).unwrap().is_none() {
            writer_bell.recv_timeout(LOST).expect("the writer's wake-up was lost");
        }
        writer.disarm();
    }
    let header = RecordHeader { epoch: number, ..Default::default() };
    if writer.commit(header, len) {
        let _ = reader_bell.try_send(());
    }
}

fn receive(reader: &mut Reader<Private>, number: u32, reader_bell: &Receiver<()>, writer_bell: &SyncSender<()>) {
    loop {
        if let Some((header, payload)) = reader.try_receive().unwrap() {
            assert_eq!(header.epoch, number, "lost or reordered");
            assert_eq!(payload.len(), (number as usize * 37) % 700);
            for at in 0..payload.len() {
                // SAFETY: inside the payload; the writer has published it and does not touch it until it is released.
                assert_eq!(unsafe { payload.as_ptr().add(at).read_volatile() }, number as u8, "torn at byte {at}");
            }
            break;
        }
        reader.arm();
        if reader.try_receive().unwrap().is_none() {
            reader_bell.recv_timeout(LOST).expect("the reader's wake-up was lost");
        }
        reader.disarm();
    }
    if reader.release() {
        let _ = writer_bell.try_send(());
    }
}

/// Both sides sleep whenever they find nothing to do, so that each record can lose a wake-up on either side.
#[test]
fn no_record_and_no_wake_up_is_lost_between_two_threads() {
    const RECORDS: u32 = if cfg!(miri) { 200 } else { 200_000 };
    let (w, r) = Private::pair(16 << 10);
    let (mut writer, mut reader) = (Writer::new(w), Reader::new(r));
    let (ring_reader, reader_bell) = bell();
    let (ring_writer, writer_bell) = bell();
    let sender = std::thread::spawn(move || {
        for number in 0..RECORDS {
            send(&mut writer, number, &ring_reader, &writer_bell);
        }
    });
    for number in 0..RECORDS {
        receive(&mut reader, number, &reader_bell, &ring_writer);
    }
    sender.join().unwrap();
}

/// The same between a strict ping and a strict pong, where every record meets a side that is about to sleep.
#[test]
fn no_wake_up_is_lost_in_ping_pong() {
    const ROUNDS: u32 = if cfg!(miri) { 100 } else { 50_000 };
    let (w, r) = Private::pair(16 << 10);
    let (mut ping_out, mut ping_in) = (Writer::new(w), Reader::new(r));
    let (w, r) = Private::pair(16 << 10);
    let (mut pong_out, mut pong_in) = (Writer::new(w), Reader::new(r));
    let (ring_b, bell_b) = bell();
    let (ring_a, bell_a) = bell();
    let echo = std::thread::spawn(move || {
        for number in 0..ROUNDS {
            receive(&mut ping_in, number, &bell_b, &ring_a);
            send(&mut pong_out, number, &ring_a, &bell_b);
        }
    });
    for number in 0..ROUNDS {
        send(&mut ping_out, number, &ring_b, &bell_a);
        receive(&mut pong_in, number, &bell_a, &ring_b);
    }
    echo.join().unwrap();
}
