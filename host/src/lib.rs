//! Context-parallel linear attention (Kimi Delta Attention and Gated DeltaNet) whose kernels send each
//! head's state summary to the PEs that need it while other heads still compute.

pub mod cli;
pub mod compare;
pub mod error;
pub mod exec;
pub mod file;
pub mod generate;
pub mod heap;
pub mod inputs;
pub mod op;
pub mod plan;
pub mod reference;
pub mod tensor;
pub mod trace;
pub mod world;
