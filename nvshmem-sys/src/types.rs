//! Structures of NVSHMEM's interface: sizes and version words as its headers have them.

use std::ffi::{c_char, c_int, c_void};

/// The version word of a structure: 1 in the upper half, its size in the lower.
const fn word<T>() -> c_int {
    (1 << 16) + size_of::<T>() as c_int
}

/// `nvshmemx_uniqueid_v1`: identifies one start of NVSHMEM; made by PE 0, plain bytes for the others.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UniqueId {
    version: c_int,
    internal: [c_char; 124],
}

impl UniqueId {
    /// Bytes of an identifier.
    pub const BYTES: usize = size_of::<Self>();

    /// `NVSHMEMX_UNIQUEID_INITIALIZER`.
    pub const fn new() -> Self {
        Self { version: word::<Self>(), internal: [0; 124] }
    }

    /// What PE 0 sends.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.version.to_ne_bytes());
        for (byte, &char) in bytes[4..].iter_mut().zip(&self.internal) {
            *byte = char as u8;
        }
        bytes
    }

    /// What the others make of it; nothing if it has another length or version word.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        let (version, internal) = bytes.split_at(4);
        let id = Self {
            version: c_int::from_ne_bytes(version.try_into().ok()?),
            internal: std::array::from_fn(|i| internal[i] as c_char),
        };
        (id.version == word::<Self>()).then_some(id)
    }
}

impl Default for UniqueId {
    fn default() -> Self {
        Self::new()
    }
}

/// `nvshmemx_uniqueid_args_v1`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UniqueIdArgs {
    version: c_int,
    /// Set by `nvshmemx_set_attr_uniqueid_args`.
    pub id: *mut UniqueId,
    /// As `id`.
    pub my_rank: c_int,
    /// As `id`.
    pub n_ranks: c_int,
}

/// `nvshmemx_init_args_v1`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct InitArgs {
    version: c_int,
    /// Start-up with an identifier.
    pub uid_args: UniqueIdArgs,
    content: [c_char; 96],
}

/// `nvshmemx_init_attr_v1`: how NVSHMEM is to start.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct InitAttr {
    version: c_int,
    /// For start-up through MPI.
    pub mpi_comm: *mut c_void,
    /// For start-up with an identifier.
    pub args: InitArgs,
}

impl InitAttr {
    /// `NVSHMEMX_INIT_ATTR_INITIALIZER`.
    pub const fn new() -> Self {
        let uid_args =
            UniqueIdArgs { version: word::<UniqueIdArgs>(), id: std::ptr::null_mut(), my_rank: -1, n_ranks: -1 };
        let args = InitArgs { version: word::<InitArgs>(), uid_args, content: [0; 96] };
        Self { version: word::<Self>(), mpi_comm: std::ptr::null_mut(), args }
    }
}

impl Default for InitAttr {
    fn default() -> Self {
        Self::new()
    }
}

/// A version of NVSHMEM; also `nvshmemi_version_t`, of which a linked module holds one.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Interface.
    pub major: c_int,
    /// Release.
    pub minor: c_int,
    /// Fix.
    pub patch: c_int,
}

impl Version {
    /// Symbol of the version that a module's device library was built as.
    pub const DEVICE_SYMBOL: &str = "nvshmemi_device_lib_version_d";

    /// The version in the bytes of [`Self::DEVICE_SYMBOL`].
    pub fn from_bytes(bytes: [u8; 12]) -> Self {
        let word = |i: usize| c_int::from_ne_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
        Self { major: word(0), minor: word(4), patch: word(8) }
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn layouts_are_those_of_the_headers() {
        assert_eq!((size_of::<UniqueId>(), align_of::<UniqueId>()), (128, 4));
        assert_eq!((size_of::<UniqueIdArgs>(), align_of::<UniqueIdArgs>()), (24, 8));
        assert_eq!((size_of::<InitArgs>(), align_of::<InitArgs>()), (128, 8));
        assert_eq!((size_of::<InitAttr>(), align_of::<InitAttr>()), (144, 8));
        assert_eq!(size_of::<Version>(), 12);
        assert_eq!((offset_of!(UniqueIdArgs, id), offset_of!(UniqueIdArgs, my_rank)), (8, 16));
        assert_eq!((offset_of!(InitArgs, uid_args), offset_of!(InitArgs, content)), (8, 32));
        assert_eq!((offset_of!(InitAttr, mpi_comm), offset_of!(InitAttr, args)), (8, 16));
    }

    #[test]
    fn version_words_hold_the_sizes() {
        let attr = InitAttr::new();
        assert_eq!(UniqueId::new().version, 0x1_0080);
        assert_eq!((attr.version, attr.args.version, attr.args.uid_args.version), (0x1_0090, 0x1_0080, 0x1_0018));
        assert_eq!((attr.args.uid_args.my_rank, attr.args.uid_args.n_ranks), (-1, -1));
    }

    #[test]
    fn an_identifier_survives_the_way() {
        let mut id = UniqueId::new();
        id.internal[123] = -7;
        let bytes = id.to_bytes();
        assert_eq!(UniqueId::from_bytes(&bytes), Some(id));
        assert_eq!(UniqueId::from_bytes(&bytes[1..]), None);
        assert_eq!(UniqueId::from_bytes(&[0; 128]), None, "another version word");
    }

    #[test]
    fn a_modules_version_is_read() {
        let mut bytes = [0; 12];
        bytes[..4].copy_from_slice(&3_i32.to_ne_bytes());
        bytes[4..8].copy_from_slice(&4_i32.to_ne_bytes());
        bytes[8..].copy_from_slice(&5_i32.to_ne_bytes());
        assert_eq!(Version::from_bytes(bytes).to_string(), "3.4.5");
    }
}
