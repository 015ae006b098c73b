//! Which cases there are: every operation on tiles of several sizes, whole and parts of others, plain and transposed, from
//! memory of every type and layout. Values are random with fixed seeds.

use kernels_gpu::conformance::elements::FUNCTIONS;
use kernels_gpu::conformance::{A_TRANSPOSED, B_ABSENT, B_TRANSPOSED, TileOp, block};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::case::{Case, Operand, UNTOUCHED, rounded};
use crate::tensor::Dtype;

/// Element types.
pub const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

/// Rows, columns and inner extent of register tiles.
const ACC_SHAPES: [[usize; 3]; 6] =
    [[16, 16, 16], [16, 64, 32], [64, 16, 48], [32, 48, 128], [48, 32, 16], [64, 64, 64]];
/// Rows and columns of tiles of the other operations, which need not be multiples of 16.
const SHAPES: [[usize; 2]; 6] = [[16, 16], [32, 64], [64, 32], [64, 64], [7, 40], [33, 1]];

/// How a matrix lies in its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// Row after row.
    Rows,
    /// Column after column.
    Columns,
    /// Row after row, with room between them and before the first.
    Spread,
    /// One row, that stands for all.
    Repeated,
}

const LAYOUTS: [Layout; 3] = [Layout::Rows, Layout::Columns, Layout::Spread];

/// Makes the cases of one operation and element type.
struct Maker {
    rng: ChaCha8Rng,
    op: TileOp,
    dtype: Dtype,
    /// Counts cases, to vary what is not varied on purpose.
    turn: usize,
}

/// All cases, in the order of the operations.
pub fn all() -> Vec<Case> {
    TileOp::ALL.iter().flat_map(|&op| of(op)).collect()
}

/// The cases of one operation.
pub fn of(op: TileOp) -> Vec<Case> {
    let dtypes = if has_element_type(op) { &DTYPES[..] } else { &DTYPES[..1] };
    let make = |&dtype: &Dtype| {
        let seed = 1000 * op as u64 + dtype as u64;
        Maker { rng: ChaCha8Rng::seed_from_u64(seed), op, dtype, turn: 0 }.cases()
    };
    dtypes.iter().flat_map(make).collect()
}

/// Whether the element type of a tile is a parameter of the operation; the others work on f32.
fn has_element_type(op: TileOp) -> bool {
    let of_f32 = matches!(
        op,
        TileOp::AccScaleColumns
            | TileOp::AccAddGlobal
            | TileOp::AccStoreGlobal
            | TileOp::LoadFunction
            | TileOp::MapWithRow
            | TileOp::ScaleRows
            | TileOp::InverseNorms
            | TileOp::Scalar
    ) || (op as u32) >= TileOp::TotalDecay as u32;
    !of_f32 || op == TileOp::DiagonalScores
}

impl Maker {
    fn cases(&mut self) -> Vec<Case> {
        use TileOp::*;
        match self.op {
            AccMma | AccMmaSub => self.products(),
            AccZeros | AccLoad | AccAdd | AccScaleColumns | AccStore | AccAddGlobal | AccStoreGlobal => {
                ACC_SHAPES.iter().flat_map(|&[r, c, _]| [self.sums(r, c, 0), self.sums(r, c, A_TRANSPOSED)]).collect()
            }
            LoadFunction => (0..FUNCTIONS.len()).map(|which| self.function(which)).collect(),
            InverseNorms => {
                [[16, 64, 64], [64, 64, 128], [33, 20, 7], [64, 1, 48]].map(|shape| self.norms(shape)).to_vec()
            }
            ScalePrefix | ScaleSuffix => {
                let shapes = [[64, 64, 64], [64, 48, 16], [32, 16, 32], [48, 64, 16], [64, 32, 32]];
                shapes.iter().flat_map(|&shape| [self.running(shape, false), self.running(shape, true)]).collect()
            }
            TotalDecay => SHAPES
                .iter()
                .flat_map(|&[r, c]| [self.running([r, c, r], false), self.running([r, c, r], true)])
                .collect(),
            ScalePairwise => [16, 32, 48, 64].map(|n| self.running([n, n, n], true)).to_vec(),
            DiagonalScores => {
                [[16, 16], [32, 64], [64, 64], [64, 128], [48, 32]].map(|shape| self.scores(shape)).to_vec()
            }
            InvertUnitLower => [16, 32, 48, 64].map(|n| self.triangle(n)).to_vec(),
            Place | Elect | NextTicket | SyncAnd | Exchange | ExchangeUnequal | Increment | Clock | Stamp | Read => {
                [[1, 1], [2, 1], [3, 2], [4, 3], [2, 5]]
                    .map(|[warpgroups, grid]| self.together(warpgroups, grid))
                    .to_vec()
            }
            Load | LoadMap | Fill | Store | Convert | ConvertRest | ConvertUp | ToOperand | MapWithRow | ScaleRows
            | Scalar => {
                let flags = [0, A_TRANSPOSED, B_TRANSPOSED, A_TRANSPOSED | B_TRANSPOSED];
                SHAPES.iter().flat_map(|&[r, c]| flags.map(|flags| self.elementwise(r, c, flags))).collect()
            }
        }
    }

