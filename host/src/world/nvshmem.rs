//! NVSHMEM under a world of processes: GPU memory in which each PE reaches the others'.
//!
//! The world starts the PEs, orders their steps and tells of failures, under any launcher; NVSHMEM gives the pool of the
//! symmetric heap and serves kernels that call it. PE 0's identifier travels through the world ([`Pe::all_gather`]), so
//! that none of NVSHMEM's own start-up protocols has to fit the launcher.
//!
//! Each step that can fail on one PE alone is followed by one in which all learn of it, before NVSHMEM's next collective
//! call, which would wait forever.

mod error;
mod introduction;

use std::ffi::{c_int, c_void};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nvshmem_sys::{INIT_WITH_UNIQUEID, InitAttr, Library, ONE_MACHINE, UniqueId, Version};

pub use error::NvshmemError;

use super::Pe;
use crate::exec::cuda::{Gpu, Kernels, Module, Sharing, Stream};
use crate::heap::{ALIGN, DevicePool, Heap, HeapStats, Reach};

/// NVSHMEM on one PE. It ends by [`close`](Self::close) or [`abandon`](Self::abandon); dropped without, it stays up until the
/// process ends, because its end is a collective step and others may have failed.
#[derive(Debug)]
pub struct Nvshmem<'pe> {
    pe: &'pe Pe,
    gpu: Gpu,
    library: Library,
    heap: Heap<DevicePool>,
    /// What `nvshmem_malloc` returned.
    pool: u64,
    modules: Vec<Module>,
    sharing: Sharing,
    warnings: Vec<String>,
    closed: bool,
}

impl<'pe> Nvshmem<'pe> {
    /// Starts NVSHMEM on all PEs and takes `pool_bytes` of symmetric memory on each. Collective.
    ///
    /// Sets `NVSHMEM_DISABLE_NVLS=1` and `NVSHMEM_REMOTE_TRANSPORT=none` unless they are set. Call it before the program has
    /// threads of its own that read the environment other than through `std::env`.
    ///
    /// # Errors
    /// [`NvshmemError`]: no library, different libraries, a start that fails, no memory.
    pub fn start(pe: &'pe Pe, gpu: &Gpu, pool_bytes: usize) -> Result<Self, NvshmemError> {
        set_defaults();
        let library = Library::load()?;
        let (sharing, warnings) = introduction::introduce(pe, gpu, &library)?;
        let id = identifier(pe, &library)?;
        initialise(pe, gpu, &library, id)?;

        let bytes = pool_bytes.max(1).next_multiple_of(ALIGN);
        gpu.make_current()?;
        let watch = pe.watch("NVSHMEM's allocation of symmetric memory (nvshmem_malloc)");
        // SAFETY: NVSHMEM has started; all PEs make this call, with the size that their program asks for.
        let pool = unsafe { (library.malloc)(bytes) } as u64;
        drop(watch);
        let (free, total) = gpu.free_memory()?;
        let mine = [u64::from(pool != 0), free as u64, total as u64];
        agree(pe, "symmetric memory", bytemuck::bytes_of(&mine), |rank, answer| {
            let [given, free, total] = bytemuck::try_pod_read_unaligned(answer).unwrap_or([0_u64; 3]);
            let (free, total) = (free as usize, total as usize);
            if given == 1 { Ok(()) } else { Err(NvshmemError::NoMemory { rank, bytes, free, total }) }
        })?;
        let address = |rank: usize| {
            // SAFETY: an address from nvshmem_malloc and a PE that exists.
            let address = unsafe { (library.ptr)(pool as *const c_void, rank as c_int) } as u64;
            (address != 0).then_some(address)
        };
        let addresses = (0..pe.size()).map(|rank| if rank == pe.rank() { Some(pool) } else { address(rank) }).collect();
        // SAFETY: the pool is freed by `close` only, which makes sure that nothing refers to it; the others' addresses are
        // NVSHMEM's word.
        let memory = unsafe { DevicePool::new(pe.rank(), gpu, bytes, addresses, Arc::new(())) }?;
        let (gpu, heap) = (gpu.clone(), Heap::over(pe, memory));
        Ok(Self { pe, gpu, library, heap, pool, modules: Vec::new(), sharing, warnings, closed: false })
    }

    /// The symmetric heap.
    pub fn heap(&self) -> &Heap<DevicePool> {
        &self.heap
    }

    /// How kernels of this PE get data to PE `rank`.
    ///
    /// # Panics
    /// If there is no such PE.
    pub fn reach(&self, rank: usize) -> Reach {
        self.heap.memory().reach(rank)
    }

