//! The CUDA driver and its GPUs, through the driver library loaded at run time: deltalink itself links to nothing of CUDA.

use std::ffi::{CStr, OsStr, c_char, c_int, c_uint};

use indicatif::BinaryBytes;
use libloading::Library;

use super::peers::{self, Link};
use super::{Finding, Status, loader_says};

/// A GPU as the driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cli) struct Gpu {
    pub name: String,
    /// Bytes.
    pub memory: usize,
    /// Compute capability, major and minor.
    pub compute: (c_int, c_int),
}

/// What the driver library says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cli) enum Driver {
    /// It cannot be loaded.
    Absent { why: String },
    /// It can, and this call failed.
    Failed { call: &'static str, code: c_int },
    /// It works. `cuda` is the newest CUDA version it supports, 1000 * major + 10 * minor;
    /// `links[from][to]` is how one GPU reaches another.
    Present { cuda: c_int, gpus: Vec<Gpu>, links: Vec<Vec<Link>> },
}

/// `CUdevice_attribute` values of the driver API.
const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
const COMPUTE_CAPABILITY_MINOR: c_int = 76;

/// `CUdevice_P2PAttribute` values.
const ACCESS_SUPPORTED: c_int = 2;
const NATIVE_ATOMIC_SUPPORTED: c_int = 3;

/// `CUresult` values worth their own advice.
const NO_DEVICE: c_int = 100;
const SYSTEM_DRIVER_MISMATCH: c_int = 803;
const COMPAT_NOT_SUPPORTED: c_int = 804;

/// The few functions of the driver API that are asked.
struct Api<'lib> {
    init: Function<'lib, unsafe extern "C" fn(c_uint) -> c_int>,
    version: Function<'lib, unsafe extern "C" fn(*mut c_int) -> c_int>,
    count: Function<'lib, unsafe extern "C" fn(*mut c_int) -> c_int>,
    get: Function<'lib, unsafe extern "C" fn(*mut c_int, c_int) -> c_int>,
    name: Function<'lib, unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int>,
    memory: Function<'lib, unsafe extern "C" fn(*mut usize, c_int) -> c_int>,
    attribute: Function<'lib, unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int>,
    link: Function<'lib, unsafe extern "C" fn(*mut c_int, c_int, c_int, c_int) -> c_int>,
}

type Function<'lib, F> = libloading::Symbol<'lib, F>;

