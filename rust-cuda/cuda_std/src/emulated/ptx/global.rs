//! Plain loads and stores of global memory.

use crate::emulated::{FaultKind, Site, raise, settled};

/// Checks an address for an access of `N` elements.
#[track_caller]
fn checked<T, const N: usize>(name: &'static str, address: *const T) -> *const T {
    let align = (size_of::<T>() * N) as u32;
    if address.is_null() {
        raise(Site::here(name), FaultKind::Null);
    }
    if !(address as u64).is_multiple_of(align.into()) {
        raise(Site::here(name), FaultKind::Misaligned { address: address as u64, align });
    }
    address
}

#[track_caller]
unsafe fn load<T: Copy, const N: usize>(name: &'static str, address: *const T) -> [T; N] {
    // SAFETY: the caller's, see the module.
    unsafe { checked::<T, N>(name, address).cast::<[T; N]>().read() }
}

#[track_caller]
unsafe fn store<T: Copy, const N: usize>(name: &'static str, address: *mut T, value: [T; N]) {
    // SAFETY: the caller's, see the module.
    unsafe { checked::<T, N>(name, address).cast_mut().cast::<[T; N]>().write(value) }
}

macro_rules! loads {
    ($($name:ident: $ty:ty $(, $count:literal)?;)*) => {$(
        /// Loads what the name says.
        #[track_caller]
        pub unsafe fn $name(address: *const $ty) -> loads!(@result $ty $(, $count)?) {
            // SAFETY: the caller's, see the module.
            unsafe { loads!(@load stringify!($name), address $(, $count)?) }
        }
    )*};
    (@result $ty:ty) => { $ty };
    (@result $ty:ty, $count:literal) => { [$ty; $count] };
    (@load $name:expr, $address:ident) => { load::<_, 1>($name, $address)[0] };
    (@load $name:expr, $address:ident, $count:literal) => { load::<_, $count>($name, $address) };
}

loads! {
    ld_global_b16: u16;
    ld_global_u32: u32;
    ld_global_f32: f32;
    ld_global_u64: u64;
    ld_global_v2_u32: u32, 2;
    ld_global_v4_u32: u32, 4;
    ld_global_v2_f32: f32, 2;
    ld_global_v4_f32: f32, 4;
    ld_global_nc_b16: u16;
    ld_global_nc_u32: u32;
    ld_global_nc_f32: f32;
    ld_global_nc_v2_u32: u32, 2;
    ld_global_nc_v4_u32: u32, 4;
    ld_global_nc_v2_f32: f32, 2;
    ld_global_nc_v4_f32: f32, 4;
}

/// Loads a word that nobody writes, if `condition` is not 0; else it is 0.
#[track_caller]
pub unsafe fn ld_global_nc_u32_if(address: *const u32, condition: u32) -> u32 {
    // SAFETY: the caller's, see the module.
    if condition == 0 { 0 } else { unsafe { ld_global_nc_u32(address) } }
}

/// Loads 2 words that nobody writes, if `condition` is not 0; else they are 0.
#[track_caller]
pub unsafe fn ld_global_nc_v2_u32_if(address: *const u32, condition: u32) -> [u32; 2] {
    // SAFETY: the caller's, see the module.
    if condition == 0 { [0; 2] } else { unsafe { ld_global_nc_v2_u32(address) } }
}

/// Stores 16 bits.
#[track_caller]
pub unsafe fn st_global_b16(address: *mut u16, value: u16) {
    // SAFETY: the caller's, see the module.
    unsafe { store("st.global.b16", address, [value]) }
}

/// Stores a word.
#[track_caller]
pub unsafe fn st_global_u32(address: *mut u32, value: u32) {
    // SAFETY: the caller's, see the module.
    unsafe { store("st.global.u32", address, [value]) }
}

/// Stores a number.
#[track_caller]
pub unsafe fn st_global_f32(address: *mut f32, value: f32) {
    // SAFETY: the caller's, see the module.
    unsafe { store("st.global.f32", address, [settled("st.global.f32", value)]) }
}

/// Stores a number, if `condition` is not 0.
#[track_caller]
pub unsafe fn st_global_f32_if(address: *mut f32, value: f32, condition: u32) {
    if condition != 0 {
        // SAFETY: the caller's, see the module.
        unsafe { st_global_f32(address, value) }
    }
}

/// Stores a double word.
#[track_caller]
pub unsafe fn st_global_u64(address: *mut u64, value: u64) {
    // SAFETY: the caller's, see the module.
    unsafe { store("st.global.u64", address, [value]) }
}

/// Stores 2 words.
#[track_caller]
pub unsafe fn st_global_v2_u32(address: *mut u32, a: u32, b: u32) {
    // SAFETY: the caller's, see the module.
    unsafe { store("st.global.v2.u32", address, [a, b]) }
}

/// Stores 4 words.
#[track_caller]
pub unsafe fn st_global_v4_u32(address: *mut u32, a: u32, b: u32, c: u32, d: u32) {
    // SAFETY: the caller's, see the module.
    unsafe { store("st.global.v4.u32", address, [a, b, c, d]) }
}

/// Stores 2 numbers.
#[track_caller]
pub unsafe fn st_global_v2_f32(address: *mut f32, a: f32, b: f32) {
    let value = [a, b].map(|x| settled("st.global.v2.f32", x));
    // SAFETY: the caller's, see the module.
    unsafe { store("st.global.v2.f32", address, value) }
}

/// Stores 4 numbers.
#[track_caller]
pub unsafe fn st_global_v4_f32(address: *mut f32, a: f32, b: f32, c: f32, d: f32) {
    let value = [a, b, c, d].map(|x| settled("st.global.v4.f32", x));
    // SAFETY: the caller's, see the module.
    unsafe { store("st.global.v4.f32", address, value) }
}
