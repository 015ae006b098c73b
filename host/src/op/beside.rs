//! `prep` beside a walk: see [`Beside`].
//!
//! A walk goes through the chunks one after the other and takes a block for 64 columns of each head, which is half of the
//! multiprocessors of an H200 for 32 heads; the others have nothing to do meanwhile. `prep` takes all of them, for as long. So a step
//! prepares only as many chunks before the walk as it must for the rest to be ready when the walk comes to them.

use kernels_gpu::params::{Array, Beside, BesidePass, PrepParams};

use super::step::{Common, Step};
use crate::exec::{Blocks, Body, ExecError, Executor, Grid, Kernel, Overlap, Scratch};
use crate::inputs::Op;
use crate::tensor::Dtype;

/// Of what the walk and `prep` were measured to take alone on an H200 (K = V = 128, chunks of 64, bodies for Hopper): microseconds of
/// a chunk of a walk, and of a chunk and head of `prep` if it had one multiprocessor.
const WALK_US: f64 = 1.15;
/// See [`WALK_US`].
const fn prep_us(op: Op) -> f64 {
    match op {
        Op::Kda => 6.7,
        Op::Gdn => 4.1,
    }
}
/// Most of the chunks that are prepared beside a walk, and of the multiprocessors that the walk may take.
const MOST: f64 = 0.85;
/// See [`MOST`].
const MOST_TAKEN: f64 = 0.7;
/// Fewest chunks for which it is worth a launch more: `prep` goes in waves over the multiprocessors, and of few waves little can be
/// taken away. (32 heads and 32 chunks: KDA took 122 us before and 127 us beside, GDN 103 and 87 to 93 us.)
const fn fewest(op: Op) -> usize {
    match op {
        Op::Kda => 48,
        Op::Gdn => 24,
    }
}

/// A walk of more than so many multiprocessors of 100 and `prep` beside it ask for all that the memory gives; of that much data little is
/// left in the L2 cache, and long sequences are no faster, or slower: 32 heads and 32768 tokens of GDN took 1.04 ms before and 1.08 ms
/// beside, KDA 1.30 and 1.24 to 1.32 ms; with 8192 tokens 288 and 276 us, 370 and 350 us.
const MANY_TAKEN: f64 = 0.4;
/// See [`MANY_TAKEN`]: most chunks of such a walk.
const MOST_CHUNKS: usize = 256;

/// How many of `chunks` chunks of `hv` heads are prepared beside a walk of `blocks` blocks.
fn share(overlap: Overlap, op: Op, [chunks, hv, blocks, multiprocessors]: [usize; 4]) -> usize {
    let free = multiprocessors.saturating_sub(blocks);
    let taken = blocks as f64 / multiprocessors.max(1) as f64;
    let part = match overlap {
        Overlap::Never => return 0,
        // Whatever is asked for: what the walk waits for needs multiprocessors.
        _ if taken > MOST_TAKEN => return 0,
        Overlap::Percent(percent) => f64::from(percent) / 100.0,
        Overlap::Auto if chunks < fewest(op) => return 0,
        Overlap::Auto if taken > MANY_TAKEN && chunks > MOST_CHUNKS => return 0,
        Overlap::Auto => (WALK_US * free as f64 / (hv as f64 * prep_us(op))).min(MOST),
    };
    // One at least is there when the walk starts.
    ((part * chunks as f64) as usize).min(chunks.saturating_sub(1))
}

