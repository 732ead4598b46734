// SPDX-License-Identifier: MIT OR Apache-2.0
//! The others: Open MPI and Gloo, where they are installed, measured by small programs of ours.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use super::Job;
use crate::{failure::Failure, scratch::Scratch};

const OSU_LOOP: &str = include_str!("osu_loop.c");
const GLOO_LOOP: &str = include_str!("gloo_loop.py");

/// Another library, ready to run.
#[derive(Debug)]
pub struct Peer {
    /// As reports call it.
    pub name: &'static str,
    /// Its version.
    pub version: String,
    program: PathBuf,
    arguments: Vec<String>,
    environment: Vec<(&'static str, &'static str)>,
}

/// Those that are installed; their programs live in `folder`. What is missing is said on standard error.
///
/// # Errors
/// Run when a program can not be written to the folder.
pub fn find(job: &Job, folder: &Scratch) -> Result<Vec<Peer>, Failure> {
    let mut peers = Vec::new();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).map_err(|e| Failure::Run(format!("{}: {e}", path.display())))?;
        Ok::<PathBuf, Failure>(path)
    };
    let (source, program) = (write("osu_loop.c", OSU_LOOP)?, folder.path().join("osu_loop"));
    let compiled = Command::new("mpicc").arg("-O2").arg("-o").arg(&program).arg(&source).stderr(Stdio::null()).status();
    match (version("mpirun", &["--version"]), compiled) {
        (Some(version), Ok(status)) if status.success() => {
            let text = |p: &Path| p.to_string_lossy().into_owned();
            let mut arguments = vec!["-n".to_owned(), job.ranks.to_string(), "--oversubscribe".into()];
            let environment = vec![("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")];
            let peer = |name, arguments: &[String]| Peer {
                name,
                version: version.clone(),
                program: "mpirun".into(),
                arguments: arguments.iter().cloned().chain([text(&program)]).collect(),
                environment: environment.clone(),
            };
            peers.push(peer("Open MPI", &arguments));
            arguments.extend(["--mca", "coll_xhc_priority", "90"].map(str::to_owned));
            peers.push(peer("Open MPI xhc", &arguments));
        }
        _ => eprintln!("Open MPI is not here (mpirun and mpicc): left out"),
    }
    let script = write("gloo_loop.py", GLOO_LOOP)?;
    match version(
        "python3",
        &["-c", "import torch.distributed as d; assert d.is_gloo_available(); import torch; print(torch.__version__)"],
    ) {
        Some(version) => peers.push(Peer {
            name: "Gloo",
            version: format!("torch {version}"),
            program: "python3".into(),
            arguments: vec![script.to_string_lossy().into_owned(), job.ranks.to_string()],
            environment: vec![("USE_LIBUV", "0"), ("GLOO_SOCKET_IFNAME", "lo"), ("OMP_NUM_THREADS", "1")],
        }),
        None => eprintln!("Gloo is not here (python3 with torch): left out"),
    }
    Ok(peers)
}

fn version(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).stderr(Stdio::null()).output().ok().filter(|o| o.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or("").trim().to_owned())
}

impl Peer {
    /// Microseconds of each size.
    ///
    /// # Errors
    /// Run when its program fails.
    pub fn measure(&self, job: &Job) -> Result<BTreeMap<usize, f64>, Failure> {
        let output = Command::new(&self.program)
            .args(&self.arguments)
            .arg(job.time.as_secs_f64().to_string())
            .args(job.sizes.iter().map(usize::to_string))
            .envs(self.environment.iter().copied())
            .output()
            .map_err(|e| Failure::Run(format!("{}: {e}", self.name)))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let row = |line: &str| {
            let (bytes, us) = line.trim().split_once(' ')?;
            Some((bytes.parse().ok()?, us.parse().ok()?))
        };
        let rows: BTreeMap<usize, f64> = text.lines().filter_map(row).collect();
        if !output.status.success() || rows.len() != job.sizes.len() {
            let words = String::from_utf8_lossy(&output.stderr);
            let last: Vec<&str> = words.lines().rev().take(8).collect();
            let last: Vec<&str> = last.into_iter().rev().collect();
            return Err(Failure::Run(format!(
                "{} ended with {} after {} sizes:\n{}",
                self.name,
                output.status,
                rows.len(),
                last.join("\n")
            )));
        }
        Ok(rows)
    }
}
