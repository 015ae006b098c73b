//! Drives the kernels of a backward step directly, without the operation's host side: PEs are taken in turn on one thread, so
//! that every wait finds what it waits for. What the forward pass would have kept (states that were received,
//! transitions) comes from the f64 reference.

mod launch;
mod memory;
mod tables;

use std::ops::Range;

use deltalink::exec::{Grid, Kernel};
use deltalink::gradients::{Gradients, Upstream};
use deltalink::inputs::{Beta, Dims, Gate, Inputs, Op, StateLayout};
use deltalink::reference::{Problem, segment_summary, state_at};
use deltalink::tensor::{Buffer, Dtype};
use kernels_gpu::backward::reduce::{self, Launch};
use kernels_gpu::backward::{grad, scan, states};
use kernels_gpu::fixup;
use kernels_gpu::params::{
    Array, Beside, FixParams, GateForm, GradParams, PrepParams, Records, ReduceParams, ScanBackParams, Sizes,
    StatesParams, StepMode, Tensor as Param, TraceBuffer,
};
use kernels_gpu::prep;
use kernels_gpu::tile::SHARED_BYTES;

pub use launch::{Launcher, Portable};
use memory::{Memory, absent, optional, view};
use tables::{Channels, PeTables};

/// A problem, cut into the tokens of PEs.
pub struct Setup<'a> {
    /// All tokens.
    pub inputs: &'a Inputs<'a>,
    /// Gradients of the results.
    pub upstream: &'a Upstream<'a>,
    /// Where sequences begin, of packed ones.
    pub cu_seqlens: Option<&'a [usize]>,
    /// Tokens of a chunk.
    pub chunk: usize,
    /// Offsets of the PEs' tokens, over the flattened tokens.
    pub cuts: &'a [usize],
    /// Whether gradients of states are handed from PE to PE.
    pub exact: bool,
}

/// All gradients, of all PEs' tokens, by the portable kernels.
///
/// # Panics
/// If a kernel breaks a rule.
pub fn gradients(setup: &Setup<'_>) -> Gradients<Vec<f64>> {
    gradients_by(setup, &mut Portable::new())
}

/// As [`gradients`], with kernels as `launcher` runs them.
///
/// # Panics
/// As [`gradients`].
pub fn gradients_by<L: Launcher>(setup: &Setup<'_>, launcher: &mut L) -> Gradients<Vec<f64>> {
    Step::new(setup, launcher).run()
}

struct Step<'a, L> {
    setup: &'a Setup<'a>,
    launcher: &'a mut L,
    problem: Problem,
    dims: Dims,
    sizes: Sizes,
    dtype: Dtype,
}

/// Results of the whole, written by the PEs each in its place.
struct Results {
    dq: Memory,
    dk: Memory,
    dv: Memory,
    dg: Memory,
    dbeta: Memory,
    dh0: Memory,
    da_log: Vec<f64>,
    ddt_bias: Vec<f64>,
}

/// One PE's memory between launches.
struct Pe {
    tokens: Range<usize>,
    tables: PeTables,
    operands: Memory,
    decay: Memory,
    states: Memory,
    v_new: Memory,
    d_states: Memory,
    d_v_new: Memory,
    state_in: Memory,
    state_out: Memory,
    transitions: Memory,
}

impl<'a, L: Launcher> Step<'a, L> {
    fn new(setup: &'a Setup<'a>, launcher: &'a mut L) -> Self {
        let dims = setup.inputs.dims().unwrap();
        let sizes = Sizes {
            h: dims.h as u32,
            hv: dims.hv as u32,
            k: dims.k as u32,
            v: dims.v as u32,
            chunk: setup.chunk as u32,
            pad: 0,
        };
        Self {
            setup,
            launcher,
            problem: Problem::new(setup.inputs, setup.cu_seqlens).unwrap(),
            dims,
            sizes,
            dtype: setup.inputs.dtype(),
        }
    }

