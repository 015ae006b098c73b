//! Errors of the library: each says what was asked, what was found and what to do.

use crate::tensor::{Dtype, Location};

/// The caller's tensors do not describe a computation.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum InputError {
    #[error("shape {shape:?} needs {} elements, the data has {found}", shape.iter().product::<usize>())]
    Length { shape: Vec<usize>, found: usize },
    #[error("a view of shape {shape:?} is not contiguous in row-major order; make a contiguous copy first")]
    NotContiguous { shape: Vec<usize> },
    #[error("{name} has {} dimensions (shape {shape:?}), it needs {want}", shape.len())]
    Rank { name: &'static str, shape: Vec<usize>, want: usize },
    #[error("{name} has shape {shape:?}, the other tensors ask for {want:?}")]
    Shape { name: &'static str, shape: Vec<usize>, want: Vec<usize> },
    #[error("{name} has element type {found}, it needs {want}")]
    Dtype { name: &'static str, found: Dtype, want: String },
    #[error("HV = {hv} value heads is not a positive multiple of H = {h} query/key heads")]
    Heads { h: usize, hv: usize },
    #[error("{name} = {found}: a head dimension must be a multiple of 16 from 16 to 256")]
    HeadDim { name: &'static str, found: usize },
    #[error("GDN has no lower-bound gate; use Gate::Softplus or Gate::Given")]
    LowerBoundGdn,
    #[error("the lower bound of the gate is {found}; it must be finite and below 0")]
    LowerBound { found: f32 },
    #[error("the factor of beta is {found}; it must be 1, or 2 to allow negative eigenvalues")]
    BetaFactor { found: f32 },
    #[error("scale is {found}; it must be finite")]
    Scale { found: f32 },
    #[error(
        "{name}{index:?} is {value}; clean the input, or pass allow_nonfinite (--allow-nonfinite) to compute with it"
    )]
    NonFinite { name: &'static str, index: Vec<usize>, value: f64 },
    #[error(
        "g{index:?} is {value}; the log decay must be at most 0 (is it the gate's raw input? then use Gate::Softplus)"
    )]
    PositiveGate { index: Vec<usize>, value: f64 },
    #[error("{name} has {found} rows, the plan has {want} sequences {what}")]
    StateRows { name: &'static str, found: usize, want: usize, what: &'static str },
    #[error("the inputs hold [B, T] = [{b}, {t}] tokens, the plan gives this PE [{want_b}, {want_t}]")]
    Tokens { b: usize, t: usize, want_b: usize, want_t: usize },
    #[error("chunk is {found}; it must be 16, 32 or 64")]
    Chunk { found: usize },
    #[error("no tensor lies at address {address:#x} on {location}; it must be a multiple of {align} and not 0")]
    Address { address: u64, location: Location, align: u64 },
    #[error("{name} begins at address {address:#x}, which is no multiple of {align}; give it memory that is aligned")]
    Alignment { name: &'static str, address: u64, align: u64 },
    #[error("{name} lies on {found}, {why}; copy it to {want} first")]
    Location { name: &'static str, found: Location, want: Location, why: &'static str },
    #[error(
        "{result}, which is written, shares memory with {other} on {location}; give every result memory of its own, \
         apart from all other tensors of the call"
    )]
    Overlap { result: &'static str, other: &'static str, location: Location },
    #[error("memory for {name} was {}given; {why}", if *given { "" } else { "not " })]
    Result { name: &'static str, given: bool, why: &'static str },
}

/// For conversions that cannot fail.
impl From<std::convert::Infallible> for InputError {
    fn from(never: std::convert::Infallible) -> Self {
        match never {}
    }
}
