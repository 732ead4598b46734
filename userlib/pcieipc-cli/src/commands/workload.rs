// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which collective over what: the arguments that `bench` and `trace` have in common.

use std::time::Duration;

use clap::ValueEnum;
use pcieipc::{
    plan::{Algorithm, Collective},
    reduce::{Kind, Op},
};

use crate::{
    bench::{Job, Memory, Over},
    failure::Failure,
    ranks::{Asked, Mover},
    transport,
};

/// What the ranks call.
#[derive(Debug, clap::Args)]
pub struct Workload {
    /// How many ranks, one process each (1 to 16)
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=16))]
    ranks: u8,
    /// all-reduce, reduce-scatter, all-gather, reduce, broadcast or all-to-all
    #[arg(long, default_value_t = Collective::AllReduce)]
    pub collective: Collective,
    /// f64 f32 f16 bf16 i8 i16 i32 i64 u8 u16 u32 u64
    #[arg(long = "type", value_name = "TYPE", default_value_t = Kind::F32)]
    pub kind: Kind,
    /// sum, prod, min, max or avg
    #[arg(long, default_value_t = Op::Sum)]
    pub op: Op,
    /// The root of a reduce or broadcast
    #[arg(long, value_name = "RANK", default_value_t = 0)]
    root: u8,
    /// Ordinary memory, or buffers registered once that all ranks can read (all-reduce, reduce-scatter, all-gather and broadcast)
    #[arg(long, value_enum, default_value_t = Memory::Ordinary)]
    memory: Memory,
    /// one-shot, two-shot, star, ring, recursive-doubling or hierarchical, instead of the default choice
    #[arg(long)]
    algorithm: Option<Algorithm>,
    /// What carries the records
    #[arg(long, value_enum, default_value_t = Asked::Auto)]
    transport: Asked,
    /// With kmod: who moves the records
    #[arg(long, value_enum, default_value_t = Mover::Processor)]
    mover: Mover,
}

impl Workload {
    /// The job for these sizes, over the transport that is there; says which it is. Nothing is checked, measured or traced yet.
    ///
    /// # Errors
    /// Use for arguments that do not go together; as for [`transport::choose`].
    pub fn job(&self, sizes: Vec<usize>) -> Result<Job, Failure> {
        use Collective as C;
        let ranks = usize::from(self.ranks);
        if usize::from(self.root) >= ranks {
            return Err(Failure::Use(format!("there is no rank {} among {ranks}", self.root)));
        }
        if matches!(self.collective, C::SendReceive | C::Barrier) {
            return Err(Failure::Use(format!("{} is not measured; take all-reduce or another", self.collective)));
        }
        if self.memory == Memory::Registered && matches!(self.collective, C::Reduce | C::AllToAll) {
            return Err(Failure::Use(format!("{} has no call for registered buffers; leave --memory away", self.collective)));
        }
        let choice = transport::choose(self.transport, ranks, &[])?;
        eprintln!("transport: {} ({})", choice.name, choice.why);
        let over = if choice.endpoints.is_empty() {
            Over::Shm
        } else {
            Over::Kmod { endpoints: choice.endpoints.iter().map(|e| e.id.0).collect(), mover: self.mover }
        };
        Ok(Job {
            ranks,
            over,
            collective: self.collective.name().into(),
            kind: self.kind.name().into(),
            op: self.op.name().into(),
            root: self.root.into(),
            algorithm: self.algorithm.map(|a| a.name().into()),
            calibration: None,
            checked: false,
            memory: self.memory,
            sizes,
            time: Duration::ZERO,
            check: false,
            limit: false,
            trace: None,
        })
    }
}

impl ValueEnum for Memory {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Ordinary, Self::Registered]
    }
    fn to_possible_value(&self) -> Option<clap::builder::PossibleValue> {
        Some(clap::builder::PossibleValue::new(match self {
            Self::Ordinary => "ordinary",
            Self::Registered => "registered",
        }))
    }
}
