use std::path::Path;

use super::*;
use crate::gradients::Gradients;
use crate::inputs::{Beta, Gate, Op, StateLayout};
use crate::tensor::{Buffer, Dtype, Tensor};

fn tensor(shape: &[usize], first: f32) -> Tensor {
    let values = (0..shape.iter().product::<usize>()).map(|i| f64::from(first) + i as f64 / 8.0);
    Tensor { shape: shape.to_vec(), data: Buffer::from_f64(Dtype::F32, values) }
}

/// A whole KDA problem of three tokens, by name.
fn problem() -> Vec<(&'static str, Tensor)> {
    vec![
        ("q", tensor(&[1, 3, 1, 16], 1.0)),
        ("k", tensor(&[1, 3, 1, 16], 2.0)),
        ("v", tensor(&[1, 3, 1, 16], 3.0)),
        ("g", tensor(&[1, 3, 1, 16], -9.0)),
        ("beta", tensor(&[1, 3, 1], 0.5)),
        ("o", tensor(&[1, 3, 1, 16], 4.0)),
    ]
}

fn write(path: &Path, tensors: &[(&str, Tensor)], offsets: Option<&[i64]>, metadata: &[(&str, &str)]) {
    let mut entries: Vec<_> = tensors.iter().map(|(name, tensor)| (*name, Entry::Tensor(tensor))).collect();
    entries.extend(offsets.map(|offsets| ("cu_seqlens", Entry::Offsets(offsets))));
    let metadata: Vec<_> = metadata.iter().map(|(key, value)| (*key, (*value).to_owned())).collect();
    save(path, &entries, &metadata).unwrap();
}

/// Loads a file made of these parts.
fn reload(
    tensors: &[(&str, Tensor)],
    offsets: Option<&[i64]>,
    metadata: &[(&str, &str)],
) -> Result<InputFile, FileError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("case.safetensors");
    write(&path, tensors, offsets, metadata);
    InputFile::load(&path)
}

#[test]
fn what_was_saved_is_loaded() {
    let file = reload(
        &problem(),
        Some(&[0, 1, 3]),
        &[("op", "kda"), ("scale", "0.25"), ("use_qk_l2norm", "true"), ("layout", "V-first"), ("note", "x")],
    )
    .unwrap();
    let inputs = file.inputs();
    assert_eq!((inputs.op, inputs.scale, inputs.l2norm), (Op::Kda, Some(0.25), true));
    assert_eq!(inputs.state_layout, StateLayout::VFirst);
    assert_eq!(inputs.k.to_f64(), problem()[1].1.data.to_f64());
    assert!(matches!(inputs.gate, Gate::Given(_)) && matches!(inputs.beta, Beta::Given(_)));
    assert_eq!(file.cu_seqlens(), Some(vec![0, 1, 3]));
    assert_eq!(file.cuts(), None);
    assert_eq!(file.expected("o"), Some(&problem()[5].1));
    assert_eq!(file.expected("q"), None, "an input is not an expected result");
    assert_eq!(file.metadata()["note"], "x");
    inputs.dims().unwrap();
}

#[test]
fn upstream_gradients_are_inputs_and_gradients_are_expected_results() {
    let (d_o, dht) = (("do", tensor(&[1, 3, 1, 16], 5.0)), ("dht", tensor(&[1, 1, 16, 16], 6.0)));
    let without = reload(&problem(), None, &[("op", "kda")]).unwrap();
    assert!(without.upstream().is_none());
    let missing = reload(&[problem(), vec![dht.clone()]].concat(), None, &[("op", "kda")]).unwrap_err();
    assert!(matches!(missing, FileError::MissingTensor { name: "do", .. }), "{missing}");

    let whole = [problem(), vec![d_o, dht]].concat();
    let file = reload(&whole, None, &[("op", "kda")]).unwrap();
    assert_eq!(file.expected("do"), None, "an input is not an expected result");
    let file = file.to_dtype(Dtype::Bf16);
    let upstream = file.upstream().unwrap();
    let (d_o, dht) = (upstream.d_o, upstream.d_final_state.unwrap());
    assert_eq!((d_o.shape(), d_o.dtype()), (&[1, 3, 1, 16][..], Dtype::Bf16));
    assert_eq!((dht.to_f64(), dht.dtype()), (whole[7].1.data.to_f64(), Dtype::F32));
}

