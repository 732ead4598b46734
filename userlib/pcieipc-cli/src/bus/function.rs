// SPDX-License-Identifier: MIT OR Apache-2.0
//! A PCI function as sysfs has it.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use pcieipc::topology::Address;

/// The module's driver.
pub const DRIVER: &str = "pcieipc";

/// The PCI bus of a host whose sysfs stands under a folder: `/`, or a test's.
#[derive(Debug, Clone)]
pub struct Sysfs(PathBuf);

/// One function.
#[derive(Debug, Clone)]
pub struct Function {
    /// Where it is.
    pub address: Address,
    sysfs: Sysfs,
}

fn write(path: &Path, text: &str) -> io::Result<()> {
    // Opened without creating, so that a file that went away is an error everywhere.
    let mut file = fs::OpenOptions::new().write(true).open(path).map_err(|error| with_path(path, &error))?;
    io::Write::write_all(&mut file, text.as_bytes()).map_err(|error| with_path(path, &error))
}

fn with_path(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

impl Sysfs {
    /// Of the host below `root`.
    pub fn at(root: &Path) -> Self {
        Self(root.to_owned())
    }

    /// A path of the host.
    pub fn path(&self, path: &str) -> PathBuf {
        self.0.join(path)
    }

    /// A function, whether it is there or not.
    pub fn function(&self, address: Address) -> Function {
        Function { address, sysfs: self.clone() }
    }

    /// The file by which the kernel looks for functions.
    pub fn rescan_file(&self) -> PathBuf {
        self.path("sys/bus/pci/rescan")
    }

    /// Has the kernel look for functions that came back.
    ///
    /// # Errors
    /// What sysfs says.
    pub fn rescan(&self) -> io::Result<()> {
        write(&self.rescan_file(), "1")
    }
}

impl Function {
    /// Its folder, or a file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.sysfs.path("sys/bus/pci/devices").join(self.address.to_string()).join(name)
    }

    /// Whether the bus has it.
    pub fn exists(&self) -> bool {
        self.file("").exists()
    }

    /// Whether its configuration space answers.
    pub fn answers(&self) -> bool {
        fs::read(self.file("config")).is_ok_and(|bytes| bytes.get(..4).is_some_and(|ids| ids != [0xff; 4]))
    }

    /// The driver that owns it.
    pub fn driver(&self) -> Option<String> {
        let target = fs::read_link(self.file("driver")).ok()?;
        Some(target.file_name()?.to_string_lossy().into_owned())
    }

    /// The functions that hang from the same port, itself among them, with everything below them: what the kernel's recovery from an
    /// uncorrectable error hits. On a root bus no port is above, and a function is recovered with what is below it alone.
    pub fn on_its_link(&self) -> Vec<Function> {
        let Ok(folder) = fs::canonicalize(self.file("")) else { return Vec::new() };
        let is_function =
            |port: &Path| port.file_name().and_then(|name| name.to_str()).is_some_and(|n| n.parse::<Address>().is_ok());
        match folder.parent().filter(|port| is_function(port)) {
            Some(port) => self.found_in(port, 0),
            None => self.with_what_is_below(),
        }
    }

    /// Itself and everything below it: what leaves when it is removed.
    pub fn with_what_is_below(&self) -> Vec<Function> {
        let Ok(folder) = fs::canonicalize(self.file("")) else { return Vec::new() };
        let mut all = vec![self.clone()];
        all.extend(self.found_in(&folder, 0));
        all
    }

    fn found_in(&self, folder: &Path, depth: u32) -> Vec<Function> {
        // A bus is 256 deep at most; sysfs has no cycles, a test's folder may.
        let entries = if depth < 64 { fs::read_dir(folder).ok() } else { None };
        let mut found = Vec::new();
        for entry in entries.into_iter().flatten().flatten() {
            let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            let Some(address) = entry.file_name().to_str().and_then(|name| name.parse().ok()).filter(|_| is_folder) else {
                continue;
            };
            found.push(self.sysfs.function(address));
            found.extend(self.found_in(&entry.path(), depth + 1));
        }
        found.sort_by_key(|function| function.address);
        found
    }

    /// How the kernel can reset it, in its order; empty when it can not.
    pub fn reset_methods(&self) -> Vec<String> {
        let methods = fs::read_to_string(self.file("reset_method")).unwrap_or_default();
        methods.split_whitespace().map(str::to_owned).collect()
    }

    /// Resets it.
    ///
    /// # Errors
    /// What sysfs says.
    pub fn reset(&self) -> io::Result<()> {
        write(&self.file("reset"), "1")
    }

    /// Removes it from the bus.
    ///
    /// # Errors
    /// What sysfs says.
    pub fn remove(&self) -> io::Result<()> {
        write(&self.file("remove"), "1")
    }

    /// Gives it to a driver, whatever its ids.
    ///
    /// # Errors
    /// What sysfs says.
    pub fn bind(&self, driver: &str) -> io::Result<()> {
        write(&self.file("driver_override"), &format!("{driver}\n"))?;
        write(&self.sysfs.path("sys/bus/pci/drivers_probe"), &self.address.to_string())
    }

    /// Errors that the kernel has counted for it: correctable, non-fatal and fatal, in this order.
    pub fn counted(&self, which: &str) -> Option<u64> {
        let text = fs::read_to_string(self.file(which)).ok()?;
        let total = text.lines().find_map(|line| line.strip_prefix("TOTAL_"))?;
        total.split_whitespace().nth(1)?.parse().ok()
    }
}

