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

/// A chunk length.
pub(super) fn chunk() -> impl TypedValueParser<Value = usize> {
    PossibleValuesParser::new(["16", "32", "64"]).try_map(|chunk| chunk.parse::<usize>())
}
