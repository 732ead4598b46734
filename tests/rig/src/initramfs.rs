// SPDX-License-Identifier: MIT OR Apache-2.0
//! The guest's file system: an uncompressed newc archive (Debian's kernel does not unpack gzip).

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use cpio::newc;

use crate::error::at;
use crate::{Error, Result};

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;

/// A file system being put together.
#[derive(Debug, Default)]
pub struct Initramfs {
    entries: BTreeMap<PathBuf, Entry>,
}

#[derive(Debug)]
struct Entry {
    mode: u32,
    data: Vec<u8>,
}

impl Initramfs {
    /// One with busybox and the folders that a running system expects.
    ///
    /// # Errors
    /// [`Error::File`] if there is no static busybox here.
    pub fn with_busybox() -> Result<Initramfs> {
        let mut files = Initramfs::default();
        for folder in ["/bin", "/dev", "/etc", "/lib", "/lib64", "/modules", "/proc", "/root", "/run", "/sys", "/tmp"] {
            files.put(Path::new(folder), DIRECTORY | 0o755, Vec::new());
        }
        files.file(Path::new("/bin/busybox"), Path::new("/bin/busybox"))?;
        files.text("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n", 0o644);
        files.text("/etc/group", "root:x:0:\npcieipc:x:101:\nnogroup:x:65534:\n", 0o644);
        Ok(files)
    }

    /// Puts a text file there.
    pub fn text(&mut self, guest: &str, text: &str, mode: u32) {
        self.put(Path::new(guest), REGULAR | mode, text.as_bytes().to_vec());
    }

    /// Puts a file of the host there, with its permissions.
    ///
    /// # Errors
    /// [`Error::File`] if it cannot be read.
    pub fn file(&mut self, host: &Path, guest: &Path) -> Result<()> {
        let data = fs::read(host).map_err(at(host))?;
        let mode = fs::metadata(host).map_err(at(host))?.permissions().mode() & 0o777;
        self.put(guest, REGULAR | mode, data);
        Ok(())
    }

    /// Puts a file or a whole folder of the host there.
    ///
    /// # Errors
    /// [`Error::File`] if something in it cannot be read.
    pub fn tree(&mut self, host: &Path, guest: &Path) -> Result<()> {
        if !host.is_dir() {
            return self.file(host, guest);
        }
        self.put(guest, DIRECTORY | 0o755, Vec::new());
        for entry in fs::read_dir(host).map_err(at(host))? {
            let entry = entry.map_err(at(host))?;
            self.tree(&entry.path(), &guest.join(entry.file_name()))?;
        }
        Ok(())
    }

    /// Puts a program there without its debug sections, and the shared libraries that it needs.
    ///
    /// # Errors
    /// [`Error::Program`] if it cannot be stripped or a library is not found.
    pub fn program(&mut self, host: &Path, guest: &Path) -> Result<()> {
        let stripped = tempfile::NamedTempFile::new().map_err(at(host))?;
        let mut strip = Command::new("strip");
        strip.arg("--strip-debug").arg("-o").arg(stripped.path()).arg(host);
        output(strip)?;
        let data = fs::read(stripped.path()).map_err(at(stripped.path()))?;
        self.put(guest, REGULAR | 0o755, data);
        self.libraries_of(host)
    }

    fn libraries_of(&mut self, host: &Path) -> Result<()> {
        let mut ldd = Command::new("ldd");
        ldd.arg(host);
        // For a static program ldd prints so and exits with 1.
        let Ok(listed) = output(ldd) else { return Ok(()) };
        for line in listed.lines() {
            if line.contains("not found") {
                return Err(Error::Program { program: host.display().to_string(), why: line.trim().to_owned() });
            }
            let path = line.split_whitespace().find(|word| word.starts_with('/'));
            let Some(path) = path.map(Path::new) else { continue };
            if !self.entries.contains_key(path) {
                self.file(path, path)?;
            }
        }
        Ok(())
    }

    /// Puts modules of the kernel there, unpacked, with all that they depend on; the result is the order to load them in.
    ///
    /// # Errors
    /// [`Error::Program`] for a module that the kernel does not have.
    pub fn modules(&mut self, tree: &Path, names: &[String]) -> Result<Vec<String>> {
        let mut order: Vec<String> = Vec::new();
        if names.is_empty() {
            return Ok(order);
        }
        let list = tree.join("modules.dep");
        let list = fs::read_to_string(&list).map_err(at(&list))?;
        let builtin = tree.join("modules.builtin");
        let builtin = fs::read_to_string(&builtin).map_err(at(&builtin))?;
        for name in names {
            let is_it = |path: &str| module_name(path) == name.replace('-', "_");
            if builtin.lines().any(is_it) {
                continue;
            }
            let line = list
                .lines()
                .find(|line| line.split(':').next().is_some_and(is_it))
                .ok_or_else(|| Error::Program { program: name.clone(), why: "this kernel has no such module".into() })?;
            let (module, needed) = line.split_once(':').unwrap_or((line, ""));
            // modules.dep lists what is needed with the most basic module last.
            for path in needed.split_whitespace().rev().chain([module]) {
                let file = format!("/modules/{}.ko", module_name(path));
                if order.contains(&file) {
                    continue;
                }
                let host = tree.join(path);
                let data = match path.ends_with(".xz") {
                    true => unpacked(&host)?,
                    false => fs::read(&host).map_err(at(&host))?,
                };
                self.put(Path::new(&file), REGULAR | 0o644, data);
                order.push(file);
            }
        }
        Ok(order)
    }

