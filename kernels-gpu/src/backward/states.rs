//! `scan_states`: walks a segment's chunks in order once more, and keeps what gradients need: the state before each chunk and
//! v_new.
//!
//! As in [`crate::scan`], everything is transposed (V-first):
//! ```text
//! R^T  = v^T A'^T - S^T w^T                R = v_new
//! S^T <- S^T diag(decay) + R^T kg
//! ```
//! It starts from the initial state, or from the state that the forward pass received: no waits, no transition.

use crate::params::{Chunk, Matrix, NONE, ScanItem, Segment, Sizes, StampKind, StatesParams, Tensor};
use crate::scan::state_columns;
use crate::tile::{Acc, BLOCK_COLUMNS, OperandElement, RESERVED_BYTES, Shared, Warpgroup, share_of, tile_bytes};

/// Most warpgroups in a block; fewer where shared memory does not suffice.
pub const WARPGROUPS: usize = 2;

/// Bytes of shared memory of a block with `warpgroups` warpgroups, operands of `element` bytes.
pub const fn shared_bytes(k: usize, chunk: usize, element: usize, warpgroups: usize) -> usize {
    let operands = tile_bytes(chunk, k, element) + tile_bytes(chunk, chunk, element) + tile_bytes(1, k, 4);
    let rounded_state = if element == 4 { 0 } else { tile_bytes(BLOCK_COLUMNS, k, element) };
    let v_and_r = tile_bytes(chunk, BLOCK_COLUMNS, element) + tile_bytes(BLOCK_COLUMNS, chunk, element);
    let own = tile_bytes(BLOCK_COLUMNS, k, 4) + rounded_state + v_and_r;
    RESERVED_BYTES + operands + warpgroups * own
}

/// Tiles of the block (operands) and of each warpgroup (its columns of the state).
struct Tiles<E> {
    /// w, then kg, `[C,K]`.
    operand: Shared<E>,
    /// A', `[C,C]`.
    square: Shared<E>,
    /// exp(G_last), `[1,K]`.
    decay: Shared<f32>,
    /// S^T, `[64,K]`.
    state: Shared<f32>,
    /// S^T as an operand.
    state_operand: Shared<E>,
    /// v, `[C,64]`.
    v: Shared<E>,
    /// R^T as an operand, `[64,C]`.
    r: Shared<E>,
}

/// One warpgroup's columns of V.
#[derive(Clone, Copy)]
pub(crate) struct Columns {
    /// First column.
    pub first: usize,
    /// Columns.
    pub count: usize,
}

impl Columns {
    /// Those of S block `block`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of_block(sizes: &Sizes, block: u32) -> Self {
        let (first, v) = (block as usize * BLOCK_COLUMNS, sizes.v as usize);
        Self { first, count: (v - first).min(BLOCK_COLUMNS) }
    }

    /// These rows of `tile`, which is `[64, ..]`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn rows<T: OperandElement>(&self, tile: Shared<T>) -> Shared<T> {
        tile.row_range(0, self.count)
    }

    /// These columns of rows of V values, `[len, columns]`, of one head and a chunk's tokens.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn values(&self, sizes: &Sizes, x: &Tensor, chunk: &Chunk, head: usize) -> Matrix {
        let (hv, v) = (sizes.hv as usize, sizes.v as usize);
        let first = (chunk.token as usize * hv + head) * v + self.first;
        x.matrix(first, chunk.len as usize, self.count, hv * v, 1)
    }

    /// These rows, `[columns, K]`, of state `row` (of `[.., V, K]`).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn state(&self, sizes: &Sizes, x: &Tensor, row: usize) -> Matrix {
        let (k, v) = (sizes.k as usize, sizes.v as usize);
        x.matrix((row * v + self.first) * k, self.count, k, k, 1)
    }
}

/// Persistent grid: blocks take items by ticket until there are no more.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn scan_states<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &StatesParams) {
    let (c, k) = (p.tables.sizes.chunk as usize, p.tables.sizes.k as usize);
    let state = wg.private(BLOCK_COLUMNS, k);
    let tiles = Tiles::<E> {
        operand: wg.shared(c, k),
        square: wg.shared(c, c),
        decay: wg.shared(1, k),
        state,
        state_operand: wg.private_operand(state),
        v: wg.private(c, BLOCK_COLUMNS),
        r: wg.private(BLOCK_COLUMNS, c),
    };
    wg.expect_shared(shared_bytes(k, c, E::CODE.size(), wg.count()));
    loop {
        let ticket = wg.next_ticket(p.ticket);
        if ticket >= p.items.len {
            return;
        }
        let start = wg.clock();
        let item: ScanItem = wg.read(p.items, ticket as usize);
        let segment: Segment = wg.read(p.tables.segments, item.segment as usize);
        let has_columns = (wg.index() as u32) < item.blocks;
        let columns = has_columns.then(|| Columns::of_block(&p.tables.sizes, item.first_block + wg.index() as u32));
        if let Some(columns) = columns {
            initial_state(wg, p, &item, &segment, columns, columns.rows(tiles.state));
            wg.sync();
            wg.to_operand(columns.rows(tiles.state_operand), columns.rows(tiles.state));
        }
        for index in 0..segment.chunks {
            step(wg, p, (segment.first_chunk + index) as usize, item.head as usize, columns, &tiles);
        }
        let end = wg.clock();
        wg.stamp_block(&p.trace, StampKind::States, [start, end], [item.head, item.first_block], 0);
    }
}

