// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel that is booted, and where its parts and ours lie.

use std::env;
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// A kernel with its modules, and the module under test built for it.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// The image.
    pub image: PathBuf,
    /// Its modules, with `modules.dep`.
    pub modules: PathBuf,
    /// `pcieipc.ko` without debug sections.
    pub module: PathBuf,
    /// The folder for the logs of tests on this kernel, relative to the checkout.
    pub logs: &'static str,
}

impl Kernel {
    /// The environment's kernel: the stock one, or the one with every check switched on.
    ///
    /// # Errors
    /// [`Error::Missing`] if the environment or that kernel was not made.
    pub fn find(checkout: &Path, debug: bool) -> Result<Kernel> {
        let current = cache()?.join("current");
        let (folder, built, logs, remedy) = if debug {
            (current.join("debug"), "target/kmod-debug", "target/vm-debug", "run 'make vm-env-debug'")
        } else {
            (current, "target/kmod", "target/vm", "run 'make vm-env'")
        };
        let kernel = Kernel {
            image: folder.join("vmlinuz"),
            modules: folder.join("modules"),
            module: checkout.join(built).join("pcieipc.stripped.ko"),
            logs,
        };
        if !kernel.image.exists() {
            return Err(Error::Missing { path: kernel.image, remedy });
        }
        Ok(kernel)
    }

    /// A module that only tests need, built for this kernel.
    #[must_use]
    pub fn test_module(&self, name: &str) -> PathBuf {
        self.module.with_file_name(format!("{name}.ko"))
    }
}

/// The folder in which the environment is kept.
///
/// # Errors
/// [`Error::Missing`] if neither `PCIEIPC_CACHE` nor `HOME` is set.
pub fn cache() -> Result<PathBuf> {
    if let Some(cache) = env::var_os("PCIEIPC_CACHE") {
        return Ok(cache.into());
    }
    match env::var_os("HOME") {
        Some(home) => Ok(Path::new(&home).join(".cache/pcieipc")),
        None => Err(Error::Missing { path: "HOME".into(), remedy: "set PCIEIPC_CACHE to the environment's folder" }),
    }
}
