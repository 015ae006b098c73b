//! Calls whose tensors lie where kernels run, whose results go into the caller's memory, and that need not wait for their work.
//! On the CPU that memory is the host's; GPUs have `deltalink doctor --self-test`.

mod cp;

use std::time::Duration;

use cp::failing::{ODD, Outcome, TIMEOUT};
use cp::gradients::{Derived, shares};
use cp::{MODES, options};
use deltalink::error::InputError;
use deltalink::generate::{BetaKind, Decay, GateKind, Spec};
use deltalink::gradients::Gradients;
use deltalink::inputs::Inputs;
use deltalink::op::{BackwardOut, Config, ContextParallel, ForwardOut, Mode, OpError, Recompute, Values};
use deltalink::plan::{Cuts, Plan};
use deltalink::tensor::{Buffer, Dtype, Location, Tensor, TensorView, TensorViewMut};
use deltalink::world::{WorldOptions, run_threads};

/// Memory that belongs to nobody's tensor, full of what is no result.
struct Memory {
    words: Vec<u64>,
    shape: Vec<usize>,
    dtype: Dtype,
}

impl Memory {
    fn like(tensor: &Tensor) -> Self {
        let bytes = tensor.data.bytes().len();
        Self { words: vec![u64::MAX; bytes.div_ceil(8)], shape: tensor.shape.clone(), dtype: tensor.data.dtype() }
    }

    /// A copy of `view`.
    fn of(view: &TensorView<'_>) -> Self {
        let tensor = Tensor { shape: view.shape().to_vec(), data: Buffer::from_f64(view.dtype(), view.to_f64()) };
        let mut memory = Self::like(&tensor);
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut memory.words);
        bytes[..tensor.data.bytes().len()].copy_from_slice(tensor.data.bytes());
        memory
    }

    fn view(&self) -> TensorView<'_> {
        // SAFETY: the words hold as many elements and are borrowed as long as the view.
        unsafe { TensorView::from_raw(self.words.as_ptr() as u64, &self.shape, self.dtype, Location::Host) }.unwrap()
    }

    fn view_mut(&mut self) -> TensorViewMut<'_> {
        let address = self.words.as_mut_ptr() as u64;
        // SAFETY: as in `view`.
        unsafe { TensorViewMut::from_raw(address, &self.shape, self.dtype, Location::Host) }.unwrap()
    }

    fn holds(&self, tensor: &Tensor) -> bool {
        let bytes: &[u8] = bytemuck::cast_slice(&self.words);
        // Kernels wrote them by address.
        std::hint::black_box(bytes)[..tensor.data.bytes().len()] == *tensor.data.bytes()
    }
}

/// Memory for the results of a forward call.
struct Results {
    o: Memory,
    final_state: Option<Memory>,
}

impl Results {
    fn like(forward: &deltalink::op::Forward) -> Self {
        Self { o: Memory::like(&forward.o), final_state: forward.final_state.as_ref().map(Memory::like) }
    }

    fn out(&mut self) -> ForwardOut<'_> {
        ForwardOut { o: self.o.view_mut(), final_state: self.final_state.as_mut().map(Memory::view_mut) }
    }

    fn hold(&self, forward: &deltalink::op::Forward) -> bool {
        let states = self.final_state.as_ref().zip(forward.final_state.as_ref());
        self.o.holds(&forward.o) && states.is_none_or(|(found, want)| found.holds(want))
    }
}

fn gradients_out(memory: &mut Gradients<Memory>) -> BackwardOut<'_> {
    Gradients {
        dq: memory.dq.view_mut(),
        dk: memory.dk.view_mut(),
        dv: memory.dv.view_mut(),
        dg: memory.dg.view_mut(),
        dbeta: memory.dbeta.view_mut(),
        da_log: memory.da_log.as_mut().map(Memory::view_mut),
        ddt_bias: memory.ddt_bias.as_mut().map(Memory::view_mut),
        d_initial_state: memory.d_initial_state.as_mut().map(Memory::view_mut),
    }
}

