//! Checked mode finds what a GPU would not say: every rule of the tile DSL broken once, and the runner afterwards.

mod common;

use common::{Buffer, Kernel, launch, run, run_with};
use half::bf16;
use kernels_gpu::element::DtypeCode;
use kernels_gpu::params::{Array, Tensor};
use kernels_gpu::tile::host::{BlockRunner, Checker, Fault, FaultKind};
use kernels_gpu::tile::{Acc, RESERVED_BYTES, SHARED_BYTES, Warpgroup};

/// The fault of a kernel that needs no parameters.
fn fault(warpgroups: usize, kernel: Kernel<()>) -> Fault {
    run(warpgroups, &(), kernel).expect_err("the kernel breaks a rule")
}

fn passes(warpgroups: usize, kernel: Kernel<()>) {
    run(warpgroups, &(), kernel).unwrap_or_else(|fault| panic!("{fault}"));
}

#[test]
fn reading_ones_own_write_needs_a_barrier() {
    let found = fault(1, |wg, ()| {
        let tile = wg.shared::<f32>(16, 16);
        wg.fill(tile, |_, _| 1.0);
        let _ = Acc::load(wg, tile);
    });
    assert_eq!(found.kind, FaultKind::ReadBeforeBarrier { element: 0, writer: 0, reader: 0 });
    assert_eq!(found.place, Some((0, 0)));
    passes(1, |wg, ()| {
        let tile = wg.shared::<f32>(16, 16);
        wg.fill(tile, |_, _| 1.0);
        wg.sync();
        let _ = Acc::load(wg, tile);
    });
}

#[test]
fn reading_another_warpgroups_write_needs_the_blocks_barrier() {
    let found = fault(2, |wg, ()| {
        let tile = wg.shared::<f32>(16, 16);
        if wg.index() == 0 {
            wg.fill(tile, |_, _| 1.0);
        }
        wg.sync();
        if wg.index() == 1 {
            let _ = Acc::load(wg, tile);
        }
    });
    assert_eq!(found.kind, FaultKind::ReadBeforeBarrier { element: 0, writer: 0, reader: 1 });
    assert_eq!(found.place, Some((0, 1)));
    passes(2, |wg, ()| {
        let tile = wg.shared::<f32>(16, 16);
        if wg.index() == 0 {
            wg.fill(tile, |_, _| 1.0);
        }
        wg.sync_block();
        let _ = Acc::load(wg, tile);
    });
}

#[test]
fn writing_what_was_read_needs_a_barrier() {
    let kernel = |wg: &mut Warpgroup<'_>, (): &()| {
        let tile = wg.shared::<f32>(16, 16);
        if wg.index() == 0 {
            wg.fill(tile, |_, _| 1.0);
        }
        wg.sync_block();
        let _ = Acc::load(wg, tile.row_range(0, 16));
        // Enough among one warpgroup, too little between two.
        wg.sync();
        if wg.index() + 1 == wg.count() {
            wg.fill(tile.row_range(3, 1), |_, _| 2.0);
        }
    };
    passes(1, kernel);
    let found = fault(2, kernel);
    assert_eq!(found.kind, FaultKind::WriteBeforeBarrier { element: 3 * 16, earlier: 0, writer: 1 });
}

#[test]
fn a_write_and_a_read_between_the_same_barriers_collide_in_either_order() {
    // The coroutines run in the order of their numbers; a GPU's warpgroups need not.
    let found = fault(2, |wg, ()| {
        let tile = wg.shared::<f32>(16, 16);
        if wg.index() == 1 {
            wg.fill(tile, |_, _| 1.0);
        }
        wg.sync_block();
        if wg.index() == 0 {
            wg.fill(tile, |_, _| 2.0);
        } else {
            let _ = Acc::load(wg, tile);
        }
    });
    assert_eq!(found.kind, FaultKind::ReadBeforeBarrier { element: 0, writer: 0, reader: 1 });
}

#[test]
fn two_writes_need_a_barrier_between() {
    let found = fault(2, |wg, ()| {
        let tile = wg.shared::<f32>(16, 16);
        wg.fill(tile, |_, _| 1.0);
    });
    assert_eq!(found.kind, FaultKind::WriteBeforeBarrier { element: 0, earlier: 0, writer: 1 });
}

#[test]
fn updating_in_place_is_a_write_that_needs_barriers_on_both_sides() {
    let found = fault(1, |wg, ()| {
        let (tile, column) = (wg.shared::<f32>(16, 16), wg.shared::<f32>(16, 1));
        wg.fill(tile, |_, _| 1.0);
        wg.fill(column, |_, _| 1.0);
        wg.sync();
        wg.scale_rows(tile, column, 2.0);
        wg.scale_rows(tile, column, 2.0);
    });
    assert_eq!(found.kind, FaultKind::ReadBeforeBarrier { element: 0, writer: 0, reader: 0 });
}