    fn run(mut self) -> Gradients<Vec<f64>> {
        let Dims { b, t, h, hv, k, v } = self.dims;
        let (tokens, channels) = (b * t, self.gate_channels());
        let mut results = Results {
            dq: Memory::zeros(self.dtype, tokens * h * k),
            dk: Memory::zeros(self.dtype, tokens * h * k),
            dv: Memory::zeros(self.dtype, tokens * hv * v),
            dg: Memory::zeros(Dtype::F32, tokens * hv * channels),
            dbeta: Memory::zeros(Dtype::F32, tokens * hv),
            dh0: Memory::zeros(Dtype::F32, self.problem.sequences.len() * hv * k * v),
            da_log: vec![0.0; hv],
            ddt_bias: vec![0.0; hv * channels],
        };
        let count = self.setup.cuts.len() - 1;
        let m_dtype = if self.dtype == Dtype::F32 { Dtype::F32 } else { Dtype::Bf16 };
        let channels = Channels::new(count, &self.sizes, m_dtype, self.setup.exact);
        let mut pes: Vec<Pe> = (0..count).map(|pe| self.pe(pe, m_dtype)).collect();
        for pe in &mut pes {
            self.prep(pe);
        }
        // Gradients flow from the last PE to the first, so this order never waits.
        for (number, pe) in pes.iter_mut().enumerate().rev() {
            self.scan_back(pe, &channels, number, &mut results, 0);
        }
        for (number, pe) in pes.iter_mut().enumerate() {
            self.states(pe);
            self.merge(pe, &channels, number);
            self.scan_back(pe, &channels, number, &mut results, 1);
            self.grad(pe, &mut results);
            channels.expect_no_trap(number);
        }
        let gate = &self.setup.inputs.gate;
        let (has_a_log, has_bias) = match gate {
            Gate::Given(_) => (false, false),
            Gate::Softplus { dt_bias, .. } => (true, dt_bias.is_some()),
            Gate::LowerBound { a_log, dt_bias, .. } => (a_log.is_some(), dt_bias.is_some()),
        };
        Gradients {
            dq: results.dq.values(),
            dk: results.dk.values(),
            dv: results.dv.values(),
            dg: results.dg.values(),
            dbeta: results.dbeta.values(),
            da_log: has_a_log.then_some(results.da_log),
            ddt_bias: has_bias.then_some(results.ddt_bias),
            d_initial_state: self.setup.inputs.initial_state.is_some().then(|| results.dh0.values()),
        }
    }

    /// Values of the gate for each token and value head.
    fn gate_channels(&self) -> usize {
        if self.setup.inputs.op == Op::Kda { self.dims.k } else { 1 }
    }

    fn pe(&self, number: usize, m_dtype: Dtype) -> Pe {
        let Dims { hv, k, v, .. } = self.dims;
        let tokens = self.setup.cuts[number]..self.setup.cuts[number + 1];
        let tables = PeTables::new(&self.problem, self.setup, number, &self.sizes, self.scan_warpgroups());
        let (chunks, n) = (tables.chunks.len(), tokens.len());
        let (mut state_in, mut transitions) = (vec![0.0; hv * v * k], vec![0.0; hv * k * k]);
        if let Some(piece) = tables.continued.clone() {
            for head in 0..hv {
                let s = state_at(&self.problem, head, piece.start);
                let (m, _) = segment_summary(&self.problem, head, piece.clone());
                (0..k * v).for_each(|i| state_in[head * k * v + i % v * k + i / v] = s[i]);
                (0..k * k).for_each(|i| transitions[head * k * k + i % k * k + i / k] = m[i]);
            }
        }
        Pe {
            tokens,
            tables,
            operands: Memory::zeros(self.dtype, chunks * hv * Records::record_len(&self.sizes)),
            decay: Memory::zeros(Dtype::F32, chunks * hv * k),
            states: Memory::zeros(self.dtype, chunks * hv * v * k),
            v_new: Memory::zeros(self.dtype, n * hv * v),
            d_states: Memory::zeros(self.dtype, chunks * hv * v * k),
            d_v_new: Memory::zeros(self.dtype, n * hv * v),
            state_in: Memory::of(Buffer::from_f64(Dtype::F32, state_in)),
            state_out: Memory::zeros(Dtype::F32, hv * v * k),
            transitions: Memory::of(Buffer::from_f64(m_dtype, transitions)),
        }
    }

    fn launch<K: Kernel>(
        &mut self,
        params: &K,
        grid: Grid,
        warpgroups: usize,
        shared_bytes: usize,
        written: &[(&str, Param)],
    ) {
        assert!(shared_bytes <= SHARED_BYTES, "{}: {shared_bytes} bytes of shared memory", K::NAME);
        let kind = (self.setup.inputs.op, self.dtype);
        self.launcher.launch(kind, params, (grid, warpgroups, shared_bytes), written);
    }

    /// Two warpgroups in a block where they fit, as in the operation.
    fn scan_warpgroups(&self) -> usize {
        let bytes = states::shared_bytes(self.dims.k, self.setup.chunk, self.element(), states::WARPGROUPS);
        self.launcher.walkers(if bytes <= SHARED_BYTES { states::WARPGROUPS } else { 1 })
    }

    fn element(&self) -> usize {
        self.dtype.size()
    }

    fn v_first(&self) -> u32 {
        u32::from(self.setup.inputs.state_layout == StateLayout::VFirst)
    }

