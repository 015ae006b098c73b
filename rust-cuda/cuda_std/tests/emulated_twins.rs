//! Every function of the device library has a twin in the emulation.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Names of the public functions in the files of `folder`.
fn functions(folder: &str) -> BTreeSet<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(folder);
    let mut names = BTreeSet::new();
    for file in fs::read_dir(folder).unwrap() {
        let text = fs::read_to_string(file.unwrap().path()).unwrap();
        names.extend(text.split_whitespace().collect::<Vec<_>>().windows(2).filter_map(|words| {
            // `pub fn name(`, `opaque name(operand: ..` in a table, or a name in the arguments of a macro.
            let name = words[1].split(['(', '<', ':', ',', ')']).next().unwrap_or_default();
            let table = ["fn", "pure", "lane", "read", "opaque"].contains(&words[0]) && words[1].contains(['(', '<']);
            (table && !name.starts_with('$')).then(|| name.to_owned())
        }));
        for word in text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_') {
            let made_by_macro =
                ["wgmma_m64", "mma_m16", "ldmatrix_", "stmatrix_", "ld_", "st_", "atom_", "red_", "fence_"];
            if made_by_macro.iter().any(|prefix| word.starts_with(prefix) && word.len() > prefix.len()) {
                names.insert(word.to_owned());
            }
        }
    }
    names
}

#[test]
fn every_instruction_has_a_twin() {
    let (device, host) = (functions("ptx"), functions("emulated/ptx"));
    assert!(device.len() > 120, "{} functions: {device:?}", device.len());
    // What is no instruction, and what both have from one file.
    let other = ["carry", "field", "wgmma_descriptor_128"];
    let missing: Vec<_> = device.difference(&host).filter(|name| !other.contains(&name.as_str())).collect();
    assert!(missing.is_empty(), "functions of src/ptx with no twin in src/emulated/ptx: {missing:?}");
}