    /// A case without operands: its result as large as its tile.
    fn case(&mut self, rows: usize, cols: usize, inner: usize, flags: u32) -> Case {
        self.turn += 1;
        let (row_at, col_at) = [(0, 0), (16, 16), (3, 0), (0, 32)][self.turn % 4];
        let mut case = Case {
            op: self.op,
            dtype: self.dtype,
            warpgroups: 1 + self.turn % 2,
            grid: 1,
            rows,
            cols,
            inner,
            row_at,
            col_at,
            flags,
            span: rows,
            factor: 0.75,
            a: Operand::absent(),
            b: Operand::absent(),
            c: Operand::absent(),
            d: Operand::absent(),
            out: Operand::absent(),
            copy_stride: 0,
            words: Vec::new(),
        };
        self.put_out(&mut case, rows, cols);
        case
    }

    /// Gives the case a result of this extent for each warpgroup.
    fn put_out(&mut self, case: &mut Case, rows: usize, cols: usize) {
        let layout = LAYOUTS[self.turn % 3];
        // What is computed in f32 is stored so; what only moves is stored as every type.
        let moves = matches!(
            self.op,
            TileOp::Load | TileOp::Store | TileOp::AccStoreGlobal | TileOp::AccLoad | TileOp::ToOperand
        );
        let dtype = if moves { DTYPES[self.turn / 3 % 3] } else { Dtype::F32 };
        let mut out = placed(dtype, layout, rows, cols);
        case.copy_stride = out.memory.len();
        out.memory = vec![UNTOUCHED; out.memory.len() * case.copies()];
        case.out = out;
    }

    /// A random matrix with values from `low` to `high`; memory of type `dtype`.
    fn matrix(&mut self, dtype: Dtype, layout: Layout, [rows, cols]: [usize; 2], [low, high]: [f32; 2]) -> Operand {
        let mut matrix = placed(dtype, layout, rows, cols);
        for x in &mut matrix.memory {
            *x = rounded(dtype, self.rng.random_range(low..high));
        }
        matrix
    }

    /// The next layout and memory type.
    fn next(&mut self) -> (Dtype, Layout) {
        self.turn += 1;
        (DTYPES[self.turn % 3], LAYOUTS[self.turn / 3 % 3])
    }

    fn operand(&mut self, shape: [usize; 2]) -> Operand {
        let (dtype, layout) = self.next();
        self.matrix(dtype, layout, shape, [-1.0, 1.0])
    }

    fn products(&mut self) -> Vec<Case> {
        let flags = [0, A_TRANSPOSED, B_TRANSPOSED, A_TRANSPOSED | B_TRANSPOSED];
        let mut cases = Vec::new();
        for [r, c, k] in ACC_SHAPES {
            for flags in flags {
                let mut case = self.case(r, c, k, flags);
                case.a = self.operand([r, k]);
                case.b = self.operand([k, c]);
                case.c = self.operand([r, c]);
                cases.push(case);
            }
        }
        cases
    }

    fn sums(&mut self, r: usize, c: usize, flags: u32) -> Case {
        let mut case = self.case(r, c, 0, flags | if flags == 0 { 0 } else { B_TRANSPOSED });
        // Where global matrices may be smaller than the tile, they are in every second case.
        let smaller = if flags == 0 { [r, c] } else { [r - 5, c - 3] };
        case.c = self.operand([r, c]);
        case.b = self.operand([1, c]);
        match self.op {
            TileOp::AccAddGlobal => case.a = self.operand(smaller),
            TileOp::AccStoreGlobal => self.put_out(&mut case, smaller[0], smaller[1]),
            // Some products so small that they are set to zero.
            TileOp::AccScaleColumns => case.b = self.matrix(Dtype::F32, Layout::Rows, [1, c], [-1e-30, 1e-30]),
            _ => case.a = self.operand([r, c]),
        }
        if self.op == TileOp::AccScaleColumns && flags == 0 {
            case.b = self.operand([1, c]);
        }
        case
    }

