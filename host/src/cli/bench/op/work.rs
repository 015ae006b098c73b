//! What a step computes and moves, by the sizes of its problem: the formulas behind TFLOP/s, TB/s and the share of the roofline.
//!
//! They count what the algorithm asks for, not what a kernel happens to do: every product once and as a whole (a triangular
//! factor counts as a full square, as tensor cores multiply it), every tensor once for each kernel that reads or writes it
//! (q and k once for the value heads of a group). Sums, exponentials, norms, tables and messages are left out, and so are
//! the merges of summaries, whose size does not depend on the number of tokens. So is what a PE does more when it walks its segments
//! in parts: it is the price of the time that this saves.
//!
//! Per token and value head, with chunks of C tokens, elements of E bytes, N = 1 / C, and a gate of D bytes (K channels for
//! KDA, one for GDN):
//!
//! | kernel | FLOP | reads | writes |
//! |---|---|---|---|
//! | `prep` | 4CK scores + 2CK w + C²/3 inverse | q, k, gate, beta | w, kg, qg: 3EK; A', Aqk: 2EC; decay: 4KN |
//! | `scan_push` | 2CV A'v + 6KV + 2CV | what `prep` wrote; v: EV | o: EV |
//! | the same, with M | + 6K² + 2CK | | o before correction: 4V; q-tilde: EK, in place of o |
//! | `fix_out` | 2KV | o before correction, q-tilde | o: EV |
//! | `scan_states` | 2CV A'v + 4KV | w, kg: 2EK; A': EC; decay; v | states: EKVN; v_new: EV |
//! | `scan_back` | 2CV + 6KV | w, kg, qg: 3EK; Aqk: EC; decay; do: EV | gradients of states and of v_new: EKVN + EV |
//! | the same, for earlier PEs | 2CV + 6KV | the same | |
//! | `grad` | 6KV + 6CV + 12CK + 4C² | q, k, gate, beta, v, do, v_new, its gradient; A'; 2EKVN | dq, dk: 2EK, or of the value head: 8K; dv: EV; dgate; dbeta; shares of gate parameters: 4(K + 1)N |
//! | `reduce` | | shares | |
//! | the same, where value heads share q and k, and in portable bodies | | 8K; q, k | dq, dk |
//!
//! 6KV of a walk are three products with the state or its gradient: for o, for v_new and for the update.

use crate::inputs::Op;

/// The sizes of one PE's part of a problem.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sizes {
    pub op: Op,
    /// Tokens of the PE.
    pub tokens: usize,
    /// Query/key heads.
    pub h: usize,
    /// Value heads.
    pub hv: usize,
    /// Key channels.
    pub k: usize,
    /// Value channels.
    pub v: usize,
    pub chunk: usize,
    /// Bytes of an element of q, k, v, beta and o.
    pub element: usize,
    /// Bytes of an element of the gate.
    pub gate_element: usize,
    /// Whether `A_log` and `dt_bias` have gradients.
    pub gate_parameters: bool,
    /// Whether `grad` leaves the gradients of q and k of every value head to `reduce`.
    pub reduces_rows: bool,
}

/// What a PE does for others in one direction of a pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Part {
    /// Whether it starts from what arrives from others, and arrives late: M is needed, or a walk for what is passed on.
    pub receives: bool,
    /// Whether it sends.
    pub sends: bool,
}

/// Floating-point operations and bytes of device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Work {
    pub flop: f64,
    pub bytes: f64,
}

impl std::ops::Add for Work {
    type Output = Work;
    fn add(self, other: Work) -> Work {
        Work { flop: self.flop + other.flop, bytes: self.bytes + other.bytes }
    }
}

impl std::iter::Sum for Work {
    fn sum<I: Iterator<Item = Work>>(all: I) -> Work {
        all.fold(Work::default(), std::ops::Add::add)
    }
}

/// What a device can do at most.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Roofline {
    /// 1e12 floating-point operations per second, of matrix products.
    pub tflop_s: f64,
    /// 1e12 bytes per second, of device memory.
    pub tb_s: f64,
}

impl Roofline {
    /// Least time for `work` in microseconds.
    pub(super) fn floor_us(&self, work: Work) -> f64 {
        (work.flop / (self.tflop_s * 1e6)).max(work.bytes / (self.tb_s * 1e6))
    }
}

