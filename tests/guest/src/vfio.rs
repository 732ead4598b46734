// SPDX-License-Identifier: MIT OR Apache-2.0
//! A PCI function driven from user space by the kernel's vfio-pci, as far as a comparison needs it: BAR 0 mapped, MSI-X vectors to
//! eventfds.

use std::{
    fs::{self, File, OpenOptions},
    os::{
        fd::{AsRawFd, FromRawFd},
        unix::fs::FileExt,
    },
};

use nix::sys::eventfd::{EfdFlags, EventFd};
use vfio_bindings::bindings::vfio::{
    VFIO_API_VERSION, VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_DATA_EVENTFD, VFIO_PCI_BAR0_REGION_INDEX,
    VFIO_PCI_CONFIG_REGION_INDEX, VFIO_PCI_MSIX_IRQ_INDEX, VFIO_TYPE1v2_IOMMU, vfio_group_status, vfio_irq_set, vfio_region_info,
};

use crate::mapping::{Mapping, READ_WRITE};

const fn number(call: libc::c_ulong) -> libc::c_ulong {
    // _IO(';', 100 + call)
    0x3b64 + call
}

const GET_API_VERSION: libc::c_ulong = number(0);
const SET_IOMMU: libc::c_ulong = number(2);
const GROUP_GET_STATUS: libc::c_ulong = number(3);
const GROUP_SET_CONTAINER: libc::c_ulong = number(4);
const GROUP_GET_DEVICE_FD: libc::c_ulong = number(6);
const DEVICE_GET_REGION_INFO: libc::c_ulong = number(8);
const DEVICE_SET_IRQS: libc::c_ulong = number(10);

/// A function that vfio-pci has and this process has opened.
#[derive(Debug)]
pub struct Device {
    /// Its eventfds, one for each vector.
    pub vectors: Vec<EventFd>,
    /// BAR 0.
    pub bar0: Mapping,
    _device: File,
    _group: File,
    _container: File,
}

fn call(file: &File, number: libc::c_ulong, argument: libc::c_ulong) -> i32 {
    // SAFETY: the callers below pass what each call of VFIO takes: a number, or a pointer to a structure that outlives the call.
    let answer = unsafe { libc::ioctl(file.as_raw_fd(), number, argument) };
    assert!(answer >= 0, "vfio call {number:#x}: {}", std::io::Error::last_os_error());
    answer
}

fn open(path: &str) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

impl Device {
    /// Opens the function at an address such as `0000:01:00.0`, with `count` vectors.
    pub fn open(address: &str, count: usize) -> Self {
        let group = fs::read_link(format!("/sys/bus/pci/devices/{address}/iommu_group")).expect("an IOMMU group");
        let group = open(&format!("/dev/vfio/{}", group.file_name().expect("a number").to_string_lossy()));
        let container = open("/dev/vfio/vfio");
        assert_eq!(call(&container, GET_API_VERSION, 0), VFIO_API_VERSION as i32);
        let mut status = vfio_group_status { argsz: size_of::<vfio_group_status>() as u32, flags: 0 };
        call(&group, GROUP_GET_STATUS, (&raw mut status) as libc::c_ulong);
        assert_eq!(status.flags & 1, 1, "the group is not viable: another driver has a device of it");
        let descriptor = container.as_raw_fd();
        call(&group, GROUP_SET_CONTAINER, (&raw const descriptor) as libc::c_ulong);
        call(&container, SET_IOMMU, VFIO_TYPE1v2_IOMMU.into());
        let name = std::ffi::CString::new(address).expect("an address");
        let device = call(&group, GROUP_GET_DEVICE_FD, name.as_ptr() as libc::c_ulong);
        // SAFETY: the call has just made this descriptor for us.
        let device = unsafe { File::from_raw_fd(device) };

        let config = region(&device, VFIO_PCI_CONFIG_REGION_INDEX);
        let mut command = [0; 2];
        device.read_exact_at(&mut command, config.offset + 4).expect("the command register");
        // Memory and bus mastering, without which no MSI-X is sent.
        let command = u16::from_le_bytes(command) | 6;
        device.write_all_at(&command.to_le_bytes(), config.offset + 4).expect("the command register");

        let bar0 = region(&device, VFIO_PCI_BAR0_REGION_INDEX);
        let bar0 = Mapping::new(&device, bar0.offset, bar0.size as usize, READ_WRITE).expect("BAR 0");
        let vectors: Vec<EventFd> = (0..count)
            .map(|_| EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC).expect("an eventfd"))
            .collect();
        let mut set = vec![0u32; size_of::<vfio_irq_set>() / 4];
        set.extend(vectors.iter().map(|eventfd| std::os::fd::AsFd::as_fd(eventfd).as_raw_fd() as u32));
        let header = [
            (set.len() * 4) as u32,
            VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER,
            VFIO_PCI_MSIX_IRQ_INDEX,
            0,
            count as u32,
        ];
        set[..header.len()].copy_from_slice(&header);
        call(&device, DEVICE_SET_IRQS, set.as_ptr() as libc::c_ulong);
        Self { vectors, bar0, _device: device, _group: group, _container: container }
    }
}

fn region(device: &File, index: u32) -> vfio_region_info {
    let mut info = vfio_region_info { argsz: size_of::<vfio_region_info>() as u32, index, ..Default::default() };
    call(device, DEVICE_GET_REGION_INFO, (&raw mut info) as libc::c_ulong);
    info
}
