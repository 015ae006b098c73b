//! The entries of a device module whose bodies are for Hopper. Their threads and registers are part of them.

use cuda_std::kernel;

use super::backward::{grad, scan as scan_back, states};
use super::{fix, prep, scan};
use crate::gate::{Gdn, Kda};
use crate::params::{FixParams, GradParams, PrepParams, ScanBackParams, ScanParams, StatesParams};
use crate::tile::Warpgroup;

/// [`prep::prep`].
///
/// # Safety
/// The parameters must describe memory of this device that lives as long as the launch.
#[kernel(threads = 256, blocks_per_sm = 2)]
pub unsafe fn prep_kda_bf16_hopper(params: PrepParams) {
    // SAFETY: the first thing in the kernel; its threads are whole warpgroups.
    let mut wg = unsafe { Warpgroup::enter() };
    prep::prep::<Kda>(&mut wg, &params);
}

/// [`prep::prep`].
///
/// # Safety
/// The parameters must describe memory of this device that lives as long as the launch.
#[kernel(threads = 256, blocks_per_sm = 2)]
pub unsafe fn prep_gdn_bf16_hopper(params: PrepParams) {
    // SAFETY: the first thing in the kernel; its threads are whole warpgroups.
    let mut wg = unsafe { Warpgroup::enter() };
    prep::prep::<Gdn>(&mut wg, &params);
}

/// [`scan::scan_push`], one walking warpgroup in a block.
///
/// # Safety
/// The parameters must describe memory of this device that lives as long as the launch.
#[kernel(threads = 256, registers = 240)]
pub unsafe fn scan_push_bf16_hopper_1(params: ScanParams) {
    // SAFETY: the first thing in the kernel; its threads are whole warpgroups.
    let mut wg = unsafe { Warpgroup::enter() };
    scan::scan_push::<1>(&mut wg, &params);
}

/// [`scan::scan_push`], two walking warpgroups in a block.
///
/// # Safety
/// The parameters must describe memory of this device that lives as long as the launch.
#[kernel(threads = 384, registers = 168)]
pub unsafe fn scan_push_bf16_hopper_2(params: ScanParams) {
    // SAFETY: the first thing in the kernel; its threads are whole warpgroups.
    let mut wg = unsafe { Warpgroup::enter() };
    scan::scan_push::<2>(&mut wg, &params);
}

/// [`fix::fix_out`].
///
/// # Safety
/// The parameters must describe memory of this device that lives as long as the launch.
#[kernel(threads = 256)]
pub unsafe fn fix_out_bf16_hopper(params: FixParams) {
    // SAFETY: the first thing in the kernel; its threads are whole warpgroups.
    let mut wg = unsafe { Warpgroup::enter() };
    fix::fix_out(&mut wg, &params);
}

/// [`states::scan_states`].
///
/// # Safety
/// The parameters must describe memory of this device that lives as long as the launch.
#[kernel(threads = 256, registers = 240)]
pub unsafe fn scan_states_bf16_hopper(params: StatesParams) {
    // SAFETY: the first thing in the kernel; its threads are whole warpgroups.
    let mut wg = unsafe { Warpgroup::enter() };
    states::scan_states(&mut wg, &params);
}

/// [`scan_back::scan_back`].
///
/// # Safety
/// The parameters must describe memory of this device that lives as long as the launch.
#[kernel(threads = 256, registers = 240)]
pub unsafe fn scan_back_bf16_hopper(params: ScanBackParams) {
    // SAFETY: the first thing in the kernel; its threads are whole warpgroups.
    let mut wg = unsafe { Warpgroup::enter() };
    scan_back::scan_back(&mut wg, &params);
}

/// [`grad::grad`].
///
/// # Safety
/// The parameters must describe memory of this device that lives as long as the launch.
#[kernel(threads = 512)]
pub unsafe fn grad_kda_bf16_hopper(params: GradParams) {
    // SAFETY: the first thing in the kernel; its threads are whole warpgroups.
    let mut wg = unsafe { Warpgroup::enter() };
    grad::grad::<Kda>(&mut wg, &params);
}

/// [`grad::grad`].
///
/// # Safety
/// The parameters must describe memory of this device that lives as long as the launch.
#[kernel(threads = 512)]
pub unsafe fn grad_gdn_bf16_hopper(params: GradParams) {
    // SAFETY: the first thing in the kernel; its threads are whole warpgroups.
    let mut wg = unsafe { Warpgroup::enter() };
    grad::grad::<Gdn>(&mut wg, &params);
}
