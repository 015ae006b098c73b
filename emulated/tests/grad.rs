//! The Hopper body of `grad` in whole backward steps whose other kernels are the portable ones on the CPU: what those leave is
//! rearranged into the images that this body reads.

use std::time::Instant;

use cuda_std::emulated::{Emulator, Launch as Blocks, Schedule};
use deltalink::compare::{Allowance, gradients_within};
use deltalink::exec::cpu::{Cpu, CpuMemory};
use deltalink::exec::{Body, ExecError, Executor, Image, Kernel, Launch, Scratch, Slot, SymmetricBytes, Times, Waits};
use deltalink::generate::{BetaKind, Decay, GateKind, Keys, Spec};
use deltalink::gradients::Gradients;
use deltalink::inputs::{Beta, Inputs, Op};
use deltalink::op::whole::{Share, UpstreamShare, join_backward, one_backward};
use deltalink::op::{Config, ContextParallel, OpError};
use deltalink::plan::{Cuts, Plan};
use deltalink::reference::{Problem, backward};
use deltalink::tensor::{Buffer, Dtype, Tensor, TensorView};
use deltalink::world::{Pe, WorldOptions, run_threads};
use deltalink_emulated::entries::entry;
use kernels_gpu::element::DtypeCode;
use kernels_gpu::hopper::backward::grad;
use kernels_gpu::hopper::{CHANNELS, CHUNK, IMAGE, PANEL, RECORD, RECORD_A};
use kernels_gpu::params::{Chunk, GradParams, ReduceParams, Sizes, Tensor as Param};
use kernels_gpu::protocol::TrapRecord;

/// The CPU back end, but for `grad`, and for the normalisation of what this goes through itself.
struct GradOnHopper {
    cpu: Cpu,
    emulator: Emulator,
    schedule: Schedule,
    /// Gradients of rows of q and k as they were given, by the address at which `reduce` would find those after normalisation.
    rows: Vec<(u64, Vec<u16>)>,
}

impl GradOnHopper {
    /// Lets `grad` go through the normalisation if no heads are to be summed.
    fn normalise_in_grad(&mut self, params: &mut GradParams) {
        let Sizes { h, hv, .. } = params.prep.tables.sizes;
        self.rows.clear();
        if params.prep.l2norm != 0 && h == hv {
            for tensor in [&mut params.dq, &mut params.dk] {
                let rows = vec![0xffff_u16; tensor.len as usize];
                *tensor = Param::new(rows.as_ptr() as u64, rows.len(), DtypeCode::Bf16);
                self.rows.push((0, rows));
            }
        }
    }
}

/// Places of a panel's elements: `(r, c)` of 64 x 64.
fn in_panel(r: usize, c: usize) -> usize {
    r * 64 + (((c / 8) ^ (r % 8)) * 8) + c % 8
}

/// Elements of a 16-bit tensor.
fn elements(x: &Param) -> &[u16] {
    // SAFETY: a tensor of the step under way, which nobody writes now.
    unsafe { std::slice::from_raw_parts(x.addr as *const u16, x.len as usize) }
}

