// SPDX-License-Identifier: GPL-2.0

//! The module's state for people who debug it: `pcieipc/state` in debugfs. Not an interface; `pcieipc info` is.

use crate::{accounting, endpoint::Endpoint, registry, uapi};
use kernel::{
    debugfs::{Dir, File},
    fmt,
    prelude::*,
    sync::atomic::Relaxed,
};

/// What the file is about; all of it is looked up when it is read.
pub(crate) struct State;

/// The file.
#[pin_data]
pub(crate) struct StateFile {
    #[pin]
    file: File<State>,
    _dir: Dir,
}

impl StateFile {
    /// Makes the file; without debugfs there is none.
    pub(crate) fn new() -> impl PinInit<Self, Error> {
        let dir = Dir::new(c"pcieipc");
        try_pin_init!(Self {
            file <- dir.read_callback_file(c"state", State, &show),
            _dir: dir,
        })
    }
}

fn show(_state: &State, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let (pages, kept) = (accounting::LIVE_PAGES.load(Relaxed), accounting::KEPT_PAGES.load(Relaxed));
    writeln!(f, "pages {pages}\nkept {kept}\nchannel bytes {}", accounting::total_bytes())?;
    let Ok(endpoints) = registry::endpoints() else {
        return Err(fmt::Error);
    };
    endpoints.iter().try_for_each(|endpoint| show_endpoint(endpoint, f))
}

fn show_endpoint(endpoint: &Endpoint, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let word = endpoint.status.word();
    let counters = &endpoint.counters;
    let (mappings, slots, channels, claimed, copying) = {
        let hardware = endpoint.hardware.lock();
        let (mappings, slots) = hardware.usage();
        (mappings, slots, hardware.channels().count(), hardware.is_claimed(), hardware.engine.is_busy())
    };
    f.write_fmt(fmt!("endpoint {} at {}\n", endpoint.id, endpoint.address()))?;
    writeln!(f, "  state {}", uapi::state::name(uapi::status_state(word)))?;
    writeln!(f, "  generation {}", uapi::status_generation(word))?;
    writeln!(f, "  attached {claimed}")?;
    writeln!(f, "  channels {channels}")?;
    writeln!(f, "  mappings {mappings}")?;
    writeln!(f, "  ring slots {slots}")?;
    writeln!(f, "  copying {copying}")?;
    writeln!(f, "  doorbells {}", counters.doorbells.load(Relaxed))?;
    writeln!(f, "  interrupts {}", endpoint.status.interrupts())?;
    writeln!(f, "  dma bytes {}", counters.dma_bytes.load(Relaxed))?;
    writeln!(f, "  correctable errors {}", counters.correctable.load(Relaxed))?;
    writeln!(f, "  events lost {}", counters.events_lost.load(Relaxed))?;
    for (index, vector) in endpoint.vectors.iter().enumerate() {
        writeln!(f, "  vector {index} {}", vector.count())?;
    }
    Ok(())
}
