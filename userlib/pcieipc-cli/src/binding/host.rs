// SPDX-License-Identifier: MIT OR Apache-2.0
//! The host's side of binding: profiles in configfs, drivers in sysfs.

use std::{
    fs,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
};

use pcieipc::topology::Address;

use super::config::{Endpoint, Profile, Value, Which};

/// The driver's name, in `driver_override` too.
const DRIVER: &str = "pcieipc";

/// Where `/sys` is.
pub struct Host(PathBuf);

/// What became of a function or a profile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Done {
    /// As asked, by this run.
    Now(String),
    /// It was so already.
    Already(String),
    /// It is not there, and need not be.
    Absent(String),
    /// It could not be done.
    Failed(String),
}

impl Done {
    pub fn word(&self) -> &'static str {
        match self {
            Self::Now(_) => "done",
            Self::Already(_) => "already",
            Self::Absent(_) => "absent",
            Self::Failed(_) => "failed",
        }
    }

    pub fn text(&self) -> &str {
        match self {
            Self::Now(text) | Self::Already(text) | Self::Absent(text) | Self::Failed(text) => text,
        }
    }
}

fn told(path: &Path, error: &io::Error) -> String {
    format!("{}: {error}", path.display())
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    fs::write(path, format!("{text}\n")).map_err(|e| told(path, &e))
}

impl Host {
    pub fn at(sys: impl Into<PathBuf>) -> Self {
        Self(sys.into())
    }

    /// Whether the module's driver is there.
    pub fn has_driver(&self) -> bool {
        self.0.join("bus/pci/drivers").join(DRIVER).is_dir()
    }

    fn profiles(&self) -> PathBuf {
        self.0.join("kernel/config").join(DRIVER)
    }

    fn function(&self, address: Address) -> PathBuf {
        self.0.join("bus/pci/devices").join(address.to_string())
    }

    /// Fills in a profile and enables it. One that is enabled with the same values is left alone.
    pub fn profile(&self, name: &str, profile: &Profile) -> Done {
        match self.set_profile(name, profile) {
            Ok(true) => Done::Now(format!("profile {name} enabled")),
            Ok(false) => Done::Already(format!("profile {name} enabled")),
            Err(why) => Done::Failed(format!("profile {name}: {why}")),
        }
    }

