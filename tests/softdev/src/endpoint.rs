// SPDX-License-Identifier: MIT OR Apache-2.0
//! One endpoint: power, configuration and registers, and what they set in motion.
//!
//! Lock order: state, bus, fabric; interrupts and engine are innermost. The engine's thread never takes the state, so a
//! holder of the state may wait for it.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd, RawFd},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockWriteGuard,
        atomic::{AtomicU64, Ordering},
    },
};

use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::{
    bus::{Bus, Window},
    config::{ConfigSpace, Decode},
    engine::{Descriptor, Engine, Surroundings},
    fabric::{Fabric, Port},
    haunting::Haunting,
    interrupts::Interrupts,
    memory::{GuestFiles, SharedMemory},
    registers as reg,
    timer::Timer,
};

/// What all endpoints of a server have in common.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The first endpoint's serial number; the others count up from it.
    pub serial_base: u64,
    /// DMA_FLAGS bit 4 works.
    pub arbitrary_dma: bool,
}

/// Values that a function reset clears.
#[derive(Clone, Copy, Debug, Default)]
struct Registers {
    control: u32,
    source: u64,
    destination: u64,
    bytes: u32,
    flags: u32,
    vector: u32,
    bell: u64,
    bell_value: u32,
}

/// Counters since the server started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counters {
    /// Doorbell stores seen.
    pub doorbells: u64,
    /// MSI-X messages sent.
    pub interrupts: u64,
    /// Bytes moved by the engine.
    pub dma_bytes: u64,
    /// Descriptors that failed.
    pub dma_errors: u64,
}

#[derive(Debug)]
struct State {
    config: ConfigSpace,
    registers: Registers,
    msix_table: Vec<u8>,
    life: u32,
    powered: bool,
    silent: bool,
    /// Says that transactions of its own are pending, whether or not.
    pending: bool,
    /// Its function was reset, and nobody has switched its BARs on again.
    in_reset: bool,
    /// Accesses to BARs in that time.
    touched_in_reset: u64,
    /// Doorbells that were rung while it might not master the bus.
    rung_off_the_bus: u64,
    /// So many reads of its ids will still fail.
    misreads: u32,
    /// Whether it mastered the bus when the last machine left it.
    left_mastering: Option<bool>,
    /// What the counters were when this life began.
    before: Counters,
}

impl State {
    /// Somebody reads or writes a BAR.
    fn touch(&mut self) {
        self.touched_in_reset += u64::from(self.in_reset);
    }
}

/// How an endpoint fares, for the control socket.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Report {
    /// Its number.
    pub endpoint: usize,
    /// Device serial number.
    pub serial: u64,
    /// Power-ups and function resets.
    pub life: u32,
    /// "live", "silent" or "dead"
    pub state: &'static str,
    /// Counters since the server started.
    #[serde(flatten)]
    pub counters: Counters,
    /// Engine works.
    pub busy: bool,
    /// Valid slots of the ring table.
    pub rings: usize,
    /// The bus addresses in them.
    pub ring_addresses: Vec<u64>,
    /// Doorbells that will still meet a fault.
    pub faults: u64,
    /// Speed code and width that Link Status shows.
    pub link: (u8, u8),
    /// Bus address of BAR 0, 0 while it does not answer.
    pub bar0: u64,
    /// Bus address of BAR 2, 0 while it does not answer.
    pub bar2: u64,
    /// Bytes of guest memory mapped for its DMA.
    pub mapped_bytes: u64,
    /// Reads and writes of registers that reached the server.
    pub accesses: u64,
    /// Accesses to BARs after a function reset and before they were switched on again, when it is to be left alone.
    pub touched_in_reset: u64,
    /// Stores to doorbells while it might not master the bus, from which no interrupt comes.
    pub rung_off_the_bus: u64,
    /// Reads of its ids that will still fail.
    pub misreads: u32,
    /// It may master the bus.
    pub mastering: bool,
    /// It could when the last machine left it.
    pub left_mastering: Option<bool>,
    /// Stores of a haunting endpoint that landed.
    pub haunted: u64,
    /// Stores of a haunting endpoint that found no memory.
    pub exorcised: u64,
}