/// With `params` whose operands are images, held by the vectors.
fn with_images(params: &GradParams) -> (GradParams, [Vec<u16>; 5]) {
    let sizes = &params.prep.tables.sizes;
    let (hv, table) = (sizes.hv as usize, params.prep.tables.chunks);
    // SAFETY: the step's table.
    let chunks: &[Chunk] = unsafe { std::slice::from_raw_parts(table.addr as *const Chunk, table.len as usize) };
    let rows = chunks.len() * hv;
    let states = |x: &Param| {
        let (from, mut to) = (elements(x), vec![0u16; rows * CHANNELS * CHANNELS]);
        for row in 0..rows {
            for v in 0..CHANNELS {
                for k in 0..CHANNELS {
                    let panel = (row * 4 + v / 64 * 2 + k / 64) * PANEL as usize / 2;
                    to[panel + in_panel(v % 64, k % 64)] = from[(row * CHANNELS + v) * CHANNELS + k];
                }
            }
        }
        to
    };
    let values = |x: &Param| {
        let (from, mut to) = (elements(x), vec![0u16; rows * CHUNK * CHANNELS]);
        for row in 0..rows {
            let (chunk, head) = (&chunks[row / hv], row % hv);
            for token in 0..chunk.len as usize {
                for v in 0..CHANNELS {
                    let panel = (row * 2 + v / 64) * PANEL as usize / 2;
                    let source = ((chunk.token as usize + token) * hv + head) * CHANNELS + v;
                    to[panel + in_panel(token, v % 64)] = from[source];
                }
            }
        }
        to
    };
    let mut records = vec![0u16; rows * RECORD as usize / 2];
    for row in 0..rows {
        let (record, image) = (row * RECORD as usize / 2, row * RECORD as usize / 2 + RECORD_A as usize / 2);
        let a = record + IMAGE as usize / 2;
        for r in 0..CHUNK {
            for c in 0..CHUNK {
                records[image + in_panel(r, c)] = elements(&params.prep.records.operands)[a + r * CHUNK + c];
            }
        }
    }
    let images =
        [records, states(&params.states), states(&params.d_states), values(&params.v_new), values(&params.d_v_new)];
    let mut p = *params;
    let tensors = [&mut p.prep.records.operands, &mut p.states, &mut p.d_states, &mut p.v_new, &mut p.d_v_new];
    for (tensor, image) in tensors.into_iter().zip(&images) {
        *tensor = Param { addr: image.as_ptr() as u64, len: image.len() as u64, ..*tensor };
    }
    (p, images)
}

impl Executor for GradOnHopper {
    type Memory = CpuMemory;

    fn launch<K: Kernel>(&mut self, launch: &Launch<'_>, params: &K) -> Result<(), ExecError> {
        if K::NAME == ReduceParams::NAME {
            let params: ReduceParams = bytemuck::pod_read_unaligned(bytemuck::bytes_of(params));
            if let Some((_, rows)) = self.rows.iter().find(|(address, _)| *address == params.source.addr) {
                assert_eq!((params.target.dtype(), params.terms), (DtypeCode::Bf16, 1));
                // SAFETY: the step's memory, of that many elements.
                unsafe { std::ptr::copy_nonoverlapping(rows.as_ptr(), params.target.addr as *mut u16, rows.len()) };
                return Ok(());
            }
        }
        if K::NAME != GradParams::NAME {
            return self.cpu.launch(launch, params);
        }
        let params: GradParams = bytemuck::pod_read_unaligned(bytemuck::bytes_of(params));
        let (mut with_images, _images) = with_images(&params);
        self.normalise_in_grad(&mut with_images);
        for (row, source) in self.rows.iter_mut().zip([&params.dq, &params.dk]) {
            row.0 = source.addr;
        }
        let name = GradParams::hopper_entry(launch.op, grad::WARPGROUPS);
        let entry = entry(&name).expect("there is such an entry");
        let blocks = (params.prep.tables.chunks.len * u64::from(params.prep.tables.sizes.hv)) as u32;
        let grid = Blocks {
            kernel: &name,
            grid: blocks,
            threads: 128 * grad::WARPGROUPS as u32,
            shared_bytes: grad::SHARED as u32,
            schedule: self.schedule,
            origin: Instant::now(),
            idle: &|| (),
        };
        for block in 0..blocks {
            // SAFETY: parameters of this kernel; the step keeps their memory, and this call the images.
            let run = unsafe { entry.run(&mut self.emulator, &grid, block, &with_images) };
            run.unwrap_or_else(|fault| panic!("{fault}"));
        }
        Ok(())
    }

