//! The build itself, step by step.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command::{create_folder, read, run, write};
use crate::ir::{self, Bounds};
use crate::ptx::{self, Module};
use crate::resources::{self, KernelResources};
use crate::tools::{CudaTools, Llvm, RustToolchain, target_folder};
use crate::{Artifacts, BuildError, Fault, shim};

/// The passes of `opt`, in two runs. Before all others everything is inlined and variables become registers. A function that is
/// called gets what it refers to in local memory; and if functions were simplified one by one first, stores to the same field of
/// two variables would be merged into one store through a choice of two pointers, which keeps both variables, and often
/// with them all of a kernel's parameters, in local memory for good. Between the runs, [`ir::state_births`].
const PASSES: [&str; 2] = ["internalize,cgscc(inline)", "function(sroa),default<O3>"];

/// For [`PASSES`]. A function of any size is inlined (LLVM's own threshold is 225). Nothing is moved out of loops: LLVM
/// counts no registers, and would keep the address of every tile of a kernel in one from its beginning on; `ptxas` moves
/// out what it has registers for.
const PASS_SETTINGS: [&str; 2] = ["-inline-threshold=1000000", "-opt-disable=licm"];

/// The CUDA source of the functions through which kernels call NVSHMEM.
#[derive(Debug, Clone)]
pub struct Nvshmem {
    /// The file.
    pub shim: PathBuf,
}

/// Builds the device module of a crate.
///
/// ```no_run
/// let built = cuda_builder::CudaBuilder::new("kernels-gpu").arch("sm_90a").hot(["scan_push_bf16"]).build()?;
/// println!("{}\n{}", built.cubin.display(), built.table());
/// # Ok::<(), cuda_builder::BuildError>(())
/// ```
#[derive(Debug, Clone)]
pub struct CudaBuilder {
    krate: PathBuf,
    arch: String,
    ptx_version: u32,
    features: BTreeSet<String>,
    kernels: BTreeSet<String>,
    hot: BTreeSet<String>,
    module: Option<String>,
    nvshmem: Option<Nvshmem>,
    opt_arguments: Vec<String>,
    cuda: CudaTools,
}

impl CudaBuilder {
    /// Builds the crate in folder `krate`, whose library need not be a cdylib, for sm_90a.
    pub fn new(krate: impl Into<PathBuf>) -> Self {
        CudaBuilder {
            krate: krate.into(),
            arch: "sm_90a".into(),
            ptx_version: 83,
            features: BTreeSet::new(),
            kernels: BTreeSet::new(),
            hot: BTreeSet::new(),
            module: None,
            nvshmem: None,
            opt_arguments: Vec::new(),
            cuda: CudaTools::new(),
        }
    }

    /// Architecture, as `sm_90a`.
    pub fn arch(mut self, arch: impl Into<String>) -> Self {
        self.arch = arch.into();
        self
    }

    /// PTX version, 10 * major + minor; 83 if not given.
    pub fn ptx_version(mut self, version: u32) -> Self {
        self.ptx_version = version;
        self
    }

    /// Features of the crate, beside its default ones.
    pub fn features<S: Into<String>>(mut self, features: impl IntoIterator<Item = S>) -> Self {
        self.features.extend(features.into_iter().map(Into::into));
        self
    }

    /// The kernels to keep; all if not called.
    pub fn kernels<S: Into<String>>(mut self, kernels: impl IntoIterator<Item = S>) -> Self {
        self.kernels.extend(kernels.into_iter().map(Into::into));
        self
    }

    /// Kernels that are hot beside those that say so themselves.
    pub fn hot<S: Into<String>>(mut self, kernels: impl IntoIterator<Item = S>) -> Self {
        self.hot.extend(kernels.into_iter().map(Into::into));
        self
    }

    /// Name of the module's files; the crate's if not given. Modules that may be built at the same time need their own.
    pub fn module(mut self, name: impl Into<String>) -> Self {
        self.module = Some(name.into());
        self
    }

    /// Links with NVSHMEM.
    pub fn nvshmem(mut self, nvshmem: Nvshmem) -> Self {
        self.nvshmem = Some(nvshmem);
        self
    }