/// A driver call that did not return 0.
struct Failed(&'static str, c_int);

fn check(call: &'static str, code: c_int) -> Result<(), Failed> {
    if code == 0 { Ok(()) } else { Err(Failed(call, code)) }
}

impl<'lib> Api<'lib> {
    fn load(library: &'lib Library) -> Result<Self, libloading::Error> {
        // SAFETY: the names and signatures are those of cuda.h; CUresult, CUdevice and CUdevice_attribute are C ints.
        unsafe {
            Ok(Self {
                init: library.get("cuInit")?,
                version: library.get("cuDriverGetVersion")?,
                count: library.get("cuDeviceGetCount")?,
                get: library.get("cuDeviceGet")?,
                name: library.get("cuDeviceGetName")?,
                memory: library.get("cuDeviceTotalMem_v2")?,
                attribute: library.get("cuDeviceGetAttribute")?,
                link: library.get("cuDeviceGetP2PAttribute")?,
            })
        }
    }

    fn ask(&self) -> Result<Driver, Failed> {
        let (mut cuda, mut count) = (0, 0);
        // SAFETY: cuInit takes flags that must be 0; the others write one int each.
        unsafe {
            check("cuInit", (self.init)(0))?;
            check("cuDriverGetVersion", (self.version)(&mut cuda))?;
            check("cuDeviceGetCount", (self.count)(&mut count))?;
        }
        let gpus = (0..count).map(|ordinal| self.gpu(ordinal)).collect::<Result<_, _>>()?;
        let row = |from| (0..count).map(|to| self.link(from, to)).collect::<Result<Vec<_>, _>>();
        let links = (0..count).map(row).collect::<Result<_, _>>()?;
        Ok(Driver::Present { cuda, gpus, links })
    }

    fn link(&self, from: c_int, to: c_int) -> Result<Link, Failed> {
        if from == to {
            return Ok(Link::Atomic);
        }
        let (mut access, mut atomics, mut devices) = (0, 0, [0; 2]);
        // SAFETY: each call writes one int; the device handles are those that cuDeviceGet wrote, of two different devices.
        unsafe {
            check("cuDeviceGet", (self.get)(&mut devices[0], from))?;
            check("cuDeviceGet", (self.get)(&mut devices[1], to))?;
            let [from, to] = devices;
            check("cuDeviceGetP2PAttribute", (self.link)(&mut access, ACCESS_SUPPORTED, from, to))?;
            check("cuDeviceGetP2PAttribute", (self.link)(&mut atomics, NATIVE_ATOMIC_SUPPORTED, from, to))?;
        }
        Ok(match (access, atomics) {
            (0, _) => Link::None,
            (_, 0) => Link::Plain,
            _ => Link::Atomic,
        })
    }

    fn gpu(&self, ordinal: c_int) -> Result<Gpu, Failed> {
        let (mut device, mut memory, mut compute) = (0, 0, (0, 0));
        let mut name = [0_u8; 256];
        // SAFETY: every pointer is to a variable of the type that cuda.h names; the name's room is given with it. The
        // device handle is the one that cuDeviceGet wrote.
        unsafe {
            check("cuDeviceGet", (self.get)(&mut device, ordinal))?;
            check("cuDeviceGetName", (self.name)(name.as_mut_ptr().cast(), name.len() as c_int, device))?;
            check("cuDeviceTotalMem", (self.memory)(&mut memory, device))?;
            check("cuDeviceGetAttribute", (self.attribute)(&mut compute.0, COMPUTE_CAPABILITY_MAJOR, device))?;
            check("cuDeviceGetAttribute", (self.attribute)(&mut compute.1, COMPUTE_CAPABILITY_MINOR, device))?;
        }
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned();
        Ok(Gpu { name, memory, compute })
    }
}

impl Driver {
    /// Loads `library` and asks it.
    pub fn probe(library: &OsStr) -> Self {
        let absent = |e: libloading::Error| Driver::Absent { why: loader_says(&e) };
        // SAFETY: the driver library is made to be loaded this way; its initialisers have no conditions.
        let library = match unsafe { Library::new(library) } {
            Ok(library) => library,
            Err(e) => return absent(e),
        };
        let driver = match Api::load(&library) {
            Ok(api) => api.ask().unwrap_or_else(|Failed(call, code)| Driver::Failed { call, code }),
            Err(e) => absent(e),
        };
        // After cuInit the driver has threads of its own: never unload it.
        std::mem::forget(library);
        driver
    }

    /// `proc_version`: the text of `/proc/driver/nvidia/version`, which alone has the driver's own version number.
    pub fn findings(&self, proc_version: Option<&str>) -> Vec<Finding> {
        const ITEM: &str = "NVIDIA driver";
        let number = proc_version.and_then(driver_version);
        let version = number.clone().map_or("version unknown".into(), |v| format!("version {v}"));
        let driver = match self {
            Driver::Absent { why } if number.is_some() => Finding::new(ITEM, Status::Missing, format!("{version}, but {why}")).advice(
                "the kernel module is loaded and its user library is not found; in a container start it with GPUs (--gpus all), else add the folder of libcuda.so.1 to LD_LIBRARY_PATH",
            ),
            Driver::Absent { why } => Finding::new(ITEM, Status::Missing, why.as_str()).advice(
                "no GPU can be used, the CPU back end can; with an NVIDIA GPU install its driver, which brings libcuda.so.1, or in a container start it with GPUs (--gpus all)",
            ),
            Driver::Failed { call, code } => {
                let advice = match *code {
                    NO_DEVICE => "the driver sees no GPU: look at CUDA_VISIBLE_DEVICES, and in a container start it with GPUs (--gpus all)",
                    SYSTEM_DRIVER_MISMATCH => "libcuda.so.1 and the kernel module are of different versions: restart after a driver update, and remove older copies from LD_LIBRARY_PATH",
                    COMPAT_NOT_SUPPORTED => "a CUDA compatibility library hides the driver's own: take its folder (cuda/compat) out of LD_LIBRARY_PATH",
                    _ => "nvidia-smi says more about the driver's state, and dmesg about the kernel module's",
                };
                return vec![Finding::new(ITEM, Status::Missing, format!("{version}, {call} fails with {code}")).advice(advice)];
            }
            Driver::Present { cuda, .. } => {
                Finding::new(ITEM, Status::Ok, format!("{version}, CUDA {}.{}", cuda / 1000, cuda % 1000 / 10))
            }
        };
        let links = match self {
            Driver::Present { links, .. } => peers::findings(links),
            _ => Vec::new(),
        };
        std::iter::once(driver).chain(self.gpus()).chain(links).collect()
    }

    /// GPUs that the driver shows.
    pub fn gpu_count(&self) -> usize {
        match self {
            Driver::Present { gpus, .. } => gpus.len(),
            _ => 0,
        }
    }

    fn gpus(&self) -> Vec<Finding> {
        match self {
            Driver::Present { gpus, .. } if gpus.is_empty() => vec![
                Finding::new("GPUs", Status::Missing, "none")
                    .advice("look at CUDA_VISIBLE_DEVICES, and in a container start it with GPUs (--gpus all)"),
            ],
            Driver::Present { gpus, .. } => {
                let describe = |(i, gpu): (usize, &Gpu)| {
                    let Gpu { name, memory, compute: (major, minor) } = gpu;
                    let found = format!("{name}, {}, compute capability {major}.{minor}", BinaryBytes(*memory as u64));
                    Finding::new(format!("GPU {i}"), Status::Ok, found)
                };
                gpus.iter().enumerate().map(describe).collect()
            }
            _ => Vec::new(),
        }
    }
}

/// The first thing like 580.95.05 in the kernel module's description of itself.
pub(in crate::cli) fn driver_version(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("NVRM version"))?;
    let like_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    line.split_whitespace().find(like_version).map(str::to_owned)
}
