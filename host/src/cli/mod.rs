//! The subcommands: each has its arguments (`Args`) and a `run` that writes to a given writer, so that tests can read it.

pub mod doctor;
mod output;
pub mod plan;
pub mod trace;

pub use output::{JsonTarget, OutputError};
