// SPDX-License-Identifier: MIT OR Apache-2.0
//! A server, and what QEMU and a driver would do to it, without QEMU.
#![allow(dead_code, missing_docs)]

use std::{
    fs::File,
    io::{BufRead, BufReader, Write},
    os::{
        fd::{AsFd, AsRawFd},
        unix::{fs::FileExt, net::UnixStream},
    },
    process::{Child, ChildStdin, Command, Stdio},
    time::{Duration, Instant},
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        eventfd::{EfdFlags, EventFd},
        memfd::{MFdFlags, memfd_create},
    },
};
use serde_json::Value;
use softdev::registers as reg;
use vfio_bindings::bindings::vfio::{
    VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_DATA_EVENTFD, VFIO_PCI_CONFIG_REGION_INDEX, VFIO_PCI_MSIX_IRQ_INDEX,
};
use vfio_user::Client;

pub const CONFIG: u32 = VFIO_PCI_CONFIG_REGION_INDEX;
pub const PAGE: u64 = 4096;
pub const MIB: u64 = 1 << 20;
/// Bytes of guest memory, and where the guest sees them.
pub const GUEST_BYTES: u64 = 32 * MIB;
pub const GUEST: u64 = 0x1_0000_0000;

pub fn bar0_of(endpoint: usize) -> u64 {
    0xfe00_0000 + endpoint as u64 * 0x1_0000
}

pub fn bar2_of(endpoint: usize) -> u64 {
    0x80_0000_0000 + endpoint as u64 * reg::BAR2_BYTES
}

pub struct Machine {
    pub child: Child,
    pub stdin: Option<ChildStdin>,
    pub dir: tempfile::TempDir,
    pub guest: File,
}

impl Machine {
    pub fn start(endpoints: usize, arguments: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_softdev"))
            .arg("--dir")
            .arg(dir.path())
            .args(["--endpoints", &endpoints.to_string()])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        let guest = File::from(memfd_create(c"guest", MFdFlags::MFD_CLOEXEC).unwrap());
        guest.set_len(GUEST_BYTES).unwrap();
        Self { stdin: child.stdin.take(), child, dir, guest }
    }

    /// An endpoint as a driver leaves it after probe: BARs, bus mastering, MSI-X, engine enabled.
    pub fn driven(&self, endpoint: usize) -> Driven {
        let mut driven = self.connect(endpoint);
        driven.client.dma_map(0, GUEST, GUEST_BYTES, self.guest.as_raw_fd()).unwrap();
        driven.probe();
        driven
    }

    /// An endpoint as after power-up.
    pub fn connect(&self, endpoint: usize) -> Driven {
        let path = self.dir.path().join(format!("ep{endpoint}.sock"));
        let client = Client::new(&path).unwrap();
        let vectors = (0..reg::VECTORS).map(|_| EventFd::from_flags(EfdFlags::EFD_NONBLOCK).unwrap()).collect();
        let mut driven = Driven { client, vectors, endpoint };
        let fds: Vec<_> = driven.vectors.iter().map(|fd: &EventFd| fd.as_fd().as_raw_fd()).collect();
        let flags = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER;
        driven.client.set_irqs(VFIO_PCI_MSIX_IRQ_INDEX, flags, 0, fds.len() as u32, &fds).unwrap();
        driven
    }

