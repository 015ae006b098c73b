//! One GPU of this process.

use std::any::Any;
use std::ffi::c_int;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

use cust::context::Context;
use cust::device::Device;

use super::driver::{self, CUcontext, CUuuid, check, checked, code, device_attribute, failure};
use super::error::CudaError;

/// Loads all kernels with their module. Those that are loaded when they are first launched wait for all that run, and these
/// may wait for a PE that has yet to launch.
const LOADING: (&str, &str) = ("CUDA_MODULE_LOADING", "EAGER");
/// Lets each stream have a queue of its own. With the usual 8, kernels of PEs that are threads share queues, and one that waits
/// for another holds it up. Not under MPS, where PEs are processes with queues of their own, and these come out of one budget
/// for all clients of a GPU: four of them with 32 each are too many for an H200.
const CONNECTIONS: (&str, &str) = ("CUDA_DEVICE_MAX_CONNECTIONS", "32");

/// Whether an MPS server's control pipe is where this process looks for it.
pub(crate) fn mps_is_running() -> bool {
    let folder = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").unwrap_or_else(|| "/tmp/nvidia-mps".into());
    Path::new(&folder).join("control").exists()
}

/// What a GPU is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Properties {
    /// The driver's number of it in this process, from 0.
    pub ordinal: usize,
    /// Name.
    pub name: String,
    /// Identity, the same in every process.
    pub uuid: [u8; 16],
    /// Compute capability, major and minor.
    pub compute: (u32, u32),
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Highest clock of the SMs, in kHz.
    pub clock_khz: u32,
    /// Bytes of memory.
    pub memory_bytes: usize,
    /// Most shared bytes that one block can have.
    pub max_shared_bytes: u32,
    /// Whether cooperative launches work.
    pub cooperative: bool,
    /// Newest CUDA that the driver supports: 1000 * major + 10 * minor.
    pub cuda: u32,
    /// Version of the driver itself, if `/proc` tells.
    pub driver: Option<String>,
}

impl Properties {
    /// The identity as nvidia-smi writes it.
    pub fn uuid_text(&self) -> String {
        let mut text = "GPU-".to_owned();
        for (i, byte) in self.uuid.iter().enumerate() {
            let dash = if matches!(i, 4 | 6 | 8 | 10) { "-" } else { "" };
            text += &format!("{dash}{byte:02x}");
        }
        text
    }
}

/// Memory of a GPU that this process's handles hold, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Now.
    pub current: usize,
    /// Most at once.
    pub peak: usize,
}

/// Counts bytes that are held.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    current: AtomicUsize,
    peak: AtomicUsize,
}