/// One PCIe function.
#[derive(Debug)]
pub struct Endpoint {
    index: usize,
    serial: u64,
    arbitrary: bool,
    state: Mutex<State>,
    bus: RwLock<Bus>,
    engine: Engine,
    haunting: Haunting,
    /// Reads and writes of registers that reached this server.
    accesses: AtomicU64,
    interrupts: Arc<Interrupts>,
    memory: Arc<SharedMemory>,
    memory_file: OwnedFd,
    fabric: Arc<Fabric>,
    files: Arc<GuestFiles>,
}

/// Makes `count` endpoints that reach each other, all powered.
///
/// # Errors
/// No memory file or no thread could be made.
pub fn endpoints(count: usize, options: Options) -> io::Result<Vec<Arc<Endpoint>>> {
    let timer = Timer::start()?;
    let files = Arc::new(GuestFiles::default());
    let mut memories = Vec::new();
    let mut ports = Vec::new();
    for _ in 0..count {
        let file = File::from(memfd_create(c"pcieipc-bar2", MFdFlags::MFD_CLOEXEC)?);
        file.set_len(reg::BAR2_BYTES)?;
        let memory = Arc::new(SharedMemory::map(file.as_fd(), reg::BAR2_BYTES as usize)?);
        ports.push(Port { memory: memory.clone(), interrupts: Interrupts::new(timer.clone()) });
        memories.push((OwnedFd::from(file), memory));
    }
    let interrupts: Vec<_> = ports.iter().map(|port| port.interrupts.clone()).collect();
    let fabric = Arc::new(Fabric::new(ports));
    let made: Vec<_> = memories
        .into_iter()
        .zip(interrupts)
        .enumerate()
        .map(|(index, ((memory_file, memory), interrupts))| {
            let serial = options.serial_base.wrapping_add(index as u64);
            Arc::new(Endpoint {
                index,
                serial,
                arbitrary: options.arbitrary_dma,
                state: Mutex::new(State {
                    config: ConfigSpace::new(serial),
                    registers: Registers::default(),
                    msix_table: vec![0; reg::BAR4_BYTES as usize],
                    life: 0,
                    powered: false,
                    silent: false,
                    pending: false,
                    in_reset: false,
                    touched_in_reset: 0,
                    rung_off_the_bus: 0,
                    misreads: 0,
                    left_mastering: None,
                    before: Counters::default(),
                }),
                bus: RwLock::default(),
                engine: Engine::default(),
                haunting: Haunting::default(),
                accesses: AtomicU64::new(0),
                interrupts,
                memory,
                memory_file,
                fabric: fabric.clone(),
                files: files.clone(),
            })
        })
        .collect();
    for endpoint in &made {
        endpoint.power_cycle();
        let worker = endpoint.clone();
        std::thread::Builder::new().name(format!("engine{}", endpoint.index)).spawn(move || {
            let around = Surroundings {
                bus: &worker.bus,
                memory: &worker.memory,
                fabric: &worker.fabric,
                interrupts: &worker.interrupts,
                arbitrary: worker.arbitrary,
            };
            worker.engine.run(&around);
        })?;
        let ghost = endpoint.clone();
        let name = format!("haunting{}", endpoint.index);
        std::thread::Builder::new().name(name).spawn(move || ghost.haunting.run(&ghost.bus, &ghost.fabric))?;
    }
    Ok(made)
}

impl Endpoint {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bus(&self) -> RwLockWriteGuard<'_, Bus> {
        self.bus.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its number among the server's endpoints.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The file behind BAR 2.
    pub fn memory_fd(&self) -> RawFd {
        self.memory_file.as_raw_fd()
    }

    /// Where its vectors' eventfds are set.
    pub fn interrupts(&self) -> &Interrupts {
        &self.interrupts
    }

    /// Its engine, for faults.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Carries what configuration and power say to everybody who acts on it. What is taken away is gone on return.
    fn apply(&self, state: &State) {
        let decode = if state.powered { state.config.decode() } else { Decode::default() };
        {
            let mut bus = self.bus();
            bus.master = decode.master;
            bus.powered = state.powered;
        }
        self.fabric.set_decode(self.index, decode);
        self.interrupts.set_enabled(decode.interrupts);
        self.interrupts.set_power(state.powered, state.life);
    }

