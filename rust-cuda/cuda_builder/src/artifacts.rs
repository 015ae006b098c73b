//! What a build leaves behind.

use std::path::PathBuf;

use crate::Fault;
use crate::resources::{KernelResources, table};

/// A built device module.
#[derive(Debug, Clone)]
pub struct Artifacts {
    /// Architecture.
    pub arch: String,
    /// The PTX that was assembled.
    pub ptx: PathBuf,
    /// The module to load: assembled, and linked if NVSHMEM was asked for.
    pub cubin: PathBuf,
    /// What each kernel costs, by name.
    pub resources: Vec<KernelResources>,
    /// [`Self::resources`] as JSON.
    pub resources_json: PathBuf,
    /// What makes kernels slow that are not hot, and panics left in any.
    pub warnings: Vec<Fault>,
}

impl Artifacts {
    /// [`Self::resources`] for people.
    pub fn table(&self) -> String {
        table(&self.resources)
    }
}
