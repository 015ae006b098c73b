//! Entries on emulated threads.

use cuda_std::emulated::{Emulator, Fault, Launch};

/// A kernel, with its parameters still to come.
#[derive(Clone, Copy)]
pub struct Entry {
    bytes: usize,
    body: unsafe fn(*const u8),
}

/// The kernel whose entry in a device module has this name.
pub fn find(name: &str) -> Option<Entry> {
    super::sending::find(name).or_else(|| super::local::find(name)).or_else(|| crate::hopper::entry::find(name))
}

impl Entry {
    /// The kernel `body`, which takes the address of a `P`.
    pub(crate) fn new<P>(body: unsafe fn(*const u8)) -> Self {
        Self { bytes: size_of::<P>(), body }
    }

    /// Runs block `block` of a launch with these parameters.
    ///
    /// # Errors
    /// [`Fault`] if the kernel broke a rule.
    ///
    /// # Panics
    /// If `P` is not as large as the kernel's parameters.
    ///
    /// # Safety
    /// The parameters must be those of this kernel, and describe memory that lives as long as the call.
    pub unsafe fn run<P: Copy>(
        &self,
        emulator: &mut Emulator,
        launch: &Launch<'_>,
        block: u32,
        params: &P,
    ) -> Result<(), Fault> {
        assert_eq!(size_of::<P>(), self.bytes, "{}: parameters of another kernel", launch.kernel);
        // SAFETY: by contract; the parameters outlive the call.
        emulator.run(launch, block, &|| unsafe { (self.body)(std::ptr::from_ref(params).cast()) })
    }
}