/// Whether every gradient is there, bit for bit.
fn hold(memory: &Gradients<Memory>, want: &Gradients, inputs: &Inputs<'_>) -> bool {
    let (found, want) = (memory.named(inputs), want.named(inputs));
    found.len() == want.len() && found.iter().zip(&want).all(|((_, found), (_, want))| found.holds(want))
}

fn spec() -> Spec {
    Spec {
        t: 75,
        h: 1,
        hv: 2,
        k: 32,
        v: 48,
        decay: Decay::Slow,
        beta: BetaKind::Small,
        gate: GateKind::Softplus,
        initial_state: true,
        l2norm: true,
        ..Spec::default()
    }
}

fn problem() -> (Derived, Plan) {
    let derived = Derived::new(&spec(), true);
    let plan = derived.plan(&Cuts::at(vec![20, 50]));
    (derived, plan)
}

/// How a test makes its calls.
#[derive(Clone, Copy, PartialEq)]
enum Calls {
    Into,
    Enqueued,
}

fn compare(mode: Mode, recompute: Recompute, calls: Calls) {
    let (derived, plan) = problem();
    let whole = derived.solved.inputs();
    let config = Config { mode, recompute, chunk: 16, checked: recompute == Recompute::All, ..Config::default() };
    let outcome = run_threads(3, &WorldOptions::default(), |pe| {
        let (share, upstream) = shares(&derived, &plan, pe.rank(), &whole);
        let inputs = share.inputs(&whole);
        let mut op = ContextParallel::new(pe, config.clone())?;
        let (want, saved) = op.forward_saving(&plan, &inputs)?;
        let gradients = op.backward(&plan, &inputs, saved, &upstream.view())?.gradients;
        let mut scratch = Vec::new();
        // Ordinary calls and these share channels, so their epochs go on; three times, so that both slots are used again.
        for turn in 0..3 {
            let (mut results, mut memory) = (Results::like(&want), gradients.map(Memory::like));
            let q = Memory::of(&inputs.q);
            let inputs = Inputs { q: q.view(), ..inputs.clone() };
            let bytes_sent = match calls {
                Calls::Into => {
                    let (done, saved) = op.forward_saving_into(&plan, &inputs, &mut results.out())?;
                    let mut out = gradients_out(&mut memory);
                    op.backward_into(&plan, &inputs, saved, &upstream.view(), &mut out)?;
                    done.report.bytes_sent
                }
                Calls::Enqueued => {
                    let first = op.enqueue_forward(&plan, &inputs, &mut Results::like(&want).out())?;
                    let (second, saved) = op.enqueue_forward_saving(&plan, &inputs, &mut results.out())?;
                    let mut out = gradients_out(&mut memory);
                    let third = op.enqueue_backward(&plan, &inputs, saved, &upstream.view(), &mut out)?;
                    assert!(op.poll(&third)? && op.poll(&first)?);
                    op.wait(third)?;
                    assert_eq!(op.wait(second)?.tokens, want.report.tokens, "a report of an earlier step");
                    op.check_enqueued()?;
                    let last = op.enqueue_forward(&plan, &inputs, &mut results.out())?;
                    op.wait(last)?.bytes_sent
                }
            };
            assert_eq!(bytes_sent, want.report.bytes_sent, "turn {turn}");
            assert!(results.hold(&want), "{mode}, turn {turn}, PE {}: results differ", pe.rank());
            assert!(hold(&memory, &gradients, &inputs), "{mode}, turn {turn}, PE {}: gradients differ", pe.rank());
            scratch.push(op.scratch_bytes());
        }
        assert!(scratch.iter().all(|&bytes| bytes == scratch[0]), "memory grows: {scratch:?}");
        let again = op.forward(&plan, &inputs)?;
        assert_eq!((&again.o, &again.final_state), (&want.o, &want.final_state));
        Ok::<_, OpError>(())
    });
    outcome.unwrap_or_else(|error| panic!("{mode}, {recompute}: {error}"));
}

#[test]
fn results_go_into_the_callers_memory_bit_for_bit() {
    for mode in MODES {
        for recompute in [Recompute::All, Recompute::States] {
            compare(mode, recompute, Calls::Into);
        }
    }
}

