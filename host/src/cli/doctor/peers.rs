//! Which GPUs reach each other's memory.

use super::{Finding, Status};

/// How one GPU reaches the memory of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cli) enum Link {
    /// Not at all.
    None,
    /// By loads and stores, without atomics of its own: PCIe.
    Plain,
    /// By loads, stores and atomics: NVLink.
    Atomic,
}

/// Findings from the links of each GPU to each, by ordinal; none for a single GPU, whose memory is its own.
pub(super) fn findings(links: &[Vec<Link>]) -> Vec<Finding> {
    const ITEM: &str = "access between GPUs";
    let pairs = || (0..links.len()).flat_map(|from| (0..links.len()).map(move |to| (from, to)));
    let with = |kind: Link| -> Vec<String> {
        let such = pairs().filter(|&(from, to)| from != to && links[from][to] == kind);
        such.map(|(from, to)| format!("{from}->{to}")).collect()
    };
    let total = links.len() * links.len().saturating_sub(1);
    if total == 0 {
        return Vec::new();
    }
    let (none, plain) = (with(Link::None), with(Link::Plain));
    let kinds = [("NVLink", with(Link::Atomic)), ("PCIe", plain.clone()), ("no access", none.clone())];
    let found: Vec<String> =
        kinds
            .into_iter()
            .filter(|(_, pairs)| !pairs.is_empty())
            .map(|(kind, pairs)| {
                if pairs.len() == total { format!("{kind}, all pairs") } else { format!("{kind} {}", pairs.join(" ")) }
            })
            .collect();
    let found = found.join("; ");
    vec![match (none.is_empty(), plain.is_empty()) {
        (true, true) => Finding::new(ITEM, Status::Ok, found),
        (true, false) => Finding::new(ITEM, Status::Note, found).advice(
            "messages over PCIe take several times as long as over NVLink: give PEs that exchange GPUs with NVLink between them (--gpus)",
        ),
        (false, _) => Finding::new(ITEM, Status::Missing, found).advice(
            "kernels write straight into the memory of other PEs' GPUs, which those pairs do not allow: choose GPUs that do (--gpus; nvidia-smi topo -p2p r lists them); virtual machines and IOMMU settings are what usually prevents it",
        ),
    }]
}
