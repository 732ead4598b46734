// SPDX-License-Identifier: MIT OR Apache-2.0
//! One safetensors file: its header checked against its length, its tensors read by position.

use std::{
    collections::HashMap,
    fs::{File, OpenOptions},
    io::{self, Read},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use safetensors::{Dtype, tensor::Metadata};

use crate::failure::{remedy, with_remedy};

/// The safetensors library's own limit on a header.
const MAX_HEADER: u64 = 100_000_000;

/// Element types that the command reduces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Number {
    /// IEEE single.
    F32,
    /// The upper half of an IEEE single.
    Bf16,
}

impl Number {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Number::F32 => 4,
            Number::Bf16 => 2,
        }
    }
}

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// What its elements are.
    pub number: Number,
    /// Its shape; empty for a scalar.
    pub shape: Vec<usize>,
    /// Where its bytes start in the file.
    pub at: u64,
    /// How many bytes.
    pub bytes: usize,
}

/// Why a file, or the files together, can not be reduced.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum BadFile {
    #[error("{}: {}", .path.display(), with_remedy(.source))]
    Io { path: PathBuf, source: io::Error },
    #[error("{}: not a safetensors file: {why}", .path.display())]
    Format { path: PathBuf, why: String },
    #[error("{}: truncated or overlong: the header promises {expected} bytes, the file has {got}; write it again", .path.display())]
    Length { path: PathBuf, expected: u64, got: u64 },
    #[error("{}: tensor {tensor:?} is {got}; reduce adds F32 and BF16: convert it, or leave it out", .path.display())]
    Type { path: PathBuf, tensor: String, got: String },
    #[error("{}: no tensor in it", .path.display())]
    Empty { path: PathBuf },
    #[error(transparent)]
    Differs(Box<Difference>),
    #[error("{}: tensor {tensor:?} is missing, {} has it; all ranks must have the same tensors", .path.display(), .reference.display())]
    Missing { path: PathBuf, reference: PathBuf, tensor: String },
}

impl BadFile {
    /// Whether the file is to blame, and not a limit of this process.
    pub fn is_the_files_fault(&self) -> bool {
        !matches!(self, BadFile::Io { source, .. } if remedy(source).is_some())
    }
}

/// A tensor in which two files disagree.
#[derive(Debug, thiserror::Error)]
#[error("{}: tensor {tensor:?} has {what} {got}, but {expected} in {}; all ranks must have the same tensors", .path.display(), .reference.display())]
pub struct Difference {
    path: PathBuf,
    reference: PathBuf,
    tensor: String,
    what: &'static str,
    expected: String,
    got: String,
}

/// A file whose header has been read and checked.
#[derive(Debug)]
pub struct GradientFile {
    path: PathBuf,
    file: File,
    head: Vec<u8>,
    tensors: Vec<Tensor>,
    by_name: HashMap<String, usize>,
}

impl GradientFile {
    /// Opens a file and checks everything but the values.
    ///
    /// # Errors
    /// Any of [`BadFile`] that concerns one file.
    pub fn open(path: &Path) -> Result<Self, BadFile> {
        let io = |source| BadFile::Io { path: path.into(), source };
        let format = |why: String| BadFile::Format { path: path.into(), why };

        // A pipe must be refused, not waited for.
        let mut file = OpenOptions::new().read(true).custom_flags(nix::fcntl::OFlag::O_NONBLOCK.bits()).open(path).map_err(io)?;
        let about = file.metadata().map_err(io)?;
        if !about.is_file() {
            return Err(format("not a regular file".into()));
        }
        let got = about.len();
        let mut head = vec![0; 8];
        if got < 8 {
            return Err(format(format!("{got} bytes, the shortest has 8 and a header")));
        }
        file.read_exact(&mut head).map_err(io)?;
        let header = head.iter().rev().fold(0u64, |sum, &byte| sum << 8 | u64::from(byte));
        if header > MAX_HEADER {
            return Err(format(format!("a header of {header} bytes is announced, at most {MAX_HEADER} are allowed")));
        }
        if header > got - 8 {
            return Err(BadFile::Length { path: path.into(), expected: 8 + header, got });
        }
        // Not more than MAX_HEADER, so it fits a usize.
        head.resize(8 + header as usize, 0);
        file.read_exact(&mut head[8..]).map_err(io)?;
        let metadata: Metadata = serde_json::from_slice(&head[8..]).map_err(|error| format(error.to_string()))?;

        let start = head.len() as u64;
        let expected = start + metadata.data_len() as u64;
        if expected != got {
            return Err(BadFile::Length { path: path.into(), expected, got });
        }
        let mut tensors = Vec::new();
        for name in metadata.offset_keys() {
            let Some(info) = metadata.info(&name) else { continue };
            let number = match info.dtype {
                Dtype::F32 => Number::F32,
                Dtype::BF16 => Number::Bf16,
                other => return Err(BadFile::Type { path: path.into(), tensor: name, got: format!("{other:?}") }),
            };
            let (from, to) = info.data_offsets;
            tensors.push(Tensor { name, number, shape: info.shape.clone(), at: start + from as u64, bytes: to - from });
        }
        if tensors.is_empty() {
            return Err(BadFile::Empty { path: path.into() });
        }
        let by_name = tensors.iter().enumerate().map(|(at, tensor)| (tensor.name.clone(), at)).collect();
        Ok(Self { path: path.into(), file, head, tensors, by_name })
    }

    /// The tensors, in the order of the file.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The header as it stands in the file, length included: what a file with the same layout starts with.
    pub fn head(&self) -> &[u8] {
        &self.head
    }

    /// Reads the bytes of one tensor.
    ///
    /// # Errors
    /// Io, also when the file was cut after it was opened.
    pub fn read(&self, tensor: &Tensor) -> Result<Vec<u8>, BadFile> {
        let mut bytes = vec![0; tensor.bytes];
        self.file.read_exact_at(&mut bytes, tensor.at).map_err(|source| BadFile::Io { path: self.path.clone(), source })?;
        Ok(bytes)
    }

    /// The tensor of that name.
    pub fn find(&self, name: &str) -> Option<&Tensor> {
        self.by_name.get(name).and_then(|&at| self.tensors.get(at))
    }
}

/// Checks that all files hold the same tensors: names, types and shapes. The order in the file may differ.
///
/// # Errors
/// Differs or Missing, for the first tensor in which two files disagree.
pub fn agree(files: &[GradientFile]) -> Result<(), BadFile> {
    let Some((first, others)) = files.split_first() else { return Ok(()) };
    for other in others {
        lacks(first, other)?;
        for want in &first.tensors {
            let Some(have) = other.find(&want.name) else { continue };
            let differs = |what, expected: String, got: String| {
                BadFile::Differs(Box::new(Difference {
                    path: other.path.clone(),
                    reference: first.path.clone(),
                    tensor: want.name.clone(),
                    what,
                    expected,
                    got,
                }))
            };
            if have.number != want.number {
                return Err(differs("type", format!("{:?}", want.number), format!("{:?}", have.number)));
            }
            if have.shape != want.shape {
                return Err(differs("shape", format!("{:?}", want.shape), format!("{:?}", have.shape)));
            }
        }
        lacks(other, first)?;
    }
    Ok(())
}

fn lacks(reference: &GradientFile, file: &GradientFile) -> Result<(), BadFile> {
    match reference.tensors.iter().find(|tensor| file.find(&tensor.name).is_none()) {
        None => Ok(()),
        Some(tensor) => {
            Err(BadFile::Missing { path: file.path.clone(), reference: reference.path.clone(), tensor: tensor.name.clone() })
        }
    }
}