    /// Registers, ring table, engine and configuration at their defaults; a new life.
    fn begin_life(&self, state: &mut State) {
        // Engine first: without bus mastering it stops by itself, too, but then nobody waits for it.
        self.engine.reset();
        self.bus().rings = Default::default();
        let link = state.config.link();
        let old = std::mem::replace(&mut state.config, ConfigSpace::new(self.serial));
        state.config.keep_bars(&old);
        state.config.set_link(link.0, link.1);
        state.registers = Registers::default();
        state.msix_table.fill(0);
        state.life = state.life.wrapping_add(1);
        state.before = self.counters();
        self.apply(state);
    }

    /// Power off and on: memory zero, all faults forgotten, a new life.
    pub fn power_cycle(&self) {
        let mut state = self.lock();
        state.powered = true;
        state.silent = false;
        state.pending = false;
        state.misreads = 0;
        state.config = ConfigSpace::new(self.serial);
        self.interrupts.set_silent(false);
        self.interrupts.clear_faults();
        self.engine.clear_faults();
        self.begin_life(&mut state);
        self.memory.fill(0);
    }

    /// Function-level reset; memory and faults stay.
    pub fn function_reset(&self) {
        let mut state = self.lock();
        if state.powered {
            self.begin_life(&mut state);
            state.in_reset = true;
        }
    }

    /// The machine that it is in ends.
    pub fn leave(&self) {
        let mut state = self.lock();
        state.left_mastering = Some(state.powered && state.config.decode().master);
        state.in_reset = false;
    }

    /// The next `count` reads of its vendor and device ids, and no more, give all-ones.
    pub fn misread(&self, count: u32) {
        self.lock().misreads = count;
    }

    /// Off the bus, until [`Endpoint::power_cycle`].
    pub fn die(&self) {
        let mut state = self.lock();
        state.powered = false;
        self.apply(&state);
        self.engine.reset();
        // Where QEMU has mapped the memory nobody asks us, so that what is found there must be all-ones.
        self.memory.fill(0xff);
    }

    /// Registers answer, nothing else happens, until [`Endpoint::power_cycle`].
    pub fn silence(&self) {
        let mut state = self.lock();
        state.silent = true;
        self.interrupts.set_silent(true);
    }

    /// Transactions Pending stays set, until this is taken back or [`Endpoint::power_cycle`].
    pub fn set_pending(&self, on: bool) {
        self.lock().pending = on;
    }

    /// What Link Status shows from now on.
    pub fn set_link(&self, speed: u8, width: u8) {
        self.lock().config.set_link(speed, width);
    }

    /// Overwrites memory of a ring without any regard for bus mastering.
    ///
    /// # Errors
    /// What is wrong with slot or range.
    pub fn scribble(&self, slot: usize, offset: u64, data: &[u8]) -> Result<(), String> {
        let bus = self.bus.read().unwrap_or_else(PoisonError::into_inner);
        let (address, bytes) = bus.rings.slot(slot).ok_or_else(|| format!("slot {slot} of the ring table is not valid"))?;
        if offset.checked_add(data.len() as u64).is_none_or(|end| end > bytes) {
            return Err(format!("{} bytes at {offset} are not inside the slot's {bytes} bytes", data.len()));
        }
        bus.write(&self.fabric, address + offset, data).map_err(|_| "the slot's memory is not mapped for the endpoint".to_owned())
    }

    /// Writes into every ring that it was told of from now on, without any regard for anything but the IOMMU; or stops that.
    pub fn haunt(&self, on: bool) {
        self.haunting.set(on, &self.bus);
    }

    /// Writes at a bus address without any regard for rings and bus mastering.
    ///
    /// # Errors
    /// No memory answers there.
    pub fn poke(&self, address: u64, data: &[u8]) -> Result<(), String> {
        let bus = self.bus.read().unwrap_or_else(PoisonError::into_inner);
        bus.write(&self.fabric, address, data).map_err(|_| format!("no memory answers at {address:#x}"))
    }

