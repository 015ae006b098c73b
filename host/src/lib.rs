//! Context-parallel linear attention (Kimi Delta Attention and Gated DeltaNet) whose kernels send each
//! head's state summary to the PEs that need it while other heads still compute.

pub mod error;
pub mod inputs;
pub mod tensor;

pub mod plan;
pub mod reference;
pub mod heap;
pub mod world;
pub mod trace;
pub mod compare;
pub mod file;
pub mod generate;
pub mod cli;
