// SPDX-License-Identifier: MIT OR Apache-2.0
//! The arguments that say which group runs over what, and their checks before any process starts.

use std::{path::PathBuf, time::Duration};

use crate::{
    failure::Failure,
    gradients::{GradientFile, Number, Template, agree},
    ranks::{Algorithm, Asked, Job, Mover, Transport},
    transport::{self, Choice},
};

/// The largest group that the library plans for on one host.
const MAX_RANKS: usize = 16;

/// Arguments of every command that starts a group.
#[derive(Debug, clap::Args)]
pub struct GroupArguments {
    /// How many ranks, one process each (1 to 16)
    #[arg(long, value_name = "N", value_parser = ranks)]
    pub ranks: usize,
    /// Gradient file of each rank, with {rank} in its name: 'grads.{rank}.safetensors'
    #[arg(long, value_name = "TEMPLATE")]
    pub input: Template,
    /// What carries the records
    #[arg(long, value_enum, default_value_t = Asked::Auto)]
    pub transport: Asked,
    /// With kmod: the endpoint of each rank, by PCI address or id, instead of the first free ones
    #[arg(long, value_name = "ENDPOINT,...", value_delimiter = ',')]
    pub endpoints: Vec<String>,
    /// With kmod: who moves the records
    #[arg(long, value_enum, default_value_t = Mover::Processor)]
    pub mover: Mover,
    /// How the sum is computed
    #[arg(long, value_enum, default_value_t = Algorithm::Auto)]
    pub algorithm: Algorithm,
    /// Let every record carry a CRC-32C, and reduce only what matches it; what does not is `Corrupt`
    #[arg(long)]
    pub checked: bool,
    /// The longest that one step may wait before it is an error, such as 500ms or 10s
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = bound)]
    pub timeout: Duration,
}

fn ranks(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(ranks) if (1..=MAX_RANKS).contains(&ranks) => Ok(ranks),
        _ => Err(format!("a group has 1 to {MAX_RANKS} ranks")),
    }
}

fn bound(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text).map_err(|error| format!("{error}; write for example 500ms or 10s"))?;
    if time.is_zero() || time > Duration::from_secs(3600) {
        return Err("a bound lies between 1ns and 1h".into());
    }
    Ok(time)
}

/// A group whose files are good and whose transport is chosen.
#[derive(Debug)]
pub struct Group {
    /// The files of all ranks.
    pub files: Vec<GradientFile>,
    /// Over what, and why.
    pub choice: Choice,
    inputs: Vec<PathBuf>,
    algorithm: Algorithm,
    mover: Mover,
    checked: bool,
    timeout: Duration,
}

impl GroupArguments {
    /// Reads and compares the headers of all files, and chooses the transport.
    ///
    /// # Errors
    /// Use for files that can not be reduced, Run for a transport that can not be had.
    pub fn prepare(&self) -> Result<Group, Failure> {
        let inputs: Vec<PathBuf> = (0..self.ranks).map(|rank| self.input.path(rank)).collect();
        let files = inputs
            .iter()
            .map(|path| GradientFile::open(path))
            .collect::<Result<Vec<_>, _>>()
            .and_then(|files| agree(&files).map(|()| files))
            .map_err(
                |bad| if bad.is_the_files_fault() { Failure::Use(bad.to_string()) } else { Failure::Run(bad.to_string()) },
            )?;
        let choice = transport::choose(self.transport, self.ranks, &self.endpoints)?;
        Ok(Group {
            files,
            choice,
            inputs,
            algorithm: self.algorithm,
            mover: self.mover,
            checked: self.checked,
            timeout: self.timeout,
        })
    }
}

impl Group {
    /// How many ranks.
    pub fn ranks(&self) -> usize {
        self.files.len()
    }

    /// The longest that one step may wait.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Names and types of the tensors, in the order of the first file.
    pub fn tensors(&self) -> Vec<(String, Number)> {
        self.files
            .first()
            .map_or_else(Vec::new, |file| file.tensors().iter().map(|tensor| (tensor.name.clone(), tensor.number)).collect())
    }

    /// Bytes of all tensors of one rank.
    pub fn bytes(&self) -> usize {
        self.files.first().map_or(0, |file| file.tensors().iter().map(|tensor| tensor.bytes).sum())
    }

    /// One job a rank; the ranks meet in `meeting`.
    pub fn jobs(&self, meeting: &std::path::Path, check: bool) -> Vec<Job> {
        (0..self.ranks())
            .map(|rank| Job {
                parent: std::process::id(),
                rank,
                meeting: meeting.into(),
                transport: match self.choice.endpoints.get(rank) {
                    Some(endpoint) => Transport::Kmod { endpoint: endpoint.id.0, mover: self.mover },
                    None => Transport::Shm,
                },
                algorithm: self.algorithm,
                checked: self.checked,
                timeout: self.timeout,
                inputs: self.inputs.clone(),
                tensors: self.tensors(),
                output: None,
                check,
                rehearsal: None,
            })
            .collect()
    }
}