    fn elementwise(&mut self, r: usize, c: usize, flags: u32) -> Case {
        let mut case = self.case(r, c, 0, flags);
        let smaller = if flags & B_TRANSPOSED == 0 || r < 8 || c < 8 { [r, c] } else { [r - 3, c - 7] };
        case.a = self.operand([r, c]);
        match self.op {
            TileOp::Load | TileOp::LoadMap => case.a = self.operand(smaller),
            TileOp::Store => self.put_out(&mut case, smaller[0], smaller[1]),
            // From f32 memory, or there would be nothing to round.
            TileOp::Convert | TileOp::ConvertRest => {
                case.a = self.matrix(Dtype::F32, LAYOUTS[self.turn % 3], [r, c], [-2.0, 2.0]);
            }
            TileOp::MapWithRow => {
                (case.inner, case.b) = (smaller[0], self.matrix(Dtype::F32, Layout::Repeated, [1, c], [-1.0, 1.0]));
                if self.turn.is_multiple_of(4) {
                    case.flags |= B_ABSENT;
                }
            }
            TileOp::ScaleRows => case.b = self.operand([r, 1]),
            // The same row for all rows of the tile.
            TileOp::ToOperand if flags == 0 => {
                case.a = self.matrix(Dtype::F32, Layout::Repeated, [r, c], [-1.0, 1.0]);
            }
            _ => {}
        }
        case
    }

    fn function(&mut self, which: usize) -> Case {
        let mut case = self.case(64, 64, 0, 0);
        let range = match FUNCTIONS[which] {
            "exp" => [-80.0, 10.0],
            "ln_1p" => [0.0, 1.0],
            "rsqrt" => [1e-6, 100.0],
            _ => [-30.0, 30.0],
        };
        (case.span, case.a) = (which, self.matrix(Dtype::F32, Layout::Spread, [63, 60], range));
        case
    }

    fn norms(&mut self, [r, rows, cols]: [usize; 3]) -> Case {
        let mut case = self.case(r, 1, 0, 0);
        (case.a, case.factor) = (self.operand([rows, cols]), 1e-6);
        case
    }

    /// Running products; `one` for a decay that serves all columns.
    fn running(&mut self, [r, c, span]: [usize; 3], one: bool) -> Case {
        let mut case = self.case(r, c, 0, 0);
        (case.a, case.c, case.span) = (self.operand([r, c]), self.operand([r, c]), span);
        // Strong decays too, whose products are set to zero.
        let range = if self.turn.is_multiple_of(2) { [0.5, 1.0] } else { [0.0, 1.0] };
        case.b = self.matrix(Dtype::F32, Layout::Rows, [r, if one { 1 } else { c }], range);
        if self.op == TileOp::TotalDecay {
            self.put_out(&mut case, 1, c);
        }
        case
    }

    fn scores(&mut self, [n, k]: [usize; 2]) -> Case {
        let mut case = self.case(n, n, k, 0);
        (case.row_at, case.col_at) = (case.row_at / 2, case.col_at.min(16));
        case.warpgroups = if k > 64 { 1 } else { case.warpgroups };
        self.put_out(&mut case, n, n);
        (case.a, case.b, case.c) = (self.operand([n, k]), self.operand([n, k]), self.operand([n, n]));
        case.d = self.matrix(Dtype::F32, Layout::Rows, [n, k], [0.0, 1.0]);
        case
    }

    fn triangle(&mut self, n: usize) -> Case {
        let mut case = self.case(n, n, 0, 0);
        case.c = self.matrix(Dtype::F32, Layout::Rows, [n, n], [-0.3, 0.3]);
        case
    }

    fn together(&mut self, warpgroups: usize, grid: usize) -> Case {
        let mut case = self.case(16, 32, 0, 0);
        (case.warpgroups, case.grid) = (warpgroups, grid);
        let has_result = !matches!(self.op, TileOp::NextTicket | TileOp::Increment | TileOp::Stamp);
        let (r, c) = if has_result { (16, 32) } else { (0, 0) };
        self.put_out(&mut case, r, c);
        let stamps = 2 + block::STAMP_WORDS * (case.copies() + grid);
        case.words = vec![0; (1 + block::TICKETS * warpgroups).max(stamps)];
        if self.op == TileOp::Stamp {
            case.words.truncate(stamps);
        }
        if self.op == TileOp::Read {
            case.span = 5 * warpgroups;
            case.words = (0..64).map(|i| i * i + 3).collect();
        }
        case
    }
}

/// A matrix of zeros with its memory.
fn placed(dtype: Dtype, layout: Layout, rows: usize, cols: usize) -> Operand {
    let (offset, row_stride, col_stride) = match layout {
        Layout::Rows => (0, cols, 1),
        Layout::Columns => (0, 1, rows),
        Layout::Spread => (3, cols + 5, 1),
        Layout::Repeated => (0, 0, 1),
    };
    let last = offset + rows.saturating_sub(1) * row_stride + cols.saturating_sub(1) * col_stride;
    let len = if rows * cols == 0 { 0 } else { last + 1 };
    Operand { dtype, memory: vec![0.0; len], offset, rows, cols, row_stride, col_stride }
}