    fn prep_params(&self, pe: &mut Pe) -> PrepParams {
        let Dims { h, hv, k, .. } = self.dims;
        let (x, gate_row) = (self.setup.inputs, hv * self.gate_channels());
        let (g, a_log, dt_bias, gate_form, bound) = match &x.gate {
            Gate::Given(g) => (g, None, None, GateForm::Given, 0.0),
            Gate::Softplus { raw, a_log, dt_bias } => (raw, Some(a_log), dt_bias.as_ref(), GateForm::Softplus, 0.0),
            Gate::LowerBound { raw, a_log, dt_bias, bound } => {
                (raw, a_log.as_ref(), dt_bias.as_ref(), GateForm::LowerBound, *bound)
            }
        };
        let (beta, beta_factor) = match &x.beta {
            Beta::Given(beta) => (beta, 0.0),
            Beta::Logits { logits, factor } => (logits, *factor),
        };
        PrepParams {
            tables: pe.tables.forward(self.sizes),
            q: view(&x.q, &pe.tokens, h * k),
            k: view(&x.k, &pe.tokens, h * k),
            g: view(g, &pe.tokens, gate_row),
            beta: view(beta, &pe.tokens, hv),
            a_log: optional(a_log),
            dt_bias: optional(dt_bias),
            records: self.records(pe),
            gate_form: gate_form as u32,
            l2norm: u32::from(x.l2norm),
            bound,
            scale: x.scale_or_default(&self.dims),
            beta_factor,
            pad: 0,
            beside: Beside::none(),
            trace: no_trace(),
        }
    }

    fn prep(&mut self, pe: &mut Pe) {
        let params = self.prep_params(pe);
        let shared = prep::shared_bytes(self.dims.k, self.setup.chunk, self.element(), self.per_channel());
        let grid = Grid::Blocks(pe.tables.chunks.len() * self.dims.hv);
        self.launch(&params, grid, prep::WARPGROUPS, shared, &[]);
    }

    fn per_channel(&self) -> bool {
        self.setup.inputs.op == Op::Kda
    }

    fn records(&self, pe: &mut Pe) -> Records {
        Records { operands: pe.operands.all(), decay: pe.decay.all(), factors: absent(), sizes: self.sizes }
    }

    fn states(&mut self, pe: &mut Pe) {
        let Dims { hv, k, v, .. } = self.dims;
        let x = self.setup.inputs;
        let ticket = [0u64];
        let params = StatesParams {
            tables: pe.tables.forward(self.sizes),
            records: self.records(pe),
            v: view(&x.v, &pe.tokens, hv * v),
            initial: optional(x.initial_state.as_ref()),
            state_in: pe.state_in.all(),
            states: pe.states.all(),
            v_new: pe.v_new.all(),
            items: Array::of(&pe.tables.state_items),
            ticket: Array::of(&ticket),
            trace: no_trace(),
            v_first: self.v_first(),
            pad: 0,
        };
        let warpgroups = self.scan_warpgroups();
        let shared = states::shared_bytes(k, self.setup.chunk, self.element(), warpgroups);
        let written = [("states", params.states), ("v_new", params.v_new)];
        self.launch(&params, Grid::Resident, warpgroups, shared, &written);
    }

    /// Launch 0 or 1 of the reverse scan.
    fn scan_back(&mut self, pe: &mut Pe, channels: &Channels, number: usize, results: &mut Results, which: usize) {
        let Dims { hv, k, v, .. } = self.dims;
        let (ticket, epoch) = ([0u64], [1u64]);
        let params = ScanBackParams {
            tables: pe.tables.backward(self.sizes),
            records: self.records(pe),
            d_o: view(&self.setup.upstream.d_o, &pe.tokens, hv * v),
            initial: optional(self.setup.upstream.d_final_state.as_ref()),
            finals: results.dh0.all(),
            state_out: pe.state_out.all(),
            transitions: pe.transitions.all(),
            cuts: Array::empty(),
            own: absent(),
            d_states: pe.d_states.all(),
            d_v_new: pe.d_v_new.all(),
            items: Array::of(&pe.tables.back_items[which]),
            ticket: Array::of(&ticket),
            channel: channels.of(number, &epoch),
            beside: Beside::none(),
            trace: no_trace(),
            v_first: self.v_first(),
            m_dtype: channels.m_dtype as u32,
        };
        let warpgroups = self.scan_warpgroups();
        let shared = scan::shared_bytes(k, self.setup.chunk, self.element(), warpgroups);
        // What each launch stores depends on the segments; that all is stored shows in the results.
        self.launch(&params, Grid::Resident, warpgroups, shared, &[]);
    }

