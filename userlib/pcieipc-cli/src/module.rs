// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whether pcieipc.ko can be used from here, and if not, what is missing.

use std::{fs::OpenOptions, io, path::Path};

use nix::errno::Errno;

/// The device node.
pub const NODE: &str = "/dev/pcieipc";
const LOADED: &str = "/sys/module/pcieipc";

/// What stands between this process and the module.
#[derive(Debug, thiserror::Error)]
pub enum Obstacle {
    /// The module is not there.
    #[error("the module pcieipc is not loaded; load it with `modprobe pcieipc` (or `insmod pcieipc.ko`), or use --transport shm")]
    NotLoaded,
    /// The module is there, its node is not.
    #[error(
        "the module pcieipc is loaded, but {NODE} does not exist; is devtmpfs mounted on /dev, or does the container have the node?"
    )]
    NoNode,
    /// The node may not be opened.
    #[error(
        "no permission to open {NODE}; become a member of its group (`usermod -aG pcieipc $USER`, then log in again) or run as root"
    )]
    NoPermission,
    /// Opening failed in another way.
    #[error("open {NODE}: {0}")]
    Open(io::Error),
}

/// Looks whether the node can be opened for reading and writing.
pub fn reachable() -> Result<(), Obstacle> {
    reachable_at(Path::new(NODE), Path::new(LOADED))
}

fn reachable_at(node: &Path, loaded: &Path) -> Result<(), Obstacle> {
    match OpenOptions::new().read(true).write(true).open(node) {
        Ok(_) => Ok(()),
        Err(error) => Err(match error.raw_os_error().map(Errno::from_raw) {
            Some(Errno::ENOENT) if loaded.exists() => Obstacle::NoNode,
            // ENXIO and ENODEV: a node that was made by hand, with no driver behind it.
            Some(Errno::ENOENT | Errno::ENXIO | Errno::ENODEV) => Obstacle::NotLoaded,
            Some(Errno::EACCES | Errno::EPERM) => Obstacle::NoPermission,
            _ => Obstacle::Open(error),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_node_without_the_module_says_how_to_load_it() {
        let obstacle = reachable_at(Path::new("/nonexistent/node"), Path::new("/nonexistent/module")).unwrap_err();
        assert!(obstacle.to_string().contains("modprobe pcieipc"), "{obstacle}");
    }

    #[test]
    fn a_missing_node_with_the_module_does_not_tell_to_load_it() {
        let obstacle = reachable_at(Path::new("/nonexistent/node"), Path::new("/proc")).unwrap_err();
        assert!(matches!(obstacle, Obstacle::NoNode), "{obstacle}");
    }
}
