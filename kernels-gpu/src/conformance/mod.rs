//! Small kernels, one for each operation of the tile DSL, for comparing back ends with each other and with plain loops.
//!
//! Every kernel loads its operands from global memory into tiles, performs one operation and stores the result. All
//! warpgroups of a block do the same on tiles of their own and store into their own copy of the result, so that what one
//! of them does to another shows. Tiles are parts of larger ones ([`TileCase::row_at`], [`TileCase::col_at`]), as those
//! of the kernels proper are. Which operation runs is a launch parameter: a module has one entry for each family of
//! operations and element type.

pub mod acc;
pub mod block;
pub mod decay;
pub mod elements;

use bytemuck::{Pod, Zeroable};

use crate::params::{Array, Matrix, Tensor};
use crate::tile::{OperandElement, Shared, Warpgroup};

/// Most warpgroups in a block of these kernels.
pub const WARPGROUPS: usize = 4;

macro_rules! operations {
    ($($(#[$meta:meta])* $op:ident = $name:literal;)*) => {
        /// An operation.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        #[repr(u32)]
        pub enum TileOp {
            $($(#[$meta])* $op,)*
        }

        impl TileOp {
            /// All of them.
            pub const ALL: &[TileOp] = &[$(TileOp::$op),*];

            /// What it is called in the DSL.
            pub const fn name(self) -> &'static str {
                match self {
                    $(TileOp::$op => $name,)*
                }
            }
        }
    };
}

// Result and operands are those of `TileCase`; R, C, K are its rows, columns and inner extent.
operations! {
    /// out = 0.
    AccZeros = "Acc::zeros";
    /// out = a.
    AccLoad = "Acc::load";
    /// out = c + a b.
    AccMma = "Acc::mma";
    /// out = c - a b.
    AccMmaSub = "Acc::mma_sub";
    /// out = c + a.
    AccAdd = "Acc::add";
    /// out = c, column j times element j of the row b.
    AccScaleColumns = "Acc::scale_columns";
    /// out = c by way of a tile.
    AccStore = "Acc::store";
    /// out = c + a, where a may be smaller.
    AccAddGlobal = "Acc::add_global";
    /// out = c, where out may be smaller.
    AccStoreGlobal = "Acc::store_global";
    /// out = a, 0 where a is smaller.
    Load = "load";
    /// out = 1.5 a - 0.25, the factor where a is smaller.
    LoadMap = "load_map";
    /// out = function number `span` of [`elements::FUNCTIONS`] of a.
    LoadFunction = "load_map (math)";
    /// out = factor (C i + j).
    Fill = "fill";
    /// out = a, where out may be smaller.
    Store = "store";
    /// out = 1.25 a, from f32.
    Convert = "convert from f32";
    /// out = a - a rounded, from f32.
    ConvertRest = "convert (rest)";
    /// out = 1.25 a, to f32.
    ConvertUp = "convert to f32";
    /// out = a by way of an operand copy.
    ToOperand = "to_operand";
    /// out = 0.5 a + b in the first K rows, with b a row or absent (0).
    MapWithRow = "map_with_row";
    /// out = a, row i times element i of the column b and the factor.
    ScaleRows = "scale_rows";
    /// out = 1 / norm of the rows of a, as a column.
    InverseNorms = "inverse_norms";
    /// out = element (0, 0) of a, everywhere.
    Scalar = "scalar";
    /// out = a times running products of b.
    ScalePrefix = "scale_prefix";
    /// out = a times running products of b from below.
    ScaleSuffix = "scale_suffix";
    /// out = products of the columns of b, as a row.
    TotalDecay = "total_decay";
    /// out = c times products of the column b between row and column.
    ScalePairwise = "scale_pairwise";
    /// out = c plus scores of a against b with decays d.
    DiagonalScores = "diagonal_scores";
    /// out = (I + strictly lower part of c)^-1.
    InvertUnitLower = "invert_unit_lower";
    /// out = who the warpgroup is, see [`block::place`].
    Place = "index, count, block, grid";
    /// out = what one thread said; counts the threads that did.
    Elect = "elect";
    /// Counts who got which ticket.
    NextTicket = "next_ticket";
    /// out = bit i for vote i that was unanimous.
    SyncAnd = "sync_and";
    /// out = sum of what a neighbour wrote into shared tiles, round by round.
    Exchange = "sync, sync_block";
    /// The same, with more barriers of its own for each warpgroup than for the next one.
    ExchangeUnequal = "sync, sync_block (unequal)";
    /// Counts who got which sum.
    Increment = "increment_acq_rel";
    /// out = 1 where time did not run backwards.
    Clock = "clock, relax";
    /// Leaves stamps.
    Stamp = "stamp, stamp_block";
    /// out = word `span` of the words.
    Read = "read";
}

/// A matrix in launch parameters: see [`Matrix`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
#[allow(missing_docs)] // named as in `Matrix`
pub struct Placed {
    pub tensor: Tensor,
    pub offset: u64,
    pub rows: u64,
    pub cols: u64,
    pub row_stride: u64,
    pub col_stride: u64,
}

impl Placed {
    /// The matrix.
    #[inline(always)]
    pub fn matrix(&self) -> Matrix {
        let (rows, cols) = (self.rows as usize, self.cols as usize);
        self.tensor.matrix(self.offset as usize, rows, cols, self.row_stride as usize, self.col_stride as usize)
    }
}

/// [`TileCase::flags`]: the tile of a is kept transposed.
pub const A_TRANSPOSED: u32 = 1;
/// [`TileCase::flags`]: the tile of b is kept transposed.
pub const B_TRANSPOSED: u32 = 2;
/// [`TileCase::flags`]: there is no b.
pub const B_ABSENT: u32 = 4;

/// Parameters of all kernels of this module.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct TileCase {
    /// A [`TileOp`].
    pub op: u32,
    /// Rows of the result's tile.
    pub rows: u32,
    /// Columns of the result's tile.
    pub cols: u32,
    /// Inner extent of products, or rows that an operation touches.
    pub inner: u32,
    /// Row of a larger tile at which each tile begins.
    pub row_at: u32,
    /// Column of a larger tile at which each tile begins, a multiple of 16.
    pub col_at: u32,
    /// [`A_TRANSPOSED`] and the like.
    pub flags: u32,
    /// Rows of a run of products, or a number.
    pub span: u32,
    /// A factor.
    pub factor: f32,
    /// Zero.
    pub pad: u32,
    /// First operand.
    pub a: Placed,
    /// Second operand.
    pub b: Placed,
    /// Accumulated operand.
    pub c: Placed,
    /// Decays.
    pub d: Placed,
    /// The result of warpgroup 0 of block 0.
    pub out: Placed,
    /// Elements between the results of two warpgroups; those of a block come before those of the next.
    pub copy_stride: u64,
    /// Words for counting, zero at first.
    pub words: Array,
}

impl TileCase {
    #[inline(always)]
    fn is(&self, op: TileOp) -> bool {
        self.op == op as u32
    }

    #[inline(always)]
    fn extents(&self) -> (usize, usize, usize) {
        (self.rows as usize, self.cols as usize, self.inner as usize)
    }

    /// This warpgroup's result.
    #[inline(always)]
    fn own_out(&self, wg: &Warpgroup<'_>) -> Matrix {
        let mut out = self.out.matrix();
        out.offset += (wg.block() * wg.count() + wg.index()) * self.copy_stride as usize;
        out
    }

    /// A tile of this warpgroup's own, inside a larger one.
    #[inline(always)]
    fn tile<E: OperandElement>(&self, wg: &mut Warpgroup<'_>, rows: usize, cols: usize) -> Shared<E> {
        let (r, c) = (self.row_at as usize, self.col_at as usize);
        wg.private::<E>(r + rows, c + cols).part(r, c, rows, cols)
    }

    /// The same, kept transposed if so asked.
    #[inline(always)]
    fn oriented<E: OperandElement>(
        &self,
        wg: &mut Warpgroup<'_>,
        rows: usize,
        cols: usize,
        transposed: bool,
    ) -> Shared<E> {
        if transposed { self.tile::<E>(wg, cols, rows).t() } else { self.tile(wg, rows, cols) }
    }

    /// A tile with the values of `source`; a barrier must follow.
    #[inline(always)]
    fn loaded<E: OperandElement>(
        &self,
        wg: &mut Warpgroup<'_>,
        source: &Placed,
        (rows, cols): (usize, usize),
        transposed: bool,
    ) -> Shared<E> {
        let tile = self.oriented(wg, rows, cols, transposed);
        wg.load(tile, source.matrix());
        tile
    }

    #[inline(always)]
    fn a_transposed(&self) -> bool {
        self.flags & A_TRANSPOSED != 0
    }

    #[inline(always)]
    fn b_transposed(&self) -> bool {
        self.flags & B_TRANSPOSED != 0
    }
}

/// Runs the kernel of the operation that the parameters name.
macro_rules! dispatch {
    ($wg:ident, $p:ident, $($op:ident => $kernel:expr,)*) => {
        $(if $p.is($crate::conformance::TileOp::$op) { $kernel($wg, $p) })*
    };
}
use dispatch;
