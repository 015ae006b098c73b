//! `fix_out`: what depends on other PEs. Merges the state before each segment that began elsewhere, and adds
//! its share to the outputs.
//!
//! ```text
//! S_in  = S of the sequence's first PE, then for each later one before this: S_in <- S + M S_in
//! o     = o_local + q-tilde S_in
//! S_out = S_own + M_own S_in                       where the sequence ends here
//! ```
//! Transposed as in the scan: S^T is `[64, K]` for a column block, M^T `[K, K]`, so S_new^T = S^T + S_in^T M^T.
//! In a backward step S is the gradient of a state, later PEs take the place of earlier ones, and the map is the
//! transpose: S_in <- S + M^T S_in.
//!
//! Blocks of M may be missing, and rows of q-tilde of a segment's last chunks, where they are too small to matter (see
//! [`crate::cut`]): then there is nothing to add. A source whose M is missing altogether makes those before it superfluous, and they
//! are not waited for.
//!
//! Segments that are walked in parts (see [`crate::params::Segment`]) are merged in the same way, see `parts`.
//!
//! The only kernel that waits for other PEs (outside exact mode). Items come by ticket; the one that merges a
//! column block precedes those that use its result, so a block only ever waits for blocks that already run.

mod parts;

pub use parts::join_parts;

use crate::comm::{Port, STEP_FIX, Sources};
use crate::cut;
use crate::element::DtypeCode;
use crate::params::{Chunk, Cut, FixItem, FixParams, FixPass, Matrix, NONE, Segment, StampKind};
use crate::scan::state_columns;
use crate::tile::{Acc, BLOCK_COLUMNS, OperandElement, RESERVED_BYTES, Shared, Warpgroup, share_of, tile_bytes};

/// Warpgroups in a block of the correction.
pub const WARPGROUPS: usize = 2;

/// Bytes of shared memory of a block.
pub const fn shared_bytes(k: usize, chunk: usize, element: usize) -> usize {
    // Narrow operands come in pairs, see `Tiles`.
    let parts = if element == 4 { 1 } else { 2 };
    let own = parts * tile_bytes(BLOCK_COLUMNS, BLOCK_COLUMNS, element) + tile_bytes(chunk, BLOCK_COLUMNS, element);
    RESERVED_BYTES + tile_bytes(BLOCK_COLUMNS, k, 4) + parts * tile_bytes(BLOCK_COLUMNS, k, element) + WARPGROUPS * own
}

/// Tiles of the block: the state; and of each warpgroup: a square of M or rows of q-tilde.
///
/// Rounding S_in to an operand before every product with M would round the state itself once per PE of the sequence,
/// and these errors add up over the PEs. So narrow operands come in pairs, the rounded value and the rest.
pub(crate) struct Tiles<E> {
    /// S_in^T, `[64,K]`.
    state: Shared<f32>,
    /// S_in^T as an operand.
    pub(crate) operand: Shared<E>,
    /// What `operand` has lost of the state, as an operand; unused if operands are f32.
    rest: Shared<E>,
    /// A `[64,64]` part of M^T.
    m: Shared<E>,
    /// What `m` has lost, if M is f32 and operands are not.
    m_rest: Shared<E>,
    /// A `[C,64]` part of q-tilde.
    q_tilde: Shared<E>,
}

impl<E: OperandElement> Tiles<E> {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn new(wg: &mut Warpgroup<'_>, p: &FixParams) -> Self {
        let (c, k) = (p.tables.sizes.chunk as usize, p.tables.sizes.k as usize);
        // A copy of the state also for f32: one warpgroup still reads it while another stores its part of the next state.
        let operand = wg.shared(BLOCK_COLUMNS, k);
        let m = wg.private(BLOCK_COLUMNS, BLOCK_COLUMNS);
        let tiles = Self {
            state: wg.shared(BLOCK_COLUMNS, k),
            operand,
            rest: if E::WIDE { operand } else { wg.shared(BLOCK_COLUMNS, k) },
            m,
            m_rest: if E::WIDE { m } else { wg.private(BLOCK_COLUMNS, BLOCK_COLUMNS) },
            q_tilde: wg.private(c, BLOCK_COLUMNS),
        };
        wg.expect_shared(shared_bytes(k, c, E::CODE.size()));
        tiles
    }

    /// The rows of a place.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of(&self, at: &Place) -> Self {
        Self {
            state: self.state.row_range(0, at.count),
            operand: self.operand.row_range(0, at.count),
            rest: self.rest.row_range(0, at.count),
            ..*self
        }
    }
}

