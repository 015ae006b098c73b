//! What is to be computed: files or the bundled inputs, and how they are cut up.

use std::path::Path;

use super::{Args, RunCommandError};
use crate::compare::Regime;
use crate::error::InputError;
use crate::file::InputFile;
use crate::inputs::{Beta, Gate, Inputs, StateLayout};
use crate::op::whole::check_whole;
use crate::op::{Config, OpError, check_upstream};
use crate::plan::{Cuts, Plan, check_cu_seqlens};
use crate::reference::ProblemError;
use crate::tensor::{Tensor, TensorView};

macro_rules! bundled {
    ($name:literal) => {
        ($name, include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/", $name, ".safetensors")))
    };
}
/// Activations of a small trained language model: one entry per file, by name. `slow` has weakened gates, so that what an
/// earlier PE sends matters more.
const BUNDLED: [(&str, &[u8]); 3] =
    [bundled!("b_kda_story_t512_two_heads"), bundled!("b_gdn_story_t512_two_heads"), bundled!("b_gdn_story_t256_slow")];

/// One input and who computes which part of it.
pub(super) struct Job {
    /// Path or name of the input.
    pub name: String,
    /// The tensors, in the type in which they are computed with.
    pub file: InputFile,
    /// Whether rounding to that type changed nothing, so that the file's expected results still hold.
    pub unrounded: bool,
    /// Whether there is no NaN or infinity.
    pub finite: bool,
    /// Who holds what.
    pub plan: Plan,
}

impl Job {
    /// How demanding the file says its inputs are. A file that says nothing is taken for ordinary.
    pub fn regime(&self) -> Regime {
        let says = |key: &str, ordinary: &[&str]| {
            self.file.metadata().get(key).is_some_and(|value| !ordinary.contains(&value.as_str()))
        };
        let hard = says("decay", &["slow", "default", "fast", "bound", "trained", "perhead"])
            || says("keys", &["iso", "trained"])
            || says("beta_regime", &["std", "small", "trained"])
            || self.file.settings().allow_neg_eigval;
        if hard { Regime::Hard } else { Regime::Ordinary }
    }
}

/// Loads what `args` ask for and cuts it up for `pes` PEs.
pub(super) fn load(args: &Args, pes: usize) -> Result<Vec<Job>, RunCommandError> {
    if let Some(cuts) = args.cuts.as_ref().filter(|cuts| cuts.len() + 1 != pes) {
        return Err(RunCommandError::Cuts { cuts: cuts.len(), pes });
    }
    let job = |file: InputFile| prepare(args, pes, file);
    match &args.input {
        Some(path) => Ok(vec![job(InputFile::load(path)?)?]),
        None => {
            let files = BUNDLED.iter().map(|(name, bytes)| InputFile::from_bytes(Path::new(name), bytes));
            let files = files.collect::<Result<Vec<_>, _>>()?;
            files.into_iter().filter(|file| args.op.is_none_or(|op| file.settings().op == op)).map(job).collect()
        }
    }
}

fn prepare(args: &Args, pes: usize, file: InputFile) -> Result<Job, RunCommandError> {
    let name = file.path().display().to_string();
    if let Some(asked) = args.op.filter(|&op| op != file.settings().op) {
        return Err(RunCommandError::Op { input: name, found: file.settings().op, asked });
    }
    let (file, unrounded) = match args.dtype {
        None => (file, true),
        Some(dtype) => {
            let rounded = file.clone().to_dtype(dtype);
            let unrounded = same_values(&file, &rounded, args.backward);
            (rounded, unrounded)
        }
    };
    let inputs = file.inputs();
    let input = |source: InputError| RunCommandError::Input { input: name.clone(), source };
    let dims = inputs.dims().map_err(input)?;
    let planned = |source| RunCommandError::Plan { input: name.clone(), source };
    let cuts = match (&args.cuts, file.cuts()) {
        (Some(inner), _) => Cuts::at(inner.clone()),
        (None, Some(offsets)) if offsets.len() == pes + 1 => Cuts::offsets(offsets),
        _ => Cuts::equal(pes),
    };
    let plan = match file.cu_seqlens() {
        Some(_) if dims.b != 1 => {
            return Err(RunCommandError::Problem { input: name, source: ProblemError::PackedBatch { b: dims.b } });
        }
        Some(cu_seqlens) => {
            check_cu_seqlens(&cu_seqlens, Some(dims.t)).map_err(planned)?;
            Plan::packed(&cu_seqlens, &cuts)
        }
        None => Plan::batch(dims.b, dims.t, &cuts),
    };
    let plan = plan.map_err(planned)?;
    let config = Config { allow_nonfinite: args.allow_nonfinite, ..Config::default() };
    check_whole(&plan, &inputs, &config).map_err(|source: OpError| match source {
        OpError::Input(source) => input(source),
        source => RunCommandError::compute(&name, source),
    })?;
    for (tensor, want) in [("o", inputs.v.shape().to_vec()), ("ht", state_shape(&plan, &inputs))] {
        if let Some(Tensor { shape, .. }) = file.expected(tensor).filter(|tensor| tensor.shape != want) {
            return Err(RunCommandError::Expected { input: name, name: tensor, found: shape.clone(), want });
        }
    }
    let mut finite = !args.allow_nonfinite || inputs.check_values(false).is_ok();
    if args.backward {
        let Some(upstream) = file.upstream() else { return Err(RunCommandError::NoUpstream { input: name }) };
        check_upstream(&upstream, &inputs, &dims, plan.layout.sequences(), args.allow_nonfinite).map_err(input)?;
        finite &= upstream.check_values().is_ok();
    }
    Ok(Job { name, unrounded, finite, plan, file })
}

/// Whether rounding changed none of the tensors that it may change, those that backward starts from included if `backward`.
fn same_values(before: &InputFile, after: &InputFile, backward: bool) -> bool {
    let upstream = |file: &InputFile| file.upstream().filter(|_| backward).map(|upstream| upstream.d_o.to_f64());
    let tensors = |file: &InputFile| {
        let inputs = &file.inputs();
        let (Gate::Given(gate) | Gate::Softplus { raw: gate, .. } | Gate::LowerBound { raw: gate, .. }) = &inputs.gate;
        let (Beta::Given(beta) | Beta::Logits { logits: beta, .. }) = &inputs.beta;
        [&inputs.q, &inputs.k, &inputs.v, gate, beta].map(TensorView::to_f64)
    };
    tensors(before) == tensors(after) && upstream(before) == upstream(after)
}

/// Shape of the final states of the whole batch.
fn state_shape(plan: &Plan, inputs: &Inputs<'_>) -> Vec<usize> {
    let (n, hv, k, v) = (plan.layout.sequences(), inputs.v.shape()[2], inputs.q.shape()[3], inputs.v.shape()[3]);
    match inputs.state_layout {
        StateLayout::KFirst => vec![n, hv, k, v],
        StateLayout::VFirst => vec![n, hv, v, k],
    }
}