/// Work by kernel, each name once.
pub(super) type ByKernel = Vec<(&'static str, Work)>;

impl Sizes {
    fn all(&self, kernel: &'static str, flop: f64, bytes: f64) -> (&'static str, Work) {
        let rows = (self.tokens * self.hv) as f64;
        (kernel, Work { flop: rows * flop, bytes: rows * bytes })
    }

    /// C, K, V, E and the part of a chunk's bytes that falls to a token.
    fn numbers(&self) -> [f64; 5] {
        let [c, k, v, e] = [self.chunk, self.k, self.v, self.element].map(|x| x as f64);
        [c, k, v, e, 1.0 / c]
    }

    /// Channels of the gate.
    fn gate_width(&self) -> f64 {
        if self.op == Op::Kda { self.k as f64 } else { 1.0 }
    }

    /// Bytes of q and of k for each value head.
    fn row(&self) -> f64 {
        let [_, k, _, e, _] = self.numbers();
        e * k * self.h as f64 / self.hv as f64
    }

    /// Bytes of q, k, gate and beta.
    fn gated(&self) -> f64 {
        2.0 * self.row() + self.gate_width() * self.gate_element as f64 + self.element as f64
    }

    /// Bytes of what `prep` leaves.
    fn record(&self) -> f64 {
        let [c, k, _, e, per_chunk] = self.numbers();
        3.0 * e * k + 2.0 * e * c + 4.0 * k * per_chunk
    }

    fn prep(&self) -> (&'static str, Work) {
        let [c, k, ..] = self.numbers();
        self.all("prep", 6.0 * c * k + c * c / 3.0, self.gated() + self.record())
    }

    /// A forward step of a PE. `part.receives` means that it corrects its outputs, which exact mode does not do.
    pub fn forward(&self, part: Part) -> ByKernel {
        let [c, k, v, e, _] = self.numbers();
        let (walk, read) = (6.0 * k * v + 4.0 * c * v, self.record() + e * v);
        if !part.receives {
            return vec![self.prep(), self.all("scan_push", walk, read + e * v)];
        }
        let uncorrected = 4.0 * v + e * k;
        vec![
            self.prep(),
            self.all("scan_push", walk + 6.0 * k * k + 2.0 * c * k, read + uncorrected),
            self.all("fix_out", 2.0 * k * v, uncorrected + e * v),
        ]
    }

    /// A backward step of a PE; `recompute` if `prep` runs again. `part.receives` means that gradients arrive that are not
    /// walked from at once, as in exact mode: with something to send they ask for a walk of their own.
    pub fn backward(&self, part: Part, recompute: bool) -> ByKernel {
        let [c, k, v, e, per_chunk] = self.numbers();
        let (states, decay) = (e * k * v * per_chunk, 4.0 * k * per_chunk);
        let shares = if self.gate_parameters { 4.0 * (self.gate_width() + 1.0) * per_chunk } else { 0.0 };
        let walks = if part.receives && part.sends { 2.0 } else { 1.0 };
        let read_back = 3.0 * e * k + e * c + decay + e * v;
        let read_grad = self.gated() + 4.0 * e * v + e * c + 2.0 * states;
        let (rows, rows_left) =
            if self.reduces_rows { (8.0 * k, 8.0 * k + 4.0 * self.row()) } else { (2.0 * e * k, 0.0) };
        let written = rows + e * v + 4.0 * self.gate_width() + 4.0 + shares;
        let mut kernels = if recompute { vec![self.prep()] } else { Vec::new() };
        kernels.extend([
            self.all("scan_back", walks * (6.0 * k * v + 2.0 * c * v), walks * read_back + states + e * v),
            self.all("scan_states", 4.0 * k * v + 2.0 * c * v, 2.0 * e * k + e * c + decay + e * v + states + e * v),
            self.all("grad", 6.0 * k * v + 6.0 * c * v + 12.0 * c * k + 4.0 * c * c, read_grad + written),
            self.all("reduce", 0.0, rows_left + shares),
        ]);
        kernels
    }

    /// Bytes of a forward step that were one kernel: inputs once, outputs once.
    pub fn fused_forward(&self) -> f64 {
        self.all("", 0.0, self.gated() + 2.0 * (self.element * self.v) as f64).1.bytes
    }

    /// The same of a backward step: inputs and do, gradients of all inputs.
    pub fn fused_backward(&self) -> f64 {
        let gradients = 2.0 * self.row() + 4.0 * self.gate_width() + 4.0;
        self.all("", 0.0, self.gated() + gradients + 3.0 * (self.element * self.v) as f64).1.bytes
    }
}

#[cfg(test)]
mod tests {
    use kernels_gpu::params::{self, Records};

    use super::*;

    /// One chunk of one head with K = V = 128, C = 64, bf16 but for the gate.
    const CHUNK: Sizes = Sizes {
        op: Op::Kda,
        tokens: 64,
        h: 1,
        hv: 1,
        k: 128,
        v: 128,
        chunk: 64,
        element: 2,
        gate_element: 4,
        gate_parameters: true,
        reduces_rows: true,
    };
    const WHOLE: Part = Part { receives: false, sends: true };
    const LATER: Part = Part { receives: true, sends: false };
    const MIDDLE: Part = Part { receives: true, sends: true };

    fn of(kernels: &ByKernel, name: &str) -> Work {
        kernels.iter().find(|(kernel, _)| *kernel == name).expect("a kernel of this name").1
    }

    fn total(kernels: &ByKernel) -> Work {
        kernels.iter().map(|(_, work)| *work).sum()
    }

    #[test]
    fn bytes_are_those_of_the_tensors() {
        // By hand, per token: q 256, k 256, g 512, beta 2; w, kg, qg 256 each, A' and Aqk 128 each, decay 8.
        let first = CHUNK.forward(WHOLE);
        assert_eq!(of(&first, "prep").bytes, 64.0 * (1026.0 + 1032.0));
        assert_eq!(of(&first, "scan_push").bytes, 64.0 * (1032.0 + 256.0 + 256.0));
        let later = CHUNK.forward(LATER);
        assert_eq!(of(&later, "scan_push").bytes, 64.0 * (1032.0 + 256.0 + 512.0 + 256.0));
        assert_eq!(of(&later, "fix_out").bytes, 64.0 * (512.0 + 256.0 + 256.0));
        assert_eq!(CHUNK.fused_forward(), 64.0 * (1026.0 + 512.0));
    }

    #[test]
    fn a_record_is_what_kernels_keep() {
        for (k, chunk) in [(128, 64), (64, 32), (256, 16)] {
            let sizes = Sizes { k, chunk, tokens: chunk, ..CHUNK };
            let kernel_sizes = params::Sizes { h: 1, hv: 1, k: k as u32, v: 128, chunk: chunk as u32, pad: 0 };
            let kept = 2 * Records::record_len(&kernel_sizes) + 4 * k;
            assert!((sizes.record() * chunk as f64 - kept as f64).abs() < 1e-6);
        }
    }

    #[test]
    fn flop_are_those_of_the_products() {
        // Products of a chunk by hand: [64,128] x [128,128] has 2.097 MFLOP, [64,64] x [64,128] half as many.
        let (large, small) = (2.0 * 64.0 * 128.0 * 128.0, 2.0 * 64.0 * 64.0 * 128.0);
        let (first, later) = (CHUNK.forward(WHOLE), CHUNK.forward(LATER));
        assert_eq!(of(&first, "prep").flop, 3.0 * small + 64.0 * 64.0 * 64.0 / 3.0);
        assert_eq!(of(&first, "scan_push").flop, 3.0 * large + 2.0 * small);
        assert_eq!(of(&later, "scan_push").flop, 6.0 * large + 3.0 * small);
        assert_eq!(of(&later, "fix_out").flop, large);
        let back = CHUNK.backward(WHOLE, false);
        assert_eq!(of(&back, "scan_back").flop, 3.0 * large + small);
        assert_eq!(of(&back, "scan_states").flop, 2.0 * large + small);
        assert_eq!(of(&back, "grad").flop, 3.0 * large + 9.0 * small + 4.0 * 64.0 * 64.0 * 64.0);
    }

    #[test]
    fn work_grows_with_tokens_and_heads_and_gates_differ_in_width() {
        for part in [WHOLE, LATER, MIDDLE] {
            let many = Sizes { tokens: 640, h: 4, hv: 4, ..CHUNK };
            let scaled = |one: Work, many: Work| {
                assert!((40.0 * one.flop / many.flop - 1.0).abs() < 1e-12);
                assert!((40.0 * one.bytes / many.bytes - 1.0).abs() < 1e-12);
            };
            scaled(total(&CHUNK.forward(part)), total(&many.forward(part)));
            scaled(total(&CHUNK.backward(part, true)), total(&many.backward(part, true)));
        }
        let gdn = Sizes { op: Op::Gdn, gate_parameters: false, ..CHUNK };
        assert_eq!(CHUNK.fused_forward() - gdn.fused_forward(), 64.0 * 4.0 * 127.0);
        // Two value heads share the rows of q and k.
        let grouped = Sizes { h: 1, hv: 2, ..CHUNK };
        assert_eq!(2.0 * CHUNK.fused_forward() - grouped.fused_forward(), 64.0 * 512.0);
    }

    #[test]
    fn rows_that_grad_finishes_are_not_summed() {
        let [left, done] = [true, false].map(|reduces_rows| Sizes { reduces_rows, ..CHUNK }.backward(WHOLE, true));
        // Shares of 129 gate parameters are all that is left; rows of 128 in bf16 are written in place of f32.
        assert_eq!(of(&done, "reduce").bytes, 4.0 * 129.0);
        assert_eq!(of(&left, "grad").bytes - of(&done, "grad").bytes, 64.0 * (1024.0 - 512.0));
    }

    #[test]
    fn only_a_pe_in_the_middle_walks_back_twice() {
        let scan = |part| of(&CHUNK.backward(part, true), "scan_back");
        assert_eq!(scan(WHOLE), scan(LATER));
        assert_eq!(scan(MIDDLE).flop, 2.0 * scan(WHOLE).flop);
        let names = |recompute| CHUNK.backward(WHOLE, recompute).iter().map(|(name, _)| *name).collect::<Vec<_>>();
        assert_eq!(names(true), ["prep", "scan_back", "scan_states", "grad", "reduce"]);
        assert_eq!(names(false), ["scan_back", "scan_states", "grad", "reduce"]);
    }

    #[test]
    fn the_floor_is_the_slower_of_the_two() {
        let roofline = Roofline { tflop_s: 500.0, tb_s: 4.0 };
        assert_eq!(roofline.floor_us(Work { flop: 1e9, bytes: 4e6 }), 2.0);
        assert_eq!(roofline.floor_us(Work { flop: 1e9, bytes: 4e7 }), 10.0);
    }
}
