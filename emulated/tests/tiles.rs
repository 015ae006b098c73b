//! Every operation of the tile DSL as GPUs do it, against the CPU back end, bit for bit where both do the same arithmetic.

use cuda_std::emulated::{Order, Schedule, Timing};
use deltalink::exec::conformance::{Cpu, against_cpu, cases, table};
use deltalink_emulated::Tiles;
use kernels_gpu::conformance::TileOp;

#[test]
fn every_operation_gives_what_the_cpu_back_end_gives() {
    let begin = std::time::Instant::now();
    for &op in TileOp::ALL {
        let rows = against_cpu(&cases::of(op), &mut Tiles::new(Schedule::default()), &mut Cpu::new()).unwrap();
        println!("{op:?}: {} cases, {} elements, {:?}", rows[0].cases, rows[0].elements, begin.elapsed());
        assert!(rows.iter().all(|row| row.passed()), "{}", table(&rows));
    }
}

#[test]
fn operations_do_not_depend_on_the_order_of_threads() {
    let schedule = Schedule { timing: Timing::Eager, order: Order::Descending };
    for &op in TileOp::ALL {
        let some: Vec<_> = cases::of(op).into_iter().step_by(3).collect();
        let rows = against_cpu(&some, &mut Tiles::new(schedule), &mut Cpu::new()).unwrap();
        assert!(rows.iter().all(|row| row.passed()), "{}", table(&rows));
    }
}
