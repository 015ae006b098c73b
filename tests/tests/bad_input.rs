//! Inputs, plans and calls that are refused: each with its own message, before anything runs.

mod cp;

use cp::failing::LONG;
use cp::{options, plan_of};
use deltalink::error::InputError;
use deltalink::generate::{BetaKind, Case, GateKind, Spec};
use deltalink::inputs::{Beta, Gate, Inputs, Op, StateLayout};
use deltalink::op::whole::{self, Share};
use deltalink::op::{Config, ContextParallel, MWire, Mode, OpError};
use deltalink::plan::{Cuts, Plan, check_cu_seqlens};
use deltalink::tensor::{Buffer, Dtype, Tensor, TensorView};
use deltalink::world::{RunError, WorldError, WorldOptions, run_threads};

fn small() -> Spec {
    Spec { t: 20, h: 1, hv: 2, k: 16, v: 32, initial_state: true, ..Spec::default() }
}

/// The message with which `inputs` are refused, by the call for a whole batch and by that of one PE.
#[track_caller]
fn refused(inputs: &Inputs<'_>) -> String {
    let plan = Plan::batch(1, 20, &Cuts::equal(1)).unwrap();
    let config = Config::default();
    let whole = whole::forward(&plan, inputs, &config, &WorldOptions::default()).expect_err("bad inputs");
    let one = run_threads(1, &WorldOptions::default(), |pe| {
        let mut op = ContextParallel::new(pe, config.clone())?;
        let error = op.forward(&plan, inputs).expect_err("bad inputs");
        // Nothing was launched: the same operation still works.
        let case = small().generate();
        op.forward(&plan, &case.inputs()).map(|_| error.to_string())
    });
    assert!(matches!(whole, OpError::Input(_)), "{whole}");
    assert_eq!(one.unwrap(), [whole.to_string()]);
    whole.to_string()
}

fn zeros(dtype: Dtype, shape: &[usize]) -> Tensor {
    Tensor::zeros(dtype, shape)
}

#[test]
fn ranks_shapes_and_types_are_named() {
    let case = small().generate();
    let good = case.inputs();
    let of = |dtype, shape: &[usize]| zeros(dtype, shape);
    let f32s = |shape: &[usize]| of(Dtype::F32, shape);
    let cases: Vec<(&str, Tensor, &str)> = vec![
        ("q", f32s(&[20, 1, 16]), "q has 3 dimensions (shape [20, 1, 16]), it needs 4"),
        ("k", f32s(&[1, 20, 16]), "k has 3 dimensions (shape [1, 20, 16]), it needs 4"),
        ("k", f32s(&[1, 20, 1, 32]), "k has shape [1, 20, 1, 32], the other tensors ask for [1, 20, 1, 16]"),
        ("k", of(Dtype::Bf16, &[1, 20, 1, 16]), "k has element type bf16, it needs f32"),
        ("v", f32s(&[1, 20, 64]), "v has 3 dimensions (shape [1, 20, 64]), it needs 4"),
        ("v", f32s(&[1, 19, 2, 32]), "v has shape [1, 19, 2, 32], the other tensors ask for [1, 20, 2, 32]"),
        ("v", of(Dtype::F16, &[1, 20, 2, 32]), "v has element type f16, it needs f32"),
        ("v", f32s(&[1, 20, 2, 40]), "V = 40: a head dimension must be a multiple of 16 from 16 to 256"),
        ("v", f32s(&[1, 20, 2, 272]), "V = 272: a head dimension must be a multiple of 16 from 16 to 256"),
        ("g", f32s(&[1, 20, 2]), "g has 3 dimensions (shape [1, 20, 2]), it needs 4"),
        ("g", f32s(&[1, 20, 1, 16]), "g has shape [1, 20, 1, 16], the other tensors ask for [1, 20, 2, 16]"),
        ("beta", f32s(&[1, 20, 1]), "beta has shape [1, 20, 1], the other tensors ask for [1, 20, 2]"),
        ("h0", f32s(&[1, 2, 16]), "h0 has 3 dimensions (shape [1, 2, 16]), it needs 4"),
        ("h0", f32s(&[1, 2, 32, 16]), "h0 has shape [1, 2, 32, 16], the other tensors ask for [1, 2, 16, 32]"),
        ("h0", of(Dtype::Bf16, &[1, 2, 16, 32]), "h0 has element type bf16, it needs f32"),
    ];
    for (name, tensor, message) in &cases {
        let (mut bad, x) = (good.clone(), tensor.view());
        match *name {
            "q" => bad.q = x,
            "k" => bad.k = x,
            "v" => bad.v = x,
            "g" => bad.gate = Gate::Given(x),
            "beta" => bad.beta = Beta::Given(x),
            _ => bad.initial_state = Some(x),
        }
        assert_eq!(refused(&bad), *message);
    }
}