    fn set_profile(&self, name: &str, profile: &Profile) -> Result<bool, String> {
        let folder = self.profiles().join(name);
        match fs::create_dir(&folder) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                let hint = if self.profiles().is_dir() { "" } else { "; is configfs mounted, and the module loaded?" };
                return Err(format!("{}{hint}", told(&folder, &error)));
            }
            _ => {}
        }
        let holds = |attribute: &str| fs::read_to_string(folder.join(attribute)).map(|text| text.trim().to_owned());
        let same = |(attribute, value): (&String, &Value)| holds(attribute).is_ok_and(|text| equal(&text, value));
        if holds("enable").is_ok_and(|text| equal(&text, &Value::Number(1))) {
            if profile.iter().all(same) {
                return Ok(false);
            }
            // It does not change while it is enabled; devices that are bound keep what they were bound with.
            write(&folder.join("enable"), "0")?;
        }
        for (attribute, value) in profile {
            let file = folder.join(attribute);
            // configfs makes no files, so what is not there is no attribute of this module.
            if !file.exists() {
                return Err(format!("this module's profiles have no attribute {attribute}"));
            }
            write(&file, &value.to_string())?;
        }
        write(&folder.join("enable"), "1").map_err(|e| format!("{e}; see docs/abi.md, Profiles, for what a profile must say"))?;
        Ok(true)
    }

    /// Takes a profile away.
    pub fn remove_profile(&self, name: &str) -> Done {
        let folder = self.profiles().join(name);
        if !folder.is_dir() {
            return Done::Absent(format!("profile {name} is not there"));
        }
        match write(&folder.join("enable"), "0").and_then(|()| fs::remove_dir(&folder).map_err(|e| told(&folder, &e))) {
            Ok(()) => Done::Now(format!("profile {name} removed")),
            Err(why) => Done::Failed(format!("profile {name}: {why}")),
        }
    }

    /// The functions that an entry means.
    pub fn functions(&self, which: Which) -> Result<Vec<Address>, String> {
        let folder = self.0.join("bus/pci/devices");
        match which {
            Which::At(address) => Ok(if self.function(address).exists() { vec![address] } else { Vec::new() }),
            Which::Model(vendor, device) => {
                let mut found = Vec::new();
                for entry in fs::read_dir(&folder).map_err(|e| told(&folder, &e))? {
                    let path = entry.map_err(|e| told(&folder, &e))?.path();
                    let id = |name: &str| {
                        let text = fs::read_to_string(path.join(name)).ok()?;
                        u16::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
                    };
                    let address = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.parse().ok());
                    if let (true, Some(address)) = (id("vendor") == Some(vendor) && id("device") == Some(device), address) {
                        found.push(address);
                    }
                }
                found.sort_unstable();
                Ok(found)
            }
        }
    }

    fn driver(&self, address: Address) -> Option<String> {
        let link = fs::read_link(self.function(address).join("driver")).ok()?;
        Some(link.file_name()?.to_string_lossy().into_owned())
    }

    /// Binds what an entry means; one line for each function.
    pub fn bind(&self, endpoint: &Endpoint) -> Vec<Done> {
        match self.functions(endpoint.which) {
            Err(why) => vec![Done::Failed(why)],
            Ok(found) if found.is_empty() => {
                let text = format!("{}: no such function", endpoint.which);
                vec![if endpoint.required { Done::Failed(text) } else { Done::Absent(text) }]
            }
            Ok(found) => found.into_iter().map(|address| self.bind_one(address, endpoint.take)).collect(),
        }
    }

    fn bind_one(&self, address: Address, take: bool) -> Done {
        let folder = self.function(address);
        match self.driver(address) {
            Some(driver) if driver == DRIVER => return Done::Already(format!("{address} bound")),
            Some(driver) if !take => {
                return Done::Failed(format!("{address} belongs to {driver}; say `take = true` to take it away from it"));
            }
            Some(driver) => {
                if let Err(why) = write(&folder.join("driver/unbind"), &address.to_string()) {
                    return Done::Failed(format!("{address} stays with {driver}: {why}"));
                }
            }
            None => {}
        }
        let asked = write(&folder.join("driver_override"), DRIVER)
            .and_then(|()| write(&self.0.join("bus/pci/drivers_probe"), &address.to_string()));
        match (asked, self.driver(address).as_deref()) {
            (_, Some(DRIVER)) => Done::Now(format!("{address} bound")),
            (Err(why), _) => Done::Failed(format!("{address}: {why}")),
            (Ok(()), _) => Done::Failed(format!("{address} was refused by the module; `dmesg | grep pcieipc` says why")),
        }
    }

    /// Gives back what an entry means; another driver may have it then.
    pub fn release(&self, endpoint: &Endpoint) -> Vec<Done> {
        match self.functions(endpoint.which) {
            Err(why) => vec![Done::Failed(why)],
            Ok(found) => found.into_iter().map(|address| self.release_one(address)).collect(),
        }
    }

    fn release_one(&self, address: Address) -> Done {
        let folder = self.function(address);
        let overrides = fs::read_to_string(folder.join("driver_override")).is_ok_and(|text| text.trim() == DRIVER);
        let bound = self.driver(address).as_deref() == Some(DRIVER);
        if !overrides && !bound {
            return Done::Already(format!("{address} not bound"));
        }
        // An empty line takes the override away.
        let cleared = if overrides { write(&folder.join("driver_override"), "") } else { Ok(()) };
        let unbound = if bound { write(&folder.join("driver/unbind"), &address.to_string()) } else { Ok(()) };
        match cleared.and(unbound) {
            Ok(()) => Done::Now(format!("{address} given back")),
            Err(why) => Done::Failed(format!("{address}: {why}")),
        }
    }
}

