//! Running cases, comparing what came out, and telling it.

use kernels_gpu::conformance::TileOp;

use super::case::{Case, Outcome, UNTOUCHED};
use super::expected::{Element, comparable, expected, expected_words};
use super::rule::Rule;
use super::{Device, ExecError};
use crate::tensor::Dtype;

/// The cases of one operation and element type, together.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Row {
    /// The operation.
    pub op: &'static str,
    /// Element type of its tiles.
    pub dtype: Dtype,
    /// What results were compared with: `f64` or `cpu`.
    pub against: &'static str,
    /// Cases.
    pub cases: usize,
    /// Elements and words compared.
    pub elements: usize,
    /// How many of them were equal in all bits.
    pub identical: usize,
    /// Whether all must be.
    pub must_be_identical: bool,
    /// The error that came nearest to its bound, or went beyond.
    pub worst_error: f64,
    /// The bound of that element.
    pub bound: f64,
    /// Why results may differ, if they may.
    pub reason: Option<&'static str>,
    /// Elements and words beyond their bounds.
    pub failures: usize,
    /// The first of them.
    pub first_failure: Option<String>,
}

impl Row {
    fn new(case: &Case, against: &'static str, must_be_identical: bool, reason: Option<&'static str>) -> Self {
        Self {
            op: case.op.name(),
            dtype: case.dtype,
            against,
            cases: 0,
            elements: 0,
            identical: 0,
            must_be_identical,
            worst_error: 0.0,
            bound: 0.0,
            reason,
            failures: 0,
            first_failure: None,
        }
    }

    /// Whether every element is within its bound.
    pub fn passed(&self) -> bool {
        self.failures == 0
    }

    /// Notes an element that should be `wanted` and may be off by `bound`.
    fn note(&mut self, case: &Case, place: &str, (found, wanted): (f64, f64), identical: bool, bound: f64) {
        self.elements += 1;
        self.identical += usize::from(identical);
        let error = if identical { 0.0 } else { (found - wanted).abs() };
        // A bound of 0 asks for all bits; a NaN is beyond every bound.
        let within = identical || error <= bound && bound > 0.0;
        self.keep_worst(error, bound);
        if !within {
            self.failures += 1;
            self.first_failure
                .get_or_insert_with(|| format!("{case}: {place} is {found:e}, expected {wanted:e} within {bound:.1e}"));
        }
    }

    /// Keeps the error that is largest next to its bound; of equal ones that with the larger bound.
    fn keep_worst(&mut self, error: f64, bound: f64) {
        let share = |error: f64, bound: f64| if error == 0.0 { 0.0 } else { error / bound };
        let (new, old) = (share(error, bound), share(self.worst_error, self.bound));
        if new > old || new == old && bound > self.bound || new.is_nan() {
            (self.worst_error, self.bound) = (error, bound);
        }
    }

    /// Adds the row of another case of the same operation and element type.
    fn add(&mut self, other: Row) {
        self.cases += other.cases;
        self.elements += other.elements;
        self.identical += other.identical;
        self.failures += other.failures;
        self.keep_worst(other.worst_error, other.bound);
        self.first_failure = self.first_failure.take().or(other.first_failure);
    }

    fn note_words(&mut self, case: &Case, found: &[u64], wanted: &[u64]) {
        let (found, wanted) = (comparable(case, found), comparable(case, wanted));
        for (i, (&found, &wanted)) in found.iter().zip(&wanted).enumerate() {
            self.note(case, &format!("word {i}"), (found as f64, wanted as f64), found == wanted, 0.0);
        }
    }
}

/// Where in a result's memory element `i` of copy `copy` lies.
fn place(case: &Case, copy: usize, i: usize) -> usize {
    copy * case.copy_stride + case.out.place(i / case.out.cols, i % case.out.cols)
}

/// For each element of the result's memory what it must be; nothing where it is to be left alone.
fn wanted(case: &Case) -> Vec<Option<Element>> {
    let mut all = vec![None; case.out.memory.len()];
    // Only what whole blocks do differs between the copies.
    let mut same = None;
    for copy in 0..case.copies() {
        let own = || expected(case, copy / case.warpgroups, copy % case.warpgroups);
        let elements = if case.op < TileOp::Place { same.get_or_insert_with(own).clone() } else { own() };
        for (i, element) in elements.into_iter().enumerate() {
            all[place(case, copy, i)] = Some(element);
        }
    }
    all
}

