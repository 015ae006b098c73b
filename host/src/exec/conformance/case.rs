//! A case: one operation on given operands, and its memory.

use half::{bf16, f16};
use kernels_gpu::conformance::{Placed, TileCase, TileOp};
use kernels_gpu::params::Tensor as Param;

use crate::exec::cpu::code;
use crate::exec::{Image, Part};
use crate::tensor::Dtype;

/// What stands in a result before a kernel writes it; every element type holds it.
pub const UNTOUCHED: f32 = 123.0;

/// A matrix, and the memory around it.
#[derive(Clone, Debug)]
pub struct Operand {
    /// Element type of the memory.
    pub dtype: Dtype,
    /// The memory, as its type holds the values.
    pub memory: Vec<f32>,
    /// Element (0, 0).
    pub offset: usize,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Elements between rows.
    pub row_stride: usize,
    /// Elements between columns.
    pub col_stride: usize,
}

impl Operand {
    /// No matrix.
    pub fn absent() -> Self {
        Self { dtype: Dtype::F32, memory: Vec::new(), offset: 0, rows: 0, cols: 0, row_stride: 0, col_stride: 0 }
    }

    /// Place of element (r, c) in the memory.
    pub fn place(&self, r: usize, c: usize) -> usize {
        self.offset + r * self.row_stride + c * self.col_stride
    }

    /// Element (r, c); 0 outside.
    pub fn at(&self, r: usize, c: usize) -> f64 {
        if r < self.rows && c < self.cols { self.memory[self.place(r, c)].into() } else { 0.0 }
    }

    fn placed(&self, address: u64) -> Placed {
        let len = self.memory.len();
        let tensor = if len == 0 { Param::absent() } else { Param::new(address, len, code(self.dtype)) };
        Placed {
            tensor,
            offset: self.offset as u64,
            rows: self.rows as u64,
            cols: self.cols as u64,
            row_stride: self.row_stride as u64,
            col_stride: self.col_stride as u64,
        }
    }

    fn push_to(&self, image: &mut Image) -> Part {
        match self.dtype {
            Dtype::F32 => image.push(&self.memory),
            Dtype::Bf16 => image.push(&self.memory.iter().map(|&x| bf16::from_f32(x).to_bits()).collect::<Vec<_>>()),
            Dtype::F16 => image.push(&self.memory.iter().map(|&x| f16::from_f32(x).to_bits()).collect::<Vec<_>>()),
        }
    }
}

/// `x` as `dtype` holds it: nearest, ties to even.
pub fn rounded(dtype: Dtype, x: f32) -> f32 {
    match dtype {
        Dtype::F32 => x,
        Dtype::Bf16 => bf16::from_f32(x).to_f32(),
        Dtype::F16 => f16::from_f32(x).to_f32(),
    }
}

/// One operation on given operands. Fields as in [`TileCase`], where they have the same name.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct Case {
    pub op: TileOp,
    /// Element type of tiles whose type is a parameter of the operation.
    pub dtype: Dtype,
    pub warpgroups: usize,
    pub grid: usize,
    pub rows: usize,
    pub cols: usize,
    pub inner: usize,
    pub row_at: usize,
    pub col_at: usize,
    pub flags: u32,
    pub span: usize,
    pub factor: f32,
    pub a: Operand,
    pub b: Operand,
    pub c: Operand,
    pub d: Operand,
    pub out: Operand,
    pub copy_stride: usize,
    /// The words before the launch.
    pub words: Vec<u64>,
}

/// What a kernel left.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// All of the result's memory, widened.
    pub out: Vec<f32>,
    /// The words.
    pub words: Vec<u64>,
}

/// Where the parts of a case's memory lie.
#[derive(Clone, Copy, Debug)]
pub struct Places([Part; 6]);

impl Case {
    /// The memory before the launch.
    pub fn image(&self) -> (Image, Places) {
        let mut image = Image::default();
        let operands = [&self.a, &self.b, &self.c, &self.d, &self.out].map(|operand| operand.push_to(&mut image));
        let [a, b, c, d, out] = operands;
        let words = image.push(&self.words);
        (image, Places([a, b, c, d, out, words]))
    }

    /// The launch parameters, with the memory at `base`.
    pub fn params(&self, places: Places, base: u64) -> TileCase {
        let [a, b, c, d, out, words] = places.0.map(|part| part.at(base));
        TileCase {
            op: self.op as u32,
            rows: self.rows as u32,
            cols: self.cols as u32,
            inner: self.inner as u32,
            row_at: self.row_at as u32,
            col_at: self.col_at as u32,
            flags: self.flags,
            span: self.span as u32,
            factor: self.factor,
            pad: 0,
            a: self.a.placed(a.addr),
            b: self.b.placed(b.addr),
            c: self.c.placed(c.addr),
            d: self.d.placed(d.addr),
            out: self.out.placed(out.addr),
            copy_stride: self.copy_stride as u64,
            words,
        }
    }

    /// The memory after the launch.
    pub fn outcome(&self, image: &Image, places: Places) -> Outcome {
        let [.., out, words] = places.0;
        let bits = |to_f32: fn(u16) -> f32| image.get::<u16>(out).into_iter().map(to_f32).collect();
        let out = match self.out.dtype {
            Dtype::F32 => image.get::<f32>(out),
            Dtype::Bf16 => bits(|x| bf16::from_bits(x).to_f32()),
            Dtype::F16 => bits(|x| f16::from_bits(x).to_f32()),
        };
        Outcome { out, words: image.get(words) }
    }

    /// Results in the memory: one for each warpgroup.
    pub fn copies(&self) -> usize {
        self.warpgroups * self.grid
    }
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Case { op, dtype, rows, cols, inner, row_at, col_at, flags, warpgroups, grid, span, .. } = self;
        write!(
            f,
            "{} of {dtype}, {rows} x {cols}, inner {inner}, span {span}, tiles from ({row_at}, {col_at}), ",
            op.name()
        )?;
        write!(f, "flags {flags}, {grid} blocks of {warpgroups} warpgroups, memory {}", self.a.dtype)
    }
}
