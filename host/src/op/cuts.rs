//! What the cut of transitions did in a forward step, as its kernels noted it.

use bytemuck::Zeroable;
use kernels_gpu::params::{Array, Cut, Matrix, Tensor as Param};
use kernels_gpu::protocol::ChannelLayout;
use kernels_gpu::tile::host::Checker;

use super::CutReport;
use super::parts::Walk;
use super::step::Step;
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
    rows: usize,
    /// What was walked with columns of M; nothing in exact mode.
    walks: Vec<Walk>,
}

impl Rows {
    /// Of a forward step.
    pub fn of(step: &Step<'_>) -> Self {
        let rows = step.rows();
        let corrected = |walk: &Walk| rows > 0 && walk.lane.is_some();
        Self {
            layout: step.layout,
            hv: step.dims.hv,
            rows,
            walks: step.walks().into_iter().filter(corrected).collect(),
        }
    }

    /// Rows: lanes and value heads.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// What is corrected; all of it has a lane.
    pub fn walks(&self) -> &[Walk] {
        &self.walks
    }

    /// Entries of the table.
    pub fn entries(&self) -> usize {
        self.rows * self.layout.blocks() as usize
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
        for (walk, lane) in rows.walks.iter().filter_map(|walk| Some((walk, walk.lane?))) {
            let chunks = walk.chunks as u64;
            for (head, block) in (0..self.hv).flat_map(|head| (0..self.layout.blocks()).map(move |block| (head, block)))
            {
                let cut = self.of(lane, head, block);
                report.largest_bound = report.largest_bound.max(cut.bound);
                if !self.layout.is_state(block) {
                    report.m_chunks += chunks;
                    report.m_chunks_walked += chunks - u64::from(cut.dropped);
                }
            }
        }
    }

    /// Tells the checker which rows of `o_local` and `q_tilde` nobody had to write.
    pub fn excuse(&self, checker: &Checker, rows: &Rows, chunk: usize, o_local: &Param, q_tilde: &Param) {
        let (hv, k, v) = (self.hv, self.layout.k as usize, self.layout.v as usize);
        for (walk, lane) in rows.walks.iter().filter_map(|walk| Some((walk, walk.lane?))) {
            for (head, block) in (0..hv).flat_map(|head| (0..self.layout.blocks()).map(move |block| (head, block))) {
                let walked = walk.chunks - self.of(lane, head, block).dropped as usize;
                let first = (walked * chunk).min(walk.len);
                let (column, count) = self.layout.columns(block);
                let (tensor, width) = if self.layout.is_state(block) { (o_local, v) } else { (q_tilde, k) };
                let offset = ((walk.start + first) * hv + head) * width + column as usize;
                let rows: Matrix = tensor.matrix(offset, walk.len - first, count as usize, hv * width, 1);
                checker.excuse(&rows);
            }
        }
    }
}
