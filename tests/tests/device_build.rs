//! The device build: a crate with every instruction of `cuda_std` and every pattern that the builder guards against, and
//! the kernels themselves, are compiled, assembled and linked for sm_90a. Nothing is run: no GPU is needed, but the tools
//! that `cargo xtask setup` brings are. Without them the tests say so and pass, unless DELTALINK_REQUIRE_DEVICE_BUILD=1.

use std::path::PathBuf;
use std::sync::LazyLock;

use cuda_builder::ptx::{Function, Module};
use cuda_builder::resources::KernelResources;
use cuda_builder::{Artifacts, BuildError, CudaBuilder, CudaTools, Fault, Llvm, Nvshmem, RustToolchain};

/// Kernels of the probe that the builder accepts, hot ones among them, and those it warns of.
const ACCEPTED: [&str; 25] = [
    "arithmetic",
    "assembly_between_arms",
    "barrier_between_arms",
    "barriers",
    "checked_index",
    "copies",
    "fragments",
    "global_memory",
    "local_array",
    "order",
    "product_n128_bf16",
    "product_n128_f16",
    "product_n16_bf16",
    "product_n16_f16",
    "product_n32_bf16",
    "product_n32_f16",
    "product_n64_bf16",
    "product_n64_f16",
    "references_to_arguments",
    "shared_memory",
    "special",
    "too_few_registers",
    "touched_accumulators",
    "used_in_one_arm",
    "wgmma_chain",
];

fn in_workspace(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

fn shim() -> Nvshmem {
    Nvshmem { shim: in_workspace("nvshmem-device-shim/shim.cu") }
}

/// A builder of the probe, for a module of this name; nothing if the tools are absent and need not be there.
fn probe(module: &str) -> Option<CudaBuilder> {
    let tools = || -> Result<(), BuildError> {
        Llvm::find(&RustToolchain::find()?)?;
        let cuda = CudaTools::new();
        cuda.ptxas().and(cuda.nvlink()).and(cuda.nvcc())?;
        Ok(())
    };
    match tools() {
        Ok(()) => Some(CudaBuilder::new(in_workspace("rust-cuda/cuda_builder/tests/device")).module(module)),
        Err(error) if std::env::var("DELTALINK_REQUIRE_DEVICE_BUILD").as_deref() == Ok("1") => panic!("{error}"),
        Err(error) => {
            eprintln!("skipping: the tools of the device build are not complete (run `cargo xtask setup`): {error}");
            None
        }
    }
}

/// The accepted kernels, built once, and their PTX taken apart.
fn accepted() -> Option<&'static (Artifacts, Module)> {
    static BUILT: LazyLock<Option<(Artifacts, Module)>> = LazyLock::new(|| {
        let built = probe("accepted")?.kernels(ACCEPTED).build().unwrap();
        let module = Module::parse(&std::fs::read_to_string(&built.ptx).unwrap());
        Some((built, module))
    });
    BUILT.as_ref()
}

fn function(name: &str) -> Option<&'static Function> {
    accepted().map(|(_, module)| &module.functions[name])
}

/// Builds one kernel, made hot, and returns why it was refused.
fn refusal(kernel: &str) -> Option<BuildError> {
    let builder = probe(&format!("refused-{kernel}"))?;
    Some(builder.kernels([kernel]).hot([kernel]).build().expect_err("it should be refused"))
}

#[test]
fn a_barrier_between_two_conditional_parts_stays_one() {
    let Some(kernel) = function("barrier_between_arms") else { return };
    assert_eq!(kernel.count("bar.sync"), 1, "{:#?}", kernel.body);
}

#[test]
fn a_barrier_of_assembly_between_two_conditional_parts_stays_one() {
    let Some(kernel) = function("assembly_between_arms") else { return };
    assert_eq!(kernel.count("bar.sync"), 1, "{:#?}", kernel.body);
}