#[test]
fn saved_gradients_are_found_under_the_names_of_what_they_belong_to() {
    let named = |first| tensor(&[1, 3, 1, 16], first);
    let gradients = Gradients {
        dq: named(1.0),
        dk: named(2.0),
        dv: named(3.0),
        dg: named(4.0),
        dbeta: tensor(&[1, 3, 1], 5.0),
        da_log: Some(tensor(&[1], 6.0)),
        ddt_bias: None,
        d_initial_state: Some(tensor(&[1, 1, 16, 16], 7.0)),
    };
    let mut tensors = problem();
    tensors[3] = ("g_raw", tensor(&[1, 3, 1, 16], -9.0));
    tensors[4] = ("beta_logits", tensor(&[1, 3, 1], 0.5));
    tensors.push(("A_log", tensor(&[1], 0.0)));
    let metadata = [("op", "kda"), ("gate", "softplus")];
    let inputs = reload(&tensors, None, &metadata).unwrap();
    let saved: Vec<_> = gradient_entries(&gradients, &inputs.inputs())
        .into_iter()
        .map(|(name, entry)| {
            let Entry::Tensor(tensor) = entry else { panic!("gradients are tensors") };
            (name, tensor.clone())
        })
        .collect();
    let file = reload(&[tensors, saved].concat(), None, &metadata).unwrap();
    for (name, want) in [
        ("dq", Some(&gradients.dq)),
        ("dg_raw", Some(&gradients.dg)),
        ("dg", None),
        ("dbeta_logits", Some(&gradients.dbeta)),
        ("dbeta", None),
        ("dA_log", gradients.da_log.as_ref()),
        ("ddt_bias", None),
        ("dh0", gradients.d_initial_state.as_ref()),
    ] {
        assert_eq!(file.expected(name), want, "{name}");
    }
}

#[test]
fn gate_and_beta_follow_names_and_metadata() {
    let mut tensors = problem();
    tensors[3] = ("g_raw", tensor(&[1, 3, 1, 16], -9.0));
    tensors[4] = ("beta_logits", tensor(&[1, 3, 1], 0.5));
    let metadata = [
        ("op", "kda"),
        ("gate", "lower_bound"),
        ("lower_bound", "-5.0"),
        ("allow_neg_eigval", "true"),
        ("scale", "none"),
    ];
    let file = reload(&tensors, None, &metadata).unwrap();
    assert!(matches!(file.inputs().gate, Gate::LowerBound { a_log: None, dt_bias: None, bound: -5.0, .. }));
    assert!(matches!(file.inputs().beta, Beta::Logits { factor: 2.0, .. }));
    assert_eq!(file.inputs().scale, None);

    let missing = reload(&tensors, None, &[("op", "kda"), ("gate", "softplus")]).unwrap_err();
    assert!(matches!(missing, FileError::MissingTensor { name: "A_log", .. }), "{missing}");
}

#[test]
fn conversion_leaves_the_decay_and_expected_results_in_f32() {
    let file = reload(&problem(), None, &[("op", "kda")]).unwrap().to_dtype(Dtype::Bf16);
    let inputs = file.inputs();
    for x in [&inputs.q, &inputs.k, &inputs.v] {
        assert_eq!(x.dtype(), Dtype::Bf16);
    }
    let (Gate::Given(g), Beta::Given(beta)) = (inputs.gate, inputs.beta) else { panic!("the forms stay") };
    assert_eq!((g.dtype(), beta.dtype()), (Dtype::F32, Dtype::Bf16));
    assert_eq!(file.expected("o").unwrap().data.dtype(), Dtype::F32);
}

#[test]
fn a_missing_tensor_is_named_with_what_is_there() {
    for (skip, name) in [(0, "q"), (2, "v"), (3, "g"), (4, "beta")] {
        let mut tensors = problem();
        tensors.remove(skip);
        let error = reload(&tensors, None, &[("op", "kda")]).unwrap_err();
        let FileError::MissingTensor { name: found, present, .. } = &error else { panic!("{error}") };
        assert_eq!(*found, name);
        assert_eq!(present.len(), 5);
        assert!(error.to_string().contains("case.safetensors has no tensor"), "{error}");
    }
}

