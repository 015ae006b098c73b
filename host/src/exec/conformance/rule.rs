//! How far apart results may be, operation by operation, and why.

use kernels_gpu::conformance::TileOp;

use super::case::Case;
use super::expected::Element;
use crate::tensor::Dtype;

/// How far results may be apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    /// f32 roundings of the CPU back end, each 2^-24 of the magnitude.
    pub cpu: f64,
    /// The same of a GPU; nothing if it does the same arithmetic in the same order, so that all bits are equal.
    pub gpu: Option<(f64, &'static str)>,
    /// The types to which the result is rounded on its way.
    pub rounded: [Dtype; 2],
}

/// 2^-24, the largest relative error of rounding to f32.
const UNIT: f64 = 5.960_464_477_539_063e-8;

/// Largest relative error of rounding to a type, and largest absolute error where its numbers are denormal.
fn unit(dtype: Dtype) -> (f64, f64) {
    match dtype {
        Dtype::F32 => (0.0, 0.0),
        Dtype::Bf16 => (f64::powi(2.0, -8), f64::powi(2.0, -134)),
        Dtype::F16 => (f64::powi(2.0, -11), f64::powi(2.0, -25)),
    }
}

impl Rule {
    /// The rule of a case.
    pub fn of(case: &Case) -> Self {
        let k = case.inner as f64;
        let narrow = case.dtype != Dtype::F32;
        const ORDER: &str = "another order of summation, fused";
        const TENSOR: &str = "tensor cores cut sums off";
        let (cpu, gpu) = match case.op {
            TileOp::AccMma | TileOp::AccMmaSub if narrow => (k + 1.0, Some((2.0 * (k + 1.0), TENSOR))),
            TileOp::AccMma | TileOp::AccMmaSub => (k + 1.0, Some((k + 1.0, ORDER))),
            TileOp::LoadFunction => (6.0, Some((8.0, "own polynomials, rsqrt.approx"))),
            TileOp::InverseNorms => {
                let sum = case.a.cols as f64 / 2.0 + 4.0;
                (sum, Some((sum + 4.0, "another order of summation, rsqrt.approx")))
            }
            // Both factors of a term are rounded to bf16, each of them 2^16 roundings of f32.
            TileOp::DiagonalScores if case.dtype == Dtype::Bf16 => {
                let steps = k + 34.0 + 2.01 * f64::powi(2.0, 16);
                (steps, Some((steps, "another order of summation, rcp.approx, other roundings of operands")))
            }
            TileOp::DiagonalScores => (k + 18.0, Some((k + 18.0, ORDER))),
            TileOp::InvertUnitLower => (2.0 * case.rows as f64, Some((case.rows as f64 + 1.0, "fused multiply-adds"))),
            TileOp::AccAdd | TileOp::AccAddGlobal | TileOp::AccScaleColumns => (1.0, None),
            TileOp::Fill | TileOp::Convert | TileOp::ConvertUp => (1.0, None),
            TileOp::LoadMap | TileOp::MapWithRow | TileOp::ScaleRows => (2.0, None),
            TileOp::ScalePrefix | TileOp::ScaleSuffix => (case.span as f64 + 1.0, None),
            TileOp::TotalDecay | TileOp::ScalePairwise => (case.rows as f64 + 1.0, None),
            _ => (0.0, None),
        };
        let in_tile = matches!(
            case.op,
            TileOp::AccStore
                | TileOp::Load
                | TileOp::LoadMap
                | TileOp::Fill
                | TileOp::Store
                | TileOp::Convert
                | TileOp::ConvertRest
                | TileOp::ToOperand
                | TileOp::ScalePrefix
                | TileOp::ScaleSuffix
        );
        Self { cpu, gpu, rounded: [if in_tile { case.dtype } else { Dtype::F32 }, case.out.dtype] }
    }

    /// How far an element of the CPU back end may be from its value.
    pub fn bound(&self, element: Element) -> f64 {
        self.with_steps(self.cpu, element)
    }

    /// How far an element of a GPU may be from that of the CPU back end; 0 means all bits.
    pub fn bound_between(&self, element: Element) -> f64 {
        match self.gpu {
            None => 0.0,
            Some((gpu, _)) => self.with_steps(self.cpu, element) + self.with_steps(gpu, element),
        }
    }

    fn with_steps(&self, steps: f64, element: Element) -> f64 {
        let mut bound = steps * UNIT * element.magnitude;
        for (relative, absolute) in self.rounded.map(unit) {
            bound += relative * (element.value.abs() + bound) + absolute;
        }
        if self.rounded[0] == Dtype::F32 && self.rounded[1] == Dtype::F32 && steps > 0.0 {
            // Half a unit in the last place of denormal f32 for each rounding.
            bound += steps * f64::powi(2.0, -150);
        }
        bound
    }
}
