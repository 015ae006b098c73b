//! One case: compute it and compare.

use super::super::judge::{Found, Pair, allowed, allowed_between, on_one, on_one_pe};
use super::gradients::{Computed, Expected};
use super::matrix::Case;
use crate::generate::{Case as Generated, Spec};
use crate::gradients::Upstream;
use crate::inputs::Inputs;
use crate::op::whole::{self, Whole};
use crate::op::{Config, Device, OpError, Segments};
use crate::plan::{Cuts, Plan, PlanError};
use crate::reference::{Problem, ProblemError, recurrent, transition_weight};
use crate::world::WorldOptions;

/// What came of a case.
#[derive(Clone, Debug)]
pub(super) struct Outcome {
    /// The figures, if it could be computed.
    pub figures: Option<Figures>,
    /// What is wrong.
    pub mismatches: Vec<String>,
}

/// Figures of a case.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figures {
    /// Against the f64 reference.
    pub reference: Pair,
    /// Against one PE.
    pub one_pe: Pair,
    /// Largest relative RMS error allowed against the reference.
    pub tolerance: f64,
    /// How much of a state came from an earlier PE.
    pub transition_weight: f64,
    /// With `--backward`: see [`super::gradients::Judged::error`].
    pub gradients: Option<f64>,
}

/// How cases are computed.
#[derive(Clone, Copy, Debug)]
pub(super) struct How {
    pub device: Device,
    /// Gradients as well.
    pub backward: bool,
    /// Into how many parts PEs cut their segments.
    pub segments: Segments,
}

impl Figures {
    /// The largest error over what is allowed.
    pub fn strain(&self) -> f64 {
        let larger = |pair: &Pair| pair.o.rel_rms.max(pair.ht.rel_rms);
        let (reference, one_pe) = (larger(&self.reference), larger(&self.one_pe));
        (reference / self.tolerance).max(one_pe / allowed_between(self.tolerance))
    }
}

/// Why a case has no figures.
#[derive(Debug, thiserror::Error)]
enum MeasureError {
    #[error(transparent)]
    Op(#[from] OpError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Problem(#[from] ProblemError),
}

/// A problem with what several cases can share.
pub(super) struct Bench {
    generated: Generated,
    solved: Option<(Problem, Found)>,
    gradients: Expected,
}

impl Bench {
    /// The bench for `spec`: `last` if it is for the same one.
    pub fn reuse<'a>(last: &'a mut Option<Bench>, spec: &Spec) -> &'a mut Bench {
        if last.as_ref().is_some_and(|bench| bench.generated.spec != *spec) {
            *last = None;
        }
        last.get_or_insert_with(|| Bench { generated: spec.generate(), solved: None, gradients: Expected::new(spec) })
    }

    /// Computes `case` on PEs that are threads, and judges. That it cannot be computed is a mismatch, too.
    pub fn measure(&mut self, case: &Case, how: How) -> Outcome {
        let many = self.on_threads(case, how).map_err(|error| error.to_string());
        self.judge(case, how, many)
    }

    fn on_threads(&self, case: &Case, how: How) -> Result<Computed, MeasureError> {
        let (plan, config, inputs) = (self.plan(case)?, config(case, how), self.generated.inputs());
        if !how.backward {
            return Ok(forward(&plan, &inputs, &config)?.into());
        }
        let computed = whole::backward(&plan, &inputs, &self.upstream(), &config, &WorldOptions::default())?;
        Ok(computed.into())
    }

    /// The upstream gradients of all PEs.
    pub fn upstream(&self) -> Upstream<'_> {
        self.gradients.upstream()
    }

    /// The inputs of all PEs.
    pub fn inputs(&self) -> Inputs<'_> {
        self.generated.inputs()
    }

    /// Who holds what in `case`.
    pub fn plan(&self, case: &Case) -> Result<Plan, PlanError> {
        let cuts = Cuts::at(case.cuts.clone());
        match self.generated.cu_seqlens() {
            Some(cu_seqlens) => Plan::packed(cu_seqlens, &cuts),
            None => Plan::batch(case.spec.b, case.spec.t, &cuts),
        }
    }

    /// Compares what several PEs computed in `case`, or why they could not.
    pub fn judge(&mut self, case: &Case, how: How, many: Result<Computed, String>) -> Outcome {
        let judged = many.and_then(|many| self.figures(case, how, &many).map_err(|error| error.to_string()));
        match judged {
            Ok((figures, mismatches)) => Outcome { figures: Some(figures), mismatches },
            Err(error) => Outcome { figures: None, mismatches: vec![error] },
        }
    }

    fn figures(&mut self, case: &Case, how: How, computed: &Computed) -> Result<(Figures, Vec<String>), MeasureError> {
        let many = &computed.whole;
        let plan = self.plan(case)?;
        let inputs = self.generated.inputs();
        if self.solved.is_none() {
            let problem = Problem::new(&inputs, self.generated.cu_seqlens())?;
            let reference = Found::from(recurrent(&problem));
            self.solved = Some((problem, reference));
        }
        let (problem, reference) = self.solved.as_ref().expect("solved above");
        let config = on_one(config(case, how));
        let one = forward(&on_one_pe(&plan), &inputs, &config)?;

        let tolerance = case.allowance() * allowed(case.spec.dtype, case.regime(), &config, &plan);
        let layout = inputs.state_layout;
        let (found, expected) = (Found::new(many, layout), Found::new(&one, layout));
        let mut mismatches = found.mismatches(reference, "the f64 reference", problem, tolerance);
        mismatches.extend(found.mismatches(&expected, "one PE", problem, allowed_between(tolerance)));
        if case.bitwise() {
            mismatches.extend(differing_bytes(many, &one));
        }
        let mut gradients = None;
        if let Some(found) = &computed.gradients {
            let judged = self.gradients.judge(case, how, &plan, &inputs, problem, found)?;
            gradients = Some(judged.error);
            mismatches.extend(judged.mismatches);
        }
        let figures = Figures {
            reference: found.against(reference),
            one_pe: found.against(&expected),
            tolerance,
            transition_weight: transition_weight(problem, &plan.cuts).max,
            gradients,
        };
        Ok((figures, mismatches))
    }
}

