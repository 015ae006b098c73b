//! Where the tensors of a backward step lie.

use kernels_gpu::hopper::backward::value_panels_len;
use kernels_gpu::params::{GradParams, PrepParams, Records, ReduceParams, Tensor as Param, TraceBuffer};
use kernels_gpu::scan::own_len;
use kernels_gpu::tile::host::Checker;

use super::BackwardStep;
use crate::exec::{Body, ExecError, Executor, Scratch, Slot};
use crate::inputs::Dims;
use crate::op::BackwardOut;
use crate::op::saved::SavedMemory;
use crate::op::step::optional;
use crate::tensor::{Dtype, TensorViewMut};

/// Tensors in device memory.
pub(super) struct Memory {
    pub records: Records,
    pub records_were_kept: bool,
    pub state_in: Param,
    pub transitions: Param,
    pub states: Param,
    pub v_new: Param,
    pub state_out: Param,
    /// dS_ext of parts.
    pub own: Param,
    pub d_states: Param,
    pub d_v_new: Param,
    /// Gradients of q and k, or of every value head for `reduce`.
    dq: Param,
    dk: Param,
    dv: Param,
    dg: Param,
    dbeta: Param,
    pub d_initial: Param,
    /// Shares of the chunks.
    a_log_shares: Param,
    dt_bias_shares: Param,
    /// Whether it leaves gradients of rows to `reduce`.
    reduces_rows: bool,
    /// What `reduce` writes: targets of the four above.
    sums: Sums,
}

#[derive(Clone, Copy)]
struct Sums {
    dq: Param,
    dk: Param,
    da_log: Param,
    ddt_bias: Param,
    /// The rows of q and k as they were before they were normalised, if they were.
    q: Param,
    k: Param,
}

impl BackwardStep<'_> {
    /// Whether `grad` leaves the gradients of q and k of every value head to `reduce`. The body for Hopper goes through the
    /// normalisation itself.
    fn reduces_rows(&self, body: Body) -> bool {
        self.step.dims.hv != self.step.dims.h || self.step.inputs.l2norm && body == Body::Portable
    }

    pub(super) fn memory<X: Executor>(
        &self,
        exec: &mut X,
        body: Body,
        chunks: usize,
        out: &mut BackwardOut<'_>,
        saved: &mut SavedMemory<X>,
    ) -> Result<Memory, ExecError> {
        let step = &self.step;
        let Dims { b, t, hv, k, v, .. } = *step.dims;
        let (dtype, sizes, tokens) = (step.inputs.dtype(), step.sizes(), b * t);
        let (operands, decay) = step.record_lens(chunks);
        let kept = saved.records(sizes);
        let records = match kept {
            Some(records) => records,
            None => Records {
                operands: exec.scratch(Scratch::Operands, operands, dtype)?,
                decay: exec.scratch(Scratch::Decay, decay, Dtype::F32)?,
                factors: Param::absent(),
                sizes,
            },
        };
        let values = match body {
            Body::Portable => tokens * hv * v,
            Body::Hopper => value_panels_len(chunks, hv),
        };
        let mut output = |slot, x: Option<&mut TensorViewMut<'_>>| match x {
            Some(x) => exec.output(slot, x),
            None => Ok(Param::absent()),
        };
        let (dq, dk) = (output(Slot::DQ, Some(&mut out.dq))?, output(Slot::DK, Some(&mut out.dk))?);
        let (dv, dg) = (output(Slot::DV, Some(&mut out.dv))?, output(Slot::DGate, Some(&mut out.dg))?);
        let dbeta = output(Slot::DBeta, Some(&mut out.dbeta))?;
        let da_log = output(Slot::DALog, out.da_log.as_mut())?;
        let ddt_bias = output(Slot::DDtBias, out.ddt_bias.as_mut())?;
        let d_initial = output(Slot::DInitialState, out.d_initial_state.as_mut())?;

        let normalised = Some(step.inputs).filter(|x| x.l2norm);
        let q = optional(exec, Slot::Q, normalised.map(|x| &x.q))?;
        let rows = optional(exec, Slot::K, normalised.map(|x| &x.k))?;
        let sums = Sums { dq, dk, da_log, ddt_bias, q, k: rows };
        let reduces_rows = self.reduces_rows(body);
        let heads = if reduces_rows { tokens * hv * k } else { 0 };
        let shares = |gradient: &Option<TensorViewMut<'_>>| gradient.as_ref().map_or(0, |x| chunks * x.len());
        // In exact mode there are none: what arrives is not merged, but walked from.
        let rows = step.rows();
        let own = if step.parts.most() > 1 { rows * own_len(&step.layout) } else { 0 };
        Ok(Memory {
            records,
            records_were_kept: kept.is_some(),
            state_in: saved.state_in.param(),
            transitions: saved.transitions.param(),
            states: exec.scratch(Scratch::States, chunks * hv * v * k, dtype)?,
            v_new: exec.scratch(Scratch::VNew, values, dtype)?,
            state_out: exec.scratch(Scratch::StateOut, rows * v * k, Dtype::F32)?,
            own: exec.scratch(Scratch::Own, own, Dtype::F32)?,
            d_states: exec.scratch(Scratch::DStates, chunks * hv * v * k, dtype)?,
            d_v_new: exec.scratch(Scratch::DVNew, values, dtype)?,
            dq: if heads > 0 { exec.scratch(Scratch::DQHeads, heads, Dtype::F32)? } else { dq },
            dk: if heads > 0 { exec.scratch(Scratch::DKHeads, heads, Dtype::F32)? } else { dk },
            dv,
            dg,
            dbeta,
            d_initial,
            a_log_shares: exec.scratch(Scratch::ALogShares, shares(&out.da_log), Dtype::F32)?,
            dt_bias_shares: exec.scratch(Scratch::DtBiasShares, shares(&out.ddt_bias), Dtype::F32)?,
            reduces_rows,
            sums,
        })
    }

    /// The sums over value heads and over chunks.
    pub(super) fn sums(&self, memory: &Memory, chunks: usize, trace: TraceBuffer) -> Vec<ReduceParams> {
        let Dims { b, t, h, hv, k, .. } = *self.step.dims;
        let group = hv / h;
        let mut all = Vec::new();
        if memory.reduces_rows {
            let Sums { dq, dk, q, k: keys, .. } = memory.sums;
            let rows = |source, target, x| ReduceParams {
                source,
                target,
                x,
                rows: (b * t * h) as u64,
                cols: k as u64,
                terms: group as u64,
                row_stride: (group * k) as u64,
                term_stride: k as u64,
                trace,
            };
            all.extend([rows(memory.dq, dq, q), rows(memory.dk, dk, keys)]);
        }
        let Sums { da_log, ddt_bias, .. } = memory.sums;
        for (source, target) in [(memory.a_log_shares, da_log), (memory.dt_bias_shares, ddt_bias)] {
            if target.is_present() {
                let cols = target.len;
                let (x, terms) = (Param::absent(), chunks as u64);
                all.push(ReduceParams {
                    source,
                    target,
                    x,
                    rows: 1,
                    cols,
                    terms,
                    row_stride: 0,
                    term_stride: cols,
                    trace,
                });
            }
        }
        all
    }
}