#[cfg(test)]
pub mod fake {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A host in a folder: a port with two functions on one card, and one card below another port.
    pub fn host() -> (tempfile::TempDir, Sysfs) {
        let folder = tempfile::tempdir().unwrap();
        let sys = folder.path().join("sys");
        for (path, driver) in [
            ("pci0000:00/0000:00:01.0", "pcieport"),
            ("pci0000:00/0000:00:01.0/0000:01:00.0", "pcieipc"),
            ("pci0000:00/0000:00:01.0/0000:01:00.1", "snd_hda_intel"),
            ("pci0000:00/0000:00:02.0", "pcieport"),
            ("pci0000:00/0000:00:02.0/0000:02:00.0", "nvidia"),
            ("pci0000:00/0000:00:03.0", ""),
        ] {
            let device = sys.join("devices").join(path);
            fs::create_dir_all(&device).unwrap();
            for (file, text) in [
                ("config", "\u{1}\u{2}\u{3}\u{4}more"),
                ("remove", ""),
                ("reset", ""),
                ("reset_method", "flr bus\n"),
                ("driver_override", "(null)\n"),
                ("aer_dev_correctable", "BadTLP 3\nTOTAL_ERR_COR 3\n"),
                ("aer_dev_nonfatal", "TOTAL_ERR_NONFATAL 0\n"),
                ("aer_dev_fatal", "TOTAL_ERR_FATAL 1\n"),
            ] {
                fs::write(device.join(file), text).unwrap();
            }
            if !driver.is_empty() {
                fs::create_dir_all(sys.join("bus/pci/drivers").join(driver)).unwrap();
                symlink(sys.join("bus/pci/drivers").join(driver), device.join("driver")).unwrap();
            }
            fs::create_dir_all(sys.join("bus/pci/devices")).unwrap();
            symlink(&device, sys.join("bus/pci/devices").join(device.file_name().unwrap())).unwrap();
        }
        fs::write(sys.join("bus/pci/rescan"), "").unwrap();
        fs::write(sys.join("bus/pci/drivers_probe"), "").unwrap();
        fs::create_dir_all(folder.path().join("dev")).unwrap();
        fs::write(folder.path().join("dev/aer_inject"), "").unwrap();
        let sysfs = Sysfs::at(folder.path());
        (folder, sysfs)
    }

    pub fn at(sysfs: &Sysfs, address: &str) -> Function {
        sysfs.function(address.parse().unwrap())
    }
}

#[cfg(test)]
mod tests {
    use super::{
        fake::{at, host},
        *,
    };

    #[test]
    fn a_recovery_hits_the_whole_card_and_a_removal_what_is_below() {
        let (_folder, sysfs) = host();
        let names = |functions: Vec<Function>| functions.iter().map(|f| f.address.to_string()).collect::<Vec<_>>();
        assert_eq!(names(at(&sysfs, "0000:01:00.0").on_its_link()), ["0000:01:00.0", "0000:01:00.1"]);
        assert_eq!(names(at(&sysfs, "0000:01:00.0").with_what_is_below()), ["0000:01:00.0"]);
        assert_eq!(names(at(&sysfs, "0000:00:01.0").with_what_is_below()), ["0000:00:01.0", "0000:01:00.0", "0000:01:00.1"]);
        assert!(at(&sysfs, "0000:09:00.0").on_its_link().is_empty());
        // The host bridge is no port: its other ports are not hit.
        assert_eq!(names(at(&sysfs, "0000:00:01.0").on_its_link()), ["0000:00:01.0", "0000:01:00.0", "0000:01:00.1"]);
        assert_eq!(names(at(&sysfs, "0000:00:03.0").on_its_link()), ["0000:00:03.0"]);
    }

    #[test]
    fn what_is_done_is_written_where_the_kernel_reads_it() {
        let (_folder, sysfs) = host();
        let function = at(&sysfs, "0000:01:00.0");
        assert_eq!((function.driver().as_deref(), function.counted("aer_dev_correctable")), (Some("pcieipc"), Some(3)));
        assert!(function.answers() && function.reset_methods() == ["flr", "bus"]);
        function.remove().unwrap();
        function.reset().unwrap();
        function.bind("pcieipc").unwrap();
        sysfs.rescan().unwrap();
        let read = |path: PathBuf| fs::read_to_string(path).unwrap();
        assert_eq!((read(function.file("remove")), read(function.file("reset"))), ("1".into(), "1".into()));
        assert!(read(function.file("driver_override")).starts_with("pcieipc\n"));
        assert_eq!(read(sysfs.path("sys/bus/pci/drivers_probe")), "0000:01:00.0");
        assert_eq!(read(sysfs.rescan_file()), "1");
    }

    #[test]
    fn a_function_that_is_not_there_is_an_error_that_names_the_file() {
        let (_folder, sysfs) = host();
        let error = at(&sysfs, "0000:09:00.0").remove().unwrap_err().to_string();
        assert!(error.contains("0000:09:00.0/remove"), "{error}");
    }

    #[test]
    fn all_ones_is_no_answer() {
        let (_folder, sysfs) = host();
        let function = at(&sysfs, "0000:01:00.0");
        fs::write(function.file("config"), [0xff; 64]).unwrap();
        assert!(function.exists() && !function.answers());
    }
}