    fn merge(&mut self, pe: &mut Pe, channels: &Channels, number: usize) {
        let (ticket, epoch) = ([0u64], [1u64]);
        let params = FixParams {
            tables: pe.tables.backward(self.sizes),
            o_local: absent(),
            q_tilde: absent(),
            own: absent(),
            state_in: pe.state_out.all(),
            transitions: absent(),
            o: absent(),
            finals: absent(),
            cuts: Array::empty(),
            items: Array::of(&pe.tables.merge_items),
            ticket: Array::of(&ticket),
            channel: channels.of(number, &epoch),
            trace: no_trace(),
            v_first: self.v_first(),
            m_dtype: channels.m_dtype as u32,
            m_transposed: 1,
            pad: 0,
        };
        let state_out = [("state_out", params.state_in)];
        let written = if pe.tables.merge_items.is_empty() { &[][..] } else { &state_out };
        let shared = fixup::shared_bytes(self.dims.k, self.setup.chunk, self.element());
        self.launch(&params, Grid::Resident, fixup::WARPGROUPS, shared, written);
        channels.expect_no_trap(number);
    }

    fn grad(&mut self, pe: &mut Pe, results: &mut Results) {
        let Dims { h, hv, k, v, .. } = self.dims;
        let (x, channels) = (self.setup.inputs, self.gate_channels());
        let (tokens, chunks, n) = (pe.tokens.clone(), pe.tables.chunks.len(), pe.tokens.len());
        let direct = hv == h && !x.l2norm;
        let mut heads = [Memory::zeros(Dtype::F32, n * hv * k), Memory::zeros(Dtype::F32, n * hv * k)];
        let [head_q, head_k] = &mut heads;
        let mut da_log = Memory::zeros(Dtype::F32, chunks * hv);
        let mut ddt_bias = Memory::zeros(Dtype::F32, chunks * hv * channels);
        let prep = self.prep_params(pe);
        let params = GradParams {
            v: view(&x.v, &tokens, hv * v),
            d_o: view(&self.setup.upstream.d_o, &tokens, hv * v),
            states: pe.states.all(),
            v_new: pe.v_new.all(),
            d_states: pe.d_states.all(),
            d_v_new: pe.d_v_new.all(),
            dq: if direct { results.dq.rows(&tokens, h * k) } else { head_q.all() },
            dk: if direct { results.dk.rows(&tokens, h * k) } else { head_k.all() },
            dv: results.dv.rows(&tokens, hv * v),
            dg: results.dg.rows(&tokens, hv * channels),
            dbeta: results.dbeta.rows(&tokens, hv),
            da_log: if prep.a_log.is_present() { da_log.all() } else { absent() },
            ddt_bias: if prep.dt_bias.is_present() { ddt_bias.all() } else { absent() },
            prep,
        };
        let outputs = [
            ("dq", params.dq),
            ("dk", params.dk),
            ("dv", params.dv),
            ("dg", params.dg),
            ("dbeta", params.dbeta),
            ("dA_log", params.da_log),
            ("ddt_bias", params.ddt_bias),
        ];
        let written: Vec<_> = outputs.into_iter().filter(|(_, x)| x.is_present()).collect();
        let shared = grad::shared_bytes(k, self.setup.chunk, self.element(), self.per_channel());
        self.launch(&params, Grid::Blocks(chunks * hv), grad::WARPGROUPS, shared, &written);

        let group = hv / h;
        if !direct {
            let all = ReduceParams {
                source: params.dq,
                target: results.dq.rows(&tokens, h * k),
                x: if x.l2norm { prep.q } else { absent() },
                rows: (n * h) as u64,
                cols: k as u64,
                terms: group as u64,
                row_stride: (group * k) as u64,
                term_stride: k as u64,
                trace: no_trace(),
            };
            self.reduce(&all);
            let x = if x.l2norm { prep.k } else { absent() };
            self.reduce(&ReduceParams { source: params.dk, target: results.dk.rows(&tokens, h * k), x, ..all });
        }
        for (source, whole) in [(params.da_log, &mut results.da_log), (params.ddt_bias, &mut results.ddt_bias)] {
            if !source.is_present() {
                continue;
            }
            let mut sum = Memory::zeros(Dtype::F32, whole.len());
            self.reduce(&ReduceParams {
                source,
                target: sum.all(),
                x: absent(),
                rows: 1,
                cols: whole.len() as u64,
                terms: chunks as u64,
                row_stride: 0,
                term_stride: whole.len() as u64,
                trace: no_trace(),
            });
            whole.iter_mut().zip(sum.values()).for_each(|(whole, part)| *whole += part);
        }
    }

    fn reduce(&mut self, params: &ReduceParams) {
        let Launch { blocks, shared_bytes } = reduce::launch(params);
        self.launch(params, Grid::Blocks(blocks), reduce::WARPGROUPS, shared_bytes, &[("sums", params.target)]);
    }
}

fn no_trace() -> TraceBuffer {
    TraceBuffer { stamps: Array::of::<u64>(&[]), cursor: Array::of::<u64>(&[]) }
}

/// The mode of a channel.
fn step_mode(exact: bool) -> StepMode {
    if exact { StepMode::Exact } else { StepMode::Overlap }
}
