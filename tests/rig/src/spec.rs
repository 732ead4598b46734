// SPDX-License-Identifier: MIT OR Apache-2.0
//! A test in a virtual machine, as its TOML file describes it.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::after::After;
use crate::error::at;
use crate::machine::Machine;
use crate::{Error, Result};

/// One test: a machine, what is put into it, and the command it runs.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// The file's name without its ending; also the name of the folder with the logs.
    #[serde(skip)]
    pub name: String,
    /// What the test promises, in one sentence.
    #[serde(default)]
    pub about: String,
    /// The hardware.
    #[serde(default)]
    pub machine: Machine,
    /// What is in the guest and what it runs.
    #[serde(default)]
    pub guest: Guest,
    /// Regular expressions of kernel messages that this test provokes and that must not fail it.
    #[serde(default)]
    pub allow: Vec<String>,
    /// What must be so when the machine is off.
    #[serde(default)]
    pub after: After,
}

/// What is in the guest and what it runs.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Guest {
    /// The shell command line; its standard output is read as results, its exit code must be 0.
    pub command: String,
    /// Seconds until the machine is stopped and the test has failed.
    pub timeout: u64,
    /// Whether `pcieipc.ko` is loaded before the command.
    pub module: bool,
    /// The module's parameters at load.
    pub parameters: String,
    /// Modules of the stock kernel to load first, with what they depend on.
    pub stock_modules: Vec<String>,
    /// Modules of `tests/` by name; they land in `/modules` and are not loaded.
    pub test_modules: Vec<String>,
    /// Programs that cargo built, by name; they land in `/bin`.
    pub programs: Vec<String>,
    /// C programs, by source path relative to the checkout; linked statically, built with `uapi/` as the only added include folder.
    pub c_programs: Vec<PathBuf>,
    /// The same, built as 32-bit programs; `-32` is added to the name.
    pub c_programs_32: Vec<PathBuf>,
    /// Static libraries of the environment that the C programs are linked with, as after `-l`.
    pub c_libraries: Vec<String>,
    /// Programs of the environment (of Debian), by absolute path, with the libraries they need.
    pub system: Vec<PathBuf>,
    /// Debian's udev, which no program of the environment is, in `/udev`: `LD_LIBRARY_PATH=/udev/lib /udev/udevadm`.
    pub udev: bool,
    /// Other files, `HOST-PATH:GUEST-PATH`, the first relative to the checkout; a folder is taken whole.
    pub files: Vec<String>,
}

impl Default for Guest {
    fn default() -> Self {
        Guest {
            command: String::new(),
            timeout: 120,
            module: true,
            parameters: String::new(),
            stock_modules: Vec::new(),
            test_modules: Vec::new(),
            programs: Vec::new(),
            c_programs: Vec::new(),
            c_programs_32: Vec::new(),
            c_libraries: Vec::new(),
            system: Vec::new(),
            udev: false,
            files: Vec::new(),
        }
    }
}

impl Spec {
    /// Reads a test's file.
    ///
    /// # Errors
    /// [`Error::File`] if it cannot be read, [`Error::Spec`] if it has an unknown field, a wrong type or no command.
    pub fn read(path: &Path) -> Result<Spec> {
        let text = std::fs::read_to_string(path).map_err(at(path))?;
        let wrong = |why: String| Error::Spec { path: path.to_owned(), why };
        let mut spec: Spec = toml::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        spec.name = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        if spec.guest.command.trim().is_empty() {
            return Err(wrong("guest.command is missing: what shall the guest run?".into()));
        }
        Ok(spec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_field_is_refused() {
        let wrong = toml::from_str::<Spec>("[guest]\ncommand = 'true'\ntime_out = 3\n");
        assert!(wrong.unwrap_err().to_string().contains("time_out"));
    }

    #[test]
    fn what_is_not_said_has_a_default() {
        let spec: Spec = toml::from_str("[guest]\ncommand = 'true'\n").unwrap();
        assert_eq!((spec.guest.timeout, spec.guest.module, spec.machine.endpoints()), (120, true, 0));
    }
}