impl Ledger {
    // Relaxed throughout: the numbers order nothing.
    pub(super) fn take(&self, bytes: usize) {
        let now = self.current.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    pub(super) fn give(&self, bytes: usize) {
        self.current.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(super) fn read(&self) -> MemoryUse {
        MemoryUse { current: self.current.load(Ordering::Relaxed), peak: self.peak.load(Ordering::Relaxed) }
    }
}

/// A GPU with its primary context, which it shares with everything else in this process that uses the CUDA runtime. A
/// clone is the same handle.
#[derive(Clone, Debug)]
pub struct Gpu {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// Before the context, in which it is released.
    retired: Mutex<Retired>,
    device: Device,
    context: Context,
    properties: Properties,
    ledger: Ledger,
}

/// Memory whose release is put off.
#[derive(Debug, Default)]
struct Retired {
    /// [`Deferral`]s that are alive.
    deferrals: usize,
    memory: Vec<Held>,
}

/// Memory, and how many bytes of it the ledger counts.
type Held = (Box<dyn Any + Send>, usize);

/// Puts off the release of a GPU's memory while it lives; see [`Gpu::defer_releases`].
#[derive(Debug)]
pub struct Deferral {
    gpu: Gpu,
}

impl Drop for Deferral {
    fn drop(&mut self) {
        let memory = {
            let mut retired = self.gpu.retired();
            retired.deferrals -= 1;
            if retired.deferrals > 0 { Vec::new() } else { std::mem::take(&mut retired.memory) }
        };
        self.gpu.release(memory);
    }
}

/// The GPU of a PE: its rank on this machine modulo the number of GPUs.
///
/// # Panics
/// If there is no GPU.
pub fn choose_device(local_rank: usize, gpus: usize) -> usize {
    local_rank % gpus
}

impl Gpu {
    /// Number of GPUs. The first call in a process starts the driver, with `CUDA_MODULE_LOADING=EAGER` and, except under MPS,
    /// `CUDA_DEVICE_MAX_CONNECTIONS=32`, unless those are set. Make it before the program has threads that read the environment
    /// other than through `std::env`.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`] if there is no driver, [`CudaError::Driver`] if it cannot be used, [`CudaError::NoDevice`] if
    /// it sees no GPU.
    pub fn count() -> Result<usize, CudaError> {
        static SETTINGS: Once = Once::new();
        SETTINGS.call_once(|| {
            let connections = (!mps_is_running()).then_some(CONNECTIONS);
            let settings = connections.into_iter().chain([LOADING]);
            for (name, value) in settings.filter(|(name, _)| std::env::var_os(name).is_none()) {
                // SAFETY: the driver has not started, so it reads nothing now; other readers are excluded as documented.
                unsafe { std::env::set_var(name, value) };
            }
        });
        driver::load().map_err(|error| CudaError::NoDriver { reason: error.to_string() })?;
        // SAFETY: takes flags that must be 0; may be called again.
        match unsafe { driver::cuInit(0) } {
            0 => {}
            code::NO_DEVICE => return Err(CudaError::NoDevice),
            status => return Err(CudaError::Driver { failure: failure(status) }),
        }
        let mut count = 0;
        // SAFETY: writes one int.
        check("cuDeviceGetCount", unsafe { driver::cuDeviceGetCount(&mut count) })?;
        match usize::try_from(count) {
            Ok(count) if count > 0 => Ok(count),
            _ => Err(CudaError::NoDevice),
        }
    }

    /// Opens GPU `ordinal` and makes its primary context current on this thread.
    ///
    /// # Errors
    /// [`CudaError`]: no driver, no GPU, not this one, one older than Hopper, or one that is taken.
    pub fn open(ordinal: usize) -> Result<Self, CudaError> {
        let found = Self::count()?;
        if ordinal >= found {
            return Err(CudaError::Ordinal { asked: ordinal, found });
        }
        let device = checked("cuDeviceGet", Device::get_device(ordinal as u32))?;
        let name = checked("cuDeviceGetName", device.name())?;
        let properties = properties(ordinal, name, device)?;
        if properties.compute < (9, 0) {
            let Properties { name, compute, .. } = properties;
            return Err(CudaError::ComputeCapability { ordinal, name, compute });
        }
        let context = context(ordinal, device)?;
        let (retired, ledger) = (Mutex::default(), Ledger::default());
        Ok(Self { shared: Arc::new(Shared { retired, device, context, properties, ledger }) })
    }

    /// What it is.
    pub fn properties(&self) -> &Properties {
        &self.shared.properties
    }

    /// Memory that buffers of this handle and its clones hold.
    pub fn memory_use(&self) -> MemoryUse {
        self.shared.ledger.read()
    }

    /// Free and total bytes of the GPU, all processes considered.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn free_memory(&self) -> Result<(usize, usize), CudaError> {
        self.make_current()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two sizes; the context is current.
        check("cuMemGetInfo", unsafe { driver::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free, total))
    }

    /// Makes the context current on this thread, for libraries such as NVSHMEM; own calls do it themselves.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn make_current(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained by `shared`.
        check("cuCtxSetCurrent", unsafe { driver::cuCtxSetCurrent(self.context()) })
    }

    /// Whether kernels of this GPU can reach memory of `peer`, another one.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn can_reach(&self, peer: &Gpu) -> Result<bool, CudaError> {
        can_access(self.shared.device, peer.shared.device)
    }

    /// Lets kernels of this GPU reach memory of `peer`, which may be the same GPU.
    ///
    /// # Errors
    /// [`CudaError::NoPeerAccess`] if the hardware cannot.
    pub fn enable_access(&self, peer: &Gpu) -> Result<(), CudaError> {
        let (from, to) = (self.properties().ordinal, peer.properties().ordinal);
        if from == to {
            return Ok(());
        }
        if !self.can_reach(peer)? {
            return Err(CudaError::NoPeerAccess { from, to });
        }
        self.make_current()?;
        // SAFETY: both contexts are retained; this GPU's is current.
        match unsafe { driver::cuCtxEnablePeerAccess(peer.context(), 0) } {
            0 | code::PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            status => check("cuCtxEnablePeerAccess", status),
        }
    }

    /// Which GPU can reach which one's memory, by ordinal; true on the diagonal.
    ///
    /// # Errors
    /// As [`count`](Self::count), and [`CudaError::Call`].
    pub fn peer_matrix() -> Result<Vec<Vec<bool>>, CudaError> {
        let devices = (0..Self::count()? as u32).map(|i| checked("cuDeviceGet", Device::get_device(i)));
        let devices: Vec<Device> = devices.collect::<Result<_, _>>()?;
        let row = |&from: &Device| devices.iter().map(move |&to| can_access(from, to)).collect::<Result<Vec<_>, _>>();
        devices.iter().map(row).collect()
    }

    /// Puts off releases of memory until the returned guard, and all others, are dropped: the driver lets a release wait
    /// for all kernels of the GPU, and while PEs are threads of one process, one of these may wait for the PE that
    /// releases. Memory that is short ends the wait early.
    #[must_use]
    pub fn defer_releases(&self) -> Deferral {
        self.retired().deferrals += 1;
        Deferral { gpu: self.clone() }
    }

    /// Releases `memory`, of which `bytes` are counted, now or when it may.
    pub(super) fn retire<T: Any + Send>(&self, memory: T, bytes: usize) {
        let mut retired = self.retired();
        let held: Held = (Box::new(memory), bytes);
        if retired.deferrals > 0 {
            retired.memory.push(held);
        } else {
            drop(retired);
            self.release(vec![held]);
        }
    }

    /// Releases what was put off; whether there was anything.
    pub(super) fn release_retired(&self) -> bool {
        let memory = std::mem::take(&mut self.retired().memory);
        let any = !memory.is_empty();
        self.release(memory);
        any
    }

    fn release(&self, memory: Vec<Held>) {
        // The driver frees in the current context. If this fails the context is gone, and the memory with it.
        let _ = self.make_current();
        for (memory, bytes) in memory {
            drop(memory);
            self.shared.ledger.give(bytes);
        }
    }

    fn retired(&self) -> MutexGuard<'_, Retired> {
        // Nothing panics between two related changes.
        self.shared.retired.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn context(&self) -> CUcontext {
        self.shared.context.as_raw()
    }

    pub(super) fn take(&self, bytes: usize) {
        self.shared.ledger.take(bytes);
    }
}