#[test]
fn shared_memory_holds_nothing_before_the_first_write() {
    let found = fault(1, |wg, ()| {
        let tile = wg.shared::<f32>(16, 32);
        wg.fill(tile.columns(0, 20), |_, _| 0.0);
        wg.sync();
        let _ = Acc::load(wg, tile.columns(0, 16));
        let _ = Acc::load(wg, tile.columns(16, 16));
    });
    assert_eq!(found.kind, FaultKind::ReadUnwritten { element: 20 });
}

#[test]
fn a_block_barrier_that_some_never_reach() {
    for leaver in 0..3 {
        let kernel: Kernel<usize> = |wg, &leaver| {
            if wg.index() != leaver {
                wg.sync_block();
            }
        };
        let found = run(3, &leaver, kernel).unwrap_err();
        assert_eq!(found.kind, FaultKind::DivergentBarrier { waiting: 2, of: 3 }, "warpgroup {leaver} leaves");
    }
}

#[test]
fn views_of_global_memory_end_where_the_tensor_ends() {
    let mut x = Buffer::random(DtypeCode::Bf16, 16 * 16, 1);
    let x = x.tensor();
    let kernels: [(&str, Kernel<Tensor>); 6] = [
        ("load", |wg, x| {
            let tile = wg.shared::<f32>(16, 16);
            wg.load(tile, x.matrix(1, 16, 16, 16, 1));
        }),
        ("store", |wg, x| {
            let tile = wg.shared::<f32>(16, 16);
            wg.fill(tile, |_, _| 0.0);
            wg.sync();
            wg.store(x.matrix(1, 16, 16, 1, 16), tile);
        }),
        ("add_global", |wg, x| Acc::zeros(16, 16).add_global(wg, x.matrix(0, 2, 16, 241, 1))),
        ("store_global", |wg, x| Acc::zeros(16, 16).store_global(wg, x.matrix(256 - 16, 2, 16, 1, 1))),
        ("inverse_norms", |wg, x| {
            let column = wg.shared::<f32>(16, 1);
            wg.inverse_norms(column, x.matrix(0, 16, 17, 16, 1), 0.0);
        }),
        ("scalar", |wg, x| {
            wg.scalar(x.matrix(256, 1, 1, 1, 1));
        }),
    ];
    for (name, kernel) in kernels {
        let found = run(1, &x, kernel).expect_err(name);
        assert_eq!(found.kind, FaultKind::GlobalBounds { op: name, element: 256, len: 256 });
    }
    // The last element itself, and a matrix without elements anywhere, are inside.
    run(1, &x, |wg, x| {
        wg.scalar(x.matrix(255, 1, 1, 1, 1));
        Acc::zeros(16, 16).add_global(wg, x.matrix(1000, 0, 16, 1, 1));
    })
    .unwrap();
    let table = Array::of(&[1u32, 2]);
    let found = run(1, &table, |wg, table| _ = wg.read::<u32>(*table, 2)).unwrap_err();
    assert_eq!(found.kind, FaultKind::GlobalBounds { op: "read", element: 2, len: 2 });
    let found = run(1, &table, |wg, table| _ = wg.word(*table, 7)).unwrap_err();
    assert_eq!(found.kind, FaultKind::GlobalBounds { op: "word", element: 7, len: 2 });
}

#[test]
fn parts_lie_inside_their_tile() {
    let found = fault(1, |wg, ()| _ = wg.shared::<f32>(16, 32).part(8, 0, 9, 32));
    assert_eq!(found.kind, FaultKind::TileBounds { found: [17, 32], bound: [16, 32] });
    let found = fault(1, |wg, ()| _ = wg.shared::<f32>(16, 32).t().columns(16, 1));
    assert_eq!(found.kind, FaultKind::TileBounds { found: [32, 17], bound: [32, 16] });
    passes(1, |wg, ()| _ = wg.shared::<f32>(16, 32).part(16, 32, 0, 0));
}

#[test]
fn shapes_must_fit_together() {
    let kernels: [(&str, Kernel<()>); 7] = [
        ("mma", |wg, ()| {
            let (a, b) = (wg.shared::<bf16>(16, 32), wg.shared::<bf16>(16, 32));
            Acc::zeros(16, 32).mma(wg, a, b);
        }),
        ("mma", |wg, ()| {
            let (a, b) = (wg.shared::<bf16>(16, 32), wg.shared::<bf16>(32, 32));
            Acc::zeros(16, 16).mma_sub(wg, a, b);
        }),
        ("Acc::zeros", |_, ()| _ = Acc::zeros(16, 80)),
        ("Acc::zeros", |wg, ()| {
            let tile = wg.shared::<f32>(8, 16);
            let _ = Acc::load(wg, tile);
        }),
        ("store", |wg, ()| {
            let tile = wg.shared::<f32>(32, 16);
            Acc::zeros(16, 32).store(wg, tile);
        }),
        ("convert", |wg, ()| {
            let (to, from) = (wg.shared::<bf16>(16, 32), wg.shared::<f32>(32, 16));
            wg.convert(to, from, |x| x);
        }),
        ("load", |wg, ()| {
            let tile = wg.shared::<f32>(16, 16);
            wg.load(tile, Tensor::absent().matrix(0, 17, 16, 16, 1));
        }),
    ];
    for (name, kernel) in kernels {
        match fault(1, kernel).kind {
            FaultKind::Shapes { op, .. } => assert_eq!(op, name),
            other => panic!("{name}: {other}"),
        }
    }
}