    /// Whether there is a PE that kernels of this one reach by puts only: they then need a module that is
    /// [attached](Self::attach).
    pub fn needs_puts(&self) -> bool {
        (0..self.pe.size()).any(|rank| self.reach(rank) == Reach::Put)
    }

    /// How the PEs share GPUs; the same on every PE.
    pub fn sharing(&self) -> Sharing {
        self.sharing
    }

    /// Version of the host library.
    pub fn version(&self) -> Version {
        self.library.version()
    }

    /// Where the host library is.
    pub fn path(&self) -> &Path {
        self.library.path()
    }

    /// What is not wrong but slow, one line each; the same on every PE.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// This build's kernels that also reach PEs by puts. Nothing else gives them: who has them has started NVSHMEM.
    ///
    /// ```no_run
    /// # use deltalink::exec::cuda::{Gpu, Kernels};
    /// # use deltalink::{exec::ExecError, world::{Pe, nvshmem::Nvshmem}};
    /// fn kernels(pe: &Pe) -> Result<Kernels, ExecError> {
    ///     let gpu = Gpu::open(0)?;
    ///     Ok(Nvshmem::start(pe, &gpu, 1 << 20)?.kernels()?)
    /// }
    /// ```
    /// Without a start they cannot be had:
    /// ```compile_fail,E0624
    /// # use deltalink::exec::cuda::{Gpu, Kernels};
    /// # use deltalink::exec::ExecError;
    /// fn kernels() -> Result<Kernels, ExecError> {
    ///     let gpu = Gpu::open(0)?;
    ///     Ok(Kernels::with_nvshmem(&gpu)?)
    /// }
    /// ```
    /// Nor does NVSHMEM start before there is a context on a GPU, which is what a [`Gpu`] holds:
    /// ```compile_fail,E0061
    /// # use deltalink::exec::cuda::Kernels;
    /// # use deltalink::{exec::ExecError, world::{Pe, nvshmem::Nvshmem}};
    /// fn kernels(pe: &Pe) -> Result<Kernels, ExecError> {
    ///     Ok(Nvshmem::start(pe, 1 << 20)?.kernels()?)
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`attach`](Self::attach), and [`NvshmemError::Cuda`] if the modules do not load.
    pub fn kernels(&mut self) -> Result<Kernels, NvshmemError> {
        let kernels = Kernels::with_nvshmem(&self.gpu)?;
        self.attach(kernels.module(), &self.gpu.stream()?)?;
        Ok(kernels)
    }

    /// Tells the kernels of `module`, which has NVSHMEM's device library linked in, of this start.
    ///
    /// # Errors
    /// [`NvshmemError::NoDeviceLibrary`], [`NvshmemError::DeviceVersion`] with both versions, [`NvshmemError::Call`].
    pub fn attach(&mut self, module: &Module, stream: &Stream) -> Result<(), NvshmemError> {
        let name = || module.name().to_owned();
        let Some(device) = module.read_global::<12>(stream, Version::DEVICE_SYMBOL)?.map(Version::from_bytes) else {
            return Err(NvshmemError::NoDeviceLibrary { module: name() });
        };
        let host = self.version();
        if (device.major, device.minor) != (host.major, host.minor) {
            let path = self.path().display().to_string();
            return Err(NvshmemError::DeviceVersion { module: name(), device, host, path });
        }
        self.gpu.make_current()?;
        // SAFETY: a loaded module of the current context, kept until it is told of the end.
        let code = unsafe { (self.library.cumodule_init)(module.raw().cast()) };
        self.check("nvshmemx_cumodule_init", code)?;
        self.modules.push(module.clone());
        Ok(())
    }

    /// Ends NVSHMEM on all PEs. Collective; kernels that use it must have ended.
    ///
    /// # Errors
    /// [`NvshmemError::Lent`] with the names of what is still lent, [`NvshmemError::InUse`] if something of the heap is still held
    /// otherwise, [`NvshmemError::World`] if another PE has failed or
    /// does not come within the world's time-out: NVSHMEM then stays up until the process ends.
    pub fn close(mut self) -> Result<(), NvshmemError> {
        self.heap.await_loans(Duration::ZERO).map_err(NvshmemError::Lent)?;
        let HeapStats { live, .. } = self.heap.stats();
        if !self.heap.is_unused_elsewhere() {
            return Err(NvshmemError::InUse { live });
        }
        self.gpu.make_current()?;
        // From here on all PEs are alive and do the same.
        self.pe.barrier("the end of NVSHMEM")?;
        self.closed = true;
        for module in self.modules.drain(..) {
            // SAFETY: told of the start by `attach`, still loaded. What it answers changes nothing: the module goes next.
            let _ = unsafe { (self.library.cumodule_finalize)(module.raw().cast()) };
        }
        // SAFETY: from nvshmem_malloc; nothing refers to it any more, and all PEs make these calls in this order.
        unsafe {
            (self.library.free)(self.pool as *mut c_void);
            (self.library.hostlib_finalize)();
        }
        Ok(())
    }

    /// Leaves NVSHMEM up until the process ends, without a word: what there is to do after a failure of this PE or of another,
    /// where nobody knows who would come to a collective end.
    pub fn abandon(mut self) {
        tracing::debug!("PE {}: NVSHMEM stays up until this process ends", self.pe.rank());
        self.closed = true;
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), NvshmemError> {
        if code == 0 { Ok(()) } else { Err(NvshmemError::Call { call, rank: self.pe.rank(), code }) }
    }
}

