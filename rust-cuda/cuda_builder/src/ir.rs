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

/// States that a variable holds nothing when its life begins. LLVM knows that, but does not use it when it puts variables into
/// registers: one that a loop writes and reads under a condition would stay in registers all around the loop, from one turn to
/// the next. In a persistent kernel everything is in a loop.
pub fn state_births(ir: &str) -> String {
    let mut stated = String::with_capacity(ir.len() + ir.len() / 8);
    let mut bytes = BTreeMap::new();
    for line in ir.lines() {
        stated.push_str(line);
        stated.push('\n');
        if line.starts_with("define ") {
            bytes.clear();
        } else if let Some((name, size)) = variable(line) {
            bytes.insert(name, size);
        } else if let Some(name) = born(line)
            && let Some(size) = bytes.get(name)
        {
            // Not a store: its type would take part in how the variable is taken apart.
            stated.push_str(&format!("  call void @llvm.memset.p0.i64(ptr {name}, i8 undef, i64 {size}, i1 false)\n"));
        }
    }
    if !ir.contains("declare void @llvm.memset.p0.i64(") {
        stated.push_str("declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)\n");
    }
    stated
}

/// Name and bytes of the variable that a line makes. None if it has no bytes.
fn variable(line: &str) -> Option<(&str, usize)> {
    let (name, rest) = line.trim_start().split_once(" = alloca [")?;
    let (size, _) = rest.split_once(" x i8]")?;
    Some((name, size.parse().ok().filter(|size| *size > 0)?))
}

/// The variable whose life a line begins.
fn born(line: &str) -> Option<&str> {
    let (_, arguments) = line.split_once("call void @llvm.lifetime.start.p0(")?;
    arguments.split_once(')')?.0.rsplit(' ').next()
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
    fn variables_are_born_with_nothing_in_them() {
        let module = "define void @f() {
  %a = alloca [12 x i8], align 4
  %b = alloca [0 x i8], align 1
  call void @llvm.lifetime.start.p0(ptr nonnull %a), !noalias !1
  call void @llvm.lifetime.start.p0(ptr %b)
}
define void @g() {
  call void @llvm.lifetime.start.p0(ptr %a)
}
";
        let stated = state_births(module);
        let added = "  call void @llvm.memset.p0.i64(ptr %a, i8 undef, i64 12, i1 false)\n";
        let declared = "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)\n";
        assert_eq!(stated.replacen(added, "", 1), format!("{module}{declared}"));
        assert!(stated.contains(&format!("!noalias !1\n{added}")), "{stated}");
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