/// Whether an attribute that reads so has the value already.
fn equal(text: &str, value: &Value) -> bool {
    let number = |text: &str| match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    };
    match value {
        Value::Number(wanted) => number(text) == Some(*wanted),
        Value::Word(word) => text == word,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A host whose files accept everything, as plain files do: no driver answers there.
    fn host() -> (tempfile::TempDir, Host) {
        let root = tempfile::tempdir().unwrap();
        let sys = root.path();
        for (address, vendor, device, driver) in [
            ("0000:01:00.0", "0x10ee", "0x9038", Some("xdma")),
            ("0000:02:00.0", "0x10ee", "0x9038", Some(DRIVER)),
            ("0000:03:00.0", "0x8086", "0x1", None),
        ] {
            let folder = sys.join("bus/pci/devices").join(address);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("vendor"), format!("{vendor}\n")).unwrap();
            fs::write(folder.join("device"), format!("{device}\n")).unwrap();
            fs::write(folder.join("driver_override"), "(null)\n").unwrap();
            if let Some(driver) = driver {
                let target = sys.join("bus/pci/drivers").join(driver);
                fs::create_dir_all(&target).unwrap();
                symlink(&target, folder.join("driver")).unwrap();
            }
        }
        fs::create_dir_all(sys.join("kernel/config/pcieipc")).unwrap();
        let host = Host::at(sys);
        (root, host)
    }

    fn entry(which: Which, required: bool, take: bool) -> Endpoint {
        Endpoint { which, required, take }
    }

    #[test]
    fn each_function_of_a_model_is_told_of() {
        let (_root, host) = host();
        let done = host.bind(&entry(Which::Model(0x10ee, 0x9038), true, false));
        let words: Vec<&str> = done.iter().map(Done::word).collect();
        assert_eq!(words, ["failed", "already"]);
        assert!(done[0].text().contains("belongs to xdma") && done[0].text().contains("take = true"), "{done:?}");
    }

    #[test]
    fn what_is_not_there_fails_only_where_it_is_required() {
        let (_root, host) = host();
        for (required, word) in [(true, "failed"), (false, "absent")] {
            let done = host.bind(&entry(Which::At("0000:09:00.0".parse().unwrap()), required, false));
            assert_eq!(done[0].word(), word);
        }
    }

    #[test]
    fn a_function_without_driver_is_offered_to_the_module_and_its_refusal_is_told() {
        let (root, host) = host();
        let done = host.bind(&entry(Which::At("0000:03:00.0".parse().unwrap()), true, false));
        assert!(done[0].word() == "failed" && done[0].text().contains("dmesg"), "{done:?}");
        let read = |name: &str| fs::read_to_string(root.path().join(name)).unwrap();
        assert_eq!(read("bus/pci/devices/0000:03:00.0/driver_override"), "pcieipc\n");
        assert_eq!(read("bus/pci/drivers_probe"), "0000:03:00.0\n");
    }

    #[test]
    fn a_profile_has_only_the_attributes_that_the_module_knows() {
        let (root, host) = host();
        let folder = root.path().join("kernel/config/pcieipc/fpga");
        fs::create_dir(&folder).unwrap();
        for (name, value) in [("vendor", "0x0"), ("vectors", "4"), ("enable", "0")] {
            fs::write(folder.join(name), value).unwrap();
        }
        let profile = Profile::from([("vendor".into(), Value::Number(0x10ee)), ("vectors".into(), Value::Number(4))]);
        assert_eq!(host.profile("fpga", &profile).word(), "done");
        assert_eq!(fs::read_to_string(folder.join("vendor")).unwrap(), "0x10ee\n");
        // As the kernel shows it.
        fs::write(folder.join("enable"), "0x1\n").unwrap();
        assert_eq!(host.profile("fpga", &profile).word(), "already");
        let unknown = Profile::from([("vector".into(), Value::Number(4))]);
        let done = host.profile("fpga", &unknown);
        assert!(done.word() == "failed" && done.text().contains("no attribute vector"), "{done:?}");
    }
}