#[test]
fn heads_and_head_dimensions_are_checked() {
    let (q, v) = (zeros(Dtype::F32, &[1, 20, 2, 16]), zeros(Dtype::F32, &[1, 20, 3, 32]));
    let case = small().generate();
    let good = case.inputs();
    let bad = Inputs { q: q.view(), k: q.view(), v: v.view(), ..good.clone() };
    assert_eq!(refused(&bad), "HV = 3 value heads is not a positive multiple of H = 2 query/key heads");
    for (k, message) in [(272, "K = 272"), (24, "K = 24"), (0, "K = 0")] {
        let q = zeros(Dtype::F32, &[1, 20, 1, k]);
        let found = refused(&Inputs { q: q.view(), k: q.view(), ..good.clone() });
        assert_eq!(found, format!("{message}: a head dimension must be a multiple of 16 from 16 to 256"));
    }
    let none = zeros(Dtype::F32, &[1, 20, 0, 32]);
    let found = refused(&Inputs { v: none.view(), ..good });
    assert_eq!(found, "HV = 0 value heads is not a positive multiple of H = 1 query/key heads");
}

#[test]
fn gate_and_step_options_are_checked() {
    let softplus = Spec { gate: GateKind::Softplus, beta: BetaKind::Logits, ..small() }.generate();
    let Inputs { gate: Gate::Softplus { raw, a_log, dt_bias }, beta: Beta::Logits { logits, .. }, .. } =
        softplus.inputs()
    else {
        panic!("not the gate that was asked for");
    };
    let good = softplus.inputs();
    let bounded = |bound| Inputs {
        gate: Gate::LowerBound { raw: raw.clone(), a_log: Some(a_log.clone()), dt_bias: dt_bias.clone(), bound },
        ..good.clone()
    };
    assert_eq!(refused(&bounded(0.5)), "the lower bound of the gate is 0.5; it must be finite and below 0");
    assert_eq!(
        refused(&bounded(f32::NEG_INFINITY)),
        "the lower bound of the gate is -inf; it must be finite and below 0"
    );

    let (short, rows) = (zeros(Dtype::F32, &[1]), zeros(Dtype::F32, &[2]));
    let gate = Gate::Softplus { raw: raw.clone(), a_log: short.view(), dt_bias: None };
    assert_eq!(refused(&Inputs { gate, ..good.clone() }), "A_log has shape [1], the other tensors ask for [2]");
    let gate = Gate::Softplus { raw: raw.clone(), a_log: a_log.clone(), dt_bias: Some(rows.view()) };
    assert_eq!(refused(&Inputs { gate, ..good.clone() }), "dt_bias has 1 dimensions (shape [2]), it needs 2");
    let narrow = zeros(Dtype::Bf16, &[2]);
    let gate = Gate::Softplus { raw: raw.clone(), a_log: narrow.view(), dt_bias: None };
    assert_eq!(refused(&Inputs { gate, ..good.clone() }), "A_log has element type bf16, it needs f32");

    let beta = Beta::Logits { logits, factor: 1.5 };
    let found = refused(&Inputs { beta, ..good.clone() });
    assert_eq!(found, "the factor of beta is 1.5; it must be 1, or 2 to allow negative eigenvalues");
    let found = refused(&Inputs { scale: Some(f32::NAN), ..good });
    assert_eq!(found, "scale is NaN; it must be finite");

    let gdn = Spec { op: Op::Gdn, gate: GateKind::Softplus, ..small() }.generate();
    let Gate::Softplus { raw, a_log, .. } = gdn.inputs().gate else { panic!("not the gate that was asked for") };
    let gate = Gate::LowerBound { raw, a_log: Some(a_log), dt_bias: None, bound: -5.0 };
    let found = refused(&Inputs { gate, ..gdn.inputs() });
    assert_eq!(found, "GDN has no lower-bound gate; use Gate::Softplus or Gate::Given");
}