    fn keep(&mut self, bytes: usize) -> Result<CpuMemory, ExecError> {
        self.cpu.keep(bytes)
    }
    fn reuse(&mut self, memory: CpuMemory) {
        self.cpu.reuse(memory);
    }
    fn input(&mut self, slot: Slot, tensor: &TensorView<'_>) -> Result<Param, ExecError> {
        self.cpu.input(slot, tensor)
    }
    fn output(&mut self, slot: Slot, tensor: &mut Tensor) -> Result<Param, ExecError> {
        // Whatever a kernel should fail to write must not look like a result.
        tensor.data.bytes_mut().fill(0xff);
        self.cpu.output(slot, tensor)
    }
    fn fetch(&mut self, slot: Slot, tensor: &mut Tensor) -> Result<(), ExecError> {
        self.cpu.fetch(slot, tensor)
    }
    fn scratch(&mut self, which: Scratch, len: usize, dtype: Dtype) -> Result<Param, ExecError> {
        let memory = self.cpu.scratch(which, len, dtype)?;
        if memory.is_present() {
            // SAFETY: memory of this executor, of that many bytes, that no kernel uses now.
            unsafe { std::ptr::write_bytes(memory.addr as *mut u8, 0xff, len * dtype.size()) };
        }
        Ok(memory)
    }
    fn scratch_bytes(&self) -> usize {
        self.cpu.scratch_bytes()
    }
    fn put_image(&mut self, image: &Image) -> Result<u64, ExecError> {
        self.cpu.put_image(image)
    }
    fn get_image(&mut self, image: &mut Image, peer_failed: &dyn Fn() -> bool) -> Result<(), ExecError> {
        self.cpu.get_image(image, peer_failed)
    }
    fn watch(&mut self) -> Result<u64, ExecError> {
        self.cpu.watch()
    }
    fn trap(&self) -> TrapRecord {
        self.cpu.trap()
    }
    fn take_times(&mut self) -> Result<Times, ExecError> {
        self.cpu.take_times()
    }
    unsafe fn copy(&mut self, to: u64, from: u64, bytes: usize) -> Result<(), ExecError> {
        // SAFETY: by contract.
        unsafe { self.cpu.copy(to, from, bytes) }
    }
    fn symmetric(&mut self, pe: &Pe, name: &str, bytes: usize) -> Result<SymmetricBytes, ExecError> {
        self.cpu.symmetric(pe, name, bytes)
    }
    fn heap_bytes(&self, pe: &Pe) -> usize {
        self.cpu.heap_bytes(pe)
    }
    fn concurrency(&self) -> usize {
        self.cpu.concurrency()
    }
    fn body(&self, sizes: &Sizes, operands: Dtype) -> Body {
        self.cpu.body(sizes, operands)
    }
    fn checks(&self) -> bool {
        false
    }
    fn waits(&self) -> Waits {
        self.cpu.waits()
    }
    fn peak_device_bytes(&self, pe: &Pe) -> usize {
        self.cpu.peak_device_bytes(pe)
    }
    fn set_clock_origin(&mut self, origin: Instant) {
        self.cpu.set_clock_origin(origin);
    }
}

/// Gradients of the problem, with its own steps or these, from this body (with a schedule) or the portable one.
fn gradients(spec: &Spec, steps: Option<&Tensor>, schedule: Option<Schedule>) -> Gradients {
    let (case, upstream) = (spec.generate(), spec.generate_upstream(false));
    let whole = with_steps(case.inputs(), steps);
    let plan = match case.cu_seqlens() {
        Some(cu_seqlens) => Plan::packed(cu_seqlens, &Cuts::equal(1)),
        None => Plan::batch(spec.b, spec.t, &Cuts::equal(1)),
    };
    let plan = plan.expect("one PE");
    let parts = run_threads(1, &WorldOptions::default(), |pe| -> Result<_, OpError> {
        let share = Share::new(&plan, 0, &whole);
        let (inputs, upstream) = (share.inputs(&whole), UpstreamShare::new(&plan, 0, &upstream.view()));
        let cpu = Cpu::new(1).map_err(|error| OpError::from(ExecError::from(error)))?;
        match schedule {
            Some(schedule) => {
                let exec = GradOnHopper { cpu, emulator: Emulator::new(), schedule, rows: Vec::new() };
                let mut op = ContextParallel::on(pe, Config::default(), exec)?;
                one_backward(&mut op, &plan, &inputs, &upstream.view())
            }
            None => {
                let mut op = ContextParallel::on(pe, Config::default(), cpu)?;
                one_backward(&mut op, &plan, &inputs, &upstream.view())
            }
        }
    });
    let parts = parts.unwrap_or_else(|error| panic!("{spec:?}: {error}"));
    join_backward(&plan, &whole, parts).gradients
}

