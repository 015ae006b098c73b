//! KDA forward on the CPU back end, one PE, against the time of plain matrix products of the same FLOPs.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use deltalink::generate::{Case, Spec};
use deltalink::inputs::Op;
use deltalink::op::{Config, ContextParallel, OpError};
use deltalink::plan::{Cuts, Plan};
use deltalink::tensor::Dtype;
use deltalink::world::{Pe, WorldOptions};

const TOKENS: usize = 4096;
const HEADS: usize = 4;
const DIM: usize = 64;
const CHUNK: usize = 64;
const WORKERS: usize = 2;

/// The products of a chunk, all `[64,64] x [64,64]` at these sizes: two score matrices, w, A' v, S w^T, S qg^T,
/// R Aqk^T and R kg.
const PRODUCTS: usize = 8;

fn products(c: &mut Criterion) {
    let n = DIM;
    let (a, b) = (vec![0.5f32; n * n], vec![0.25f32; n * n]);
    let chunks = TOKENS / CHUNK * HEADS;
    let flops = (chunks * PRODUCTS * 2 * n * n * n) as u64;
    let mut group = c.benchmark_group("forward");
    group.throughput(Throughput::Elements(flops)).sample_size(20);
    group.bench_function("matrixmultiply, same FLOPs, 2 threads", |bench| {
        bench.iter(|| {
            std::thread::scope(|scope| {
                for _ in 0..WORKERS {
                    scope.spawn(|| {
                        let mut out = vec![0.0f32; n * n];
                        for _ in 0..chunks * PRODUCTS / WORKERS {
                            let (n_, s) = (n, n as isize);
                            // SAFETY: all three are n x n, row-major, and `out` overlaps neither operand.
                            unsafe {
                                matrixmultiply::sgemm(
                                    n_,
                                    n_,
                                    n_,
                                    1.0,
                                    a.as_ptr(),
                                    s,
                                    1,
                                    b.as_ptr(),
                                    s,
                                    1,
                                    1.0,
                                    out.as_mut_ptr(),
                                    s,
                                    1,
                                );
                            }
                        }
                        std::hint::black_box(&out);
                    });
                }
            });
        });
    });
    group.finish();
}

fn forward(c: &mut Criterion) {
    for op in [Op::Kda, Op::Gdn] {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let spec =
                Spec { op, t: TOKENS, h: HEADS, hv: HEADS, k: DIM, v: DIM, dtype, l2norm: true, ..Spec::default() };
            let case = spec.generate();
            let plan = Plan::batch(1, TOKENS, &Cuts::equal(1)).expect("one PE holds all tokens");
            let pe = Pe::alone(&WorldOptions::default()).expect("memory for an empty heap");
            measure(c, &pe, &case, &plan).expect("valid inputs");
        }
    }
}

fn measure(c: &mut Criterion, pe: &Pe, case: &Case, plan: &Plan) -> Result<(), OpError> {
    let (inputs, spec) = (case.inputs(), &case.spec);
    let mut operation = ContextParallel::new(pe, Config { workers: Some(WORKERS), ..Config::default() })?;
    let name = format!("{} {} H={HEADS} T={TOKENS} K=V={DIM}", spec.op, spec.dtype);
    let mut group = c.benchmark_group("forward");
    group.sample_size(20).bench_function(&name, |bench| {
        bench.iter(|| operation.forward(plan, &inputs).expect("valid inputs"));
    });
    group.finish();
    let report = operation.forward(plan, &inputs)?.report;
    let channels = if spec.op == Op::Kda { 4 * DIM + 1 } else { 3 * DIM + 2 };
    let ratio = report.scratch_bytes as f64 / (TOKENS * HEADS * channels * spec.dtype.size()) as f64;
    println!("{name}: scratch {} bytes, {ratio:.2} times the inputs", report.scratch_bytes);
    for kernel in &report.kernels {
        println!("  {} {:.2?}", kernel.kernel, kernel.time);
    }
    Ok(())
}

criterion_group!(benches, products, forward);
criterion_main!(benches);
