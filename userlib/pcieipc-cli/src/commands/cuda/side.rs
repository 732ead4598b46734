// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is measured: something that all-reduces device memory on a stream.

use std::sync::Arc;

use pcieipc::{
    Result,
    reduce::{Kind, Op},
};
use pcieipc_cuda::{
    Communicator, Tensor,
    choice::candidates,
    driver::{Address, Device, Event, Graph, Stream},
};

use super::{
    nccl::Nccl,
    order::{Beside, Shape},
    product::Product,
};
use crate::failure::Failure;

/// One side of a comparison, at one rank.
pub enum Side {
    Ours(Box<Communicator>),
    Nccl(Nccl),
}

impl Side {
    pub fn device(&self) -> Arc<dyn Device> {
        match self {
            Self::Ours(communicator) => communicator.device().clone(),
            Self::Nccl(nccl) => nccl.device().clone(),
        }
    }

    /// What a tuner may try, by name.
    pub fn candidates(&self, bytes: u64) -> Vec<String> {
        match self {
            Self::Ours(communicator) => candidates(communicator.setting(), bytes).iter().map(ToString::to_string).collect(),
            Self::Nccl(_) => Vec::new(),
        }
    }

    /// # Safety
    /// As for [`Communicator::all_reduce`].
    unsafe fn sum(
        &mut self,
        input: Address,
        output: Address,
        count: u64,
        kind: Kind,
        candidate: Option<usize>,
        stream: Stream,
    ) -> Result<()> {
        let tensor = |at| Tensor { at, count };
        match (self, candidate) {
            (Self::Ours(communicator), Some(candidate)) => {
                let bytes = count * kind.size() as u64;
                let all = candidates(communicator.setting(), bytes);
                // SAFETY: the caller's promise.
                unsafe { communicator.launch(input, output, bytes, kind, Op::Sum, &all[candidate % all.len()], stream) }
            }
            // SAFETY: the caller's promise.
            (Self::Ours(communicator), None) => unsafe {
                communicator.all_reduce(tensor(input), tensor(output), kind, Op::Sum, stream)
            },
            // SAFETY: the caller's promise.
            (Self::Nccl(nccl), _) => unsafe { nccl.all_reduce(input, output, count, kind, stream) },
        }
    }

    fn wait(&mut self, stream: Stream) -> Result<()> {
        match self {
            Self::Ours(communicator) => communicator.wait(stream),
            Self::Nccl(nccl) => nccl.device().synchronize(stream),
        }
    }
}

/// Buffers of four times the L2, through which the calls rotate, and what was captured.
pub struct Stage {
    device: Arc<dyn Device>,
    stream: Stream,
    input: Address,
    output: Address,
    room: u64,
    events: [Event; 2],
    shape: Option<Shape>,
    graph: Option<Graph>,
    product: Option<Product>,
}

impl Stage {
    /// `largest` is the longest tensor that will be asked for.
    pub fn new(side: &Side, largest: u64) -> Result<Self> {
        let device = side.device();
        let room = largest.max(4 * device.facts().l2_bytes).next_multiple_of(1 << 20);
        let (input, output) = (device.alloc(room)?, device.alloc(room)?);
        // bf16 values of moderate size, all bits used.
        let block = super::numbers::fill(Kind::BF16, 2 << 20, u64::from(std::process::id()));
        for at in (0..room).step_by(block.len()) {
            let len = (room - at).min(block.len() as u64) as usize;
            device.write(input + at, &block[..len])?;
        }
        Ok(Self {
            stream: device.stream()?,
            events: [device.event(true)?, device.event(true)?],
            device,
            input,
            output,
            room,
            shape: None,
            graph: None,
            product: None,
        })
    }

