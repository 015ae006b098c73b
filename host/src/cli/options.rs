//! Options that several subcommands take.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde::de::DeserializeOwned;

/// One of `names`, which are those that `T` has in JSON.
pub(super) fn one_of<T>(names: &'static [&'static str]) -> impl TypedValueParser<Value = T>
where
    T: DeserializeOwned + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(names).try_map(|name| serde_json::from_value(serde_json::Value::String(name)))
}

pub(super) const OPS: &[&str] = &["kda", "gdn"];
pub(super) const DEVICES: &[&str] = &["cpu", "cuda"];
pub(super) const MODES: &[&str] = &["overlap", "bulk", "exact"];
pub(super) const TRANSPORTS: &[&str] = &["auto", "put"];
pub(super) const DTYPES: &[&str] = &["f32", "bf16", "f16"];
pub(super) const RECOMPUTES: &[&str] = &["all", "states"];
pub(super) const M_WIRES: &[&str] = &["auto", "bf16", "f32"];

/// Default of [`cut_tolerance`]: [`CUT_TOLERANCE`](crate::op::CUT_TOLERANCE) as text.
pub(super) const CUT_TOLERANCE: &str = "5.9604645e-8";

/// A tolerance of the cut.
pub(super) fn cut_tolerance(text: &str) -> Result<f32, String> {
    let least = crate::op::LEAST_CUT_TOLERANCE;
    match text.parse::<f32>() {
        Ok(x) if x == 0.0 || (least..1.0).contains(&x) => Ok(x),
        _ => Err(format!("it must be 0 to leave out nothing, or from {least:e} to below 1")),
    }
}

/// A chunk length.
pub(super) fn chunk() -> impl TypedValueParser<Value = usize> {
    PossibleValuesParser::new(["16", "32", "64"]).try_map(|chunk| chunk.parse::<usize>())
}

#[cfg(test)]
mod tests {
    #[test]
    fn tolerances_of_the_cut_are_numbers_below_1() {
        let parse = super::cut_tolerance;
        assert_eq!(parse(super::CUT_TOLERANCE), Ok(crate::op::CUT_TOLERANCE));
        assert_eq!((parse("0"), parse("1e-3")), (Ok(0.0), Ok(1e-3)));
        for bad in ["1", "-1e-3", "1e-16", "nan", "tiny"] {
            assert!(parse(bad).unwrap_err().contains("must be 0"), "{bad}");
        }
    }
}