#[test]
fn bad_metadata_is_named_with_what_it_must_be() {
    for (metadata, key) in [
        (vec![], "op"),
        (vec![("op", "gla")], "op"),
        (vec![("op", "kda"), ("gate", "tanh")], "gate"),
        (vec![("op", "kda"), ("gate", "lower_bound")], "lower_bound"),
        (vec![("op", "kda"), ("scale", "big")], "scale"),
        (vec![("op", "kda"), ("use_qk_l2norm", "1")], "use_qk_l2norm"),
        (vec![("op", "kda"), ("layout", "T-first")], "layout"),
    ] {
        let error = reload(&problem(), None, &metadata).unwrap_err();
        assert!(matches!(&error, FileError::Metadata { key: found, .. } if *found == key), "{metadata:?}: {error}");
    }
    let absent = reload(&problem(), None, &[]).unwrap_err().to_string();
    assert!(absent.ends_with("metadata op is absent, it must be kda or gdn"), "{absent}");
}

#[test]
fn wrong_element_types_and_negative_offsets_are_refused() {
    let negative = reload(&problem(), Some(&[0, -1, 3]), &[("op", "kda")]).unwrap_err();
    assert!(matches!(negative, FileError::Offset { value: -1, .. }), "{negative}");

    let mut tensors = problem();
    tensors.push(("cu_seqlens", tensor(&[2], 0.0)));
    let float = reload(&tensors, None, &[("op", "kda")]).unwrap_err();
    assert!(float.to_string().ends_with("tensor cu_seqlens has element type F32, it needs I64 or I32"), "{float}");

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ints.safetensors");
    let mut entries = vec![("q", Entry::Offsets(&[1, 2]))];
    let tensors = problem();
    entries.extend(tensors[1..].iter().map(|(name, tensor)| (*name, Entry::Tensor(tensor))));
    save(&path, &entries, &[("op", "kda".to_owned())]).unwrap();
    let ints = InputFile::load(&path).unwrap_err();
    assert!(matches!(&ints, FileError::Dtype { name, found, .. } if name == "q" && found == "I64"), "{ints}");
}

#[test]
fn truncated_foreign_and_absent_files_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("case.safetensors");
    write(&path, &problem(), None, &[("op", "kda")]);
    let whole = std::fs::read(&path).unwrap();
    for length in [0, 4, 100, whole.len() / 2, whole.len() - 1] {
        let error = InputFile::from_bytes("cut.safetensors", &whole[..length]).unwrap_err();
        assert!(matches!(error, FileError::Foreign { .. }), "{length} bytes: {error}");
    }
    let text = InputFile::from_bytes("notes.txt", b"These are my notes about attention.\n").unwrap_err();
    assert!(
        text.to_string().starts_with("notes.txt is not a whole safetensors file (")
            && text.to_string().contains("q, k, v"),
        "{text}"
    );
    let absent = InputFile::load(folder.path().join("none")).unwrap_err();
    assert!(matches!(absent, FileError::Missing { .. }), "{absent}");
    let directory = InputFile::load(folder.path()).unwrap_err();
    assert!(matches!(directory, FileError::Read { .. }), "{directory}");
}

#[test]
fn saving_replaces_whole_files_and_leaves_nothing_beside() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.safetensors");
    std::fs::write(&path, "before").unwrap();
    check_writable(&path).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"before", "the check must not touch the file");
    write(&path, &problem(), None, &[("op", "kda")]);
    InputFile::load(&path).unwrap();
    let names: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["out.safetensors"]);
}

#[test]
fn places_that_cannot_be_written_are_refused_before_anything_runs() {
    let folder = tempfile::tempdir().unwrap();
    for path in [folder.path().to_owned(), folder.path().join("no/such/folder/out"), Path::new("/proc/out").to_owned()]
    {
        let error = check_writable(&path).unwrap_err();
        assert!(matches!(error, FileError::NotWritable { .. }), "{}: {error}", path.display());
        let error = save(&path, &[], &[]).unwrap_err();
        assert!(matches!(error, FileError::NotWritable { .. }), "{}: {error}", path.display());
    }
}
