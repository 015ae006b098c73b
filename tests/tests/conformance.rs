//! Every operation of the tile DSL on the CPU back end against plain loops in f64. With a GPU, `deltalink doctor --tiles`
//! also compares the GPU with the CPU back end by the same means.

use deltalink::exec::ExecError;
use deltalink::exec::conformance::case::{Case, Outcome, UNTOUCHED};
use deltalink::exec::conformance::rule::Rule;
use deltalink::exec::conformance::{Cpu, Device, against_cpu, against_f64, cases, table};
use kernels_gpu::conformance::TileOp;

#[test]
fn every_operation_gives_what_plain_loops_give() {
    let cases = cases::all();
    let rows = against_f64(&cases, &mut Cpu::new()).unwrap();
    println!("{}", table(&rows));
    assert!(rows.iter().all(|row| row.passed()), "{}", table(&rows));
    for op in TileOp::ALL {
        let of_op: Vec<&Case> = cases.iter().filter(|case| case.op == *op).collect();
        assert!(of_op.len() >= 4, "{op:?} has {} cases", of_op.len());
        assert!(rows.iter().any(|row| row.op == op.name() && row.elements > 0), "{op:?} is compared");
    }
}

#[test]
fn a_back_end_is_identical_to_itself() {
    let rows = against_cpu(&cases::all(), &mut Cpu::new(), &mut Cpu::new()).unwrap();
    assert!(rows.iter().all(|row| row.passed() && row.identical == row.elements), "{}", table(&rows));
}

/// The CPU back end, with something done to what it leaves.
struct Altered<F>(Cpu, F);

impl<F: FnMut(&Case, &mut Outcome)> Device for Altered<F> {
    fn run(&mut self, case: &Case) -> Result<Outcome, ExecError> {
        let mut outcome = self.0.run(case)?;
        (self.1)(case, &mut outcome);
        Ok(outcome)
    }
}

/// The first element of the last warpgroup's result.
fn last_copy(case: &Case) -> usize {
    (case.copies() - 1) * case.copy_stride + case.out.place(0, 0)
}

/// Cases of every operation that has a result.
fn with_results() -> Vec<Case> {
    cases::all().into_iter().filter(|case| !case.out.memory.is_empty()).collect()
}

#[test]
fn one_element_beyond_its_bound_is_noticed() {
    let cases = with_results();
    let mut plain = Cpu::new();
    for case in &cases {
        // A change that no rounding can explain: a quarter of the largest value, or of 1.
        let alter = |case: &Case, outcome: &mut Outcome| {
            let values = outcome.out.iter().filter(|x| **x != UNTOUCHED);
            let largest = values.fold(1.0f32, |largest, x| largest.max(x.abs()));
            outcome.out[last_copy(case)] += largest * 0.25;
        };
        let case = std::slice::from_ref(case);
        let rows = against_f64(case, &mut Altered(Cpu::new(), alter)).unwrap();
        assert!(!rows[0].passed(), "{}", table(&rows));
        assert!(rows[0].first_failure.as_ref().unwrap().contains("expected"), "{}", table(&rows));
        let rows = against_cpu(case, &mut Altered(Cpu::new(), alter), &mut plain).unwrap();
        assert_eq!(rows[0].failures, 1, "{}", table(&rows));
    }
}

#[test]
fn one_bit_is_noticed_where_the_arithmetic_is_the_same() {
    let flip = |case: &Case, outcome: &mut Outcome| {
        let x = &mut outcome.out[last_copy(case)];
        *x = f32::from_bits(x.to_bits() ^ 1);
    };
    let exact: Vec<Case> = with_results().into_iter().filter(|case| Rule::of(case).gpu.is_none()).collect();
    let rows = against_cpu(&exact, &mut Altered(Cpu::new(), flip), &mut Cpu::new()).unwrap();
    assert!(rows.len() > 30);
    for row in &rows {
        assert_eq!(row.failures, row.cases, "{}", table(std::slice::from_ref(row)));
    }
}

#[test]
fn a_write_beside_the_result_is_noticed() {
    let beside = |case: &Case, outcome: &mut Outcome| {
        // Before the first element, where the layout leaves room.
        assert!(case.out.offset > 0 && outcome.out[0] == UNTOUCHED);
        outcome.out[0] = 0.0;
    };
    let roomy: Vec<Case> = with_results().into_iter().filter(|case| case.out.offset > 0).collect();
    assert!(roomy.len() > 50);
    let rows = against_f64(&roomy, &mut Altered(Cpu::new(), beside)).unwrap();
    for row in &rows {
        assert_eq!(row.failures, row.cases, "{}", table(std::slice::from_ref(row)));
    }
}

#[test]
fn a_lost_count_is_noticed() {
    let lose = |_: &Case, outcome: &mut Outcome| outcome.words[1] = 0;
    for op in [TileOp::NextTicket, TileOp::Increment] {
        let rows = against_f64(&cases::of(op), &mut Altered(Cpu::new(), lose)).unwrap();
        assert_eq!(rows[0].failures, rows[0].cases, "{}", table(&rows));
    }
    let lose = |_: &Case, outcome: &mut Outcome| outcome.words[2..].fill(0);
    let rows = against_f64(&cases::of(TileOp::Stamp), &mut Altered(Cpu::new(), lose)).unwrap();
    assert!(!rows[0].passed(), "{}", table(&rows));
}
