// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the buffers of a rank hold, as symbols.

use std::{
    collections::{BTreeMap, HashMap},
    rc::Rc,
};

use super::Flaw;
use crate::{
    error::Rank,
    plan::{Collective, Plan},
};

/// An input chunk: whose, and from which element on.
type Term = (Rank, usize);

/// What a chunk holds: some inputs combined.
#[derive(Debug, Clone, PartialEq)]
pub struct Value {
    terms: Rc<[Term]>,
    /// Whether the inputs were combined one after the other in rank order.
    ordered: bool,
    finished: bool,
}

impl Value {
    fn input(rank: Rank, start: usize) -> Self {
        Self { terms: Rc::new([(rank, start)]), ordered: true, finished: false }
    }

    /// Whether it fits into the user's form without a rounding of its own.
    pub fn exact(&self) -> bool {
        self.finished || self.terms.len() <= 1
    }

    /// What a step makes of its sources.
    pub fn combine(values: Vec<Self>, finish: bool, reduces: bool) -> Result<Self, String> {
        if values.iter().any(|v| v.finished) && (values.len() > 1 || finish) {
            return Err("a finished result is combined again".into());
        }
        if values.len() > 1 && !reduces {
            return Err("this collective does not combine".into());
        }
        let finished = finish || values.iter().any(|v| v.finished);
        if let [one] = values.as_slice() {
            return Ok(Self { finished, ..one.clone() });
        }
        // Only the first operand of a chain may itself be a chain.
        let chain = values.iter().skip(1).all(|v| v.terms.len() == 1) && values.iter().all(|v| v.ordered);
        let terms: Rc<[Term]> = values.iter().flat_map(|v| v.terms.iter().copied()).collect();
        let ordered = chain && terms.windows(2).all(|w| w[0].0 < w[1].0);
        Ok(Self { terms, ordered, finished })
    }

    fn shifted(&self, by: usize) -> Self {
        Self { terms: self.terms.iter().map(|&(rank, start)| (rank, start + by)).collect(), ..self.clone() }
    }
}

/// One rank's buffers.
#[derive(Debug)]
pub struct Memory {
    rank: Rank,
    in_place: bool,
    output: BTreeMap<usize, (usize, Value)>,
    scratch: HashMap<(usize, usize), (usize, Value)>,
}

impl Memory {
    pub fn new(rank: Rank, in_place: bool) -> Self {
        Self { rank, in_place, output: BTreeMap::new(), scratch: HashMap::new() }
    }

    /// The last stored piece that begins before `end`, if it reaches into `start..end`.
    fn stored(&self, start: usize, end: usize) -> Option<(usize, &(usize, Value))> {
        self.output.range(..end).next_back().map(|(&s, piece)| (s, piece)).filter(|(s, (len, _))| s + len > start)
    }

    pub fn input(&self, start: usize, len: usize) -> Result<Value, String> {
        if self.in_place && self.stored(start, start + len).is_some() {
            return self.output(start, len).map_err(|_| "reads input that a result has partly replaced".into());
        }
        Ok(Value::input(self.rank, start))
    }

    pub fn output(&self, start: usize, len: usize) -> Result<Value, String> {
        match self.stored(start, start + len) {
            Some((s, (stored, value))) if s <= start && s + stored >= start + len => Ok(value.shifted(start - s)),
            _ => Err(format!("reads output {start}..{} before it was stored in one piece", start + len)),
        }
    }

    pub fn store_output(&mut self, start: usize, len: usize, value: Value) -> Result<(), String> {
        if len == 0 {
            return Ok(());
        }
        match self.stored(start, start + len) {
            Some((s, (stored, _))) if (s, *stored) != (start, len) => {
                Err(format!("stores output {start}..{} across pieces stored before", start + len))
            }
            _ => {
                self.output.insert(start, (len, value));
                Ok(())
            }
        }
    }

    pub fn scratch(&self, lane: usize, number: usize, len: usize) -> Result<Value, String> {
        match self.scratch.get(&(lane, number)) {
            Some((stored, value)) if *stored == len => Ok(value.clone()),
            _ => Err(format!("reads scratch {number} before {len} elements were stored there")),
        }
    }

    pub fn store_scratch(&mut self, lane: usize, number: usize, len: usize, value: Value) {
        self.scratch.insert((lane, number), (len, value));
    }

    /// Compares the whole output with what the collective promises; answers whether all was combined in rank order.
    pub fn verify(&self, plan: &Plan, in_place: bool) -> Result<bool, Flaw> {
        let wrong = |start, end, what: String| Err(Flaw::Wrong { rank: self.rank, start, end, what, in_place });
        let (mut next, mut ordered) = (0, true);
        for (&start, (len, value)) in &self.output {
            let end = start + len;
            if start != next {
                return wrong(next, start, "never stored".into());
            }
            next = end;
            let want = promised(plan, self.rank, start);
            let mut got = value.terms.to_vec();
            got.sort_unstable();
            // A piece must not span two blocks, or its end would be another rank's.
            let last: Vec<Term> = want.iter().map(|&(rank, first)| (rank, first + len - 1)).collect();
            if got != want || promised(plan, self.rank, end - 1) != last {
                return wrong(start, end, format!("holds the inputs {got:?} (rank, first element)"));
            }
            if value.finished != plan.collective.reduces() {
                return wrong(start, end, "not finished exactly once".into());
            }
            ordered &= value.ordered;
        }
        if next != plan.output {
            return wrong(next, plan.output, "never stored".into());
        }
        Ok(ordered)
    }
}

/// The input elements of which output element `at` consists, sorted.
fn promised(plan: &Plan, rank: Rank, at: usize) -> Vec<Term> {
    let (n, block) = (plan.ranks(), plan.shape.count.max(1));
    match plan.collective {
        Collective::AllReduce | Collective::Reduce => (0..n).map(|r| (r, at)).collect(),
        Collective::ReduceScatter => (0..n).map(|r| (r, rank * block + at)).collect(),
        Collective::AllGather => vec![(at / block, at % block)],
        Collective::AllToAll => vec![(at / block, rank * block + at % block)],
        Collective::Broadcast | Collective::SendReceive => vec![(plan.shape.root, at)],
        Collective::Barrier => vec![],
    }
}