#[test]
fn instructions_of_a_warp_are_not_sunk_to_where_some_threads_use_them() {
    let Some(kernel) = function("used_in_one_arm") else { return };
    let at = |text: &str| kernel.body.iter().position(|line| line.contains(text)).unwrap();
    for instruction in ["shfl.sync", "ldmatrix.sync", "mma.sync"] {
        assert!(at(instruction) < at("bra "), "{instruction}: {:#?}", kernel.body);
    }
}

#[test]
fn orderings_are_in_the_instructions() {
    let Some(kernel) = function("order") else { return };
    for instruction in [
        "ld.acquire.sys.global.u64",
        "ld.acquire.gpu.global.u64",
        "st.release.sys.global.u64",
        "st.release.gpu.global.u64",
        "st.relaxed.sys.global.u64",
        "fence.acq_rel.cta",
        "fence.acq_rel.gpu",
        "fence.acq_rel.sys",
        "atom.acq_rel.gpu.global.add.u64",
        "atom.acq_rel.sys.global.add.u64",
        "atom.relaxed.gpu.global.cas.b64",
        "red.release.sys.global.add.u64",
    ] {
        assert_eq!(kernel.count(instruction), 1, "{instruction}: {:#?}", kernel.body);
    }
}

#[test]
fn hot_kernels_are_free_of_faults_and_others_are_warned_of() {
    let Some((built, module)) = accepted() else { return };
    assert_eq!(built.resources.iter().map(|kernel| kernel.kernel.as_str()).collect::<Vec<_>>(), ACCEPTED);
    for kernel in built.resources.iter().filter(|kernel| kernel.hot) {
        assert_eq!(kernel.faults(), [], "{}", kernel.kernel);
        assert!(!module.functions[&kernel.kernel].has_local(), "{}", kernel.kernel);
    }
    let chain = built.resources.iter().find(|kernel| kernel.kernel == "wgmma_chain").unwrap();
    assert!(chain.hot && chain.threads == Some(128) && chain.max_registers == Some(240));
    assert!(module.functions["wgmma_chain"].count("wgmma.mma_async") == 12);

    let warned = |kernel: &str| built.warnings.iter().find(|fault| fault.to_string().starts_with(kernel));
    assert!(matches!(warned("local_array:"), Some(Fault::Local { arrays: 1, .. })));
    assert!(matches!(warned("too_few_registers:"), Some(Fault::Spills { .. })));
    assert!(matches!(warned("touched_accumulators:"), Some(Fault::Serialized { .. })));
    assert!(matches!(warned("checked_index:"), Some(Fault::Panics { .. })));
}

#[test]
fn the_module_has_launch_bounds_and_a_table() {
    let Some((built, _)) = accepted() else { return };
    let ptx = std::fs::read_to_string(&built.ptx).unwrap();
    let head = &ptx[ptx.find(".entry wgmma_chain(").unwrap()..];
    let head = &head[..head.find('{').unwrap()];
    assert!(head.contains(".reqntid 128") && head.contains(".maxnreg 240"), "{head}");
    assert!(std::fs::read(&built.cubin).unwrap().starts_with(b"\x7fELF"));

    let json = std::fs::read_to_string(&built.resources_json).unwrap();
    let read: Vec<KernelResources> = serde_json::from_str(&json).unwrap();
    assert_eq!(read, built.resources);
    assert!(built.table().contains("wgmma_chain (hot)"), "{}", built.table());
}

#[test]
fn slow_kernels_are_refused_when_hot() {
    for (kernel, what) in [
        ("local_array", "1 functions keep arrays in local memory"),
        ("too_few_registers", "bytes of spill stores"),
        ("touched_accumulators", "wgmma serialised"),
    ] {
        let Some(error) = refusal(kernel) else { return };
        let message = error.to_string();
        assert!(matches!(error, BuildError::Hot { .. }) && message.contains(&format!("{kernel}: ")), "{message}");
        assert!(message.contains(what), "{message}");
    }
}

