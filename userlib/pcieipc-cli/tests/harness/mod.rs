// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs the command as a user would, in a folder of its own.
#![allow(dead_code, reason = "every test file uses its own part of it")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use safetensors::{Dtype, tensor::TensorView};

/// What a run gave.
pub struct Ran {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
    pub took: Duration,
}

impl Ran {
    /// Asserts the exit code and that standard error says all of `says`.
    #[track_caller]
    pub fn fails(&self, code: i32, says: &[&str]) -> &Self {
        assert_eq!(self.code, Some(code), "{}{}", self.out, self.err);
        for part in says {
            assert!(self.err.contains(part), "{part:?} is not in: {}", self.err);
        }
        assert!(!self.err.contains("panicked"), "{}", self.err);
        self
    }

    #[track_caller]
    pub fn succeeds(&self) -> &Self {
        assert_eq!(self.code, Some(0), "{}{}", self.out, self.err);
        self
    }

    #[track_caller]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {}{}", self.out, self.err))
    }
}

/// The command, ready for arguments.
pub fn pcieipc(directory: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pcieipc"));
    command.current_dir(directory).args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs the command to its end.
pub fn run(directory: &Path, arguments: &[&str]) -> Ran {
    run_command(pcieipc(directory, arguments))
}

/// Runs a command of [`pcieipc`] to its end.
pub fn run_command(mut command: Command) -> Ran {
    let start = Instant::now();
    let output = command.output().unwrap();
    Ran {
        code: output.status.code(),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
        took: start.elapsed(),
    }
}

/// The real gradients of the repository.
pub fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data").join(name)
}

/// One f32 tensor of a test's file.
pub fn f32s(name: &str, shape: &[usize], values: &[f32]) -> (String, Dtype, Vec<usize>, Vec<u8>) {
    (name.into(), Dtype::F32, shape.into(), values.iter().flat_map(|value| value.to_le_bytes()).collect())
}

/// Writes a safetensors file.
pub fn write(path: &Path, tensors: &[(String, Dtype, Vec<usize>, Vec<u8>)]) {
    let views =
        tensors.iter().map(|(name, dtype, shape, bytes)| (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// A folder with good files of `ranks` ranks: `grads.{rank}.safetensors`.
pub fn good(ranks: usize) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for rank in 0..ranks {
        let part = rank as f32;
        let tensors =
            [f32s("weight", &[2, 3], &[part, 1.5, -2.0, 0.25, part * 0.1, 1e-3]), f32s("bias", &[3], &[part, -part, 7.0])];
        write(&directory.path().join(format!("grads.{rank}.safetensors")), &tensors);
    }
    directory
}

/// Everything in a folder, sorted: what a failed run must not have changed.
pub fn listing(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