/// An item's place: which state, and which 64 columns of it.
pub(crate) struct Place {
    pub(crate) item: FixItem,
    pub(crate) segment: Segment,
    /// Row of the channel.
    row: u32,
    /// First column of V and number of columns.
    pub(crate) first: usize,
    count: usize,
    /// Chunks of the item whose outputs are to be corrected, or at least rounded; the others are complete.
    pub(crate) corrected: u32,
    /// Of these, chunks that need the state.
    pub(crate) needing: u32,
}

impl Place {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of(wg: &Warpgroup<'_>, p: &FixParams, item: FixItem) -> Self {
        let segment: Segment = wg.read(p.tables.segments, item.segment as usize);
        let (first, count) = p.channel.layout.columns(item.block);
        let row = segment.receive_lane.wrapping_mul(p.tables.sizes.hv).wrapping_add(item.head);
        Self { item, segment, row, first: first as usize, count: count as usize, corrected: 0, needing: 0 }
    }

    /// Of `chunks`, the first chunks of the segment, how many belong to the item.
    fn of_item(&self, chunks: u32) -> u32 {
        chunks.saturating_sub(self.item.first_chunk).min(self.item.chunks)
    }

    /// What became of column block `block` of the row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn cut(&self, wg: &Warpgroup<'_>, p: &FixParams, block: u32) -> Cut {
        cut::read(wg, p.cuts, self.row as usize * p.channel.layout.blocks() as usize + block as usize)
    }

    /// Chunks of the item with rows of q-tilde of block `i` of M.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(crate) fn with_block(&self, wg: &Warpgroup<'_>, p: &FixParams, i: u32) -> u32 {
        let cut = self.cut(wg, p, p.channel.layout.s_blocks() + i);
        self.of_item(self.segment.chunks - cut.dropped).min(self.corrected)
    }

    /// Row of the item's head in a lane.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn row_of(&self, p: &FixParams, lane: u32) -> u32 {
        lane.wrapping_mul(p.tables.sizes.hv).wrapping_add(self.item.head)
    }
}

/// How outputs are corrected, once the state is there.
pub(crate) trait Correction<E> {
    /// o = o_local + q-tilde S_in for the item's chunks, each warpgroup its own.
    fn correct(wg: &mut Warpgroup<'_>, p: &FixParams, at: &Place, t: &Tiles<E>);
}

/// With the common tile operations.
struct Portable;

impl<E: OperandElement> Correction<E> for Portable {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn correct(wg: &mut Warpgroup<'_>, p: &FixParams, at: &Place, t: &Tiles<E>) {
        correct(wg, p, at, t);
    }
}

/// Persistent grid: blocks take items by ticket until there are no more.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn fix_out<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &FixParams) {
    fix_out_by::<E, Portable>(wg, p);
}

/// [`fix_out`], corrected by `B`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) fn fix_out_by<E: OperandElement, B: Correction<E>>(wg: &mut Warpgroup<'_>, p: &FixParams) {
    let tiles = Tiles::<E>::new(wg, p);
    let m_dtype = DtypeCode::from_code(p.m_dtype);
    let port = Port { channel: &p.channel, trace: &p.trace, step: STEP_FIX, m_dtype };
    loop {
        let ticket = wg.next_ticket(p.ticket);
        if ticket >= p.items.len || !wg.sync_and(!port.trapped(wg)) {
            return;
        }
        let item: FixItem = wg.read(p.items, ticket as usize);
        let mut at = Place::of(wg, p, item);
        let segment = at.segment;
        if item.chunks > 0 {
            at.corrected = at.of_item(segment.chunks - at.cut(wg, p, item.block).dropped);
            for i in 0..p.channel.layout.m_blocks() {
                at.needing = at.needing.max(at.with_block(wg, p, i));
            }
        }
        let t = tiles.of(&at);
        let merges = item.pass == FixPass::Merges as u32;
        let ready = if merges { merge(wg, p, &port, &at, &t) } else { at.needing == 0 || fetch(wg, p, &port, &at, &t) };
        if !ready {
            return;
        }
        let start = wg.clock();
        if at.corrected > 0 {
            B::correct(wg, p, &at, &t);
        }
        let end = wg.clock();
        wg.stamp_block(&p.trace, StampKind::FixOut, [start, end], [item.head, item.first_chunk], 0);
        if merges && segment.final_row != NONE && p.finals.is_present() {
            final_state(wg, p, &at, &t);
        }
    }
}

