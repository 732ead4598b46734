// SPDX-License-Identifier: MIT OR Apache-2.0
//! The files in `/etc/pcieipc`: profiles, and functions to bind.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use pcieipc::topology::Address;
use serde::Deserialize;

use crate::failure::Failure;

/// What a profile's attribute is set to: a number, or `none`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum Value {
    Number(u64),
    Word(String),
}

impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number:#x}"),
            Self::Word(word) => f.write_str(word),
        }
    }
}

/// Attributes by their names in configfs.
pub type Profile = BTreeMap<String, Value>;

/// Which functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    /// The one at this address.
    At(Address),
    /// All of this vendor and device.
    Model(u16, u16),
}

impl std::fmt::Display for Which {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::At(address) => address.fmt(f),
            Self::Model(vendor, device) => write!(f, "{vendor:04x}:{device:04x}"),
        }
    }
}

/// Functions to bind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    pub which: Which,
    /// Their absence is a failure.
    pub required: bool,
    /// They are taken from another driver.
    pub take: bool,
}

/// All files together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Config {
    pub profiles: BTreeMap<String, Profile>,
    pub endpoints: Vec<Endpoint>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    profile: BTreeMap<String, Profile>,
    #[serde(default)]
    endpoint: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    address: Option<String>,
    vendor: Option<u16>,
    device: Option<u16>,
    #[serde(default = "yes")]
    required: bool,
    #[serde(default)]
    take: bool,
}

fn yes() -> bool {
    true
}

impl Config {
    /// A file, or all `*.toml` of a folder in the order of their names. A folder that is not there holds none.
    ///
    /// # Errors
    /// Use, with the file and the place in it.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let mut config = Self::default();
        for file in files(path)? {
            let text = fs::read_to_string(&file).map_err(|e| Failure::Use(format!("{}: {e}", file.display())))?;
            config.add(&text).map_err(|e| Failure::Use(format!("{}: {e}", file.display())))?;
        }
        Ok(config)
    }

    fn add(&mut self, text: &str) -> Result<(), String> {
        let file: File = toml::from_str(text).map_err(|e| e.to_string())?;
        for (name, profile) in file.profile {
            check_profile(&name, &profile)?;
            if self.profiles.insert(name.clone(), profile).is_some() {
                return Err(format!("profile {name} is there twice"));
            }
        }
        for entry in file.endpoint {
            let which = entry.which()?;
            if self.endpoints.iter().any(|e| e.which == which) {
                return Err(format!("endpoint {which} is there twice"));
            }
            self.endpoints.push(Endpoint { which, required: entry.required, take: entry.take });
        }
        Ok(())
    }
}

impl Entry {
    fn which(&self) -> Result<Which, String> {
        match (&self.address, self.vendor, self.device) {
            (Some(address), None, None) => {
                let parsed = address.parse().map_err(|_| format!("{address:?} is no PCI address such as 0000:41:00.0"))?;
                Ok(Which::At(parsed))
            }
            (None, Some(vendor), Some(device)) => Ok(Which::Model(vendor, device)),
            _ => Err("an endpoint has either an address, or a vendor and a device".into()),
        }
    }
}

/// The names become paths, so nothing in them may lead elsewhere.
fn check_profile(name: &str, profile: &Profile) -> Result<(), String> {
    let plain = |text: &str| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        !text.is_empty() && text.len() <= 64 && text.chars().all(allowed)
    };
    if !plain(name) {
        return Err(format!("profile {name:?}: a name has letters, digits, - and _"));
    }
    for (attribute, value) in profile {
        if !plain(attribute) || attribute == "enable" {
            return Err(format!("profile {name}: {attribute:?} is no attribute of a profile"));
        }
        if matches!(value, Value::Word(word) if word != "none") {
            return Err(format!("profile {name}: {attribute} is a number or \"none\""));
        }
    }
    Ok(())
}

fn files(path: &Path) -> Result<Vec<PathBuf>, Failure> {
    let failed = |e: std::io::Error| Failure::Use(format!("{}: {e}", path.display()));
    if !path.is_dir() {
        // A folder that was never made is an empty one; a file that was named has to be there.
        return if path.exists() || path.extension().is_some() { Ok(vec![path.to_owned()]) } else { Ok(Vec::new()) };
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(path).map_err(failed)? {
        let file = entry.map_err(failed)?.path();
        if file.extension().is_some_and(|e| e == "toml") {
            files.push(file);
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Config, String> {
        let mut config = Config::default();
        config.add(text).map(|()| config)
    }

    #[test]
    fn profiles_and_endpoints_are_read_and_numbers_may_be_hexadecimal() {
        let config = parsed(
            "[profile.my-fpga]\nvendor = 0x10ee\ndevice = 0x9038\nvectors = 4\nmemory_bar = \"none\"\n\
             [[endpoint]]\naddress = \"0000:41:00.0\"\ntake = true\n[[endpoint]]\nvendor = 0x10ee\ndevice = 0x9038\nrequired = false\n",
        )
        .unwrap();
        let profile = &config.profiles["my-fpga"];
        assert_eq!((profile["vendor"].to_string(), profile["memory_bar"].to_string()), ("0x10ee".into(), "none".into()));
        let at = Which::At("0000:41:00.0".parse().unwrap());
        assert_eq!(config.endpoints[0], Endpoint { which: at, required: true, take: true });
        assert_eq!(config.endpoints[1], Endpoint { which: Which::Model(0x10ee, 0x9038), required: false, take: false });
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_its_name() {
        for (text, told) in [
            ("[profile.\"../x\"]\nvendor = 1\n", "../x"),
            ("[profile.a]\n\"../enable\" = 1\n", "../enable"),
            ("[profile.a]\nenable = 1\n", "enable"),
            ("[profile.a]\nvendor = \"ten\"\n", "vendor"),
            ("[profile.a]\nvendor = -1\n", "vendor"),
            ("[[endpoint]]\naddress = \"41\"\n", "41"),
            ("[[endpoint]]\nvendor = 1\n", "either an address"),
            ("[[endpoint]]\naddress = \"0000:41:00.0\"\nvendor = 1\ndevice = 1\n", "either an address"),
            ("[[endpoint]]\naddress = \"0000:41:00.0\"\n[[endpoint]]\naddress = \"0000:41:00.0\"\n", "twice"),
            ("[[endpoints]]\naddress = \"0000:41:00.0\"\n", "endpoints"),
            ("nonsense", "1"),
        ] {
            let error = parsed(text).unwrap_err();
            assert!(error.contains(told), "{text}: {error}");
        }
    }

    #[test]
    fn files_are_read_in_the_order_of_their_names_and_a_missing_folder_is_empty() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("20-b.toml"), "[[endpoint]]\naddress = \"0000:02:00.0\"\n").unwrap();
        fs::write(folder.path().join("10-a.toml"), "[[endpoint]]\naddress = \"0000:01:00.0\"\n").unwrap();
        fs::write(folder.path().join("10-a.toml.dpkg-old"), "nonsense").unwrap();
        let config = Config::read(folder.path()).unwrap();
        let order: Vec<String> = config.endpoints.iter().map(|e| e.which.to_string()).collect();
        assert_eq!(order, ["0000:01:00.0", "0000:02:00.0"]);
        assert_eq!(Config::read(&folder.path().join("none")).unwrap(), Config::default());
        assert!(Config::read(&folder.path().join("none.toml")).is_err());
    }
}