#[test]
fn wrong_kernels_are_refused_by_name() {
    let Some(error) = refusal("ordered_update") else { return };
    let message = error.to_string();
    assert!(message.starts_with("ordered_update has an atomic read-modify-write with ordering acq_rel"), "{message}");
    let message = refusal("undefined").unwrap().to_string();
    assert!(message.starts_with("nothing defines expf"), "{message}");
    let message = refusal("absent").unwrap().to_string();
    assert!(message.contains("no kernel absent; it has arithmetic, "), "{message}");
}

#[test]
fn kernels_that_call_nvshmem_link_with_the_shim() {
    let Some(builder) = probe("linked") else { return };
    let built = builder.kernels(["ring"]).nvshmem(shim()).build().unwrap();
    let module = std::fs::read(&built.cubin).unwrap();
    // The host initialises NVSHMEM's state in the module by these names; a second copy would stay as it is.
    for symbol in ["nvshmemi_device_state_d", "nvshmemi_device_lib_version_d", "ring"] {
        let name = [b"\0", symbol.as_bytes(), b"\0"].concat();
        assert_eq!(module.windows(name.len()).filter(|bytes| *bytes == name).count(), 1, "{symbol}");
    }
    let kernels = std::fs::read_to_string(&built.ptx).unwrap();
    assert!(!kernels.contains("nvshmem"), "what is NVSHMEM's comes from its library alone");
    let message = refusal("ring").unwrap().to_string();
    assert!(message.starts_with("nothing defines dl_") && message.contains("CudaBuilder::nvshmem"), "{message}");
}

#[test]
fn registers_cannot_be_moved_in_a_linked_module() {
    let Some(builder) = probe("linked-setmaxnreg") else { return };
    let message = builder.kernels(["special"]).nvshmem(shim()).build().unwrap_err().to_string();
    assert!(message.contains("special: setmaxnreg is ignored"), "{message}");
}

/// Bytes that a kernel may spill, by the start of its name. Those for Hopper spill around their loops, not inside; the
/// convolutions pay with theirs for more blocks on a multiprocessor. All others spill nothing.
const SPILLS: [(&str, u64); 5] = [
    ("convolve_back_", 500),
    ("convolve_", 50),
    ("grad_", 350),
    ("prep_kda_bf16_hopper", 40),
    ("scan_push_bf16_hopper_2", 1100),
];

/// Kernels whose blocks have a multiprocessor for themselves, so that all its barriers are theirs: halves of a block meet at one whose
/// number is in a register.
const ALL_BARRIERS: [&str; 2] = ["grad_kda_bf16_hopper", "grad_gdn_bf16_hopper"];

/// Walks have one more, by which stages are handed to the feeding warpgroup, and one for two walking warpgroups.
const MORE_BARRIERS: [(&str, u32); 4] = [
    ("scan_push_bf16_hopper_1", 1),
    ("scan_push_bf16_hopper_2", 2),
    ("scan_states_bf16_hopper", 1),
    ("scan_back_bf16_hopper", 1),
];