    /// Further arguments of `opt`, as `-unroll-threshold=1000`.
    pub fn opt_arguments<S: Into<String>>(mut self, arguments: impl IntoIterator<Item = S>) -> Self {
        self.opt_arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Uses these CUDA tools.
    pub fn cuda_tools(mut self, tools: CudaTools) -> Self {
        self.cuda = tools;
        self
    }

    /// Builds the module.
    pub fn build(&self) -> Result<Artifacts, BuildError> {
        let rust = RustToolchain::find()?;
        let llvm = Llvm::find(&rust)?;
        let ptxas = self.cuda.ptxas()?;

        let name = self.crate_name()?;
        let ir = read(&self.compile(&rust, &name)?)?;
        let kernels = self.select(&ir)?;
        let folder = target_folder().join("device").join(&self.arch).join(self.module.as_ref().unwrap_or(&name));
        create_folder(&folder)?;
        let text = self.lower(&llvm, &ir, &kernels, &folder)?;
        let module = Module::parse(&text);
        if self.nvshmem.is_none() && !module.external.is_empty() {
            return Err(BuildError::Undefined { names: module.external.into_iter().collect() });
        }

        let ptx = folder.join("module.ptx");
        write(&ptx, &text)?;
        let (cubin, said) = self.assemble(&ptxas, &ptx, &folder)?;
        let said = resources::parse(&said, &self.arch);
        let resources = kernels
            .iter()
            .map(|(kernel, bounds)| {
                KernelResources::of_kernel(kernel, bounds, &said, &module)
                    .ok_or(BuildError::Ptx { kernel: kernel.clone(), why: "ptxas does not mention it" })
            })
            .collect::<Result<Vec<_>, _>>()?;
        let resources_json = folder.join("resources.json");
        let json = serde_json::to_string_pretty(&resources).unwrap_or_default();
        write(&resources_json, &json)?;
        write(&folder.join("resources.txt"), &resources::table(&resources))?;
        let warnings = judge(&resources)?;
        Ok(Artifacts { arch: self.arch.clone(), ptx, cubin, resources, resources_json, warnings })
    }

    /// The library's name, as cargo sees it.
    fn crate_name(&self) -> Result<String, BuildError> {
        let manifest = read(&self.krate.join("Cargo.toml"))?;
        let name = manifest.lines().find_map(|line| line.trim().strip_prefix("name")?.trim_start().strip_prefix('='));
        Ok(name.unwrap_or_default().trim().trim_matches('"').replace('-', "_"))
    }

    /// rustc's LLVM IR of the crate and `core`, unoptimised.
    fn compile(&self, rust: &RustToolchain, name: &str) -> Result<PathBuf, BuildError> {
        // Two sets of features would write the same .ll, and cargo would not notice: one folder for each.
        let features = self.features.iter().cloned().collect::<Vec<_>>();
        let folder = std::iter::once("rustc").chain(features.iter().map(String::as_str)).collect::<Vec<_>>().join("+");
        let target = target_folder().join("device").join(&self.arch).join(folder);
        let mut cargo = Command::new(&rust.cargo);
        // A cargo or rustup that runs this would otherwise decide about flags, profiles and the toolchain.
        for (variable, _) in std::env::vars_os() {
            let name = variable.to_string_lossy();
            let foreign =
                ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP", "RUSTFLAGS"].iter().any(|start| name.starts_with(start));
            let network = ["CARGO_HOME", "CARGO_NET", "CARGO_HTTP", "CARGO_REGISTR", "RUSTUP_HOME"];
            if foreign && !network.iter().any(|start| name.starts_with(start)) {
                cargo.env_remove(&variable);
            }
        }
        cargo
            .args(["rustc", "--lib", "--crate-type", "cdylib", "--release", "--target", "nvptx64-nvidia-cuda"])
            .args(["-Zbuild-std=core", "--quiet", "--color", "never", "--features", &features.join(",")])
            .arg("--manifest-path")
            .arg(self.krate.join("Cargo.toml"))
            .arg("--target-dir")
            .arg(&target)
            // The IR is all that is wanted of the last step.
            .args(["--", "--emit=llvm-ir", "-C", "linker=true"])
            .env("RUSTC", &rust.rustc)
            // Device code needs unstable features of a stable compiler.
            .env("RUSTC_BOOTSTRAP", "1")
            .env("RUSTFLAGS", self.rustflags())
            .env("CARGO_PROFILE_RELEASE_LTO", "fat")
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1")
            .env("CARGO_PROFILE_RELEASE_PANIC", "abort")
            .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "3")
            .env("CARGO_PROFILE_RELEASE_DEBUG", "false");
        run("compiling the device crate", &mut cargo)?;
        Ok(target.join("nvptx64-nvidia-cuda/release/deps").join(format!("{name}.ll")))
    }

