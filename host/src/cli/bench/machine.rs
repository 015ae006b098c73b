//! The machine that a measurement was made on.

use serde::Serialize;

use super::super::doctor::{self, Driver};

/// What a result depends on besides the program.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Machine {
    /// CPU, as the kernel names it.
    pub cpu: String,
    /// Cores that this process may use.
    pub cores: usize,
    /// Version of the operating system's kernel.
    pub kernel: Option<String>,
    /// Names of the GPUs that this process sees.
    pub gpus: Vec<String>,
    /// Version of the NVIDIA driver.
    pub driver: Option<String>,
    /// Newest CUDA that the driver supports.
    pub cuda: Option<String>,
    /// Version of NVSHMEM, if it took part.
    pub nvshmem: Option<String>,
}

impl Machine {
    /// This machine; `nvshmem` is the version of the library that took part.
    pub(super) fn this(nvshmem: Option<String>) -> Self {
        let read = |path: &str| std::fs::read_to_string(path).ok();
        let cpuinfo = read("/proc/cpuinfo").unwrap_or_default();
        let model = cpuinfo.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split_once(':'));
        let (gpus, cuda) = match Driver::probe("libcuda.so.1".as_ref()) {
            Driver::Present { cuda, gpus, .. } => {
                (gpus.into_iter().map(|gpu| gpu.name).collect(), Some(format!("{}.{}", cuda / 1000, cuda % 1000 / 10)))
            }
            Driver::Absent { .. } | Driver::Failed { .. } => (Vec::new(), None),
        };
        Self {
            cpu: model.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, model)| model.trim().to_owned()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: read("/proc/sys/kernel/osrelease").map(|text| text.trim().to_owned()),
            gpus,
            driver: read("/proc/driver/nvidia/version").and_then(|text| doctor::driver_version(&text)),
            cuda,
            nvshmem,
        }
    }
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, {} cores", self.cpu, self.cores)?;
        if let Some(first) = self.gpus.first() {
            let alike = self.gpus.iter().all(|gpu| gpu == first);
            let names = if alike { format!("{} x {first}", self.gpus.len()) } else { self.gpus.join(", ") };
            write!(f, "; {names}")?;
        }
        for (what, version) in [("driver", &self.driver), ("CUDA", &self.cuda), ("NVSHMEM", &self.nvshmem)] {
            if let Some(version) = version {
                write!(f, ", {what} {version}")?;
            }
        }
        Ok(())
    }
}