/// S^T before the first chunk.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) fn initial_state(
    wg: &mut Warpgroup<'_>,
    p: &StatesParams,
    item: &ScanItem,
    segment: &Segment,
    columns: Columns,
    state: Shared<f32>,
) {
    let sizes = &p.tables.sizes;
    if segment.receive_lane != NONE {
        let row = segment.receive_lane * sizes.hv + item.head;
        wg.load(state, columns.state(sizes, &p.state_in, row as usize));
    } else if segment.initial != NONE && p.initial.is_present() {
        let v_first = p.v_first != 0;
        let Columns { first, count } = columns;
        wg.load(state, state_columns(sizes, v_first, &p.initial, segment.initial, item.head, first, count));
    } else {
        wg.fill(state, |_, _| 0.0);
    }
}

/// One chunk. The block's barriers are around the loads of the shared operands; all warpgroups take part in
/// them, also those without columns in this item.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn step<E: OperandElement>(
    wg: &mut Warpgroup<'_>,
    p: &StatesParams,
    chunk_index: usize,
    head: usize,
    columns: Option<Columns>,
    t: &Tiles<E>,
) {
    let chunk: Chunk = wg.read(p.tables.chunks, chunk_index);
    let (c, k, sizes) = (t.operand.rows(), t.operand.cols(), &p.tables.sizes);
    if let Some(columns) = columns {
        wg.load(t.v.columns(0, columns.count), columns.values(sizes, &p.v, &chunk, head));
    }
    load_operands(wg, t.operand, t.square, p.records.w(chunk_index, head), Some(p.records.a(chunk_index, head)));
    if let Some(columns) = columns {
        // The operand copy: what v_new is computed from.
        let state = columns.state(sizes, &p.states, chunk_index * sizes.hv as usize + head);
        wg.store(state, columns.rows(t.state_operand));
        let mut r = Acc::zeros(columns.count, c);
        r.mma(wg, t.v.columns(0, columns.count).t(), t.square.t());
        r.mma_sub(wg, columns.rows(t.state_operand), t.operand.t());
        r.store(wg, columns.rows(t.r));
        r.store_global(wg, transposed(columns.values(sizes, &p.v_new, &chunk, head)));
    }
    load_operands(wg, t.operand, t.square, p.records.kg(chunk_index, head), None);
    if wg.index() == 0 {
        wg.load(t.decay, p.records.decay(chunk_index, head));
    }
    wg.sync_block();
    if let Some(columns) = columns {
        let mut channel = 0;
        while channel < k {
            let width = (k - channel).min(BLOCK_COLUMNS);
            let state = columns.rows(t.state).columns(channel, width);
            let mut s = Acc::load(wg, state);
            s.scale_columns(wg, t.decay.columns(channel, width));
            s.mma(wg, columns.rows(t.r), t.operand.columns(channel, width));
            wg.sync();
            s.store(wg, state);
            if !E::WIDE {
                s.store(wg, columns.rows(t.state_operand).columns(channel, width));
            }
            channel += width;
        }
    }
}

/// The transpose.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn transposed(x: Matrix) -> Matrix {
    Matrix { rows: x.cols, cols: x.rows, row_stride: x.col_stride, col_stride: x.row_stride, ..x }
}

/// Loads the block's operands, each warpgroup its share of the rows, between two barriers.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn load_operands<E: OperandElement>(
    wg: &mut Warpgroup<'_>,
    operand: Shared<E>,
    square: Shared<E>,
    operand_source: Matrix,
    square_source: Option<Matrix>,
) {
    wg.sync_block();
    let (first, rows) = share_of(operand.rows(), wg.count(), wg.index());
    if rows > 0 {
        wg.load(operand.row_range(first, rows), operand_source.row_range(first, rows));
        if let Some(source) = square_source {
            wg.load(square.row_range(first, rows), source.row_range(first, rows));
        }
    }
    wg.sync_block();
}