/// Waits for the summaries of all PEs before this one, composes them, stores the state, or the states before the segment's
/// parts, and tells the other blocks. False, on all warpgroups, if a summary did not arrive in time.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn merge<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &FixParams, port: &Port<'_>, at: &Place, t: &Tiles<E>) -> bool {
    let sources = Sources { table: p.tables.sources, first: at.segment.first_source, count: at.segment.sources };
    let mut i = 0;
    // The other PEs, then this one's parts but the last.
    while i + 1 < sources.count + at.segment.parts {
        let start = wg.clock();
        let is_part = i >= sources.count;
        let part = parts::part(wg, p, at, i.saturating_sub(sources.count));
        let mut from = 0;
        let missing;
        if is_part {
            missing = part.missing(wg, p);
            keep(wg, p, at, t, part.row);
        } else {
            let next = if wg.index() == 0 { port.await_source(wg, sources, i, at.row, at.item.block) } else { None };
            let next = wg.share_block(next.map_or(u64::MAX, u64::from)) as u32;
            if next == u32::MAX {
                return false;
            }
            if next > i {
                i = next;
                continue;
            }
            from = sources.get(wg, i);
            // The first PE of a sequence sends its state, which is complete: no M.
            missing = if i == 0 { port.all_blocks() } else { port.empty_blocks(wg, from, at.row) };
            if missing != port.all_blocks() {
                to_operand(wg, t);
            }
        }
        let block = |wg: &Warpgroup<'_>, block| match (is_part, p.channel.layout.is_state(block)) {
            (false, _) => port.received(wg, from, at.row, block),
            (true, true) => part.summary(p, block),
            (true, false) => part.transition(p, block),
        };
        let s = block(wg, at.item.block);
        each_slab(wg, p, |wg, channel, width| {
            let acc = compose(wg, p, t, Some(s), missing, channel, width, block);
            acc.store(wg, t.state.columns(channel, width));
        });
        let end = wg.clock();
        wg.stamp_block(&p.trace, StampKind::Merge, [start, end], [at.item.head, at.item.block], 0);
        i += 1;
    }
    let last = parts::last(wg, p, at);
    keep(wg, p, at, t, last.row);
    // All of the states are stored, and all of the slots are read, before one warpgroup says so.
    if wg.index() == 0 {
        port.publish_merged(wg, at.row, at.item.block);
        port.finish_reading(wg, at.row, sources.table, sources.first, sources.count);
    }
    true
}

/// Stores the state of row `row`, and makes it an operand; ends with a barrier of the block.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn keep<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &FixParams, at: &Place, t: &Tiles<E>, row: u32) {
    to_operand(wg, t);
    let (first, rows) = share_of(at.count, wg.count(), wg.index());
    if rows > 0 {
        wg.store_rows(state_in(p, at, row).row_range(first, rows), t.state.row_range(first, rows));
    }
    wg.sync_block();
}

/// The merged state `[count, K]` of row `row` in global memory.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn state_in(p: &FixParams, at: &Place, row: u32) -> Matrix {
    let (k, v) = (p.tables.sizes.k as usize, p.tables.sizes.v as usize);
    p.state_in.matrix((row as usize * v + at.first) * k, at.count, k, k, 1)
}

/// Takes the state that another block merged, or an earlier launch. False, on all warpgroups, if it did not come in time.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn fetch<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &FixParams, port: &Port<'_>, at: &Place, t: &Tiles<E>) -> bool {
    let lane = at.segment.await_lane;
    let merged = wg.index() != 0 || lane == NONE || port.await_merged(wg, at.row_of(p, lane), at.item.block);
    if !wg.sync_and(merged) {
        return false;
    }
    let (first, rows) = share_of(at.count, wg.count(), wg.index());
    if rows > 0 {
        wg.load(t.operand.row_range(first, rows), state_in(p, at, at.row).row_range(first, rows));
    }
    wg.sync_block();
    true
}

/// operand = state, rounded, and rest = state - operand; between two block barriers.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn to_operand<E: OperandElement>(wg: &mut Warpgroup<'_>, t: &Tiles<E>) {
    wg.sync_block();
    let (first, rows) = share_of(t.state.rows(), wg.count(), wg.index());
    if rows > 0 {
        let (operand, state) = (t.operand.row_range(first, rows), t.state.row_range(first, rows));
        if E::WIDE {
            wg.convert(operand, state, |x| x);
        } else {
            wg.split(operand, t.rest.row_range(first, rows), state);
        }
    }
    wg.sync_block();
}

/// Calls `f(channel, width)` for this warpgroup's slabs of K.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn each_slab(wg: &mut Warpgroup<'_>, p: &FixParams, mut f: impl FnMut(&mut Warpgroup<'_>, usize, usize)) {
    let k = p.tables.sizes.k as usize;
    let mut channel = wg.index() * BLOCK_COLUMNS;
    while channel < k {
        f(wg, channel, (k - channel).min(BLOCK_COLUMNS));
        channel += wg.count() * BLOCK_COLUMNS;
    }
}

