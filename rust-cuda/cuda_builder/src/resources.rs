//! What a kernel costs, by what `ptxas -v` says, as a table and as JSON.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Fault;
use crate::ir::Bounds;
use crate::ptx::{Function, Module};

/// The resources of a kernel. Sizes in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct KernelResources {
    /// Name of the entry point.
    pub kernel: String,
    /// Architecture it was assembled for.
    pub arch: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Barriers of a block: all 16 if the number of one is in a register.
    pub barriers: u32,
    /// Static shared memory of a block.
    pub static_shared_bytes: u64,
    /// Stack frame of a thread.
    pub stack_bytes: u64,
    /// Spilled to memory, by each thread.
    pub spill_store_bytes: u64,
    /// Loaded from where it was spilled, by each thread.
    pub spill_load_bytes: u64,
    /// Functions with arrays in local memory, the kernel itself and those it calls.
    pub local_arrays: usize,
    /// Calls of panics that are left.
    pub panics: usize,
    /// What ptxas says about serialised `wgmma`.
    pub serialized_wgmma: Vec<String>,
    /// Whether it has `setmaxnreg` that ptxas ignores.
    pub setmaxnreg_ignored: bool,
    /// Whether it was built as a hot kernel.
    pub hot: bool,
    /// Threads of a block, if fixed.
    pub threads: Option<u32>,
    /// Most registers of a thread, if bounded.
    pub max_registers: Option<u32>,
}

impl KernelResources {
    /// The resources of a kernel: its own, together with what the functions that it calls spill and keep in local
    /// memory.
    pub(crate) fn of_kernel(kernel: &str, bounds: &Bounds, said: &Report, module: &Module) -> Option<Self> {
        let mut all = said.functions.get(kernel)?.clone();
        (all.hot, all.threads, all.max_registers) = (bounds.hot, bounds.threads, bounds.registers);
        for (name, calls) in module.reached(kernel) {
            all.local_arrays += usize::from(module.functions.get(name).is_some_and(Function::has_local));
            all.panics += if name.contains("panicking") { calls } else { 0 };
            all.setmaxnreg_ignored |= said.setmaxnreg_ignored
                && module.functions.get(name).is_some_and(|function| function.count("setmaxnreg.") > 0);
            if let (Some(callee), true) = (said.functions.get(name), name != kernel) {
                all.spill_store_bytes += callee.spill_store_bytes;
                all.spill_load_bytes += callee.spill_load_bytes;
            }
        }
        Some(all)
    }

    /// What makes the kernel slow, if anything.
    pub fn faults(&self) -> Vec<Fault> {
        let kernel = || self.kernel.clone();
        let (stores, loads) = (self.spill_store_bytes, self.spill_load_bytes);
        let mut faults = Vec::new();
        if self.local_arrays > 0 {
            faults.push(Fault::Local { kernel: kernel(), arrays: self.local_arrays });
        }
        if stores + loads > 0 {
            faults.push(Fault::Spills { kernel: kernel(), stores, loads });
        }
        if !self.serialized_wgmma.is_empty() {
            faults.push(Fault::Serialized { kernel: kernel(), warnings: self.serialized_wgmma.clone() });
        }
        if self.setmaxnreg_ignored {
            faults.push(Fault::SetmaxnregIgnored { kernel: kernel() });
        }
        if self.panics > 0 {
            faults.push(Fault::Panics { kernel: kernel(), calls: self.panics });
        }
        faults
    }
}

/// What `ptxas -v` says.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// The functions that it names, kernels and those they call. Only kernels have registers of their own.
    pub functions: BTreeMap<String, KernelResources>,
    /// Whether it ignores `setmaxnreg` somewhere: it does not say where.
    pub setmaxnreg_ignored: bool,
}

