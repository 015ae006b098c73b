//! The kernels of the backward pass against golden vectors and the f64 reference.

mod backward_pes;

use backward_pes::{Setup, gradients};
use deltalink::compare::{Error, against_file};
use deltalink_tests::{golden_files, load, name};

/// Largest relative RMS error in f32.
const F32: f64 = 1e-4;

#[test]
fn golden_vectors_in_f32_on_one_pe() {
    let mut errors = Vec::new();
    for path in golden_files() {
        let file = load(&path);
        let inputs = file.inputs();
        let dims = inputs.dims().unwrap();
        let cu = file.cu_seqlens();
        let upstream = file.upstream().expect("a golden file has do");
        for chunk in [16, 32, 64] {
            let found = gradients(&Setup {
                inputs: &inputs,
                upstream: &upstream,
                cu_seqlens: cu.as_deref(),
                chunk,
                cuts: &[0, dims.b * dims.t],
                exact: false,
            });
            let found = found.named(&inputs);
            let slices: Vec<(&str, &[f64])> = found.iter().map(|(name, x)| (*name, &x[..])).collect();
            for checked in against_file(&file, &slices, F32) {
                println!("{} chunk {chunk} {}: {}", name(&path), checked.name, checked.error);
                errors.push((
                    checked.error.rel_rms,
                    checked.mismatch.map(|m| format!("{} chunk {chunk}: {m}", name(&path))),
                ));
            }
        }
    }
    let bad: Vec<_> = errors.iter().filter_map(|(_, m)| m.clone()).collect();
    assert!(bad.is_empty(), "{}", bad.join("\n"));
    let mut errors: Vec<f64> = errors.into_iter().map(|e| e.0).collect();
    errors.sort_by(f64::total_cmp);
    let median = errors[errors.len() / 2];
    assert!(median < 1e-5, "median relative error {median:e}");
    let _ = Error::of(&[], &[]);
}