/// Compares with the f64 reference, as `deltalink verify` does, in these orders of events; and requires that errors are about as
/// large as those of the portable body.
fn check(spec: &Spec, schedules: &[Schedule]) {
    check_with(spec, None, schedules);
}

/// The inputs, with these steps if there are any.
fn with_steps<'a>(inputs: Inputs<'a>, steps: Option<&'a Tensor>) -> Inputs<'a> {
    match steps {
        Some(steps) => Inputs { beta: Beta::Given(steps.view()), ..inputs },
        None => inputs,
    }
}

/// [`check`] with these steps, if there are any, in place of the problem's own.
fn check_with(spec: &Spec, steps: Option<&Tensor>, schedules: &[Schedule]) {
    let (case, upstream) = (spec.generate(), spec.generate_upstream(false));
    let inputs = with_steps(case.inputs(), steps);
    let problem = Problem::new(&inputs, case.cu_seqlens()).expect("a problem");
    let reference = backward(&problem, &upstream.view()).expect("a reference");
    let judged =
        |found: &Gradients| gradients_within(&inputs, &problem, &found.to_f64(), &reference, Allowance::default());
    let portable = judged(&gradients(spec, steps, None));
    for &schedule in schedules {
        let found = judged(&gradients(spec, steps, Some(schedule)));
        for (found, portable) in found.iter().zip(&portable) {
            println!("{spec} {schedule:?} {}: {} (portable {})", found.name, found.error, portable.error);
        }
        for (found, portable) in found.iter().zip(&portable) {
            assert_eq!(found.mismatch, None, "{spec:?} {schedule:?}");
            let limit = 1.5 * portable.error.rel_rms + 1e-3;
            assert!(
                found.error.rel_rms <= limit || found.error.rel_rms.is_nan(),
                "{spec:?} {}: {}",
                found.name,
                found.error
            );
        }
    }
}

/// A problem that the body computes.
fn spec(op: Op, t: usize) -> Spec {
    Spec { op, t, h: 1, hv: 1, k: 128, v: 128, dtype: Dtype::Bf16, ..Spec::default() }
}

#[test]
fn whole_chunks_in_every_order_of_events() {
    for op in [Op::Kda, Op::Gdn] {
        check(&spec(op, 128), &Schedule::ALL);
    }
}

#[test]
fn partial_chunks_shared_heads_and_every_gate() {
    let last = &Schedule::ALL[3..];
    for op in [Op::Kda, Op::Gdn] {
        check(&Spec { t: 65, h: 1, hv: 2, l2norm: true, ..spec(op, 65) }, last);
        check(&Spec { cu_seqlens: Some(vec![0, 37, 37, 101]), gate: GateKind::Softplus, ..spec(op, 101) }, last);
        check(&Spec { beta: BetaKind::Logits2, h: 2, hv: 2, l2norm: true, seed: 3, ..spec(op, 17) }, last);
    }
    check(&Spec { gate: GateKind::LowerBound, hv: 3, beta: BetaKind::Logits, ..spec(Op::Kda, 90) }, last);
}

#[test]
fn weak_and_strong_decays_and_steps() {
    let first = &Schedule::ALL[..1];
    for op in [Op::Kda, Op::Gdn] {
        for decay in [Decay::None, Decay::Slow, Decay::Fast, Decay::Bursty, Decay::AllStrong] {
            check(&Spec { decay, beta: BetaKind::UpTo2, ..spec(op, 128) }, first);
        }
        check(&Spec { decay: Decay::Slow, keys: Keys::CommonMean, beta: BetaKind::Small, ..spec(op, 128) }, first);
    }
}

/// A step of 0 has a gradient too, which is a quotient of what the floor of beta leaves; 2 turns a key's direction round.
#[test]
fn steps_of_nothing_and_of_two() {
    for op in [Op::Kda, Op::Gdn] {
        let spec = spec(op, 70);
        let steps: Vec<f64> = (0..70).map(|token| [0.0, 2.0, 0.0, 0.5, 1.0][token % 5]).collect();
        let steps = Tensor { shape: vec![1, 70, 1], data: Buffer::from_f64(Dtype::Bf16, steps) };
        check_with(&spec, Some(&steps), &Schedule::ALL[..1]);
    }
}