/// How `case` is to be computed.
pub(super) fn config(case: &Case, how: How) -> Config {
    Config {
        device: how.device,
        segments: how.segments,
        mode: case.mode,
        chunk: case.chunk,
        m_wire: case.m_wire,
        checked: case.checked,
        ..Config::default()
    }
}

fn forward(plan: &Plan, inputs: &Inputs<'_>, config: &Config) -> Result<Whole, OpError> {
    whole::forward(plan, inputs, config, &WorldOptions::default())
}

/// Says so if the results are not the same bytes.
fn differing_bytes(many: &Whole, one: &Whole) -> Option<String> {
    let states = |whole: &Whole| whole.final_state.as_ref().map(|state| state.data.bytes().to_vec());
    let (o, ht) = (many.o.data.bytes() == one.o.data.bytes(), states(many) == states(one));
    let what = match (o, ht) {
        (true, true) => return None,
        (false, true) => "o differs",
        (true, false) => "ht differs",
        (false, false) => "o and ht differ",
    };
    Some(format!("{what} from one PE in some bits; exact mode with aligned cuts must give the same ones"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{Buffer, Tensor};

    #[test]
    fn a_single_bit_is_noticed() {
        let whole = |o: f32, ht: f32| {
            let tensor = |x| Tensor { shape: vec![1, 1, 1, 1], data: Buffer::F32(vec![x]) };
            Whole { o: tensor(o), final_state: Some(tensor(ht)), reports: Vec::new(), trace: None }
        };
        let next = f32::from_bits(1.0f32.to_bits() + 1);
        assert_eq!(differing_bytes(&whole(1.0, 2.0), &whole(1.0, 2.0)), None);
        let text = |many, one| differing_bytes(&many, &one).unwrap();
        assert!(text(whole(next, 2.0), whole(1.0, 2.0)).starts_with("o differs"));
        assert!(text(whole(1.0, 0.0), whole(1.0, -0.0)).starts_with("ht differs"));
    }
}