    /// `target-cpu` because the default is too old and it must be the same for all crates; jump threading duplicates
    /// barriers; optimisation waits until assembly is marked.
    fn rustflags(&self) -> String {
        format!("-C target-cpu={} -Z mir-enable-passes=-JumpThreading -C no-prepopulate-passes", self.arch)
    }

    /// The kernels of the module, as asked for.
    fn select(&self, ir: &str) -> Result<BTreeMap<String, Bounds>, BuildError> {
        let mut kernels = ir::kernels(ir);
        if kernels.is_empty() {
            return Err(BuildError::NoKernels { krate: self.krate.clone() });
        }
        if let Some(name) = self.kernels.union(&self.hot).find(|name| !kernels.contains_key(*name)) {
            return Err(BuildError::UnknownKernel { name: name.clone(), found: kernels.into_keys().collect() });
        }
        kernels.retain(|name, _| self.kernels.is_empty() || self.kernels.contains(name));
        for (name, bounds) in &mut kernels {
            bounds.hot |= self.hot.contains(name);
        }
        Ok(kernels)
    }

    /// From IR to PTX.
    fn lower(
        &self,
        llvm: &Llvm,
        ir: &str,
        kernels: &BTreeMap<String, Bounds>,
        folder: &Path,
    ) -> Result<String, BuildError> {
        let [marked, inlined, born, optimised, ptx] =
            ["marked.ll", "inlined.ll", "born.ll", "optimised.ll", "llc.ptx"].map(|name| folder.join(name));
        write(&marked, &ir::mark_convergent(ir)?)?;
        let names = kernels.keys().cloned().collect::<Vec<_>>().join(",");
        let opt = |passes: &str, from: &Path, to: &Path| {
            let mut opt = Command::new(&llvm.opt);
            opt.args(["-S", &format!("-passes={passes}")]).arg(format!("--internalize-public-api-list={names}"));
            opt.args(PASS_SETTINGS).args(&self.opt_arguments).arg(from).arg("-o").arg(to);
            run("opt", &mut opt)
        };
        opt(PASSES[0], &marked, &inlined)?;
        write(&born, &ir::state_births(&read(&inlined)?))?;
        opt(PASSES[1], &born, &optimised)?;
        ir::refuse_ordered_updates(&read(&optimised)?)?;
        let mut llc = Command::new(&llvm.llc);
        llc.arg("-O3").arg(format!("--mcpu={}", self.arch)).arg(format!("--mattr=+ptx{}", self.ptx_version));
        run("llc", llc.arg(&optimised).arg("-o").arg(&ptx))?;
        ptx::put_bounds(&read(&ptx)?, kernels)
    }

    /// From PTX to a module; and what ptxas says.
    fn assemble(&self, ptxas: &Path, ptx: &Path, folder: &Path) -> Result<(PathBuf, String), BuildError> {
        let assembled = folder.join(if self.nvshmem.is_some() { "relocatable.cubin" } else { "module.cubin" });
        let mut command = Command::new(ptxas);
        command.arg(format!("-arch={}", self.arch)).args(["-O3", "-v"]);
        if self.nvshmem.is_some() {
            command.arg("-c");
        }
        let said = run("ptxas", command.arg(ptx).arg("-o").arg(&assembled))?;
        let Some(nvshmem) = &self.nvshmem else { return Ok((assembled, said)) };
        let linked = folder.join("linked.cubin");
        shim::link(&self.cuda, nvshmem, &self.arch, &target_folder().join("device"), &assembled, &linked)?;
        Ok((linked, said))
    }
}

/// Fails for the faults of hot kernels and returns the others.
fn judge(resources: &[KernelResources]) -> Result<Vec<Fault>, BuildError> {
    let (mut faults, mut warnings) = (Vec::new(), Vec::new());
    for kernel in resources {
        for fault in kernel.faults() {
            let fatal = kernel.hot && !matches!(fault, Fault::Panics { .. });
            if fatal { faults.push(fault) } else { warnings.push(fault) }
        }
    }
    if faults.is_empty() { Ok(warnings) } else { Err(BuildError::Hot { faults }) }
}
