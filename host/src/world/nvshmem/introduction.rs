//! What the PEs tell each other before NVSHMEM starts: whether their libraries fit, and who shares a GPU.

use std::collections::BTreeMap;

use nvshmem_sys::Library;
use serde::{Deserialize, Serialize};

use super::NvshmemError;
use crate::exec::cuda::{Gpu, Sharing, mps_is_running};
use crate::world::Pe;

/// What a PE tells.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Introduction {
    gpu: String,
    version: String,
    path: String,
    /// Whether there is an MPS server where this PE looks for it.
    mps: bool,
}

/// Collective: compares libraries; tells how GPUs are shared, the same on every PE, and returns warnings.
pub(super) fn introduce(pe: &Pe, gpu: &Gpu, library: &Library) -> Result<(Sharing, Vec<String>), NvshmemError> {
    let mine = Introduction {
        gpu: gpu.properties().uuid_text(),
        version: library.version().to_string(),
        path: library.path().display().to_string(),
        mps: mps_is_running(),
    };
    let unreadable =
        |rank| move |error: serde_json::Error| NvshmemError::Unreadable { rank, reason: error.to_string() };
    let bytes = serde_json::to_vec(&mine).map_err(unreadable(pe.rank()))?;
    let all = pe.all_gather("NVSHMEM: GPUs and libraries", &bytes)?;
    let all = all.iter().enumerate().map(|(rank, bytes)| serde_json::from_slice(bytes).map_err(unreadable(rank)));
    let all: Vec<Introduction> = all.collect::<Result<_, _>>()?;
    same_library(&all)?;
    Ok((sharing(&all), warnings(&all)))
}

fn same_library(all: &[Introduction]) -> Result<(), NvshmemError> {
    let first = &all[0];
    match all.iter().enumerate().find(|(_, other)| other.version != first.version) {
        None => Ok(()),
        Some((second_rank, second)) => Err(NvshmemError::Versions {
            first: first.version.clone(),
            first_path: first.path.clone(),
            second_rank,
            second: second.version.clone(),
            second_path: second.path.clone(),
        }),
    }
}

/// The PEs of each GPU.
fn by_gpu(all: &[Introduction]) -> BTreeMap<&str, Vec<String>> {
    let mut pes: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (rank, introduction) in all.iter().enumerate() {
        pes.entry(&introduction.gpu).or_default().push(rank.to_string());
    }
    pes
}

/// Kernels of processes that share a GPU run at the same time if all of them are served by MPS.
fn sharing(all: &[Introduction]) -> Sharing {
    let pes = by_gpu(all).values().map(Vec::len).max().unwrap_or(1);
    Sharing { pes, concurrent: pes == 1 || all.iter().all(|introduction| introduction.mps) }
}

/// A warning for each GPU that several PEs share without MPS.
fn warnings(all: &[Introduction]) -> Vec<String> {
    if sharing(all).concurrent {
        return Vec::new();
    }
    let shared = by_gpu(all).into_iter().filter(|(_, pes)| pes.len() > 1);
    shared
        .map(|(gpu, pes)| {
            format!(
                "PEs {} share {gpu} without MPS: they take turns and wait for each other on the host, between kernels; start \
                 MPS (nvidia-cuda-mps-control -d) or fewer PEs",
                pes.join(", ")
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn introductions(gpus: &[&str], mps: bool) -> Vec<Introduction> {
        let one = |gpu: &&str| Introduction { gpu: (*gpu).into(), version: "3.4.5".into(), path: "/x".into(), mps };
        gpus.iter().map(one).collect()
    }

    #[test]
    fn pes_that_share_a_gpu_are_warned_of_the_cost() {
        let mut all = introductions(&["GPU-a", "GPU-b", "GPU-a", "GPU-c"], false);
        let found = warnings(&all);
        assert_eq!((found.len(), sharing(&all)), (1, Sharing { pes: 2, concurrent: false }));
        assert!(found[0].starts_with("PEs 0, 2 share GPU-a without MPS"), "{found:?}");
        assert_eq!((warnings(&all[1..]), sharing(&all[1..])), (Vec::new(), Sharing::NONE));
        all.iter_mut().for_each(|introduction| introduction.mps = true);
        assert_eq!((warnings(&all), sharing(&all)), (Vec::new(), Sharing { pes: 2, concurrent: true }));
        all[1].mps = false;
        assert!(!sharing(&all).concurrent, "a PE that looks elsewhere has no part in it");
    }

    #[test]
    fn different_libraries_are_told_with_both_versions_and_paths() {
        let mut all = introductions(&["GPU-a", "GPU-b", "GPU-c"], false);
        assert_eq!(same_library(&all), Ok(()));
        all[2].version = "3.7.0".into();
        all[2].path = "/y".into();
        let text = same_library(&all).expect_err("differ").to_string();
        assert!(text.contains("PE 0 has loaded NVSHMEM 3.4.5 (/x), PE 2 3.7.0 (/y)"), "{text}");
    }
}