#[test]
fn enqueued_calls_and_ordinary_ones_follow_each_other() {
    for mode in [Mode::Overlap, Mode::Exact] {
        for recompute in [Recompute::All, Recompute::States] {
            compare(mode, recompute, Calls::Enqueued);
        }
    }
}

/// Plans that change from call to call make the PEs agree and tables be made; those that come back find theirs.
#[test]
fn many_forms_of_one_operation_take_bounded_memory() {
    let derived = Derived::new(&spec(), false);
    let whole = derived.solved.inputs();
    let outcome = run_threads(2, &WorldOptions::default(), |pe| {
        let mut op = ContextParallel::new(pe, Config { chunk: 16, ..Config::default() })?;
        let mut most = 0;
        for turn in 0..60 {
            let plan = derived.plan(&Cuts::at(vec![5 + turn % 30]));
            let (share, _) = shares(&derived, &plan, pe.rank(), &whole);
            op.forward(&plan, &share.inputs(&whole))?;
            if turn < 30 {
                most = most.max(op.scratch_bytes());
            }
            assert!(op.scratch_bytes() <= most, "turn {turn}: {} after {most} bytes", op.scratch_bytes());
        }
        Ok::<_, OpError>(())
    });
    outcome.unwrap();
}

/// What can be said against the tensors is said before anything is launched, on every PE alike, and the operation goes on.
#[test]
fn memory_that_does_not_fit_is_refused_before_anything_is_launched() {
    let (derived, plan) = problem();
    let whole = derived.solved.inputs();
    let outcome = run_threads(3, &WorldOptions::default(), |pe| {
        let (share, upstream) = shares(&derived, &plan, pe.rank(), &whole);
        let inputs = share.inputs(&whole);
        let mut op = ContextParallel::new(pe, Config { chunk: 16, ..Config::default() })?;
        let (want, saved) = op.forward_saving(&plan, &inputs)?;
        let mut results = Results::like(&want);
        let mut refused = |inputs: &Inputs<'_>, out: &mut ForwardOut<'_>| match op.forward_into(&plan, inputs, out) {
            Err(OpError::Input(error)) => error,
            other => panic!("{other:?}"),
        };
        let error = refused(&inputs, &mut ForwardOut { final_state: None, ..results.out() });
        assert!(matches!(error, InputError::Result { name: "final_state", given: false, .. }), "{error}");
        let mut half = Memory::like(&want.o.to_dtype(Dtype::Bf16));
        let error = refused(&inputs, &mut ForwardOut { o: half.view_mut(), ..results.out() });
        assert_eq!(error, InputError::Dtype { name: "o", found: Dtype::Bf16, want: "f32".into() });
        let mut short = Memory::like(&Tensor::zeros(Dtype::F32, &[1, 3]));
        let error = refused(&inputs, &mut ForwardOut { o: short.view_mut(), ..results.out() });
        assert!(matches!(error, InputError::Shape { name: "o", .. }), "{error}");
        let over_v = ForwardOut {
            // SAFETY: refused, so nobody writes it.
            o: unsafe { TensorViewMut::from_raw(inputs.v.address(), &want.o.shape, Dtype::F32, Location::Host) }
                .unwrap(),
            ..results.out()
        };
        let error = refused(&inputs, &mut { over_v });
        assert_eq!(error, InputError::Overlap { result: "o", other: "v", location: Location::Host });
        // SAFETY: refused, so nobody reads it.
        let q = unsafe { TensorView::from_raw(4096, inputs.q.shape(), Dtype::F32, Location::Gpu(1)) }.unwrap();
        let error = refused(&Inputs { q, ..inputs.clone() }, &mut results.out());
        assert_eq!(error.to_string(), "q lies on GPU 1, where this PE does not compute; copy it to the host first");

        let gradients = Gradients::zeros(&inputs);
        let mut memory = gradients.map(Memory::like);
        let out = &mut BackwardOut { da_log: None, ..gradients_out(&mut memory) };
        let error = op.backward_into(&plan, &inputs, saved, &upstream.view(), out).unwrap_err();
        assert!(error.to_string().starts_with("memory for dA_log was not given"), "{error}");
        // All of this was refused everywhere, so the calls still match.
        op.forward_into(&plan, &inputs, &mut results.out())?;
        assert!(results.hold(&want));
        Ok::<_, OpError>(())
    });
    outcome.unwrap();
}