/// A copy of a view with one element replaced.
fn with(x: &TensorView<'_>, at: usize, value: f64) -> Tensor {
    let mut values = x.to_f64();
    values[at] = value;
    Tensor { shape: x.shape().to_vec(), data: Buffer::from_f64(x.dtype(), values) }
}

/// Every tensor with a NaN or an infinity in it: refused with its place, and computed with if that is asked for.
#[test]
fn values_that_are_not_finite_are_named_with_their_index() {
    for gate in [GateKind::Given, GateKind::Softplus, GateKind::LowerBound] {
        let case = Spec { gate, ..small() }.generate();
        let good = case.inputs();
        let (raw, a_log, dt_bias) = match &good.gate {
            Gate::Given(g) => (g.clone(), None, None),
            Gate::Softplus { raw, a_log, dt_bias } => (raw.clone(), Some(a_log.clone()), dt_bias.clone()),
            Gate::LowerBound { raw, a_log, dt_bias, .. } => (raw.clone(), a_log.clone(), dt_bias.clone()),
        };
        let Beta::Given(beta) = &good.beta else { panic!("not the beta that was asked for") };
        let mut places = vec![
            ("q", good.q.clone(), 37, "[0, 2, 0, 5]"),
            ("k", good.k.clone(), 0, "[0, 0, 0, 0]"),
            ("v", good.v.clone(), 20 * 64 - 1, "[0, 19, 1, 31]"),
            ("beta", beta.clone(), 3, "[0, 1, 1]"),
            ("h0", good.initial_state.clone().unwrap(), 33, "[0, 0, 1, 1]"),
            (if gate == GateKind::Given { "g" } else { "g_raw" }, raw.clone(), 33, "[0, 1, 0, 1]"),
        ];
        places.extend(a_log.clone().map(|x| ("A_log", x, 1, "[1]")));
        places.extend(dt_bias.clone().map(|x| ("dt_bias", x, 17, "[1, 1]")));
        for (name, tensor, at, index) in places {
            for value in [f64::NAN, f64::NEG_INFINITY] {
                let bad = with(&tensor, at, value);
                let (mut inputs, x) = (good.clone(), bad.view());
                match name {
                    "q" => inputs.q = x,
                    "k" => inputs.k = x,
                    "v" => inputs.v = x,
                    "beta" => inputs.beta = Beta::Given(x),
                    "h0" => inputs.initial_state = Some(x),
                    _ => inputs.gate = replaced_gate(&good.gate, name, &bad),
                }
                let found = refused(&inputs);
                let want = format!(
                    "{name}{index} is {value}; clean the input, or pass allow_nonfinite (--allow-nonfinite) to compute with it"
                );
                assert_eq!(found, want);
                let plan = Plan::batch(1, 20, &Cuts::equal(2)).unwrap();
                let config = Config { allow_nonfinite: true, ..Config::default() };
                let result = whole::forward(&plan, &inputs, &config, &WorldOptions::default());
                let o = result.unwrap_or_else(|e| panic!("{name} = {value}: {e}")).o;
                // A decay of minus infinity is a decay to zero; everything else shows in the result.
                let visible = !(value < 0.0 && matches!(name, "g" | "g_raw" | "A_log" | "dt_bias"));
                assert_eq!(o.data.to_f64().iter().any(|x| !x.is_finite()), visible, "{name} = {value}");
            }
        }
    }
}

fn replaced_gate<'a>(gate: &Gate<'a>, name: &str, bad: &'a Tensor) -> Gate<'a> {
    let mut gate = gate.clone();
    match &mut gate {
        Gate::Given(g) => *g = bad.view(),
        Gate::Softplus { raw, a_log, dt_bias } => match name {
            "g_raw" => *raw = bad.view(),
            "A_log" => *a_log = bad.view(),
            _ => *dt_bias = Some(bad.view()),
        },
        Gate::LowerBound { raw, a_log, dt_bias, .. } => match name {
            "g_raw" => *raw = bad.view(),
            "A_log" => *a_log = Some(bad.view()),
            _ => *dt_bias = Some(bad.view()),
        },
    }
    gate
}