impl Step<'_> {
    /// How the `chunks` chunks of this PE are prepared before and beside a walk, from its end if `from_the_end`; all before it, where
    /// nothing else is worth it, or kernels do not run side by side.
    pub fn beside<X: Executor>(
        &self,
        exec: &mut X,
        (body, chunks): (Body, usize),
        from_the_end: bool,
    ) -> Result<Option<Beside>, ExecError> {
        let hv = self.dims.hv;
        let blocks = hv * self.layout.s_blocks() as usize;
        let numbers = [chunks, hv, blocks, exec.multiprocessors()];
        let beside = share(exec.overlap(), self.inputs.op, numbers);
        // Walks of several segments start in several places.
        if beside == 0 || body != Body::Hopper || self.rank().segments.len() != 1 || self.parts.most() > 1 {
            return Ok(None);
        }
        let words = beside * hv;
        let memory = exec.scratch(Scratch::Ready, 2 * words, Dtype::F32)?;
        Ok(Some(Beside {
            ready: Array { addr: memory.addr, len: words as u64 },
            first: (chunks - beside) as u32,
            chunks: chunks as u32,
            from_the_end: from_the_end.into(),
            pass: BesidePass::Only as u32,
        }))
    }
}

impl Common<'_> {
    /// `prep` of all chunks, and a walk: beside each other as `beside` says. `blocks` are those of `prep` and of the walk.
    pub fn launch_walk<X: Executor, W: Kernel>(
        &mut self,
        exec: &mut X,
        beside: Option<Beside>,
        [prep_blocks, walk_blocks]: [Blocks; 2],
        prep: &PrepParams,
        walk: &W,
    ) -> Result<(), ExecError> {
        let Some(beside) = beside else {
            self.launch(exec, prep_blocks, prep)?;
            return self.launch(exec, walk_blocks, walk);
        };
        let hv = prep.tables.sizes.hv;
        let part = |pass: BesidePass, chunks: u32| {
            let blocks = Blocks { grid: Grid::Blocks((chunks * hv) as usize), ..prep_blocks };
            (self.one(blocks), PrepParams { beside: Beside { pass: pass as u32, ..beside }, ..*prep })
        };
        let (before, before_params) = part(BesidePass::Before, beside.first);
        let (rest, rest_params) = part(BesidePass::Beside, beside.chunks - beside.first);
        let walk_launch = self.one(walk_blocks);
        self.launched.push(W::WITH_PREP);
        exec.launch_beside([(&before, &before_params), (&rest, &rest_params)], (&walk_launch, walk))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_prepared_beside_a_walk_that_leaves_multiprocessors_free() {
        let auto = |op, chunks, hv, blocks| share(Overlap::Auto, op, [chunks, hv, blocks, 132]);
        // 32 heads: 68 multiprocessors make 68 / 6.7 records in a microsecond, the walk takes 32 in 1.15.
        assert_eq!(auto(Op::Kda, 128, 32, 64), 46);
        assert_eq!(auto(Op::Gdn, 128, 32, 64), 76);
        assert_eq!(auto(Op::Kda, 128, 8, 16), 108, "few heads: all but a few chunks");
        assert_eq!(auto(Op::Kda, 128, 64, 128), 0, "no multiprocessor is free");
        assert_eq!(auto(Op::Kda, 47, 32, 64), 0, "too few chunks");
        assert_eq!(auto(Op::Kda, 512, 32, 64), 0, "all that the memory gives, for long");
        assert_eq!(auto(Op::Kda, 512, 16, 32), 435, "less than the memory gives");
    }

    #[test]
    fn the_first_chunk_is_always_prepared_before() {
        let asked = |overlap, chunks| share(overlap, Op::Kda, [chunks, 4, 8, 132]);
        assert_eq!(asked(Overlap::Percent(50), 5), 2);
        assert_eq!(asked(Overlap::Percent(100), 5), 4);
        assert_eq!((asked(Overlap::Percent(100), 1), asked(Overlap::Percent(100), 0)), (0, 0));
        assert_eq!(asked(Overlap::Never, 100), 0);
    }

    #[test]
    fn a_walk_that_takes_too_many_multiprocessors_waits_for_nothing() {
        for overlap in [Overlap::Auto, Overlap::Percent(50)] {
            assert_eq!(share(overlap, Op::Kda, [128, 64, 128, 132]), 0);
        }
    }
}