fn can_access(from: Device, to: Device) -> Result<bool, CudaError> {
    if from.as_raw() == to.as_raw() {
        return Ok(true);
    }
    let mut can = 0;
    // SAFETY: writes one int; both devices exist.
    check("cuDeviceCanAccessPeer", unsafe { driver::cuDeviceCanAccessPeer(&mut can, from.as_raw(), to.as_raw()) })?;
    Ok(can != 0)
}

fn context(ordinal: usize, device: Device) -> Result<Context, CudaError> {
    /// `CU_CTX_LMEM_RESIZE_TO_MAX`.
    const KEEP_LOCAL_MEMORY: u32 = 0x10;
    // Without this the driver fits the threads' local memory to each kernel that needs another amount, and waits for all
    // running kernels to do so: a kernel that waits for a PE that has yet to launch would never end. An error here means
    // that someone else has made the context, with flags of its own: then those hold.
    // SAFETY: sets flags of an existing device.
    let _ = unsafe { driver::cuDevicePrimaryCtxSetFlags_v2(device.as_raw(), KEEP_LOCAL_MEMORY) };
    match Context::new(device) {
        Err(cust::error::CudaError(status @ (code::DEVICE_UNAVAILABLE | 101 | 201))) => {
            Err(CudaError::Unavailable { ordinal, failure: failure(status) })
        }
        context => checked("cuDevicePrimaryCtxRetain", context),
    }
}

fn properties(ordinal: usize, name: String, device: Device) -> Result<Properties, CudaError> {
    let attribute = |attribute: c_int| -> Result<u32, CudaError> {
        let mut value = 0;
        // SAFETY: writes one int; the device exists.
        check("cuDeviceGetAttribute", unsafe { driver::cuDeviceGetAttribute(&mut value, attribute, device.as_raw()) })?;
        Ok(value.max(0) as u32)
    };
    let mut uuid = CUuuid { bytes: [0; 16] };
    // SAFETY: writes 16 bytes; the device exists.
    check("cuDeviceGetUuid", unsafe { driver::cuDeviceGetUuid_v2(&mut uuid, device.as_raw()) })?;
    let mut cuda = 0;
    // SAFETY: writes one int.
    check("cuDriverGetVersion", unsafe { driver::cuDriverGetVersion(&mut cuda) })?;
    let memory_bytes = checked("cuDeviceTotalMem", device.total_memory())?;
    Ok(Properties {
        ordinal,
        name,
        uuid: uuid.bytes.map(|byte| byte as u8),
        compute: (attribute(device_attribute::COMPUTE_MAJOR)?, attribute(device_attribute::COMPUTE_MINOR)?),
        sms: attribute(device_attribute::MULTIPROCESSORS)?,
        clock_khz: attribute(device_attribute::CLOCK_RATE_KHZ)?,
        memory_bytes,
        max_shared_bytes: attribute(device_attribute::MAX_SHARED_BYTES_OPTIN)?,
        cooperative: attribute(device_attribute::COOPERATIVE_LAUNCH)? != 0,
        cuda: cuda.max(0) as u32,
        driver: std::fs::read_to_string("/proc/driver/nvidia/version").ok().and_then(|text| driver_version(&text)),
    })
}

/// The first thing like 580.95.05 in the kernel module's description of itself.
fn driver_version(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("NVRM version"))?;
    let like_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    line.split_whitespace().find(like_version).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pes_take_gpus_in_turn() {
        let chosen: Vec<usize> = (0..5).map(|local_rank| choose_device(local_rank, 2)).collect();
        assert_eq!(chosen, [0, 1, 0, 1, 0]);
    }

    #[test]
    fn the_ledger_keeps_the_peak() {
        let ledger = Ledger::default();
        ledger.take(100);
        ledger.take(50);
        ledger.give(100);
        ledger.take(20);
        assert_eq!(ledger.read(), MemoryUse { current: 70, peak: 150 });
    }

    #[test]
    fn the_drivers_version_is_found() {
        let text =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 12.2\n";
        assert_eq!(driver_version(text).as_deref(), Some("580.95.05"));
        assert_eq!(driver_version("GCC version: 12.2"), None);
    }
}