#[test]
fn positive_gates_are_refused_even_where_infinities_are_not() {
    let case = small().generate();
    let good = case.inputs();
    let Gate::Given(g) = &good.gate else { panic!("not the gate that was asked for") };
    let bad = with(g, 32 + 16 + 3, 0.25);
    let want =
        "g[0, 1, 1, 3] is 0.25; the log decay must be at most 0 (is it the gate's raw input? then use Gate::Softplus)";
    let inputs = Inputs { gate: Gate::Given(bad.view()), ..good };
    assert_eq!(refused(&inputs), want);
    let config = Config { allow_nonfinite: true, ..Config::default() };
    let plan = Plan::batch(1, 20, &Cuts::equal(2)).unwrap();
    let found = whole::forward(&plan, &inputs, &config, &WorldOptions::default()).unwrap_err();
    assert_eq!(found.to_string(), want);
}

#[test]
fn views_must_hold_their_shape_and_be_contiguous() {
    let data = [0.0f32; 6];
    let error = TensorView::new(&[2, 4], &data[..]).unwrap_err();
    assert_eq!(error.to_string(), "shape [2, 4] needs 8 elements, the data has 6");
    let array = ndarray::Array2::<f32>::zeros((2, 3));
    let error = TensorView::try_from(array.t()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "a view of shape [3, 2] is not contiguous in row-major order; make a contiguous copy first"
    );
    assert_eq!(TensorView::try_from(array.view()).unwrap().shape(), [2, 3]);
}