#[test]
fn the_kernels_keep_no_arrays_in_local_memory_and_products_stay_asynchronous() {
    if probe("unused").is_none() {
        return;
    }
    // A build with modules of its own is judged by those; otherwise they are built here.
    let folder = match std::env::var_os("DELTALINK_DEVICE_MODULE") {
        Some(module) => PathBuf::from(module).with_file_name(""),
        None => {
            let built = CudaBuilder::new(in_workspace("kernels-gpu")).module("kernels-test").build().unwrap();
            built.cubin.with_file_name("")
        }
    };
    let read = |file: &str| std::fs::read_to_string(folder.join(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
    let (module, resources): (_, Vec<KernelResources>) =
        (Module::parse(&read("module.ptx")), serde_json::from_str(&read("resources.json")).unwrap());
    let names: Vec<&str> = resources.iter().map(|kernel| kernel.kernel.as_str()).collect();
    for entry in deltalink::exec::conformance::device_entries() {
        assert!(names.contains(&entry.as_str()), "no {entry} in {names:?}");
    }
    for kernel in &resources {
        let name = &kernel.kernel;
        assert_eq!(kernel.static_shared_bytes, 0, "{name}: shared memory is dynamic throughout");
        let spills = SPILLS.iter().find(|(start, _)| name.starts_with(start)).map_or(0, |&(_, bytes)| bytes);
        let local = (kernel.stack_bytes, kernel.spill_store_bytes, kernel.spill_load_bytes);
        assert_eq!(kernel.local_arrays, 0, "{name}: arrays");
        assert!(
            [local.0, local.1, local.2].iter().all(|&bytes| bytes <= spills),
            "{name}: {local:?}, allowed {spills}"
        );
        assert!(kernel.serialized_wgmma.is_empty(), "{name}: {:?}", kernel.serialized_wgmma);
        assert!(!kernel.setmaxnreg_ignored, "{name}: setmaxnreg is ignored");
        if ALL_BARRIERS.contains(&name.as_str()) {
            continue;
        }
        // That of the block and those of up to four warpgroups, by numbers that the assembler sees.
        let more = MORE_BARRIERS.iter().find(|(kernel, _)| name == kernel).map_or(0, |&(_, more)| more);
        assert!(kernel.barriers <= 5 + more, "{name}: {} barriers", kernel.barriers);
        // Those of a warp take a mask.
        let of_threads = |line: &&String| line.trim_start().starts_with("bar.") && !line.contains("bar.warp.");
        for barrier in module.functions[name].body.iter().filter(of_threads) {
            assert!(!barrier.contains('%'), "{name}: {barrier}");
        }
    }
}

#[test]
fn the_kernels_build_for_racecheck() {
    if probe("unused").is_none() {
        return;
    }
    let kernels = CudaBuilder::new(in_workspace("kernels-gpu")).kernels(["prep_kda_f32"]);
    let plain = kernels.clone().module("kernels-test-plain").build().unwrap();
    let level = kernels.module("kernels-test-racecheck").features(["racecheck"]).build().unwrap();
    let barriers = |built: &Artifacts| {
        let module = Module::parse(&std::fs::read_to_string(&built.ptx).unwrap());
        module.functions["prep_kda_f32"].count("bar.sync 1, 128")
    };
    // One more before each barrier of the block, in a loop.
    assert!(barriers(&level) > barriers(&plain) && barriers(&plain) > 0);
}

#[test]
fn references_to_arguments_need_no_memory() {
    let Some((built, module)) = accepted() else { return };
    let resources = built.resources.iter().find(|kernel| kernel.kernel == "references_to_arguments").unwrap();
    let kernel = &module.functions["references_to_arguments"];
    assert!(!kernel.has_local() && resources.stack_bytes == 0, "{:#?}", kernel.body);
}

#[test]
fn absent_tools_are_named_with_what_to_do() {
    let message = RustToolchain::find_among(&["/nonexistent/rustc".into()]).unwrap_err().to_string();
    for part in ["/nonexistent/rustc: it does not run", "cargo xtask setup", "rust-src", RustToolchain::VARIABLE] {
        assert!(message.contains(part), "{part} in {message}");
    }
    let message = Llvm::find_among(&["/nonexistent".into()], (22, 1)).unwrap_err().to_string();
    for part in ["its LLVM is 22.1", "/nonexistent: no opt", "cargo xtask setup", Llvm::VARIABLE] {
        assert!(message.contains(part), "{part} in {message}");
    }
    let message = CudaTools::within(vec!["/nonexistent".into()]).ptxas().unwrap_err().to_string();
    assert!(message.contains("no ptxas") && message.contains("cargo xtask setup"), "{message}");
}