#[test]
fn a_blocks_shared_memory_is_bounded() {
    // What the DSL keeps, 12 tiles of 64 rows of 64 + 4 f32, and one of f32 and one of bf16 that are too much.
    let found = fault(2, |wg, ()| {
        for _ in 0..6 {
            wg.private::<f32>(64, 64);
        }
        wg.shared::<f32>(64, 64);
        wg.shared::<bf16>(64, 64);
    });
    let asked = RESERVED_BYTES + 13 * 64 * 68 * 4 + 64 * 72 * 2;
    assert!(asked - 64 * 72 * 2 <= SHARED_BYTES && asked > SHARED_BYTES);
    assert_eq!(found.kind, FaultKind::SharedBudget { asked, limit: SHARED_BYTES });
    passes(1, |wg, ()| _ = wg.shared::<bf16>(1, (SHARED_BYTES - RESERVED_BYTES) / 2 - 8));
}

#[test]
fn outputs_that_nobody_writes_are_counted() {
    let (mut whole, mut gaps) = (Buffer::filled(DtypeCode::F16, 100, 0.0), Buffer::filled(DtypeCode::F32, 150, 0.0));
    let outputs = (whole.tensor(), gaps.tensor());
    let kernel: Kernel<(Tensor, Tensor)> = |wg, (whole, gaps)| {
        let first = 50 * wg.block();
        Acc::zeros(16, 64).store_global(wg, whole.matrix(first, 1, 50, 50, 1));
        let tile = wg.shared::<f32>(1, 64);
        wg.fill(tile, |_, _| 1.0);
        wg.sync();
        // Every second element of 40 in each half.
        wg.store(gaps.matrix(first, 1, 20, 0, 2), tile);
    };
    let mut checker = Checker::new();
    checker.expect_written("whole", outputs.0);
    checker.expect_written("gaps", outputs.1);
    launch(&mut BlockRunner::new(), Some(&checker), 1, 2, &outputs, kernel).unwrap();
    let found = checker.finish("writer").unwrap_err();
    assert_eq!(
        found.to_string(),
        "kernel writer: 110 of 150 elements of output gaps were never written, the first is 1"
    );
    let mut checker = Checker::new();
    checker.expect_written("whole", outputs.0);
    launch(&mut BlockRunner::new(), Some(&checker), 1, 2, &outputs, kernel).unwrap();
    assert_eq!(checker.finish("writer"), Ok(()));
}

#[test]
fn a_panic_in_a_kernel_is_a_fault_with_its_message() {
    let found = fault(2, |wg, ()| {
        wg.sync_block();
        assert!(wg.index() == 0, "warpgroup {} has had enough", wg.index());
        wg.sync_block();
    });
    assert_eq!(found.place, Some((0, 1)));
    assert_eq!(found.to_string(), "kernel test, block 0, warpgroup 1: panicked: warpgroup 1 has had enough");
}

/// Multiplies what its warpgroups bring along.
fn product(wg: &mut Warpgroup<'_>, out: &Tensor) {
    let (tile, total) = (wg.shared::<f32>(4, 1), wg.shared::<f32>(1, 1));
    let own = wg.index();
    wg.fill(tile.row_range(own, 1), |_, _| 1.0 + own as f32);
    wg.sync_block();
    if own == 0 {
        wg.total_decay(total, tile.row_range(0, wg.count()));
        wg.sync();
        wg.store(out.matrix(0, 1, 1, 1, 1), total);
    }
}

#[test]
fn a_runner_goes_on_after_a_fault() {
    // The fault comes from any warpgroup, before its first barrier or after some.
    let faulty: [Kernel<(usize, usize)>; 3] = [
        |wg, &(guilty, _)| {
            assert!(wg.index() != guilty, "at once");
            wg.sync_block();
        },
        |wg, &(guilty, barriers)| {
            for _ in 0..barriers {
                wg.sync_block();
            }
            let tile = wg.private::<f32>(16, 16);
            if wg.index() == guilty {
                let _ = Acc::load(wg, tile);
            }
            wg.sync_block();
        },
        |wg, &(guilty, _)| {
            if wg.index() != guilty {
                wg.sync_block();
            }
        },
    ];
    let mut runner = BlockRunner::new();
    for kernel in faulty {
        for warpgroups in 2..=4 {
            for guilty in 0..warpgroups {
                for barriers in [0, 3] {
                    run_with(&mut runner, warpgroups, &(guilty, barriers), kernel).expect_err("a fault");
                    for warpgroups in [2, 1, 4, 3] {
                        let mut out = Buffer::filled(DtypeCode::F32, 1, 0.0);
                        run_with(&mut runner, warpgroups, &out.tensor(), product).unwrap();
                        assert_eq!(out.get(0), (1..=warpgroups).product::<usize>() as f32);
                    }
                }
            }
        }
    }
}