#[test]
fn tokens_and_states_must_fit_the_plan() {
    let case = small().generate();
    let inputs = case.inputs();
    let plans = [
        (
            Plan::batch(1, 21, &Cuts::equal(2)).unwrap(),
            "the inputs hold [B, T] = [1, 20] tokens, the plan gives this PE [1, 21]",
        ),
        (
            Plan::batch(2, 20, &Cuts::equal(2)).unwrap(),
            "the inputs hold [B, T] = [1, 20] tokens, the plan gives this PE [2, 20]",
        ),
        (Plan::packed(&[0, 10, 20], &Cuts::equal(2)).unwrap(), "h0 has 1 rows, the plan has 2 sequences in all"),
    ];
    for (plan, message) in plans {
        let error = whole::forward(&plan, &inputs, &Config::default(), &WorldOptions::default()).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
    // On one PE of two: everything instead of its half; a state row for a sequence that starts elsewhere.
    let plan = Plan::batch(1, 20, &Cuts::at(vec![12])).unwrap();
    let messages = run_threads(2, &WorldOptions::default(), |pe| {
        let mut op = ContextParallel::new(pe, Config::default())?;
        let tokens = op.forward(&plan, &inputs).unwrap_err();
        let share = Share::new(&plan, pe.rank(), &inputs);
        let mine = share.inputs(&inputs);
        let two = Tensor::zeros(Dtype::F32, &[2, 2, 16, 32]);
        let rows = op.forward(&plan, &Inputs { initial_state: Some(two.view()), ..mine.clone() }).unwrap_err();
        // Refused calls leave the operation usable, on all PEs.
        op.forward(&plan, &mine)?;
        Ok::<_, OpError>([tokens.to_string(), rows.to_string()])
    })
    .unwrap();
    for (rank, tokens, rows) in [(0, 12, 1), (1, 8, 0)] {
        assert_eq!(
            messages[rank],
            [
                format!("the inputs hold [B, T] = [1, 20] tokens, the plan gives this PE [1, {tokens}]"),
                format!("h0 has 2 rows, the plan has {rows} sequences that start on this PE"),
            ]
        );
    }
}

#[test]
fn options_and_plans_for_other_worlds_are_refused() {
    let plan = Plan::batch(1, 20, &Cuts::equal(3)).unwrap();
    let case = small().generate();
    let messages = run_threads(2, &WorldOptions::default(), |pe| {
        let chunk = ContextParallel::new(pe, Config { chunk: 48, ..Config::default() }).map(|_| ()).unwrap_err();
        let size = ContextParallel::new(pe, Config::default())?.forward(&plan, &case.inputs()).unwrap_err();
        Ok::<_, OpError>([chunk.to_string(), size.to_string()])
    })
    .unwrap();
    for message in messages {
        assert_eq!(
            message,
            [
                "chunk is 48; it must be 16, 32 or 64",
                "the plan is for 3 PEs, the world has 2; make the plan with as many cuts as there are PEs",
            ]
        );
    }
}

#[test]
fn a_heap_that_is_too_small_is_named_on_every_pe() {
    let solved = cp::Solved::new(&small());
    let (plan, inputs) = (solved.plan(&Cuts::equal(2)), solved.inputs());
    let options = WorldOptions { heap_bytes: 4096, ..WorldOptions::default() };
    let errors = run_threads(2, &options, |pe| {
        let share = Share::new(&plan, pe.rank(), &inputs);
        let mut op = ContextParallel::new(pe, Config::default())?;
        let first = op.forward(&plan, &share.inputs(&inputs)).unwrap_err();
        let second = op.forward(&plan, &share.inputs(&inputs)).unwrap_err();
        Ok::<_, OpError>((first, second))
    })
    .unwrap();
    for (rank, (first, second)) in errors.into_iter().enumerate() {
        let message = first.to_string();
        assert!(matches!(first, OpError::Heap(_)), "{message}");
        assert!(message.contains("no room for `summary slots`") && message.contains("raise heap_bytes"), "{message}");
        assert_eq!(second, OpError::FailedBefore { rank, first: message });
    }
}

#[test]
fn plans_that_cannot_be_made() {
    let packed = |cu: &[usize], cuts: &Cuts| Plan::packed(cu, cuts).unwrap_err().to_string();
    let one = &Cuts::equal(1);
    let cases = [
        (packed(&[], one), "cu_seqlens is empty; give N + 1 offsets for N sequences, the first of them 0"),
        (packed(&[1, 5], one), "cu_seqlens starts at 1; the first offset must be 0"),
        (
            packed(&[0, 7, 5], one),
            "cu_seqlens[2] = 5 is below cu_seqlens[1] = 7; offsets must not descend (are these lengths? then sum them up)",
        ),
        (packed(&[0, 9], &Cuts::equal(0)), "0 PEs were asked for; a plan needs at least 1"),
        (packed(&[0, 9], &Cuts::equal(2000)), "2000 PEs were asked for; a plan is made for at most 1024"),
        (
            packed(&[0, 2], &Cuts::equal(3)),
            "3 PEs were asked for and there are only 2 tokens to share out; ask for at most 2 PEs, or give explicit cuts, which may leave PEs empty",
        ),
        (packed(&[0, 9], &Cuts::at(vec![5, 3])), "cut 1 = 3 is below the cut before it, 5; cuts must not descend"),
        (
            packed(&[0, 9], &Cuts::at(vec![10])),
            "cut 0 = 10 lies beyond the end, T = 9; a cut is a token offset from 0 to T",
        ),
        (
            packed(&[0, 9], &Cuts::offsets(vec![0, 4])),
            "the offsets cover tokens 0..4, the tensors hold 0..9; P + 1 offsets must begin with 0 and end with T",
        ),
        (
            check_cu_seqlens(&[0, 5], Some(6)).unwrap_err().to_string(),
            "cu_seqlens ends at 5, the tensors hold T = 6 tokens; the last offset must be T",
        ),
    ];
    for (found, message) in cases {
        assert_eq!(found, message);
    }
}

/// How PE 1 differs from the others, and what they say about it.
struct Odd {
    spec: Spec,
    cuts: Vec<usize>,
    config: Config,
    message: &'static str,
}

#[test]
fn pes_that_are_called_differently_say_in_what() {
    let usual = || Odd { spec: small(), cuts: vec![5, 12], config: Config::default(), message: "" };
    let config = |config, message| Odd { config, message, ..usual() };
    let spec = |spec, message| Odd { spec, message, ..usual() };
    let odd = [
        config(Config { chunk: 32, ..Config::default() }, "the chunk length = 32, PE 0 with 64"),
        config(Config { mode: Mode::Exact, ..Config::default() }, "the mode = exact, PE 0 with overlap"),
        config(Config { m_wire: MWire::Bf16, ..Config::default() }, "the type of M on the wire = bf16, PE 0 with f32"),
        spec(Spec { op: Op::Gdn, ..small() }, "op = gdn, PE 0 with kda"),
        spec(Spec { l2norm: true, ..small() }, "l2norm = true, PE 0 with false"),
        spec(Spec { gate: GateKind::Softplus, ..small() }, "the gate = softplus, PE 0 with given"),
        spec(Spec { beta: BetaKind::Logits2, ..small() }, "beta = 2 sigmoid(logits), PE 0 with given"),
        spec(Spec { hv: 4, ..small() }, "HV = 4, PE 0 with 2"),
        spec(Spec { h: 2, ..small() }, "H = 2, PE 0 with 1"),
        spec(Spec { k: 32, ..small() }, "K = 32, PE 0 with 16"),
        spec(Spec { v: 16, ..small() }, "V = 16, PE 0 with 32"),
        spec(Spec { dtype: Dtype::Bf16, ..small() }, "the element type = bf16, PE 0 with f32"),
        spec(
            Spec { state_layout: StateLayout::VFirst, ..small() },
            "the layout of states = V-first, PE 0 with K-first",
        ),
        Odd { cuts: vec![5, 13], message: "the cuts = [0, 5, 13, 20], PE 0 with [0, 5, 12, 20]", ..usual() },
        spec(
            Spec { cu_seqlens: Some(vec![0, 20]), ..small() },
            "the sequences = Packed { cu_seqlens: [0, 20] }, PE 0 with Batch { b: 1, t: 20 }",
        ),
    ];
    for odd in odd {
        let errors = run_threads(3, &options(LONG), |pe| {
            let usual = usual();
            let Odd { spec, cuts, config, .. } = if pe.rank() == 1 { &odd } else { &usual };
            let case: Case = spec.generate();
            let plan = plan_of(case.cu_seqlens(), spec.b, spec.t, &Cuts::at(cuts.clone()));
            let share = Share::new(&plan, pe.rank(), &case.inputs());
            let mut op = ContextParallel::new(pe, config.clone())?;
            Ok::<_, OpError>(op.forward(&plan, &share.inputs(&case.inputs())).map(|_| ()).unwrap_err())
        })
        .unwrap();
        for error in errors {
            assert!(matches!(error, OpError::Disagreement { second: 1, first: 0, .. }), "{error}");
            let want = format!("PE 1 was called with {}; all PEs must be called alike", odd.message);
            assert_eq!(error.to_string(), want);
        }
    }
}

/// One PE has bad inputs, the others good ones: they learn who, instead of waiting for it.
#[test]
fn one_pe_with_bad_inputs_stops_the_others() {
    let solved = cp::Solved::new(&small());
    let (plan, inputs) = (solved.plan(&Cuts::at(vec![5, 12])), solved.inputs());
    let error = run_threads(3, &options(LONG), |pe| {
        let share = Share::new(&plan, pe.rank(), &inputs);
        let mut mine = share.inputs(&inputs);
        let bad = with(&mine.v, 7, f64::NAN);
        if pe.rank() == 1 {
            mine.v = bad.view();
        }
        let mut op = ContextParallel::new(pe, Config::default())?;
        let result = op.forward(&plan, &mine);
        if pe.rank() != 1 {
            let error = result.as_ref().map(|_| ()).unwrap_err();
            let named = matches!(error, OpError::World(WorldError::PeFailed { rank: 1, .. }));
            assert!(named && error.to_string().contains("v[0, 0, 0, 7] is NaN"), "PE {}: {error}", pe.rank());
        }
        result.map(|_| ())
    })
    .unwrap_err();
    let RunError::Pe { rank: 1, error: OpError::Input(InputError::NonFinite { name: "v", .. }) } = &error else {
        panic!("{error}");
    };
}
