// SPDX-License-Identifier: MIT OR Apache-2.0
//! The vfio-user side: what QEMU asks of an endpoint.

use std::{fs::File, io, path::Path, sync::Arc, thread, time::Duration};

use vfio_bindings::bindings::vfio::{
    VFIO_IRQ_INFO_EVENTFD, VFIO_IRQ_INFO_NORESIZE, VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_DATA_EVENTFD,
    VFIO_IRQ_SET_DATA_NONE, VFIO_PCI_BAR0_REGION_INDEX, VFIO_PCI_BAR2_REGION_INDEX, VFIO_PCI_BAR4_REGION_INDEX,
    VFIO_PCI_CONFIG_REGION_INDEX, VFIO_PCI_MSIX_IRQ_INDEX, VFIO_PCI_NUM_IRQS, VFIO_PCI_NUM_REGIONS, VFIO_REGION_INFO_FLAG_MMAP,
    VFIO_REGION_INFO_FLAG_READ, VFIO_REGION_INFO_FLAG_WRITE, vfio_region_info, vfio_region_sparse_mmap_area,
};
use vfio_user::{DmaMapFlags, DmaUnmapFlags, IrqInfo, Server, ServerBackend, ServerRegion, SparseArea};

use crate::{
    config::CONFIG_BYTES,
    endpoint::Endpoint,
    registers::{BAR0_BYTES, BAR2_BYTES, BAR4_BYTES, VECTORS},
};

/// One endpoint's socket.
pub struct Listener {
    server: Server,
    endpoint: Arc<Endpoint>,
}

impl Listener {
    /// Listens; the path must not exist.
    ///
    /// # Errors
    /// What vfio_user says.
    pub fn bind(path: &Path, endpoint: Arc<Endpoint>, map_memory: bool) -> Result<Self, vfio_user::Error> {
        let server = Server::new(path, true, interrupts(), regions(&endpoint, map_memory))?;
        Ok(Self { server, endpoint })
    }

    /// Serves one virtual machine after the other; each finds the endpoint as after power-up. Does not return.
    pub fn serve(self) {
        loop {
            if let Err(error) = self.server.run(&mut Connection { endpoint: &self.endpoint }) {
                eprintln!("softdev: endpoint {}: {error}", self.endpoint.index());
                // An error that stays must not turn into a busy loop.
                thread::sleep(Duration::from_millis(100));
            }
            self.endpoint.leave();
            self.endpoint.unmap_all();
            for vector in 0..VECTORS {
                self.endpoint.interrupts().set_vector(vector, None);
            }
            self.endpoint.power_cycle();
        }
    }
}

fn regions(endpoint: &Endpoint, map_memory: bool) -> Vec<ServerRegion> {
    let access = VFIO_REGION_INFO_FLAG_READ | VFIO_REGION_INFO_FLAG_WRITE;
    (0..VFIO_PCI_NUM_REGIONS)
        .map(|index| {
            let (size, mapped) = match index {
                VFIO_PCI_BAR0_REGION_INDEX => (BAR0_BYTES, false),
                VFIO_PCI_BAR2_REGION_INDEX => (BAR2_BYTES, map_memory),
                VFIO_PCI_BAR4_REGION_INDEX => (BAR4_BYTES, false),
                VFIO_PCI_CONFIG_REGION_INDEX => (CONFIG_BYTES as u64, false),
                _ => (0, false),
            };
            let flags = if size == 0 { 0 } else { access } | if mapped { VFIO_REGION_INFO_FLAG_MMAP } else { 0 };
            let argsz = size_of::<vfio_region_info>() as u32;
            // QEMU maps a region only when it is told which part.
            let whole = SparseArea { area: vfio_region_sparse_mmap_area { offset: 0, size } };
            ServerRegion {
                region_info: vfio_region_info { argsz, flags, index, size, ..Default::default() },
                sparse_areas: if mapped { vec![whole] } else { vec![] },
                mmap_fd: mapped.then(|| endpoint.memory_fd()),
            }
        })
        .collect()
}

fn interrupts() -> Vec<IrqInfo> {
    (0..VFIO_PCI_NUM_IRQS)
        .map(|index| match index {
            VFIO_PCI_MSIX_IRQ_INDEX => {
                IrqInfo { index, flags: VFIO_IRQ_INFO_EVENTFD | VFIO_IRQ_INFO_NORESIZE, count: VECTORS as u32 }
            }
            _ => IrqInfo { index, flags: 0, count: 0 },
        })
        .collect()
}

struct Connection<'a> {
    endpoint: &'a Endpoint,
}

impl ServerBackend for Connection<'_> {
    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> io::Result<()> {
        match region {
            VFIO_PCI_CONFIG_REGION_INDEX => self.endpoint.config_read(offset, data),
            _ => self.endpoint.bar_read(region, offset, data),
        }
        Ok(())
    }

    fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        match region {
            VFIO_PCI_CONFIG_REGION_INDEX => self.endpoint.config_write(offset, data),
            _ => self.endpoint.bar_write(region, offset, data),
        }
        Ok(())
    }

    fn dma_map(&mut self, flags: DmaMapFlags, offset: u64, address: u64, size: u64, fd: Option<File>) -> io::Result<()> {
        // Without a file it is another device's BAR; those of our own endpoints are found by their configuration.
        let Some(file) = fd else { return Ok(()) };
        self.endpoint.map(address, size, &file, offset, flags.contains(DmaMapFlags::READ), flags.contains(DmaMapFlags::WRITE))
    }

    fn dma_unmap(&mut self, flags: DmaUnmapFlags, address: u64, size: u64) -> io::Result<()> {
        if flags.contains(DmaUnmapFlags::UNMAP_ALL) {
            self.endpoint.unmap_all();
        } else {
            self.endpoint.unmap(address, size);
        }
        Ok(())
    }

    fn reset(&mut self) -> io::Result<()> {
        self.endpoint.function_reset();
        Ok(())
    }

    fn set_irqs(&mut self, index: u32, flags: u32, start: u32, count: u32, fds: Vec<File>) -> io::Result<()> {
        if index != VFIO_PCI_MSIX_IRQ_INDEX || flags & VFIO_IRQ_SET_ACTION_TRIGGER == 0 {
            return Ok(());
        }
        let (start, count) = (start as usize, count as usize);
        if start.checked_add(count.max(fds.len())).is_none_or(|end| end > VECTORS) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("vectors {start} and {count} more of {VECTORS}")));
        }
        let interrupts = self.endpoint.interrupts();
        if flags & VFIO_IRQ_SET_DATA_EVENTFD != 0 {
            // Fewer descriptors than vectors: the rest is switched off.
            let mut fds = fds.into_iter();
            (start..start + count).for_each(|vector| interrupts.set_vector(vector, fds.next()));
        } else if flags & VFIO_IRQ_SET_DATA_NONE != 0 && count == 0 {
            (0..VECTORS).for_each(|vector| interrupts.set_vector(vector, None));
        } else {
            (start..start + count).for_each(|vector| interrupts.raise(vector));
        }
        Ok(())
    }
}
