//! Gradients of a case.

use super::super::judge::{allowance, allowed_between, on_one, on_one_pe};
use super::matrix::Case;
use super::measure::{How, config};
use crate::compare::{Allowance, Checked, Regime, gradients_within, tolerance};
use crate::generate::{RandomUpstream, Spec};
use crate::gradients::{Gradients, Upstream};
use crate::inputs::Inputs;
use crate::op::OpError;
use crate::op::whole::{self, Whole, WholeBackward};
use crate::plan::Plan;
use crate::reference::{Problem, backward};
use crate::world::WorldOptions;

/// What several PEs computed.
pub(super) struct Computed {
    pub whole: Whole,
    /// With `--backward`.
    pub gradients: Option<Gradients>,
}

impl From<WholeBackward> for Computed {
    fn from(computed: WholeBackward) -> Self {
        Self { whole: computed.forward, gradients: Some(computed.gradients) }
    }
}

impl From<Whole> for Computed {
    fn from(whole: Whole) -> Self {
        Self { whole, gradients: None }
    }
}

/// What gradients of a problem are compared with.
pub(super) struct Expected {
    upstream: RandomUpstream,
    reference: Option<Gradients<Vec<f64>>>,
}

/// How far gradients are off.
pub(super) struct Judged {
    /// The largest relative RMS error of dq, dk and dv against the reference: of those that are no differences of large sums.
    pub error: f64,
    pub mismatches: Vec<String>,
}

impl Expected {
    pub fn new(spec: &Spec) -> Self {
        // Problems with an initial state get a gradient of the final one, too.
        Self { upstream: spec.generate_upstream(spec.initial_state), reference: None }
    }

    pub fn upstream(&self) -> Upstream<'_> {
        self.upstream.view()
    }

    /// Compares the gradients `found` of `case` with the reference and with one PE, bit by bit where they must be the same.
    pub fn judge(
        &mut self,
        case: &Case,
        how: How,
        plan: &Plan,
        inputs: &Inputs<'_>,
        problem: &Problem,
        found: &Gradients,
    ) -> Result<Judged, OpError> {
        if self.reference.is_none() {
            self.reference = Some(backward(problem, &self.upstream.view())?);
        }
        let reference = self.reference.as_ref().expect("made above");
        let config = on_one(config(case, how));
        let options = WorldOptions::default();
        let one = whole::backward(&on_one_pe(plan), inputs, &self.upstream.view(), &config, &options)?.gradients;

        let dtype = case.spec.dtype;
        let usual = allowance(dtype, &config, plan);
        let harder = tolerance(dtype, case.regime()) / tolerance(dtype, Regime::Ordinary);
        let allowed = Allowance { factor: case.allowance() * harder, ..usual };
        let between = Allowance { factor: allowed_between(allowed.factor), ..allowed };
        let wide = found.to_f64();
        let against_reference = gradients_within(inputs, problem, &wide, reference, allowed);
        let against_one = gradients_within(inputs, problem, &wide, &one.to_f64(), between);
        let said = |what: &str, checked: &[Checked]| {
            let wrong = checked.iter().filter_map(|checked| checked.mismatch.as_ref());
            wrong.map(|text| format!("against {what}: {text}")).collect::<Vec<_>>()
        };
        let mut mismatches = said("the f64 reference", &against_reference);
        mismatches.extend(said("one PE", &against_one));
        if case.bitwise() {
            mismatches.extend(differing_bytes(inputs, found, &one));
        }
        let plain = against_reference.iter().filter(|checked| ["dq", "dk", "dv"].contains(&checked.name.as_str()));
        let error = plain.map(|checked| checked.error.rel_rms).fold(0.0, f64::max);
        Ok(Judged { error, mismatches })
    }
}

/// Says so if gradients are not the same bytes. Those of the gate's parameters are put together from shares and may differ.
fn differing_bytes(inputs: &Inputs<'_>, many: &Gradients, one: &Gradients) -> Option<String> {
    let pairs = many.named(inputs).into_iter().zip(one.named(inputs));
    let differing = pairs.filter(|((name, many), (_, one))| {
        !["dA_log", "ddt_bias"].contains(name) && many.data.bytes() != one.data.bytes()
    });
    let names: Vec<&str> = differing.map(|((name, _), _)| name).collect();
    (!names.is_empty()).then(|| {
        let names = names.join(", ");
        format!("{names}: not the bits of one PE; exact mode with aligned cuts must give the same ones")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_bit_of_a_gradient_is_noticed() {
        let case = Spec { t: 3, initial_state: true, ..Spec::default() }.generate();
        let inputs = case.inputs();
        let (zero, mut other) = (Gradients::zeros(&inputs), Gradients::zeros(&inputs));
        assert_eq!(differing_bytes(&inputs, &zero, &other), None);
        other.dk.data.bytes_mut()[5] = 1;
        other.d_initial_state.as_mut().expect("there is one").data.bytes_mut()[3] = 0x80;
        assert!(differing_bytes(&inputs, &zero, &other).unwrap().starts_with("dk, dh0: not the bits"));
    }
}
