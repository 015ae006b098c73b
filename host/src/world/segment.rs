//! The one mapping that holds the control block and the heaps of all PEs.
//!
//! `[header][failure][slot x P][letters x P][heap 0][heap 1]..`: each part starts on a page, heap `r` lies at
//! `heaps + r * stride`, so a peer's copy of a symmetric object is one multiplication away from one's own. Threads map
//! anonymous memory, processes a memfd; nothing above this file tells the two apart.

use std::fs::File;

use memmap2::{MmapOptions, MmapRaw};

use super::WorldError;
use super::collective::Letters;
use super::control::{Failure, Header, Slot};

const PAGE: usize = 4096;

/// Most PEs of a world.
pub const MAX_SIZE: usize = 1024;

/// Where the parts of a segment lie, in bytes from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout {
    size: usize,
    slots: usize,
    letters: usize,
    heaps: usize,
    stride: usize,
    total: usize,
}

impl Layout {
    fn new(size: usize, heap_bytes: usize) -> Result<Self, WorldError> {
        if size == 0 || size > MAX_SIZE {
            return Err(WorldError::Size { found: size, max: MAX_SIZE });
        }
        let pages = |bytes: usize| bytes.checked_next_multiple_of(PAGE);
        let slots = PAGE + size_of::<Failure>().next_multiple_of(PAGE);
        let letters = slots + (size * size_of::<Slot>()).next_multiple_of(PAGE);
        let heaps = letters + (size * size_of::<Letters>()).next_multiple_of(PAGE);
        (|| {
            let stride = pages(heap_bytes)?;
            let total = heaps.checked_add(stride.checked_mul(size)?)?;
            isize::try_from(total).ok()?;
            Some(Self { size, slots, letters, heaps, stride, total })
        })()
        .ok_or(WorldError::TooLarge { size, heap_bytes })
    }
}

/// The mapping and its layout.
#[derive(Debug)]
pub(crate) struct Segment {
    map: MmapRaw,
    layout: Layout,
    heap_bytes: usize,
    /// Kept open so that other processes can open it.
    file: Option<File>,
}

impl Segment {
    /// Memory for PEs that are threads of this process.
    pub(super) fn anonymous(size: usize, heap_bytes: usize) -> Result<Self, WorldError> {
        let layout = Layout::new(size, heap_bytes)?;
        // Without reserved swap, pages that no PE touches cost nothing, as in the memfd.
        let map = MmapOptions::new().len(layout.total).no_reserve_swap().map_anon();
        let map = map.map_err(|error| cannot_map(&layout, &error))?;
        Self::with_header(map.into(), layout, heap_bytes, None)
    }

    /// Memory that processes can open by [`address`](Self::address).
    #[cfg(target_os = "linux")]
    pub(super) fn shared(size: usize, heap_bytes: usize) -> Result<Self, WorldError> {
        use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
        let layout = Layout::new(size, heap_bytes)?;
        let failed = |error: &std::io::Error| cannot_map(&layout, error);
        let fd = memfd_create("deltalink-heap", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|error| failed(&error.into()))?;
        let file = File::from(fd);
        file.set_len(layout.total as u64).map_err(|error| failed(&error))?;
        // A file that cannot shrink cannot turn an access of another PE into SIGBUS.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).map_err(|error| failed(&error.into()))?;
        let map = MmapOptions::new().len(layout.total).map_raw(&file).map_err(|error| failed(&error))?;
        Self::with_header(map, layout, heap_bytes, Some(file))
    }

    /// Memory that processes can open.
    #[cfg(not(target_os = "linux"))]
    pub(super) fn shared(_size: usize, _heap_bytes: usize) -> Result<Self, WorldError> {
        Err(WorldError::Unsupported { what: "a world of processes" })
    }

    fn with_header(map: MmapRaw, layout: Layout, heap_bytes: usize, file: Option<File>) -> Result<Self, WorldError> {
        let header = Header::new(layout.size, heap_bytes);
        // SAFETY: the first page is mapped, writable and page-aligned, and nobody else knows the segment yet.
        unsafe { map.as_mut_ptr().cast::<Header>().write(header) };
        Ok(Self { map, layout, heap_bytes, file })
    }

    /// Opens what process `pid` made with [`shared`](Self::shared), after checking that it is for this world.
    pub(super) fn open(address: HeapAddress, size: usize, heap_bytes: usize) -> Result<Self, WorldError> {
        if cfg!(not(target_os = "linux")) {
            return Err(WorldError::Unsupported { what: "a world of processes" });
        }
        let path = address.path();
        let layout = Layout::new(size, heap_bytes)?;
        let refused = |error: std::io::Error| WorldError::Open { path: path.clone(), reason: error.to_string() };
        let file = File::options().read(true).write(true).open(&path).map_err(refused)?;
        let header = read_header(&file)
            .map_err(|error| WorldError::Foreign { path: path.clone(), reason: error.to_string() })?;
        header.check(&path, &Header::new(size, heap_bytes))?;
        let found = file.metadata().map_err(refused)?.len();
        if found != layout.total as u64 {
            let reason = format!("it has {found} bytes instead of {}", layout.total);
            return Err(WorldError::Foreign { path, reason });
        }
        let map = MmapOptions::new().len(layout.total).map_raw(&file).map_err(|error| cannot_map(&layout, &error))?;
        Ok(Self { map, layout, heap_bytes, file: Some(file) })
    }