impl Drop for Nvshmem<'_> {
    fn drop(&mut self) {
        if !self.closed && self.pe.failed_peer().is_none() {
            tracing::warn!("PE {}: NVSHMEM was not closed and stays up until this process ends", self.pe.rank());
        }
    }
}

fn set_defaults() {
    for (name, value) in ONE_MACHINE {
        if std::env::var_os(name).is_none() {
            // SAFETY: NVSHMEM reads the environment in calls of this thread only; that the program has no thread that reads
            // it otherwise is the documented condition of `start`, and `std::env` locks.
            unsafe { std::env::set_var(name, value) };
        }
    }
}

/// Gathers a short answer of every PE and judges each, the same way on every PE.
fn agree(
    pe: &Pe,
    what: &str,
    mine: &[u8],
    judge: impl Fn(usize, &[u8]) -> Result<(), NvshmemError>,
) -> Result<(), NvshmemError> {
    let all = pe.all_gather(&format!("NVSHMEM: {what}"), mine)?;
    all.iter().enumerate().try_for_each(|(rank, answer)| judge(rank, answer))
}

/// PE 0's identifier of this start, on every PE.
fn identifier(pe: &Pe, library: &Library) -> Result<UniqueId, NvshmemError> {
    let mut id = UniqueId::new();
    let mut mine = Vec::new();
    if pe.rank() == 0 {
        // SAFETY: an identifier with its version word, to be filled in.
        let code = unsafe { (library.get_uniqueid)(&mut id) };
        if code != 0 {
            return Err(NvshmemError::Call { call: "nvshmemx_get_uniqueid", rank: 0, code });
        }
        mine = id.to_bytes().to_vec();
    }
    let all = pe.all_gather("NVSHMEM: identifier", &mine)?;
    UniqueId::from_bytes(&all[0])
        .ok_or_else(|| NvshmemError::Unreadable { rank: 0, reason: format!("an identifier of {} bytes", all[0].len()) })
}

/// Starts the library and checks that it knows its place.
fn initialise(pe: &Pe, gpu: &Gpu, library: &Library, id: UniqueId) -> Result<(), NvshmemError> {
    let (rank, size) = (pe.rank(), pe.size());
    let mut attr = InitAttr::new();
    gpu.make_current()?;
    // NVSHMEM's start waits for the other PEs, and for the network, without a bound.
    let watch = pe.watch("the start of NVSHMEM (nvshmemx_hostlib_init_attr)");
    // SAFETY: structures with their version words; `id` outlives the start, to which `attr` refers. The GPU's context is
    // current, as NVSHMEM asks, and all PEs have the same library and identifier and make these calls.
    let (call, code) = unsafe {
        match (library.set_attr_uniqueid_args)(rank as c_int, size as c_int, &id, &mut attr) {
            0 => ("nvshmemx_hostlib_init_attr", (library.hostlib_init_attr)(INIT_WITH_UNIQUEID, &mut attr)),
            code => ("nvshmemx_set_attr_uniqueid_args", code),
        }
    };
    drop(watch);
    agree(pe, "start", &code.to_ne_bytes(), |rank, code| {
        let code = code.try_into().map_or(-1, c_int::from_ne_bytes);
        if code == 0 { Ok(()) } else { Err(NvshmemError::Call { call, rank, code }) }
    })?;
    // SAFETY: NVSHMEM has started.
    let (found_rank, found_size) = unsafe { ((library.my_pe)(), (library.n_pes)()) };
    if (found_rank as usize, found_size as usize) != (rank, size) {
        return Err(NvshmemError::Place { rank, size, found_rank, found_size });
    }
    Ok(())
}
