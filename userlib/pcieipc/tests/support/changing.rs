// SPDX-License-Identifier: MIT OR Apache-2.0
//! A host whose files are exchanged while ranks follow it.

use std::{
    io,
    sync::{Arc, Mutex},
};

use pcieipc::topology::{Archive, Origin, ReadAt, Source};

/// All clones look at the same host.
#[derive(Clone)]
pub struct Changing(Arc<Mutex<Archive>>);

impl Changing {
    pub fn new(host: Archive) -> Self {
        Self(Arc::new(Mutex::new(host)))
    }

    /// From now on it is this one.
    pub fn change(&self, host: Archive) {
        *self.0.lock().unwrap() = host;
    }
}

impl Source for Changing {
    fn origin(&self) -> Origin {
        Origin::Snapshot
    }
    fn read(&self, path: &str) -> io::Result<Vec<u8>> {
        self.0.lock().unwrap().read(path)
    }
    fn open(&self, path: &str) -> io::Result<Box<dyn ReadAt>> {
        self.0.lock().unwrap().open(path)
    }
    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        self.0.lock().unwrap().list(path)
    }
    fn link(&self, path: &str) -> io::Result<String> {
        self.0.lock().unwrap().link(path)
    }
}