    fn enqueue(&self, side: &mut Side, shape: &Shape, kind: Kind, calls: u32) -> Result<()> {
        let slots = (self.room / shape.bytes.max(256).next_multiple_of(256)).max(1);
        // Far apart, so that calls in a row do not find each other's lines.
        let spread = (slots / u64::from(calls.max(1))).max(1);
        for call in 0..u64::from(calls) {
            let at = (call * spread % slots) * shape.bytes.max(256).next_multiple_of(256);
            let output = if shape.in_place { self.input } else { self.output };
            // SAFETY: both buffers are as long as `room`, and live as long as the process.
            unsafe {
                side.sum(self.input + at, output + at, shape.bytes / kind.size() as u64, kind, shape.candidate, self.stream)
            }?;
        }
        Ok(())
    }

    pub fn prepare(&mut self, side: &mut Side, shape: Shape) -> Result<(), Failure> {
        let kind = kind(&shape.kind)?;
        if let Some(graph) = self.graph.take() {
            self.device.forget(graph)?;
        }
        self.enqueue(side, &shape, kind, 2)?;
        side.wait(self.stream)?;
        if shape.graph {
            self.device.begin_capture(self.stream)?;
            let captured = self.enqueue(side, &shape, kind, shape.calls);
            let graph = self.device.end_capture(self.stream);
            captured?;
            let graph = graph?;
            self.graph = Some(graph);
            self.device.replay(graph, self.stream)?;
            side.wait(self.stream)?;
        }
        self.shape = Some(shape);
        Ok(())
    }

    /// Microseconds a call. The calls before the first event bring the ranks together.
    pub fn measure(&mut self, side: &mut Side) -> Result<f64, Failure> {
        let Some(shape) = self.shape.clone() else { return Err(Failure::Use("nothing was prepared".into())) };
        let kind = kind(&shape.kind)?;
        let once = |side: &mut Side| match self.graph {
            Some(graph) => self.device.replay(graph, self.stream),
            None => self.enqueue(side, &shape, kind, shape.calls),
        };
        once(side)?;
        self.device.record(self.events[0], self.stream)?;
        for _ in 0..shape.replays {
            once(side)?;
        }
        self.device.record(self.events[1], self.stream)?;
        side.wait(self.stream)?;
        Ok(self.device.between(self.events[0], self.events[1])? / f64::from(shape.calls * shape.replays))
    }
}

impl Stage {
    /// Calls of this shape alone, products alone, and both at once.
    pub fn beside(&mut self, side: &mut Side, shape: Shape, replays: u32) -> Result<Beside, Failure> {
        self.prepare(side, shape)?;
        let alone = self.measure(side)?;
        if self.product.is_none() {
            self.product = Some(Product::new(&self.device)?);
        }
        let (Some(product), Some(shape)) = (&self.product, self.shape.clone()) else {
            return Err(Failure::Run("nothing was prepared".into()));
        };
        product.enqueue(5)?;
        product.took()?;
        product.enqueue(PRODUCTS)?;
        let product_alone = product.took()? / f64::from(PRODUCTS);
        let again = |stage: &Self, side: &mut Side| match stage.graph {
            Some(graph) => stage.device.replay(graph, stage.stream),
            None => stage.enqueue(side, &shape, Kind::BF16, shape.calls),
        };
        if replays == 0 {
            return Ok(Beside { alone, product_alone, ..Beside::default() });
        }
        again(self, side)?;
        side.wait(self.stream)?;
        product.enqueue(PRODUCTS)?;
        self.device.record(self.events[0], self.stream)?;
        for _ in 0..replays {
            again(self, side)?;
        }
        self.device.record(self.events[1], self.stream)?;
        let product_beside = product.took()? / f64::from(PRODUCTS);
        side.wait(self.stream)?;
        let beside = self.device.between(self.events[0], self.events[1])? / f64::from(replays * shape.calls);
        Ok(Beside { alone, beside, product_alone, product_beside })
    }
}

/// Some tens of milliseconds, against which the ranks' difference in starting is small.
pub const PRODUCTS: u32 = 40;

pub fn kind(name: &str) -> Result<Kind, Failure> {
    Kind::ALL.into_iter().find(|k| k.name() == name).ok_or_else(|| Failure::Use(format!("there is no element type {name}")))
}
