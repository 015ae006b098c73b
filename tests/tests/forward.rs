//! The kernels against golden vectors and the f64 reference.

use deltalink::compare::{Error, Regime, against_file, tolerance};
use deltalink::generate::{Spec, shapes};
use deltalink::op::{Config, Mode, whole};
use deltalink::plan::{Cuts, Plan};
use deltalink::reference::{Problem, recurrent};
use deltalink::tensor::Dtype;
use deltalink::world::WorldOptions;
use deltalink_tests::{golden_files, load, name};

/// The plan of a problem with or without packed sequences.
fn plan(cu_seqlens: Option<&[usize]>, b: usize, t: usize, cuts: &Cuts) -> Plan {
    match cu_seqlens {
        Some(cu_seqlens) => Plan::packed(cu_seqlens, cuts).unwrap(),
        None => Plan::batch(b, t, cuts).unwrap(),
    }
}

#[test]
fn golden_vectors_in_f32_on_one_pe() {
    let mut medians = Vec::new();
    for path in golden_files() {
        let file = load(&path);
        let inputs = file.inputs();
        let dims = inputs.dims().unwrap();
        let cu = file.cu_seqlens();
        let plan = plan(cu.as_deref(), dims.b, dims.t, &Cuts::equal(1));
        for chunk in [16, 32, 64] {
            let config = Config { chunk, checked: true, ..Config::default() };
            let result = whole::forward(&plan, &inputs, &config, &WorldOptions::default())
                .unwrap_or_else(|e| panic!("{}: {e}", name(&path)));
            let (o, ht) = (result.o.data.to_f64(), result.final_state.unwrap().data.to_f64());
            for checked in against_file(&file, &[("o", &o), ("ht", &ht)], tolerance(Dtype::F32, Regime::Ordinary)) {
                println!("{} chunk {chunk} {}: {}", name(&path), checked.name, checked.error);
                assert!(checked.mismatch.is_none(), "{} chunk {chunk}: {}", name(&path), checked.mismatch.unwrap());
                medians.push(checked.error.rel_rms);
            }
        }
    }
    medians.sort_by(f64::total_cmp);
    let median = medians[medians.len() / 2];
    assert!(median < 1e-5, "median relative error {median:e}");
}

#[test]
fn generated_shapes_on_one_pe_in_every_type() {
    for shape in shapes() {
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
            let spec = Spec { dtype, ..shape.clone() };
            let case = spec.generate();
            let inputs = case.inputs();
            let dims = inputs.dims().unwrap();
            let plan = plan(case.cu_seqlens(), dims.b, dims.t, &Cuts::equal(1));
            let config = Config { checked: true, mode: Mode::Overlap, ..Config::default() };
            let result = whole::forward(&plan, &inputs, &config, &WorldOptions::default())
                .unwrap_or_else(|e| panic!("{spec}: {e}"));
            let expected = recurrent(&Problem::new(&inputs, case.cu_seqlens()).unwrap());
            let o = Error::of(&result.o.data.to_f64(), &expected.o);
            println!("{spec}: o {o}");
            assert!(o.within(tolerance(dtype, Regime::Ordinary)), "{spec}: o {o}");
        }
    }
}
