//! The settings that an input file carries as metadata.

use std::collections::BTreeMap;
use std::path::Path;

use super::FileError;
use crate::inputs::{Op, StateLayout};

/// How the gate is given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GateForm {
    /// The log decay itself, tensor `g`.
    Given,
    /// `g = -exp(A_log) softplus(g_raw + dt_bias)`.
    Softplus,
    /// `g = bound * sigmoid(exp(A_log) (g_raw + dt_bias))`.
    LowerBound(f32),
}

/// The metadata that changes what is computed.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// `op`.
    pub op: Op,
    /// `scale`; absent means `K^-0.5`.
    pub scale: Option<f32>,
    /// `use_qk_l2norm`.
    pub l2norm: bool,
    /// `gate` with `lower_bound`.
    pub gate: GateForm,
    /// `allow_neg_eigval`: beta made from `beta_logits` goes to 2 in place of 1.
    pub allow_neg_eigval: bool,
    /// `layout`, of the initial and final states.
    pub layout: StateLayout,
}

impl Settings {
    /// Reads the settings from the metadata of the file at `path`.
    pub(super) fn parse(path: &Path, metadata: &BTreeMap<String, String>) -> Result<Self, FileError> {
        let get = |key: &str| metadata.get(key).map(String::as_str).filter(|x| *x != "none");
        let bad = |key: &'static str, want: &'static str| FileError::Metadata {
            path: path.to_owned(),
            key,
            found: metadata.get(key).cloned(),
            want,
        };
        let number =
            |key: &'static str, want: &'static str| get(key).map(|x| x.parse().map_err(|_| bad(key, want))).transpose();
        let flag = |key: &'static str| match get(key) {
            None | Some("false") => Ok(false),
            Some("true") => Ok(true),
            Some(_) => Err(bad(key, "true or false")),
        };
        Ok(Self {
            op: match get("op") {
                Some("kda") => Op::Kda,
                Some("gdn") => Op::Gdn,
                _ => return Err(bad("op", "kda or gdn")),
            },
            scale: number("scale", "a number, or absent for K^-0.5")?,
            l2norm: flag("use_qk_l2norm")?,
            gate: match get("gate") {
                None => GateForm::Given,
                Some("softplus") => GateForm::Softplus,
                Some("lower_bound") => {
                    let want = "a number below 0, because gate is lower_bound";
                    GateForm::LowerBound(number("lower_bound", want)?.ok_or_else(|| bad("lower_bound", want))?)
                }
                Some(_) => return Err(bad("gate", "none, softplus or lower_bound")),
            },
            allow_neg_eigval: flag("allow_neg_eigval")?,
            layout: match get("layout") {
                None | Some("K-first") => StateLayout::KFirst,
                Some("V-first") => StateLayout::VFirst,
                Some(_) => return Err(bad("layout", "K-first or V-first")),
            },
        })
    }
}