/// Reads the output of `ptxas -v`.
pub fn parse(ptxas: &str, arch: &str) -> Report {
    let mut functions = BTreeMap::<String, KernelResources>::new();
    let fresh = |name: &str| KernelResources { kernel: name.into(), arch: arch.into(), ..KernelResources::default() };
    // Register counts follow the kernel that they are of; frames and spills name their function one line above.
    let (mut compiling, mut properties) = (None::<&str>, None::<&str>);
    for line in ptxas.lines() {
        if let Some(name) = line.split_once("Compiling entry function '").and_then(|(_, rest)| quoted(rest)) {
            compiling = Some(name);
        } else if let Some((_, name)) = line.split_once("Function properties for ") {
            properties = Some(name.trim());
        } else if let (true, Some(name)) = (line.contains("bytes stack frame"), properties) {
            let function = functions.entry(name.into()).or_insert_with(|| fresh(name));
            function.stack_bytes = number_before(line, " bytes stack frame");
            function.spill_store_bytes = number_before(line, " bytes spill stores");
            function.spill_load_bytes = number_before(line, " bytes spill loads");
        } else if let (true, Some(name)) = (line.contains(": Used "), compiling) {
            let function = functions.entry(name.into()).or_insert_with(|| fresh(name));
            function.registers = number_before(line, " registers") as u32;
            function.barriers = number_before(line, " barriers") as u32;
            function.static_shared_bytes = number_before(line, " bytes smem");
        }
    }
    for line in ptxas.lines().filter(|line| is_serialization(line)) {
        let remark = line.split_once("(C").map_or(line, |(before, _)| &line[before.len()..]).trim();
        let named = line.rsplit_once("function '").and_then(|(_, rest)| quoted(rest)).unwrap_or_default();
        match functions.get_mut(named) {
            Some(function) => function.serialized_wgmma.push(remark.into()),
            // Whose it is cannot be told: rather everyone's than no one's.
            None => functions.values_mut().for_each(|function| function.serialized_wgmma.push(remark.into())),
        }
    }
    Report { functions, setmaxnreg_ignored: ptxas.contains("'setmaxnreg' ignored") }
}

/// ptxas numbers its remarks on `wgmma` that it had to serialise from C7510 to C7520.
fn is_serialization(line: &str) -> bool {
    let mut codes = line.split("(C").skip(1).filter_map(|rest| rest.split_once(')')?.0.parse::<u32>().ok());
    codes.any(|code| (7510..=7520).contains(&code))
}

fn quoted(rest: &str) -> Option<&str> {
    rest.split_once('\'').map(|(name, _)| name)
}

/// The number that ends where `unit` begins; 0 if there is none.
fn number_before(line: &str, unit: &str) -> u64 {
    let before = line.split(unit).next().filter(|before| before.len() < line.len()).unwrap_or_default();
    let digits = before.rsplit(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
    digits.parse().unwrap_or(0)
}

/// The table that people read.
pub fn table(kernels: &[KernelResources]) -> String {
    let mut table = comfy_table::Table::new();
    table.load_preset(comfy_table::presets::NOTHING);
    table.set_header([
        "kernel",
        "arch",
        "registers",
        "barriers",
        "static shared",
        "stack",
        "spill st/ld",
        "local",
        "wgmma serialised",
    ]);
    for kernel in kernels {
        table.add_row([
            format!("{}{}", kernel.kernel, if kernel.hot { " (hot)" } else { "" }),
            kernel.arch.clone(),
            kernel.max_registers.map_or(kernel.registers.to_string(), |max| format!("{} of {max}", kernel.registers)),
            kernel.barriers.to_string(),
            kernel.static_shared_bytes.to_string(),
            kernel.stack_bytes.to_string(),
            format!("{} / {}", kernel.spill_store_bytes, kernel.spill_load_bytes),
            kernel.local_arrays.to_string(),
            kernel.serialized_wgmma.len().to_string(),
        ]);
    }
    table.trim_fmt()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient \
register resources for the wgmma pipeline in the function 'step'
ptxas info    : Compiling entry function 'step' for 'sm_90a'
ptxas info    : Function properties for step
    16 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads
ptxas info    : Function properties for helper
    8 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 90 registers, used 1 barriers, 2048 bytes smem
ptxas info    : Compile time = 21.134 ms
ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma \
instructions defining accumulator registers
ptxas info    : (C7600) something else in the function 'step'
ptxas info    : (C7504) Potential Performance Loss: 'setmaxnreg' ignored to maintain compatibility across compilation units.
";

    #[test]
    fn what_ptxas_says_is_read() {
        let Report { functions, setmaxnreg_ignored } = parse(SAID, "sm_90a");
        assert!(setmaxnreg_ignored && !parse("", "sm_90a").setmaxnreg_ignored);
        assert_eq!(functions.keys().collect::<Vec<_>>(), ["helper", "step"]);
        let step = &functions["step"];
        assert_eq!((step.registers, step.barriers), (90, 1));
        assert_eq!((step.static_shared_bytes, step.stack_bytes), (2048, 16));
        assert_eq!((step.spill_store_bytes, step.spill_load_bytes), (24, 40));
        assert_eq!(step.serialized_wgmma.len(), 2);
        assert!(step.serialized_wgmma[0].starts_with("(C7510)"), "{:?}", step.serialized_wgmma);
        // A remark that names no function is held against every one.
        let helper = &functions["helper"];
        assert_eq!((helper.spill_store_bytes, helper.serialized_wgmma.len()), (4, 1));
        let table = table(std::slice::from_ref(step));
        assert!(table.contains("24 / 40") && table.contains("sm_90a"), "{table}");
    }
}