    /// How other processes open this segment while this process lives and holds it.
    pub(super) fn address(&self) -> Option<HeapAddress> {
        use std::os::fd::AsRawFd;
        self.file.as_ref().map(|file| HeapAddress { pid: std::process::id(), fd: file.as_raw_fd() })
    }

    /// Number of PEs.
    pub(crate) fn size(&self) -> usize {
        self.layout.size
    }

    /// Bytes of each PE's heap.
    pub(crate) fn heap_bytes(&self) -> usize {
        self.heap_bytes
    }

    /// Start of the heap of PE `rank`, page-aligned.
    ///
    /// # Panics
    /// If there is no such PE.
    pub(crate) fn heap(&self, rank: usize) -> *mut u8 {
        assert!(rank < self.layout.size, "PE {rank} of a world of {}", self.layout.size);
        self.at(self.layout.heaps + rank * self.layout.stride)
    }

    pub(super) fn failure(&self) -> &Failure {
        // SAFETY: lies inside the mapping, page-aligned; only atomics, valid when zero, and shared only as such.
        unsafe { &*self.at(PAGE).cast::<Failure>() }
    }

    pub(super) fn slots(&self) -> &[Slot] {
        // SAFETY: the layout holds `size` slots there, page-aligned; only atomics, valid when zero, shared only as such.
        unsafe { std::slice::from_raw_parts(self.at(self.layout.slots).cast::<Slot>(), self.layout.size) }
    }

    /// The letters of PE `rank`; who may read or write them when is the protocol of `collective`.
    pub(super) fn letters(&self, rank: usize) -> *mut Letters {
        assert!(rank < self.layout.size, "PE {rank} of a world of {}", self.layout.size);
        self.at(self.layout.letters).cast::<Letters>().wrapping_add(rank)
    }

    fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.layout.total);
        self.map.as_mut_ptr().wrapping_add(offset)
    }
}

fn read_header(file: &File) -> std::io::Result<Header> {
    use std::os::unix::fs::FileExt;
    let mut bytes = [0; size_of::<Header>()];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytemuck::pod_read_unaligned(&bytes))
}

fn cannot_map(layout: &Layout, error: &std::io::Error) -> WorldError {
    WorldError::Map { size: layout.size, bytes: layout.total, reason: error.to_string() }
}

/// Names a file that a process holds open; written `pid:fd`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeapAddress {
    pid: u32,
    fd: i32,
}

impl HeapAddress {
    fn path(self) -> String {
        format!("/proc/{}/fd/{}", self.pid, self.fd)
    }

    /// The process that holds the file.
    pub(super) fn pid(self) -> u32 {
        self.pid
    }

    /// Reads what `Display` writes.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (pid, fd) = text.split_once(':')?;
        Some(Self { pid: pid.parse().ok()?, fd: fd.parse().ok()? })
    }
}

impl std::fmt::Display for HeapAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.pid, self.fd)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_do_not_overlap() {
        for size in [1, 2, 3, 33, MAX_SIZE] {
            let layout = Layout::new(size, 5000).expect("fits");
            assert!(size_of::<Header>() <= PAGE);
            assert!(layout.slots >= PAGE + size_of::<Failure>());
            assert!(layout.letters >= layout.slots + size * size_of::<Slot>());
            assert!(layout.heaps >= layout.letters + size * size_of::<Letters>());
            assert_eq!((layout.stride, layout.total), (8192, layout.heaps + size * 8192));
        }
    }

    #[test]
    fn sizes_out_of_range_are_refused() {
        assert_eq!(Layout::new(0, 1), Err(WorldError::Size { found: 0, max: MAX_SIZE }));
        assert_eq!(Layout::new(MAX_SIZE + 1, 1), Err(WorldError::Size { found: MAX_SIZE + 1, max: MAX_SIZE }));
        for heap_bytes in [usize::MAX, usize::MAX / 2, isize::MAX as usize - PAGE] {
            assert_eq!(Layout::new(2, heap_bytes), Err(WorldError::TooLarge { size: 2, heap_bytes }));
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_segment_opens_only_for_the_same_world() {
        let made = Segment::shared(2, 4096).expect("memfd");
        let address = made.address().expect("has a file");
        assert_eq!(HeapAddress::parse(&address.to_string()), Some(address));
        let opened = Segment::open(address, 2, 4096).expect("same world");
        made.failure().report(1, "seen through both mappings");
        assert_eq!(opened.failure().get(), Some((1, "seen through both mappings".into())));
        assert!(matches!(Segment::open(address, 3, 4096), Err(WorldError::Header { field: "number of PEs", .. })));
        assert!(matches!(Segment::open(address, 2, 8192), Err(WorldError::Header { field: "heap bytes per PE", .. })));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn what_cannot_be_opened_or_is_no_segment_is_explained() {
        use std::os::fd::AsRawFd;
        let absent =
            Segment::open(HeapAddress { pid: std::process::id(), fd: 1_000_000 }, 1, 4096).expect_err("no such fd");
        assert!(absent.to_string().contains("ptrace read access"), "{absent}");
        let fd = rustix::fs::memfd_create("other", rustix::fs::MemfdFlags::CLOEXEC).expect("memfd");
        let address = HeapAddress { pid: std::process::id(), fd: fd.as_raw_fd() };
        assert!(matches!(Segment::open(address, 1, 4096), Err(WorldError::Foreign { .. })));
    }
}
