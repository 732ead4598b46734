// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which algorithm a call uses: a pure function of what all ranks know, so that they agree without talking.

use super::Executor;
use crate::{
    link::Links,
    plan::{Algorithm, Collective},
};

impl<L: Links> Executor<L> {
    pub(super) fn choose(&self, collective: Collective, bytes: usize, registered: bool) -> Algorithm {
        use {Algorithm as A, Collective as C};
        let small = bytes <= self.options.one_shot_up_to;
        let default = match collective {
            C::AllReduce => {
                if small {
                    A::OneShot
                } else if registered {
                    A::Direct
                } else {
                    A::TwoShot
                }
            }
            C::ReduceScatter | C::AllGather | C::AllToAll => A::TwoShot,
            C::Reduce | C::Broadcast => {
                if small {
                    A::Star
                } else {
                    A::TwoShot
                }
            }
            C::SendReceive | C::Barrier => A::OneShot,
        };
        match self.options.algorithm {
            Some(asked) if exists(collective, asked, registered) => asked,
            _ => default,
        }
    }
}

/// Whether the collective has the algorithm, given the buffers.
fn exists(collective: Collective, algorithm: Algorithm, registered: bool) -> bool {
    use crate::plan::{Shape, Tree, build};
    (registered || algorithm != Algorithm::Direct)
        && build(collective, algorithm, Shape::new(1, 0, 1), 0, &Tree::flat(1)).is_some()
}