/// Columns `channel ..` of s^T + S_in^T M^T, or s^T + S_in^T M if `m_transposed`, without s if there is none and without the blocks
/// of M that are `missing` (bit i for the i-th). Of narrow operands, the product of the two rests is left out: it is below f32 rounding.
#[allow(clippy::too_many_arguments)]
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn compose<E: OperandElement>(
    wg: &mut Warpgroup<'_>,
    p: &FixParams,
    t: &Tiles<E>,
    s: Option<Matrix>,
    missing: u32,
    channel: usize,
    width: usize,
    m_block: impl Fn(&Warpgroup<'_>, u32) -> Matrix,
) -> Acc {
    let layout = &p.channel.layout;
    let mut acc = Acc::zeros(t.state.rows(), width);
    if let Some(s) = s {
        acc.add_rows(wg, s.columns(channel, width));
    }
    for i in 0..layout.m_blocks() {
        // Rows of what lies there are columns of M.
        let slab = if p.m_transposed != 0 { (channel / BLOCK_COLUMNS) as u32 } else { i };
        if missing >> slab & 1 == 0 {
            let block = layout.s_blocks() + i;
            let (first, count) = layout.columns(block);
            let (first, count) = (first as usize, count as usize);
            let source = if p.m_transposed != 0 {
                m_block(wg, layout.s_blocks() + slab).columns(first, count)
            } else {
                m_block(wg, block).columns(channel, width)
            };
            let (m, m_rest) = (t.m.part(0, 0, source.rows, source.cols), t.m_rest.part(0, 0, source.rows, source.cols));
            let m_is_wider = !E::WIDE && source.tensor.dtype() == DtypeCode::F32;
            wg.sync();
            if m_is_wider {
                wg.load_split(m, m_rest, source);
            } else {
                wg.load(m, source);
            }
            wg.sync();
            let (m, m_rest) = if p.m_transposed != 0 { (m.t(), m_rest.t()) } else { (m, m_rest) };
            acc.mma(wg, t.operand.columns(first, count), m);
            if !E::WIDE {
                acc.mma(wg, t.rest.columns(first, count), m);
            }
            if m_is_wider {
                acc.mma(wg, t.operand.columns(first, count), m_rest);
            }
        }
    }
    acc
}

/// o = o_local + q-tilde S_in for the item's chunks, each warpgroup its own.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn correct<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &FixParams, at: &Place, t: &Tiles<E>) {
    let (c, k, v) = (t.q_tilde.rows(), p.tables.sizes.k as usize, p.tables.sizes.v as usize);
    let hv = p.tables.sizes.hv as usize;
    let mut index = wg.index() as u32;
    while index < at.corrected {
        let chunk_index = at.segment.first_chunk + at.item.first_chunk + index;
        let chunk: Chunk = wg.read(p.tables.chunks, chunk_index as usize);
        let token_head = chunk.token as usize * hv + at.item.head as usize;
        let len = chunk.len as usize;
        let mut o = Acc::zeros(at.count, c);
        o.add_global(wg, p.o_local.matrix(token_head * v + at.first, at.count, len, 1, hv * v));
        let mut channel = 0;
        while channel < k {
            let width = (k - channel).min(BLOCK_COLUMNS);
            if index < at.with_block(wg, p, (channel / BLOCK_COLUMNS) as u32) {
                let q_tilde = t.q_tilde.columns(0, width);
                wg.sync();
                wg.load(q_tilde, p.q_tilde.matrix(token_head * k + channel, len, width, hv * k, 1));
                wg.sync();
                o.mma(wg, t.operand.columns(channel, width), q_tilde.t());
            }
            channel += width;
        }
        o.store_global(wg, p.o.matrix(token_head * v + at.first, at.count, len, 1, hv * v));
        index += wg.count() as u32;
    }
}

/// S_out = S_own + M_own S_in into the caller's final states, where S_in is the state before the last part.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn final_state<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &FixParams, at: &Place, t: &Tiles<E>) {
    let last = parts::last(wg, p, at);
    let (sizes, head) = (&p.tables.sizes, at.item.head);
    let target = state_columns(sizes, p.v_first != 0, &p.finals, at.segment.final_row, head, at.first, at.count);
    each_slab(wg, p, |wg, channel, width| {
        let mut acc = last.after(wg, p, t, at.item.block, channel, width);
        acc.store_global(wg, target.columns(channel, width));
    });
}