    fn counters(&self) -> Counters {
        let (doorbells, interrupts) = self.interrupts.counts();
        let (dma_bytes, dma_errors) = self.engine.counts();
        Counters { doorbells, interrupts, dma_bytes, dma_errors }
    }

    /// How it fares.
    pub fn report(&self) -> Report {
        let state = self.lock();
        let decode = if state.powered { state.config.decode() } else { Decode::default() };
        let bus = self.bus.read().unwrap_or_else(PoisonError::into_inner);
        Report {
            endpoint: self.index,
            serial: self.serial,
            life: state.life,
            state: match (state.powered, state.silent) {
                (false, _) => "dead",
                (true, true) => "silent",
                (true, false) => "live",
            },
            counters: self.counters(),
            busy: self.engine.busy(),
            rings: bus.rings.valid(),
            ring_addresses: bus.rings.all().into_iter().map(|(address, _)| address).collect(),
            faults: self.interrupts.faults_waiting(),
            link: state.config.link(),
            bar0: decode.bar0.unwrap_or(0),
            bar2: decode.bar2.unwrap_or(0),
            mapped_bytes: bus.mapped().1,
            accesses: self.accesses.load(Ordering::Relaxed),
            touched_in_reset: state.touched_in_reset,
            rung_off_the_bus: state.rung_off_the_bus,
            misreads: state.misreads,
            mastering: decode.master,
            left_mastering: state.left_mastering,
            haunted: self.haunting.counts().0,
            exorcised: self.haunting.counts().1,
        }
    }

    /// Guest memory appears at bus addresses.
    ///
    /// # Errors
    /// The file cannot be mapped, or is too short.
    pub fn map(&self, address: u64, bytes: u64, file: &File, offset: u64, readable: bool, writable: bool) -> io::Result<()> {
        let overflow = || io::Error::from(io::ErrorKind::InvalidInput);
        address.checked_add(bytes).ok_or_else(overflow)?;
        let memory = self.files.map(file, offset.checked_add(bytes).ok_or_else(overflow)?)?;
        self.bus().map(address, Window { bytes, memory, offset, readable, writable });
        Ok(())
    }

    /// Guest memory disappears; on return no byte lands in it any more.
    pub fn unmap(&self, address: u64, bytes: u64) {
        self.bus().unmap(address, bytes);
    }

    /// All guest memory disappears.
    pub fn unmap_all(&self) {
        self.bus().unmap_all();
    }

    /// Configuration read.
    pub fn config_read(&self, offset: u64, into: &mut [u8]) {
        let mut state = self.lock();
        if !state.powered {
            return into.fill(0xff);
        }
        if offset == 0 && state.misreads > 0 {
            state.misreads -= 1;
            return into.fill(0xff);
        }
        let pending = state.pending || self.engine.busy();
        state.config.set_transactions_pending(pending);
        state.config.read(offset, into);
    }

    /// Configuration write.
    pub fn config_write(&self, offset: u64, from: &[u8]) {
        let mut state = self.lock();
        if !state.powered {
            return;
        }
        if state.config.write(offset, from) {
            self.begin_life(&mut state);
            state.in_reset = true;
        } else {
            self.apply(&state);
            state.in_reset &= !state.config.decode().memory;
        }
    }

    /// Read of BAR 0, 2 or 4. A BAR that does not answer gives all-ones.
    pub fn bar_read(&self, bar: u32, offset: u64, into: &mut [u8]) {
        self.accesses.fetch_add(1, Ordering::Relaxed);
        let mut state = self.lock();
        state.touch();
        if !state.powered || !state.config.decode().memory {
            return into.fill(0xff);
        }
        match bar {
            0 => {
                for (at, byte) in (offset..).zip(into) {
                    *byte = self.register(&state, at & !3).to_le_bytes()[(at & 3) as usize];
                }
            }
            2 if self.memory.read(offset, into) => {}
            4 => {
                for (at, byte) in (offset..).zip(into) {
                    *byte = usize::try_from(at).ok().and_then(|at| state.msix_table.get(at)).copied().unwrap_or(0);
                }
            }
            _ => into.fill(0xff),
        }
    }