    pub fn control(&self) -> Control {
        let stream = UnixStream::connect(self.dir.path().join("control.sock")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        Control { reader: BufReader::new(stream.try_clone().unwrap()), stream }
    }

    pub fn fill(&self, offset: u64, bytes: u64, seed: u8) -> Vec<u8> {
        let data: Vec<u8> = (0..bytes).map(|at| (at.wrapping_mul(31) >> 3) as u8 ^ (at as u8) ^ seed).collect();
        self.guest.write_all_at(&data, offset).unwrap();
        data
    }

    pub fn guest_bytes(&self, offset: u64, bytes: u64) -> Vec<u8> {
        let mut data = vec![0; bytes as usize];
        self.guest.read_exact_at(&mut data, offset).unwrap();
        data
    }

    /// Waits until the server has ended, for 5 s at most.
    pub fn ended(&mut self) -> std::process::ExitStatus {
        let until = Instant::now() + Duration::from_secs(5);
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < until, "the server lives on");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub struct Driven {
    pub client: Client,
    pub vectors: Vec<EventFd>,
    pub endpoint: usize,
}

impl Driven {
    pub fn probe(&mut self) {
        self.write32(CONFIG, 0x10, bar0_of(self.endpoint) as u32);
        self.write32(CONFIG, 0x18, bar2_of(self.endpoint) as u32);
        self.write32(CONFIG, 0x1c, (bar2_of(self.endpoint) >> 32) as u32);
        self.write32(CONFIG, 0x20, 0xfd00_0000);
        self.write16(CONFIG, 0x04, 0x0006);
        self.write16(CONFIG, 0x42, 0x8000);
        self.write32(0, reg::CONTROL, reg::CONTROL_ENGINE);
    }

    pub fn read<const N: usize>(&mut self, region: u32, offset: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.client.region_read(region, offset, &mut bytes).unwrap();
        bytes
    }

    pub fn read16(&mut self, region: u32, offset: u64) -> u16 {
        u16::from_le_bytes(self.read(region, offset))
    }

    pub fn read32(&mut self, region: u32, offset: u64) -> u32 {
        u32::from_le_bytes(self.read(region, offset))
    }

    pub fn read64(&mut self, region: u32, offset: u64) -> u64 {
        u64::from_le_bytes(self.read(region, offset))
    }

    pub fn write16(&mut self, region: u32, offset: u64, value: u16) {
        self.client.region_write(region, offset, &value.to_le_bytes()).unwrap();
    }

    pub fn write32(&mut self, region: u32, offset: u64, value: u32) {
        self.client.region_write(region, offset, &value.to_le_bytes()).unwrap();
    }

    pub fn write64(&mut self, region: u32, offset: u64, value: u64) {
        self.client.region_write(region, offset, &value.to_le_bytes()).unwrap();
    }

    pub fn set_ring(&mut self, slot: u64, address: u64, bytes: u32) {
        let at = reg::RING_TABLE + slot * reg::RING_SLOT_BYTES;
        self.write32(0, at + 16, 0);
        self.write64(0, at, address);
        self.write32(0, at + 8, bytes);
        self.write32(0, at + 12, 1 << 16);
        self.write32(0, at + 16, 1);
    }

    pub fn clear_ring(&mut self, slot: u64) {
        self.write32(0, reg::RING_TABLE + slot * reg::RING_SLOT_BYTES + 16, 0);
    }

    pub fn start_copy(&mut self, source: u64, destination: u64, bytes: u32, flags: u32) {
        self.write64(0, reg::DMA_SRC, source);
        self.write64(0, reg::DMA_DST, destination);
        self.write32(0, reg::DMA_LEN, bytes);
        self.write32(0, reg::DMA_FLAGS, flags);
        self.write32(0, reg::DMA_START, 1);
    }

    /// Waits for the end of a copy: result and error.
    pub fn finish(&mut self) -> (u32, u32) {
        let until = Instant::now() + Duration::from_secs(10);
        while self.read32(0, reg::DMA_RESULT) == reg::RESULT_BUSY {
            assert!(Instant::now() < until, "the engine does not finish");
            std::thread::sleep(Duration::from_micros(200));
        }
        (self.read32(0, reg::DMA_RESULT), self.read32(0, reg::DMA_ERROR))
    }

    pub fn copy(&mut self, source: u64, destination: u64, bytes: u32, flags: u32) -> (u32, u32) {
        self.start_copy(source, destination, bytes, flags);
        self.finish()
    }

    pub fn ring(&mut self, vector: u64) {
        self.write32(0, reg::DOORBELL_PAGE + 4 * vector, 1);
    }

    /// Interrupts of a vector since the last call, waiting at most `limit` for the first.
    pub fn interrupts(&self, vector: usize, limit: Duration) -> u64 {
        let fd = &self.vectors[vector];
        let mut fds = [PollFd::new(fd.as_fd(), PollFlags::POLLIN)];
        let limit = PollTimeout::try_from(limit.as_millis()).unwrap();
        if poll(&mut fds, limit).unwrap() == 0 { 0 } else { fd.read().unwrap() }
    }

    /// Interrupts that are there now. A reply from the server proves that all earlier stores took effect.
    pub fn interrupts_now(&self, vector: usize) -> u64 {
        self.interrupts(vector, Duration::ZERO)
    }
}

pub const DONE: (u32, u32) = (reg::RESULT_DONE, 0);

pub fn error(code: u32) -> (u32, u32) {
    (reg::RESULT_ERROR, code)
}

pub struct Control {
    stream: UnixStream,
    reader: BufReader<UnixStream>,
}

impl Control {
    pub fn raw(&mut self, line: &str) -> Value {
        writeln!(self.stream, "{line}").unwrap();
        let mut answer = String::new();
        self.reader.read_line(&mut answer).unwrap();
        serde_json::from_str(&answer).unwrap()
    }

    pub fn ok(&mut self, request: &Value) -> Value {
        let answer = self.raw(&request.to_string());
        assert_eq!(answer["ok"], true, "{request}: {answer}");
        answer
    }

    pub fn refused(&mut self, line: &str) -> String {
        let answer = self.raw(line);
        assert_eq!(answer["ok"], false, "{line}: {answer}");
        answer["error"].as_str().unwrap().to_owned()
    }

    pub fn endpoint(&mut self, endpoint: usize) -> Value {
        self.ok(&serde_json::json!({"cmd": "list"}))["endpoints"][endpoint].clone()
    }
}
