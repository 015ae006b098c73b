//! Whether all PEs are about to do the same.

use serde::{Deserialize, Serialize};

use super::{Config, OpError};
use crate::inputs::{Beta, Dims, Gate, Inputs, Op, StateLayout};
use crate::plan::{Layout, Plan};
use crate::tensor::Dtype;
use crate::world::Pe;

/// Which way an operation goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Direction {
    Forward,
    Backward,
}

impl std::fmt::Display for Direction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Direction::Forward => "forward",
            Direction::Backward => "backward",
        })
    }
}

/// What tells one call of an operation from another: those that are alike need no agreement again. It follows all that
/// [`Agreement::new`] names, apart from what does not change in an operation.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Call {
    cuts: Vec<usize>,
    sequences: Layout,
    form: Form,
}

/// Sizes and options of the inputs. Numbers are compared by their bits: NaN is like itself.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Form {
    op: Op,
    dims: Dims,
    dtype: Dtype,
    gate: &'static str,
    beta_factor: Option<u32>,
    scale: u32,
    l2norm: bool,
    states: StateLayout,
}

impl Form {
    fn of(inputs: &Inputs<'_>, dims: &Dims) -> Self {
        Self {
            op: inputs.op,
            dims: *dims,
            dtype: inputs.dtype(),
            gate: gate_name(&inputs.gate),
            beta_factor: match inputs.beta {
                Beta::Given(_) => None,
                Beta::Logits { factor, .. } => Some(factor.to_bits()),
            },
            scale: inputs.scale_or_default(dims).to_bits(),
            l2norm: inputs.l2norm,
            states: inputs.state_layout,
        }
    }
}

impl Call {
    pub fn new(plan: &Plan, inputs: &Inputs<'_>, dims: &Dims) -> Self {
        Self { cuts: plan.cuts.clone(), sequences: plan.layout.clone(), form: Form::of(inputs, dims) }
    }

    /// Whether a call is like this one.
    pub fn is(&self, plan: &Plan, inputs: &Inputs<'_>, dims: &Dims) -> bool {
        self.form == Form::of(inputs, dims) && self.cuts == plan.cuts && self.sequences == plan.layout
    }
}

fn gate_name(gate: &Gate<'_>) -> &'static str {
    match gate {
        Gate::Given(_) => "given",
        Gate::Softplus { .. } => "softplus",
        Gate::LowerBound { .. } => "bounded below",
    }
}

/// What must be equal on all PEs, as names and values for the message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Agreement {
    fields: Vec<(String, String)>,
}

impl Agreement {
    /// On these names and values.
    pub fn of(fields: Vec<(String, String)>) -> Self {
        Self { fields }
    }

    pub fn new(plan: &Plan, inputs: &Inputs<'_>, dims: &Dims, config: &Config) -> Self {
        let field = |name: &str, value: String| (name.to_owned(), value);
        let beta = match inputs.beta {
            Beta::Given(_) => "given".to_owned(),
            Beta::Logits { factor, .. } => format!("{factor} sigmoid(logits)"),
        };
        let states = match inputs.state_layout {
            StateLayout::KFirst => "K-first",
            StateLayout::VFirst => "V-first",
        };
        Self {
            fields: vec![
                field("the version of deltalink", env!("CARGO_PKG_VERSION").to_owned()),
                field("op", inputs.op.to_string()),
                field("H", dims.h.to_string()),
                field("HV", dims.hv.to_string()),
                field("K", dims.k.to_string()),
                field("V", dims.v.to_string()),
                field("the element type", inputs.dtype().to_string()),
                field("the gate", gate_name(&inputs.gate).to_owned()),
                field("beta", beta),
                field("scale", inputs.scale_or_default(dims).to_string()),
                field("l2norm", inputs.l2norm.to_string()),
                field("the mode", config.mode.to_string()),
                field("the chunk length", config.chunk.to_string()),
                field("the type of M on the wire", config.m_wire.resolve(inputs.dtype()).to_string()),
                field("the layout of states", states.to_owned()),
                field("the cuts", format!("{:?}", plan.cuts)),
                field("the sequences", format!("{:?}", plan.layout)),
            ],
        }
    }

    /// The first field that is not the same in `other`, with both values.
    pub fn first_difference(&self, other: &Self) -> Option<(String, String, String)> {
        let differing = self.fields.iter().zip(&other.fields).find(|(a, b)| a != b)?;
        let ((field, mine), (_, theirs)) = differing;
        Some((field.clone(), mine.clone(), theirs.clone()))
    }

    /// Collective: compares with all other PEs; also the direction, and backward how many calls ago the forward call was.
    pub fn reach(&self, pe: &Pe, direction: Direction, age: u64) -> Result<(), OpError> {
        let mut all = vec![("the direction".to_owned(), direction.to_string())];
        if direction == Direction::Backward {
            all.push(("the saved state".to_owned(), format!("that of {age} calls before")));
        }
        all.extend_from_slice(&self.fields);
        let mine = serde_json::to_vec(&Self { fields: all }).expect("strings serialise");
        let all = pe.all_gather("agreement on the operation", &mine)?;
        for (second, theirs) in all.iter().enumerate() {
            if all[0] == *theirs {
                continue;
            }
            // A PE of another version may say it in another form: then the difference is all there is to say.
            let read = |bytes: &[u8]| serde_json::from_slice::<Self>(bytes).map(|a| a.fields).unwrap_or_default();
            let differing = read(&all[0]).into_iter().zip(read(theirs)).find(|(a, b)| a != b);
            let ((field, first_value), (_, second_value)) = differing
                .unwrap_or_else(|| (("the call".into(), "one thing".into()), (String::new(), "another".into())));
            return Err(OpError::Disagreement { field, first: 0, first_value, second, second_value });
        }
        Ok(())
    }
}