impl Memory {
    pub fn grad_params(&self, prep: PrepParams, v: Param, d_o: Param) -> GradParams {
        GradParams {
            prep,
            v,
            d_o,
            states: self.states,
            v_new: self.v_new,
            d_states: self.d_states,
            d_v_new: self.d_v_new,
            dq: self.dq,
            dk: self.dk,
            dv: self.dv,
            dg: self.dg,
            dbeta: self.dbeta,
            da_log: self.a_log_shares,
            ddt_bias: self.dt_bias_shares,
        }
    }

    /// Tells the checker what the step must write.
    pub fn expect_outputs(&self, checker: &mut Checker) {
        let Sums { dq, dk, da_log, ddt_bias, .. } = self.sums;
        let written = [
            ("states", self.states),
            ("v_new", self.v_new),
            ("d_states", self.d_states),
            ("d_v_new", self.d_v_new),
            ("dq", dq),
            ("dk", dk),
            ("dv", self.dv),
            ("dg", self.dg),
            ("dbeta", self.dbeta),
            ("dh0", self.d_initial),
            ("dA_log", da_log),
            ("ddt_bias", ddt_bias),
        ];
        for (name, tensor) in written.into_iter().filter(|(_, tensor)| tensor.is_present()) {
            checker.expect_written(name, tensor);
        }
    }
}

/// Brings the results to the caller's memory.
pub(in super::super) fn fetch<X: Executor>(exec: &mut X, out: &mut BackwardOut<'_>) -> Result<(), ExecError> {
    let always = [
        (Slot::DQ, &mut out.dq),
        (Slot::DK, &mut out.dk),
        (Slot::DV, &mut out.dv),
        (Slot::DGate, &mut out.dg),
        (Slot::DBeta, &mut out.dbeta),
    ];
    let optional = [
        (Slot::DALog, out.da_log.as_mut()),
        (Slot::DDtBias, out.ddt_bias.as_mut()),
        (Slot::DInitialState, out.d_initial_state.as_mut()),
    ];
    let present = optional.into_iter().filter_map(|(slot, x)| Some((slot, x?)));
    for (slot, tensor) in always.into_iter().chain(present) {
        exec.fetch(slot, tensor)?;
    }
    Ok(())
}
