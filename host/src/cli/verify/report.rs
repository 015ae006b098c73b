//! What `deltalink verify` says: a row per group, then each failure with the command that repeats it.

use serde::Serialize;

use super::super::judge::Pair;
use super::super::output::{number, table};
use super::super::pes::World;
use super::matrix::Case;
use super::measure::{Figures, Outcome};
use crate::op::{Device, Segments};
use crate::tensor::Dtype;

/// From here on a wrong transition M would show in the errors.
const MATTERS: f64 = 0.1;

/// What ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    /// What a PE was.
    pub world: World,
    /// What computed.
    pub device: Device,
    /// Whether gradients were checked as well.
    pub backward: bool,
    /// Into how many parts PEs cut their segments.
    pub segments: Segments,
    /// Processes, if PEs were processes.
    pub processes: Option<usize>,
    /// Cases that need more PEs than there were.
    pub left_out: usize,
}

/// All cases; the JSON. Numbers that are not finite are `null` in JSON.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Version of this layout: 1.
    pub schema: u32,
    /// Seed of everything random.
    pub seed: u64,
    /// Whether all is right.
    pub passed: bool,
    /// What a PE was.
    pub world: World,
    /// What computed.
    pub device: Device,
    /// Whether gradients were checked as well.
    pub backward: bool,
    /// Processes that there were; absent if PEs were threads.
    pub processes: Option<usize>,
    /// Numbers of PEs of the cases that ran, ascending.
    pub pes: Vec<usize>,
    /// Cases that were left out because they need more PEs than there were.
    pub left_out: usize,
    /// Number of cases.
    pub cases: usize,
    /// Cases that must equal one PE bit for bit.
    pub bitwise: usize,
    /// Cases with a transition weight above 0.1.
    pub weighty: usize,
    /// Largest transition weight, `|M S_in| / |S_out|`, of any case.
    pub transition_weight: f64,
    /// By group and element type.
    pub groups: Vec<Group>,
    /// Cases that are wrong.
    pub failures: Vec<Failure>,
    /// What is wrong with the choice of cases as a whole.
    pub complaints: Vec<String>,
}

/// Cases of one kind in one element type.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Group {
    /// What they are examples of.
    pub group: &'static str,
    /// Element type of q, k, v and o.
    pub dtype: Dtype,
    /// Number of cases.
    pub cases: usize,
    /// Number of wrong ones.
    pub failed: usize,
    /// The case whose largest error comes closest to what is allowed; absent if none could be computed.
    pub worst: Option<Worst>,
    /// With `--backward`: the largest relative RMS error of dq, dk and dv against the f64 reference in any case.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gradients: Option<f64>,
}

/// Errors of a case.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Worst {
    /// Number of the case.
    pub case: usize,
    /// Against the f64 reference.
    pub error: Pair,
    /// Against one PE.
    pub error_vs_one_pe: Pair,
    /// Largest relative RMS error allowed.
    pub tolerance: f64,
}

/// A case that is wrong.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Failure {
    /// Number of the case.
    pub case: usize,
    /// The case in words.
    pub what: String,
    /// What is wrong.
    pub mismatches: Vec<String>,
    /// The command that repeats it.
    pub repeat: String,
}

impl Report {
    /// Sums up. If `whole`, the cases must include some in which the transition matters.
    pub(super) fn new(seed: u64, whole: bool, extent: Extent, cases: &[Case], outcomes: &[Outcome]) -> Self {
        let Extent { world, device, backward, segments, processes, left_out } = extent;
        let processes_again = if world == World::Processes { " --world processes" } else { "" };
        let mut again = if backward { " --backward" } else { "" }.to_owned();
        if segments != Segments::Auto {
            again += &format!(" --segments {segments}");
        }
        let mut pes: Vec<usize> = cases.iter().map(Case::pes).collect();
        pes.sort_unstable();
        pes.dedup();
        let weights: Vec<f64> =
            outcomes.iter().filter_map(|outcome| Some(outcome.figures?.transition_weight)).collect();
        let weighty = weights.iter().filter(|&&weight| weight > MATTERS).count();
        let failures: Vec<Failure> = cases
            .iter()
            .zip(outcomes)
            .filter(|(_, outcome)| !outcome.mismatches.is_empty())
            .map(|(case, outcome)| Failure {
                case: case.number,
                what: case.to_string(),
                mismatches: outcome.mismatches.clone(),
                repeat: format!("deltalink verify --seed {seed} --case {}{again}{processes_again}", case.number),
            })
            .collect();
        let mut complaints = Vec::new();
        if whole && weighty == 0 {
            complaints.push(format!("no case has a transition weight above {MATTERS}: a wrong M might go unnoticed"));
        }
        Self {
            schema: 1,
            seed,
            passed: failures.is_empty() && complaints.is_empty(),
            world,
            device,
            backward,
            processes,
            pes,
            left_out,
            cases: cases.len(),
            bitwise: cases.iter().filter(|case| case.bitwise()).count(),
            weighty,
            transition_weight: weights.into_iter().fold(0.0, f64::max),
            groups: groups(cases, outcomes),
            failures,
            complaints,
        }
    }