    /// Write to BAR 0, 2 or 4.
    pub fn bar_write(&self, bar: u32, offset: u64, from: &[u8]) {
        self.accesses.fetch_add(1, Ordering::Relaxed);
        let mut state = self.lock();
        state.touch();
        if !state.powered || !state.config.decode().memory {
            return;
        }
        match bar {
            0 => self.store(&mut state, offset, from),
            2 => {
                // Out of range is ignored, like every write that nobody claims.
                let _ = self.memory.write(offset, from);
            }
            4 => {
                for (at, &byte) in (offset..).zip(from).take_while(|(at, _)| *at < reg::PBA_OFFSET) {
                    state.msix_table[at as usize] = byte;
                }
            }
            _ => {}
        }
    }

    fn register(&self, state: &State, at: u64) -> u32 {
        let half = |value: u64| if at % 8 == 0 { value as u32 } else { (value >> 32) as u32 };
        let since = |now: u64, before: u64| half(now.wrapping_sub(before));
        let (now, before, registers) = (self.counters(), &state.before, &state.registers);
        match at {
            reg::MAGIC => reg::MAGIC_VALUE,
            reg::VERSION => reg::VERSION_VALUE,
            reg::FEATURES => reg::FEATURES_VALUE,
            reg::STATUS => reg::STATUS_READY | if self.engine.busy() { reg::STATUS_BUSY } else { 0 },
            reg::CONTROL => registers.control,
            reg::LIFE => state.life,
            reg::DMA_LEN => registers.bytes,
            reg::DMA_FLAGS => registers.flags,
            reg::DMA_VECTOR => registers.vector,
            reg::DMA_RESULT => self.engine.result().0,
            reg::DMA_ERROR => self.engine.result().1,
            reg::DMA_BELL_VALUE => registers.bell_value,
            reg::RING_TABLE..0x2000 => self.bus.read().unwrap_or_else(PoisonError::into_inner).rings.word(at - reg::RING_TABLE),
            _ => match at & !7 {
                reg::SERIAL => half(self.serial),
                reg::DOORBELLS => since(now.doorbells, before.doorbells),
                reg::INTERRUPTS => since(now.interrupts, before.interrupts),
                reg::DMA_BYTES => since(now.dma_bytes, before.dma_bytes),
                reg::DMA_ERRORS => since(now.dma_errors, before.dma_errors),
                reg::DMA_SRC => half(registers.source),
                reg::DMA_DST => half(registers.destination),
                reg::DMA_BELL => half(registers.bell),
                _ => 0,
            },
        }
    }

    fn store(&self, state: &mut State, offset: u64, from: &[u8]) {
        if let (Ok(bytes), 0) = (<[u8; 4]>::try_from(from), offset % 4) {
            match reg::doorbell_at(offset) {
                Some(vector) => {
                    state.rung_off_the_bus += u64::from(!state.config.decode().master);
                    self.interrupts.doorbell(vector);
                }
                None => self.set_register(state, offset, u32::from_le_bytes(bytes)),
            }
        } else if let (Ok(bytes), 0) = (<[u8; 8]>::try_from(from), offset % 8) {
            if offset < reg::DOORBELL_PAGE {
                let value = u64::from_le_bytes(bytes);
                self.set_register(state, offset, value as u32);
                self.set_register(state, offset + 4, (value >> 32) as u32);
            }
        }
    }