    /// Writes the archive.
    ///
    /// # Errors
    /// [`Error::File`] if it cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let mut archive = BufWriter::new(File::create(path).map_err(at(path))?);
        for (number, (name, entry)) in self.entries.iter().enumerate() {
            let name = name.strip_prefix("/").unwrap_or(name).to_string_lossy().into_owned();
            let size = u32::try_from(entry.data.len()).map_err(|_| Error::Program {
                program: name.clone(),
                why: "a file of 4 GiB does not fit into an initramfs".into(),
            })?;
            let number = u32::try_from(number).unwrap_or(u32::MAX);
            let builder = newc::Builder::new(&name).ino(number).mode(entry.mode).nlink(1);
            let mut writer = builder.write(&mut archive, size);
            writer.write_all(&entry.data).and_then(|()| writer.finish().map(drop)).map_err(at(path))?;
        }
        newc::trailer(&mut archive).and_then(|archive| archive.flush()).map_err(at(path))
    }

    fn put(&mut self, guest: &Path, mode: u32, data: Vec<u8>) {
        let parents: Vec<PathBuf> = guest.ancestors().skip(1).map(Path::to_owned).collect();
        for folder in parents.into_iter().filter(|folder| folder != Path::new("/")) {
            self.entries.entry(folder).or_insert(Entry { mode: DIRECTORY | 0o755, data: Vec::new() });
        }
        self.entries.insert(guest.to_owned(), Entry { mode, data });
    }

    /// Puts a symbolic link there.
    pub fn link(&mut self, target: &str, guest: &str) {
        self.put(Path::new(guest), SYMLINK | 0o777, target.as_bytes().to_vec());
    }
}

fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split(".ko").next().unwrap_or(file).replace('-', "_")
}

fn unpacked(path: &Path) -> Result<Vec<u8>> {
    let mut xz = Command::new("xz");
    xz.arg("-dc").arg(path);
    bytes(xz)
}

fn output(command: Command) -> Result<String> {
    Ok(String::from_utf8_lossy(&bytes(command)?).into_owned())
}

fn bytes(mut command: Command) -> Result<Vec<u8>> {
    let program = format!("{command:?}");
    let done = command.output().map_err(|error| Error::Program { program: program.clone(), why: error.to_string() })?;
    if done.status.success() {
        return Ok(done.stdout);
    }
    let why = format!("{}: {}", done.status, String::from_utf8_lossy(&done.stderr).trim());
    Err(Error::Program { program, why })
}

/// The modules that a module needs, as `modinfo -F depends` would say.
///
/// # Errors
/// [`Error::File`] if it cannot be read.
pub fn needs(module: &Path) -> Result<Vec<String>> {
    let data = fs::read(module).map_err(at(module))?;
    Ok(depends(&data))
}

fn depends(module: &[u8]) -> Vec<String> {
    let key = b"\0depends=";
    let Some(start) = module.windows(key.len()).position(|window| window == key) else { return Vec::new() };
    let text = module[start + key.len()..].split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_come_before_what_is_in_them() {
        let mut files = Initramfs::default();
        files.text("/a/b/c", "text", 0o644);
        let names: Vec<_> = files.entries.keys().map(|path| path.display().to_string()).collect();
        assert_eq!(names, ["/a", "/a/b", "/a/b/c"]);
    }

    #[test]
    fn modules_are_ordered_by_what_they_need() {
        let tree = tempfile::tempdir().unwrap();
        fs::create_dir(tree.path().join("k")).unwrap();
        for name in ["a-x", "b", "c"] {
            fs::write(tree.path().join(format!("k/{name}.ko")), name).unwrap();
        }
        fs::write(tree.path().join("modules.dep"), "k/a-x.ko: k/b.ko k/c.ko\nk/b.ko: k/c.ko\nk/c.ko:\n").unwrap();
        fs::write(tree.path().join("modules.builtin"), "kernel/built_in.ko\n").unwrap();
        let mut files = Initramfs::default();
        let order = files.modules(tree.path(), &["c".into(), "a_x".into(), "built-in".into()]).unwrap();
        assert_eq!(order, ["/modules/c.ko", "/modules/b.ko", "/modules/a_x.ko"]);
        assert!(files.modules(tree.path(), &["none".into()]).is_err());
    }

    #[test]
    fn what_a_module_depends_on_is_read_from_it() {
        assert_eq!(depends(b"x\0license=GPL\0depends=configfs,b\0name=a\0"), ["configfs", "b"]);
        assert!(depends(b"x\0depends=\0").is_empty() && depends(b"").is_empty());
    }
}