    pub(super) fn text(&self) -> String {
        let head = ["cases", "o", "ht", "one PE", "allowed"].map(number);
        let [cases, o, ht, one_pe, allowed] = head;
        let gradients = self.backward.then(|| number("dq, dk, dv"));
        let head = ["group".into(), "type".into(), cases, o, ht, one_pe, allowed].into_iter().chain(gradients);
        let mut rows = table(head.chain(["".into()]));
        for group in &self.groups {
            let status = if group.failed == 0 { "ok".to_owned() } else { format!("WRONG: {}", group.failed) };
            let numbers = match &group.worst {
                Some(worst) => {
                    let one_pe = worst.error_vs_one_pe.o.rel_rms.max(worst.error_vs_one_pe.ht.rel_rms);
                    let error = worst.error;
                    let errors = [error.o.rel_rms, error.ht.rel_rms, one_pe].map(|x| format!("{x:.1e}"));
                    let allowed = format!("{:.0e}", worst.tolerance);
                    errors.into_iter().chain([allowed]).collect()
                }
                None => vec!["-".to_owned(); 4],
            };
            let names = [group.group.to_owned(), group.dtype.to_string()].map(comfy_table::Cell::new);
            let of_gradients = group.gradients.map_or_else(|| "-".to_owned(), |error| format!("{error:.1e}"));
            let numbers = std::iter::once(group.cases.to_string()).chain(numbers);
            let numbers = numbers.chain(self.backward.then_some(of_gradients)).map(number);
            rows.add_row(names.into_iter().chain(numbers).chain([comfy_table::Cell::new(status)]));
        }
        let mut text: String = rows.trim_fmt().lines().map(|line| format!("{}\n", line.trim_end())).collect();
        text += "\n\
            Relative RMS errors: o and ht against the f64 reference, the larger of both\n\
            against one PE, where sqrt(2) times as much is allowed.\n";
        if self.backward {
            text += "dq, dk, dv: the largest of any case. Each gradient is judged by rules of its own, against both.\n";
        }
        text += "\n";
        text += &format!(
            "The transition matters (weight above {MATTERS}) in {} of {} cases, at most {:.2}.\n",
            self.weighty, self.cases, self.transition_weight
        );
        text += &self.where_it_ran();
        if self.bitwise > 0 {
            text += &format!("{} cases must equal one PE bit for bit.\n", self.bitwise);
        }
        for failure in &self.failures {
            text += &format!("\n#{} {}\n", failure.case, failure.what);
            for mismatch in &failure.mismatches {
                text += &format!("  {mismatch}\n");
            }
            text += &format!("  again: {}\n", failure.repeat);
        }
        for complaint in &self.complaints {
            text += &format!("\n{complaint}\n");
        }
        text += &match self.failures.len() {
            0 if self.passed => format!("\nAll {} cases are right (seed {}).\n", self.cases, self.seed),
            0 => "\nWRONG as a whole.\n".to_owned(),
            wrong => format!("\n{wrong} of {} cases are WRONG (seed {}).\n", self.cases, self.seed),
        };
        text
    }
}

impl Report {
    /// On which PEs.
    fn where_it_ran(&self) -> String {
        let processes = self.processes.map(|count| format!(", {count} in all")).unwrap_or_default();
        let pes: Vec<String> = self.pes.iter().map(usize::to_string).collect();
        let (world, device) = (self.world, self.device);
        let mut text = format!("PEs were {world}{processes}, on {device}; cases ran on {} PEs.\n", pes.join(", "));
        if self.left_out > 0 {
            text += &format!("{} cases need more PEs and were left out.\n", self.left_out);
        }
        text
    }
}

fn groups(cases: &[Case], outcomes: &[Outcome]) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    let mut strains: Vec<f64> = Vec::new();
    for (case, outcome) in cases.iter().zip(outcomes) {
        let (group, dtype) = (case.group, case.spec.dtype);
        let known = groups.iter().position(|known| (known.group, known.dtype) == (group, dtype));
        let at = known.unwrap_or_else(|| {
            groups.push(Group { group, dtype, cases: 0, failed: 0, worst: None, gradients: None });
            strains.push(f64::NEG_INFINITY);
            groups.len() - 1
        });
        let entry = &mut groups[at];
        entry.cases += 1;
        entry.failed += usize::from(!outcome.mismatches.is_empty());
        if let Some(error) = outcome.figures.and_then(|figures| figures.gradients) {
            entry.gradients = Some(entry.gradients.map_or(error, |largest| largest.max(error)));
        }
        if let Some(figures) = outcome.figures.filter(|figures| figures.strain() > strains[at]) {
            strains[at] = figures.strain();
            let Figures { reference: error, one_pe: error_vs_one_pe, tolerance, .. } = figures;
            entry.worst = Some(Worst { case: case.number, error, error_vs_one_pe, tolerance });
        }
    }
    // Groups in their order, within each f32 before bf16 and f16.
    let order = |group: &Group| {
        let first = cases.iter().position(|case| case.group == group.group);
        (first, [Dtype::F32, Dtype::Bf16, Dtype::F16].iter().position(|&dtype| dtype == group.dtype))
    };
    groups.sort_by_key(order);
    groups
}
