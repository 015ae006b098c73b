//! What the cut of transitions did in a forward step, as its kernels noted it.

use bytemuck::Zeroable;
use kernels_gpu::params::{Array, Cut, Matrix, Tensor as Param};
use kernels_gpu::protocol::ChannelLayout;
use kernels_gpu::tile::host::Checker;

use super::{Config, CutReport, Mode};
use crate::exec::{ExecError, Executor, KeptMemory};
use crate::plan::RankPlan;

/// Words of 4 bytes of a note.
pub(super) const CUT_WORDS: usize = size_of::<Cut>() / size_of::<f32>();

/// Device memory for the table in which the latest step's kernels note their cuts.
pub(super) struct CutTable<X: Executor> {
    /// The last is in use; captured steps may still write those that were too small.
    memory: Vec<X::Memory>,
}

impl<X: Executor> Default for CutTable<X> {
    fn default() -> Self {
        Self { memory: Vec::new() }
    }
}

impl<X: Executor> CutTable<X> {
    /// Where the notes of a step go, `entries` of them.
    ///
    /// # Errors
    /// [`ExecError`] if there is no memory for them; [`ExecError::NotWarm`] if it cannot be had now.
    pub fn place(&mut self, exec: &mut X, entries: usize) -> Result<Array, ExecError> {
        if entries == 0 {
            return Ok(Array::empty());
        }
        let bytes = entries * size_of::<Cut>();
        if self.memory.last().is_none_or(|memory| memory.bytes() < bytes) {
            if exec.captures() {
                return Err(ExecError::NotWarm { what: "the table of cuts" });
            }
            self.memory.push(exec.keep(bytes.next_power_of_two())?);
        }
        let addr = self.memory.last_mut().map_or(0, KeptMemory::address);
        Ok(Array { addr, len: entries as u64 })
    }

    /// The notes of the latest step, which had `rows`, after its launches.
    ///
    /// # Errors
    /// [`ExecError`] if a launch failed.
    pub fn read(&mut self, exec: &mut X, rows: &Rows) -> Result<Cuts, ExecError> {
        let cuts = match self.memory.last_mut() {
            Some(memory) => read(exec, memory, rows.entries())?,
            None => Vec::new(),
        };
        Ok(Cuts { cuts, layout: rows.layout, hv: rows.hv })
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        self.memory.iter().map(KeptMemory::bytes).sum()
    }
}

/// The first `entries` notes in `memory`, after all launches so far.
///
/// # Errors
/// [`ExecError`] if a launch failed.
pub(super) fn read<X: Executor>(exec: &mut X, memory: &mut X::Memory, entries: usize) -> Result<Vec<Cut>, ExecError> {
    let mut cuts = vec![<Cut as Zeroable>::zeroed(); entries];
    exec.read(memory, 0, bytemuck::cast_slice_mut(&mut cuts))?;
    Ok(cuts)
}

/// What the rows of a step's table are of.
#[derive(Clone, Debug)]
pub(super) struct Rows {
    layout: ChannelLayout,
    hv: usize,
    /// Lane and chunks of each receiving segment; none in exact mode, in which nothing is corrected.
    segments: Vec<(usize, u64)>,
}

impl Rows {
    pub fn of(rank: &RankPlan, layout: ChannelLayout, hv: usize, config: &Config) -> Self {
        let receiving = rank.receiving().filter(|_| config.mode != Mode::Exact);
        let chunks = |len: usize| len.div_ceil(config.chunk) as u64;
        Self { layout, hv, segments: receiving.map(|(s, receive)| (receive.lane, chunks(s.len))).collect() }
    }

    /// Rows: receiving lanes and value heads.
    pub fn rows(&self) -> usize {
        self.segments.len() * self.hv
    }

    /// Entries of the table.
    pub fn entries(&self) -> usize {
        self.rows() * self.layout.blocks() as usize
    }
}

/// Which blocks of M are empty in a table, by receiving row: bit i for the i-th.
pub(super) fn empty(cuts: &[Cut], layout: &ChannelLayout) -> Vec<u32> {
    let mask = |row: &[Cut]| {
        let m = &row[layout.s_blocks() as usize..];
        m.iter().enumerate().fold(0, |mask, (i, cut)| mask | (cut.empty & 1) << i)
    };
    cuts.chunks_exact(layout.blocks() as usize).map(mask).collect()
}

/// The kernels' table: for each receiving row (lane and value head) its blocks of S, then of M.
pub(super) struct Cuts {
    cuts: Vec<Cut>,
    layout: ChannelLayout,
    hv: usize,
}

impl Cuts {
    fn of(&self, lane: usize, head: usize, block: u32) -> &Cut {
        &self.cuts[(lane * self.hv + head) * self.layout.blocks() as usize + block as usize]
    }

    fn m_blocks(&self) -> std::ops::Range<u32> {
        self.layout.s_blocks()..self.layout.blocks()
    }

    /// Which blocks of M are empty, bit i for the i-th, by sending row of the segments of `rank`; nothing is empty where a segment receives nothing.
    pub fn empty_to_send(&self, rank: &RankPlan) -> Vec<u32> {
        let by_row = empty(&self.cuts, &self.layout);
        let mut empty = vec![0; rank.sending().count() * self.hv];
        for (segment, send) in rank.sending() {
            if let Some(receive) = &segment.receive {
                let (to, from) = (send.lane * self.hv, receive.lane * self.hv);
                empty[to..to + self.hv].copy_from_slice(&by_row[from..from + self.hv]);
            }
        }
        empty
    }

    /// Adds what there is to say to `report`.
    pub fn count(&self, report: &mut CutReport, rows: &Rows) {
        for &(lane, chunks) in &rows.segments {
            for (head, block) in (0..self.hv).flat_map(|head| self.m_blocks().map(move |block| (head, block))) {
                report.m_chunks += chunks;
                report.m_chunks_walked += chunks - u64::from(self.of(lane, head, block).dropped);
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
