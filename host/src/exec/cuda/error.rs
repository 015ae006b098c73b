//! Errors of the GPU back end.

use std::ffi::c_int;

/// A status of the driver, in its own words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// `CUresult`.
    pub code: c_int,
    /// Its name, such as `CUDA_ERROR_ILLEGAL_ADDRESS`.
    pub name: String,
    /// What the driver says about it.
    pub text: String,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { code, name, text } = self;
        if text.is_empty() { write!(f, "{name} ({code})") } else { write!(f, "{name} ({code}): {text}") }
    }
}

/// Something could not be done on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum CudaError {
    #[error(
        "there is no CUDA driver ({reason}); install the NVIDIA driver, which brings libcuda.so.1, or in a container start it \
         with GPUs (--gpus all), or compute on the CPU"
    )]
    NoDriver { reason: String },
    #[error("the CUDA driver cannot be used, cuInit ends with {failure}; {}", advice_on_init(failure.code))]
    Driver { failure: Failure },
    #[error(
        "the CUDA driver sees no GPU; look at CUDA_VISIBLE_DEVICES, and in a container start it with GPUs (--gpus all)"
    )]
    NoDevice,
    #[error("GPU {asked} was asked for, the driver sees {found}; they are numbered from 0")]
    Ordinal { asked: usize, found: usize },
    #[error(
        "GPU {ordinal} ({name}) has compute capability {}.{}; 9.0 (Hopper) or newer is needed: use another GPU or the CPU \
         back end", compute.0, compute.1
    )]
    ComputeCapability { ordinal: usize, name: String, compute: (u32, u32) },
    #[error(
        "GPU {ordinal} gives this process no context ({failure}); is it in exclusive mode and taken by another process? \
         nvidia-smi tells"
    )]
    Unavailable { ordinal: usize, failure: Failure },
    #[error(
        "GPU {ordinal} has no room for {requested} bytes: {free} of {total} are free, this process holds {in_use}; use \
         shorter segments, more PEs, or free what other processes hold (nvidia-smi names them)"
    )]
    OutOfMemory { ordinal: usize, requested: usize, free: usize, total: usize, in_use: usize },
    #[error("{call} ends with {failure}")]
    Call { call: &'static str, failure: Failure },
    #[error("bytes {start}..{end} of a buffer of {len} bytes were asked for")]
    Range { start: usize, end: usize, len: usize },
    #[error("module {module} cannot be loaded: {failure}{}", log_after(log))]
    Module { module: String, failure: Failure, log: String },
    #[error("module {module} has no {name}; it was built from other sources than this program: build it again")]
    Symbol { module: String, name: String },
    #[error("kernel {kernel} ends with {failure}{}", advice_on_kernel(failure.code))]
    Kernel { kernel: String, failure: Failure },
    #[error("after the launch of {}: {failure}{}", kernels.join(", "), advice_on_kernel(failure.code))]
    Async { kernels: Vec<String>, failure: Failure },
    #[error(
        "kernel {kernel} takes parameters of {device:?} bytes, the host has one of {host}; the module was built from other \
         sources than this program: build it again"
    )]
    Params { kernel: String, device: Vec<usize>, host: usize },
    #[error("DELTALINK_BESIDE is {value:?}; it takes hundredths of the chunks to prepare beside a walk, 0 to 100")]
    Beside { value: String },
    #[error("kernel {kernel} would get {bytes} bytes of parameters; the driver takes up to {max}")]
    ParamBytes { kernel: String, bytes: usize, max: usize },
    #[error(
        "a launch of {kernel} with {blocks} blocks of {threads} threads was asked for; a block has 1 to {max} threads"
    )]
    Shape { kernel: String, blocks: u32, threads: u32, max: u32 },
    #[error(
        "kernel {kernel} needs {dynamic} bytes of dynamic and {fixed} of static shared memory a block; the GPU has {max}"
    )]
    Shared { kernel: String, dynamic: u32, fixed: u32, max: u32 },
    #[error(
        "kernel {kernel} waits inside, so all its blocks must run at once: {blocks} blocks of {threads} threads with \
         {shared_bytes} shared bytes were asked for, {fits} fit ({per_sm} on each of {sms} SMs{}); launch fewer blocks",
        share_of(*sharers)
    )]
    NotResident {
        kernel: String,
        blocks: u32,
        threads: u32,
        shared_bytes: u32,
        fits: u32,
        per_sm: u32,
        sms: u32,
        sharers: u32,
    },
    #[error(
        "GPU {from} cannot reach the memory of GPU {to}; PEs of one process need GPUs that can (nvidia-smi topo -p2p r)"
    )]
    NoPeerAccess { from: usize, to: usize },
}

fn log_after(log: &str) -> String {
    if log.is_empty() { String::new() } else { format!("; the driver's log: {log}") }
}

fn share_of(sharers: u32) -> String {
    if sharers > 1 { format!(", shared by {sharers} PEs") } else { String::new() }
}

fn advice_on_init(code: c_int) -> &'static str {
    match code {
        super::driver::code::STUB_LIBRARY => {
            "a stub of libcuda.so.1, made for linking, was loaded: take its folder out of LD_LIBRARY_PATH, and install the \
             NVIDIA driver if there is none"
        }
        803 => {
            "libcuda.so.1 and the kernel module are of different versions: restart after a driver update, and remove \
             older copies from LD_LIBRARY_PATH"
        }
        804 => {
            "a CUDA compatibility library hides the driver's own: take its folder (cuda/compat) out of LD_LIBRARY_PATH"
        }
        802 => "the system is still starting: is nvidia-fabricmanager running?",
        _ => "nvidia-smi says more about the driver's state, dmesg about the kernel module's",
    }
}

fn advice_on_kernel(code: c_int) -> &'static str {
    match code {
        700 | 716 | 717 => "; compute-sanitizer names the instruction and the address",
        701 => "; it has too many threads for its registers",
        702 => "; a display driver's watchdog ended it",
        719 => "; compute-sanitizer may name the instruction",
        720 => "; a cooperative launch has more blocks than fit",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(code: c_int, name: &str, text: &str) -> Failure {
        Failure { code, name: name.into(), text: text.into() }
    }

    #[test]
    fn messages_say_what_to_do() {
        let stub = CudaError::Driver { failure: failure(34, "CUDA_ERROR_STUB_LIBRARY", "") };
        assert!(stub.to_string().contains("ends with CUDA_ERROR_STUB_LIBRARY (34); a stub of libcuda.so.1"), "{stub}");
        let kernel = CudaError::Async {
            kernels: vec!["prep".into(), "scan_push".into()],
            failure: failure(700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"),
        };
        assert_eq!(
            kernel.to_string(),
            "after the launch of prep, scan_push: CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access was \
             encountered; compute-sanitizer names the instruction and the address"
        );
        let blocks = CudaError::NotResident {
            kernel: "fix_out".into(),
            blocks: 264,
            threads: 256,
            shared_bytes: 100_000,
            fits: 132,
            per_sm: 2,
            sms: 132,
            sharers: 2,
        };
        assert!(blocks.to_string().contains("132 fit (2 on each of 132 SMs, shared by 2 PEs)"), "{blocks}");
    }
}
