//! What the cut of transitions did in a forward step, as its kernels noted it.

use kernels_gpu::params::{Cut, Matrix, Tensor as Param};
use kernels_gpu::protocol::ChannelLayout;
use kernels_gpu::tile::host::Checker;

use super::CutReport;
use crate::plan::RankPlan;

/// The kernels' table: for each receiving row (lane and value head) its blocks of S, then of M.
pub(super) struct Cuts {
    cuts: Vec<Cut>,
    layout: ChannelLayout,
    hv: usize,
}

impl Cuts {
    pub fn new(cuts: Vec<Cut>, layout: ChannelLayout, hv: usize) -> Self {
        Self { cuts, layout, hv }
    }

    /// Entries of the table of `rows` receiving rows.
    pub fn len(rows: usize, layout: &ChannelLayout) -> usize {
        rows * layout.blocks() as usize
    }

    fn of(&self, lane: usize, head: usize, block: u32) -> &Cut {
        &self.cuts[(lane * self.hv + head) * self.layout.blocks() as usize + block as usize]
    }

    fn m_blocks(&self) -> std::ops::Range<u32> {
        self.layout.s_blocks()..self.layout.blocks()
    }

    /// Which blocks of M are empty, by receiving row: bit i for the i-th.
    pub fn empty(&self) -> Vec<u32> {
        let mask = |row: &[Cut]| {
            let m = &row[self.layout.s_blocks() as usize..];
            m.iter().enumerate().fold(0, |mask, (i, cut)| mask | (cut.empty & 1) << i)
        };
        self.cuts.chunks_exact(self.layout.blocks() as usize).map(mask).collect()
    }

    /// The same by sending row, of the segments of `rank`; nothing is empty where a segment receives nothing.
    pub fn empty_to_send(&self, rank: &RankPlan) -> Vec<u32> {
        let by_row = self.empty();
        let mut empty = vec![0; rank.sending().count() * self.hv];
        for (segment, send) in rank.sending() {
            if let Some(receive) = &segment.receive {
                let (to, from) = (send.lane * self.hv, receive.lane * self.hv);
                empty[to..to + self.hv].copy_from_slice(&by_row[from..from + self.hv]);
            }
        }
        empty
    }

    /// Adds what there is to say to `report`; chunks have `chunk` tokens.
    pub fn count(&self, report: &mut CutReport, rank: &RankPlan, chunk: usize) {
        for (segment, receive) in rank.receiving() {
            let chunks = segment.len.div_ceil(chunk) as u64;
            for (head, block) in (0..self.hv).flat_map(|head| self.m_blocks().map(move |block| (head, block))) {
                report.m_chunks += chunks;
                report.m_chunks_walked += chunks - u64::from(self.of(receive.lane, head, block).dropped);
            }
        }
        report.largest_bound = self.cuts.iter().fold(report.largest_bound, |most, cut| most.max(cut.bound));
    }

    /// Tells the checker which rows of `o_local` and `q_tilde` nobody had to write.
    pub fn excuse(&self, checker: &Checker, rank: &RankPlan, chunk: usize, o_local: &Param, q_tilde: &Param) {
        let (hv, k, v) = (self.hv, self.layout.k as usize, self.layout.v as usize);
        for (segment, receive) in rank.receiving() {
            let chunks = segment.len.div_ceil(chunk);
            for (head, block) in (0..hv).flat_map(|head| (0..self.layout.blocks()).map(move |block| (head, block))) {
                let walked = chunks - self.of(receive.lane, head, block).dropped as usize;
                let first = (walked * chunk).min(segment.len);
                let (column, count) = self.layout.columns(block);
                let (tensor, width) = if self.layout.is_state(block) { (o_local, v) } else { (q_tilde, k) };
                let offset = ((segment.start + first) * hv + head) * width + column as usize;
                let rows: Matrix = tensor.matrix(offset, segment.len - first, count as usize, hv * width, 1);
                checker.excuse(&rows);
            }
        }
    }
}
