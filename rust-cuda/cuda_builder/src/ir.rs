//! LLVM IR as text: which kernels there are, and what has to be put right before it is optimised.

use std::collections::BTreeMap;

use crate::BuildError;

/// What `#[kernel]` says of a kernel beside its name; `None` where it does not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bounds {
    /// Threads of a block.
    pub threads: Option<u32>,
    /// Most registers of a thread.
    pub registers: Option<u32>,
    /// Blocks that must fit a multiprocessor.
    pub blocks_per_sm: Option<u32>,
    /// Blocks of a cluster.
    pub cluster: Option<u32>,
    /// Whether the kernel is hot.
    pub hot: bool,
}

/// The kernels of a module and their bounds.
pub fn kernels(ir: &str) -> BTreeMap<String, Bounds> {
    let mut kernels: BTreeMap<String, Bounds> = ir
        .lines()
        .filter(|line| line.starts_with("define ") && line.contains("ptx_kernel "))
        .filter_map(function_name)
        .map(|name| (name.to_owned(), Bounds::default()))
        .collect();
    for note in ir.lines().filter_map(|line| line.strip_prefix("module asm \"// cuda_std::kernel ")) {
        let mut words = note.trim_end_matches('"').split(' ');
        let Some(bounds) = words.next().and_then(|name| kernels.get_mut(name)) else { continue };
        for word in words {
            match word.split_once('=').map(|(name, value)| (name, value.parse().ok())) {
                Some(("threads", value)) => bounds.threads = value,
                Some(("registers", value)) => bounds.registers = value,
                Some(("blocks_per_sm", value)) => bounds.blocks_per_sm = value,
                Some(("cluster", value)) => bounds.cluster = value,
                _ => bounds.hot |= word == "hot",
            }
        }
    }
    kernels
}

/// The name in a `define` or `declare` line.
fn function_name(line: &str) -> Option<&str> {
    let (_, rest) = line.split_once('@')?;
    Some(rest.split_once('(')?.0.trim_matches('"'))
}

/// Instructions that concern one thread alone: LLVM may move and duplicate them. Everything else written in assembly is
/// marked convergent: it must not become dependent on more conditions than the program says.
const OF_ONE_THREAD: [&str; 12] = [
    "cvt.",
    "ex2.",
    "lg2.",
    "rcp.",
    "rsqrt.",
    "sqrt.",
    "mov.u32 ",
    "ld.global.",
    "ld.shared.",
    "st.global.",
    "st.shared.",
    "//",
];

/// Marks every call of assembly convergent, except of instructions of one thread.
pub fn mark_convergent(ir: &str) -> Result<String, BuildError> {
    let mut marked = String::with_capacity(ir.len() + ir.len() / 8);
    for (number, line) in ir.lines().enumerate() {
        match assembly(line) {
            None => marked.push_str(line),
            Some(template) if OF_ONE_THREAD.iter().any(|prefix| template.starts_with(prefix)) => marked.push_str(line),
            Some(_) => {
                // The last parenthesis closes the arguments: attributes and metadata are numbers of groups here.
                let unknown = || BuildError::UnknownAssembly { line: number + 1, text: line.into() };
                let end = line.rfind(')').ok_or_else(unknown)? + 1;
                let (call, attributes) = line.split_at(end);
                if !attributes.is_empty() && !attributes.starts_with(" #") && !attributes.starts_with(", !") {
                    return Err(unknown());
                }
                marked.push_str(call);
                marked.push_str(" convergent");
                marked.push_str(attributes);
            }
        }
        marked.push('\n');
    }
    Ok(marked)
}

/// The template of the assembly that a line calls, if it does.
fn assembly(line: &str) -> Option<&str> {
    let instruction = line.trim_start();
    if instruction.starts_with(';') || instruction.starts_with("module asm") {
        return None;
    }
    let (before, rest) = instruction.split_once('"')?;
    let before = before.strip_suffix("asm ").or_else(|| before.strip_suffix("asm sideeffect "))?;
    before.split(' ').any(|word| matches!(word, "call" | "invoke" | "callbr")).then_some(rest)
}

/// Fails if a read-modify-write has an ordering that code generation would drop.
pub fn refuse_ordered_updates(ir: &str) -> Result<(), BuildError> {
    let mut function = "";
    for line in ir.lines() {
        if line.starts_with("define ") {
            function = function_name(line).unwrap_or_default();
        }
        let update = line.trim_start().split(" = ").last().unwrap_or_default();
        if !update.starts_with("atomicrmw ") {
            continue;
        }
        if let Some(ordering) = ["acquire", "release", "acq_rel", "seq_cst"].iter().find(|o| update.contains(*o)) {
            return Err(BuildError::LostOrdering { function: function.into(), ordering: (*ordering).into() });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODULE: &str = r#"module asm "// cuda_std::kernel step threads=128 registers=168 hot"
define ptx_kernel void @step(ptr %out) unnamed_addr #0 {
  call void asm sideeffect "bar.sync ${0}, ${1};", "r,r,~{memory}"(i32 %a, i32 %b), !srcloc !5
  %3 = call i32 asm "shfl.sync.idx.b32 ${0}, ${1};", "=&r,r"(i32 %x) #20, !srcloc !10
  %4 = tail call float asm "cvt.rn.bf16x2.f32 ${0}, ${1};", "=&r,r"(float %x) #20
  %5 = call { i32, i32 } asm sideeffect "{ .reg .pred p; }", "=&r,=&r"()
}
define dso_local ptx_kernel void @"odd.name"(ptr %out) {
}
define internal void @helper() {
"#;

    #[test]
    fn kernels_come_with_their_bounds() {
        let kernels = kernels(MODULE);
        assert_eq!(kernels.keys().collect::<Vec<_>>(), ["odd.name", "step"]);
        let want = Bounds { threads: Some(128), registers: Some(168), hot: true, ..Bounds::default() };
        assert_eq!((kernels["step"], kernels["odd.name"]), (want, Bounds::default()));
    }

    #[test]
    fn assembly_of_several_threads_becomes_convergent() {
        let marked = mark_convergent(MODULE).unwrap();
        let changed: Vec<&str> = marked.lines().filter(|line| line.contains("convergent")).collect();
        assert!(changed[0].ends_with("(i32 %a, i32 %b) convergent, !srcloc !5"), "{marked}");
        assert!(changed[1].ends_with("(i32 %x) convergent #20, !srcloc !10"), "{marked}");
        assert!(changed[2].ends_with("\"=&r,=&r\"() convergent"), "{marked}");
        assert_eq!(changed.len(), 3);
        assert_eq!(marked.replace(" convergent", ""), MODULE);
    }

    #[test]
    fn assembly_in_an_unknown_form_is_an_error() {
        let line = "  invoke void asm sideeffect \"bar.sync 0;\", \"\"() to label %a unwind label %b";
        let error = mark_convergent(line).unwrap_err().to_string();
        assert!(error.contains("line 1") && error.contains("bar.sync"), "{error}");
    }

    #[test]
    fn ordered_updates_are_refused() {
        let module =
            |ordering| format!("define void @f() {{\n  %1 = atomicrmw add ptr %p, i64 1 {ordering}, align 8\n}}");
        assert!(refuse_ordered_updates(&module("monotonic")).is_ok());
        for ordering in ["acquire", "release", "acq_rel", "seq_cst"] {
            let error = refuse_ordered_updates(&module(ordering)).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("f has an atomic read-modify-write with ordering {ordering}")),
                "{error}"
            );
        }
    }
}