    fn set_register(&self, state: &mut State, at: u64, value: u32) {
        let set_half = |register: &mut u64| {
            let shift = at % 8 * 8;
            *register = *register & !(0xffff_ffff << shift) | u64::from(value) << shift;
        };
        let registers = &mut state.registers;
        if (reg::DMA_SRC..reg::DMA_START).contains(&at) || (reg::DMA_BELL..reg::DMA_STOP).contains(&at) {
            // Else an endpoint that ignores DMA_START would show its last copy's result as this one's.
            self.engine.forget_result();
        }
        match at {
            reg::CONTROL => {
                if value & reg::CONTROL_RESET != 0 {
                    self.engine.reset();
                    self.bus().rings = Default::default();
                    *registers = Registers::default();
                }
                registers.control = value & reg::CONTROL_ENGINE;
                if registers.control == 0 {
                    self.engine.halt();
                }
            }
            reg::DMA_LEN => registers.bytes = value,
            reg::DMA_FLAGS => registers.flags = value,
            reg::DMA_VECTOR => registers.vector = value,
            reg::DMA_BELL_VALUE => registers.bell_value = value,
            reg::DMA_START if value & 1 != 0 && registers.control & reg::CONTROL_ENGINE != 0 && !state.silent => {
                self.engine.start(Descriptor {
                    source: registers.source,
                    destination: registers.destination,
                    bytes: registers.bytes,
                    flags: registers.flags,
                    vector: registers.vector,
                    bell: registers.bell,
                    bell_value: registers.bell_value,
                });
            }
            reg::DMA_STOP if value & 1 != 0 => self.engine.stop(),
            reg::RING_TABLE..0x2000 => {
                self.bus().rings.set_word(at - reg::RING_TABLE, value);
                self.haunting.remember(|| self.bus.read().unwrap_or_else(PoisonError::into_inner).rings.all());
            }
            _ => match at & !7 {
                reg::DMA_SRC => set_half(&mut registers.source),
                reg::DMA_DST => set_half(&mut registers.destination),
                reg::DMA_BELL => set_half(&mut registers.bell),
                _ => {}
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{thread, time::Duration};

    use super::*;

    /// `take` must wait for a chunk that is being moved, which is what the bus held for reading means.
    fn waits_for_the_chunk(take: fn(&Endpoint)) {
        let options = Options { serial_base: 1, arbitrary_dma: false };
        let endpoint = endpoints(1, options).unwrap().remove(0);
        endpoint.config_write(4, &6u16.to_le_bytes());
        let chunk = endpoint.bus.read().unwrap();
        thread::scope(|scope| {
            let taking = scope.spawn(|| take(&endpoint));
            thread::sleep(Duration::from_millis(50));
            assert!(!taking.is_finished());
            drop(chunk);
            taking.join().unwrap();
        });
    }

    #[test]
    fn accesses_between_a_reset_and_the_return_of_its_bars_are_counted_and_others_are_not() {
        let endpoint = endpoints(1, Options { serial_base: 1, arbitrary_dma: false }).unwrap().remove(0);
        let read = || endpoint.bar_read(0, reg::MAGIC, &mut [0; 4]);
        endpoint.config_write(4, &6u16.to_le_bytes());
        read();
        assert_eq!(endpoint.report().touched_in_reset, 0);
        endpoint.function_reset();
        read();
        endpoint.config_read(0, &mut [0; 4]);
        endpoint.bar_write(0, reg::DOORBELL_PAGE, &1u32.to_le_bytes());
        assert_eq!(endpoint.report().touched_in_reset, 2);
        endpoint.config_write(4, &6u16.to_le_bytes());
        read();
        assert_eq!(endpoint.report().touched_in_reset, 2);
    }

    #[test]
    fn doorbells_without_mastering_are_counted_and_others_are_not() {
        let endpoint = endpoints(1, Options { serial_base: 1, arbitrary_dma: false }).unwrap().remove(0);
        let ring = || endpoint.bar_write(0, reg::DOORBELL_PAGE, &1u32.to_le_bytes());
        // Memory and mastering, then memory alone.
        for (command, rung) in [(6u16, 0), (2, 1), (6, 1)] {
            endpoint.config_write(4, &command.to_le_bytes());
            ring();
            endpoint.bar_read(0, reg::MAGIC, &mut [0; 4]);
            assert_eq!(endpoint.report().rung_off_the_bus, rung);
        }
    }

    #[test]
    fn taking_memory_slots_mastering_or_power_away_waits_for_the_chunk_that_is_moved() {
        waits_for_the_chunk(|endpoint| endpoint.unmap(0, 4096));
        waits_for_the_chunk(Endpoint::unmap_all);
        waits_for_the_chunk(|endpoint| endpoint.bar_write(0, reg::RING_TABLE + 16, &0u32.to_le_bytes()));
        waits_for_the_chunk(|endpoint| endpoint.config_write(4, &2u16.to_le_bytes()));
        waits_for_the_chunk(Endpoint::function_reset);
        waits_for_the_chunk(Endpoint::die);
    }
}