#[test]
fn bulk_mode_needs_the_host_and_says_so() {
    let (derived, plan) = problem();
    let whole = derived.solved.inputs();
    let outcome = run_threads(3, &WorldOptions::default(), |pe| {
        let (share, _) = shares(&derived, &plan, pe.rank(), &whole);
        let inputs = share.inputs(&whole);
        let mut op = ContextParallel::new(pe, Config { mode: Mode::Bulk, ..Config::default() })?;
        let want = op.forward(&plan, &inputs)?;
        let mut results = Results::like(&want);
        let error = op.enqueue_forward(&plan, &inputs, &mut results.out()).unwrap_err();
        assert!(error.to_string().contains("in bulk mode the host exchanges summaries"), "{error}");
        op.forward_into(&plan, &inputs, &mut results.out())?;
        assert!(results.hold(&want));
        Ok::<_, OpError>(())
    });
    outcome.unwrap();
}

#[test]
fn values_are_looked_at_unless_they_are_trusted() {
    let (derived, plan) = problem();
    let whole = derived.solved.inputs();
    for values in [Values::Check, Values::Trust] {
        let outcome = run_threads(3, &WorldOptions::default(), |pe| {
            let (share, _) = shares(&derived, &plan, pe.rank(), &whole);
            let inputs = share.inputs(&whole);
            let mut v = Memory::of(&inputs.v);
            let first: &mut [f32] = bytemuck::cast_slice_mut(&mut v.words);
            first[0] = f32::NAN;
            let inputs = Inputs { v: v.view(), ..inputs };
            let mut op = ContextParallel::new(pe, Config { values, ..Config::default() })?;
            let result = op.forward(&plan, &inputs);
            match values {
                Values::Check => {
                    assert!(matches!(result, Err(OpError::Input(InputError::NonFinite { name: "v", .. }))))
                }
                Values::Trust => assert!(result?.o.data.to_f64()[0].is_nan()),
            }
            Ok::<_, OpError>(())
        });
        outcome.unwrap();
    }
}

/// What an enqueued call waited for in vain shows when it is asked, and at the next call at latest; nothing goes on after it.
#[test]
fn a_failure_of_an_enqueued_call_never_passes_silently() {
    for asks in [true, false] {
        let (derived, plan) = problem();
        let whole = derived.solved.inputs();
        let outcome = Outcome::of(|calls| {
            run_threads(3, &options(TIMEOUT), |pe| {
                let (share, _) = shares(&derived, &plan, pe.rank(), &whole);
                let inputs = share.inputs(&whole);
                let mut op = ContextParallel::new(pe, Config { chunk: 16, ..Config::default() })?;
                let want = op.forward(&plan, &inputs)?;
                if pe.rank() == ODD {
                    // Stays, and makes no second call.
                    std::thread::sleep(3 * TIMEOUT);
                    return Ok(());
                }
                let mut results = Results::like(&want);
                let pending = op.enqueue_forward(&plan, &inputs, &mut results.out())?;
                let result = match asks {
                    true => op.wait(pending).map(|_| ()),
                    false => op.forward_into(&plan, &inputs, &mut results.out()).map(|_| ()),
                };
                if let Err(first) = &result {
                    let again = op.enqueue_forward(&plan, &inputs, &mut results.out()).unwrap_err();
                    let failed =
                        matches!(&again, OpError::FailedBefore { first: text, .. } if *text == first.to_string());
                    assert!(failed || matches!(again, OpError::World(_)), "{again}");
                }
                calls.lock().unwrap()[pe.rank()] = Some(result.clone());
                if pe.rank() == 0 { Ok(()) } else { result }
            })
        });
        assert!(outcome.elapsed < Duration::from_secs(30), "{:?}", outcome.elapsed);
        let error = outcome.error(2);
        let OpError::Expired(wait) = error else { panic!("asks {asks}: {error}") };
        assert_eq!((wait.expired.epoch, wait.expired.peer), (2, ODD as u32), "{error}");
    }
}