/// Runs the cases and compares with plain loops in f64. One row for each operation and element type.
///
/// # Errors
/// [`ExecError`] if a case cannot be run.
pub fn against_f64(cases: &[Case], device: &mut dyn Device) -> Result<Vec<Row>, ExecError> {
    rows(cases, |case| {
        let rule = Rule::of(case);
        let mut row = Row::new(case, "f64", false, None);
        let Outcome { out, words } = device.run(case)?;
        for (i, (&found, wanted)) in out.iter().zip(wanted(case)).enumerate() {
            let place = format!("element {i} of the result");
            match wanted {
                None => row.note(case, &place, (found.into(), UNTOUCHED.into()), found == UNTOUCHED, 0.0),
                Some(element) => {
                    let pair = (f64::from(found), element.value);
                    row.note(case, &place, pair, pair.0 == pair.1, rule.bound(element));
                }
            }
        }
        row.note_words(case, &words, &expected_words(case));
        Ok(row)
    })
}

/// Runs the cases on two back ends and compares `device` with `cpu`: all bits where the arithmetic is the same.
///
/// # Errors
/// [`ExecError`] if a case cannot be run.
pub fn against_cpu(cases: &[Case], device: &mut dyn Device, cpu: &mut dyn Device) -> Result<Vec<Row>, ExecError> {
    rows(cases, |case| {
        let rule = Rule::of(case);
        let mut row = Row::new(case, "cpu", rule.gpu.is_none(), rule.gpu.map(|(_, reason)| reason));
        let (found, reference) = (device.run(case)?, cpu.run(case)?);
        let wanted = wanted(case);
        for (i, (&x, &y)) in found.out.iter().zip(&reference.out).enumerate() {
            let bound = wanted[i].map_or(0.0, |element| rule.bound_between(element));
            row.note(
                case,
                &format!("element {i} of the result"),
                (x.into(), y.into()),
                x.to_bits() == y.to_bits(),
                bound,
            );
        }
        row.note_words(case, &found.words, &reference.words);
        Ok(row)
    })
}

/// Runs each case and adds its row to that of its operation and element type.
fn rows(cases: &[Case], mut run: impl FnMut(&Case) -> Result<Row, ExecError>) -> Result<Vec<Row>, ExecError> {
    let mut rows: Vec<Row> = Vec::new();
    for case in cases {
        let row = Row { cases: 1, ..run(case)? };
        match rows.last_mut().filter(|last| (last.op, last.dtype) == (row.op, row.dtype)) {
            Some(last) => last.add(row),
            None => rows.push(row),
        }
    }
    Ok(rows)
}

/// The rows as people read them.
pub fn table(rows: &[Row]) -> String {
    let mut table = comfy_table::Table::new();
    table.load_preset(comfy_table::presets::NOTHING);
    table.set_header([
        "operation",
        "dtype",
        "against",
        "cases",
        "bitwise",
        "worst error",
        "bound",
        "why not bitwise",
        "",
    ]);
    for row in rows {
        let bitwise = match (row.identical == row.elements, row.must_be_identical) {
            (true, _) => "all".to_owned(),
            (false, true) => format!("NOT {} of {}", row.elements - row.identical, row.elements),
            (false, false) => format!("{:.1} %", 100.0 * row.identical as f64 / row.elements as f64),
        };
        table.add_row([
            row.op.to_owned(),
            row.dtype.to_string(),
            row.against.to_owned(),
            row.cases.to_string(),
            bitwise,
            format!("{:.1e}", row.worst_error),
            if row.bound == 0.0 { "0".to_owned() } else { format!("{:.1e}", row.bound) },
            row.reason.unwrap_or_default().to_owned(),
            if row.passed() { "ok" } else { "WRONG" }.to_owned(),
        ]);
    }
    let mut text = table.trim_fmt() + "\n";
    for row in rows {
        if let Some(failure) = &row.first_failure {
            text += &format!("{} of {} elements are wrong; the first: {failure}\n", row.failures, row.elements);
        }
    }
    text
}
