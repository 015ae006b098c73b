//! `convolve_begin`: the first kernel of a step. As [`crate::begin`], and brings the call's tensors to the table in which the
//! step's kernels look them up.
//!
//! The other tables stay on the device for all calls of a form; which tensors a call has differs from call to call. They come as
//! parameters of this launch, so a step still needs nothing from the host but its launches, and a captured step has its own tensors.

use core::sync::atomic::Ordering;

use bytemuck::{Pod, Zeroable};

use super::{ConvolutionTensors, MAX_CONVOLUTIONS};
use crate::begin::{BeginParams, begin};
use crate::params::{Array, Tensor};
use crate::tile::Warpgroup;

/// Words of a tensor's description, and of those of a convolution.
const TENSOR: usize = size_of::<Tensor>() / size_of::<u64>();
const CONVOLUTION: usize = size_of::<ConvolutionTensors>() / size_of::<u64>();

/// Parameters of [`convolve_begin`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct ConvolveBeginParams {
    /// What every step begins with.
    pub begin: BeginParams,
    /// Of [`ConvolutionTensors`]: the table.
    pub table: Array,
    /// What it is to hold; only as many as it has room for.
    pub tensors: [ConvolutionTensors; MAX_CONVOLUTIONS],
}

/// The grid: [`crate::begin::BLOCKS`]. One thread does it, as they are few words.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn convolve_begin(wg: &mut Warpgroup<'_>, p: &ConvolveBeginParams) {
    begin(wg, &p.begin);
    let words = Array { addr: p.table.addr, len: p.table.len * CONVOLUTION as u64 };
    wg.elect(|wg| {
        // Each by its number, so that none is looked for in the parameters.
        describe(wg, words, 0, &p.tensors[0]);
        describe(wg, words, 1, &p.tensors[1]);
        describe(wg, words, 2, &p.tensors[2]);
    });
}

/// Writes row `row` of the table, if there is one.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn describe(wg: &Warpgroup<'_>, words: Array, row: usize, t: &ConvolutionTensors) {
    let at = row * CONVOLUTION;
    if at as u64 >= words.len {
        return;
    }
    tensor(wg, words, at, &t.x);
    tensor(wg, words, at + TENSOR, &t.weight);
    tensor(wg, words, at + 2 * TENSOR, &t.bias);
    tensor(wg, words, at + 3 * TENSOR, &t.initial);
    tensor(wg, words, at + 4 * TENSOR, &t.y);
    tensor(wg, words, at + 5 * TENSOR, &t.finals);
    tensor(wg, words, at + 6 * TENSOR, &t.dy);
    tensor(wg, words, at + 7 * TENSOR, &t.d_finals);
    tensor(wg, words, at + 8 * TENSOR, &t.dx);
    tensor(wg, words, at + 9 * TENSOR, &t.d_initial);
    tensor(wg, words, at + 10 * TENSOR, &t.shares);
    tensor(wg, words, at + 11 * TENSOR, &t.d_weight);
    tensor(wg, words, at + 12 * TENSOR, &t.d_bias);
    set(wg, words, at + 13 * TENSOR, pair(t.channels, t.first_column));
    set(wg, words, at + 13 * TENSOR + 1, pair(t.runs, t.pad));
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn tensor(wg: &Warpgroup<'_>, words: Array, at: usize, t: &Tensor) {
    set(wg, words, at, t.addr);
    set(wg, words, at + 1, t.len);
    set(wg, words, at + 2, pair(t.dtype, t.pad));
}

/// Two numbers as they follow each other in memory, on targets that are all little-endian.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn pair(first: u32, second: u32) -> u64 {
    u64::from(first) | u64::from(second) << 32
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn set(wg: &Warpgroup<'_>, words: Array, at: usize, value: u64) {
    // Relaxed: the kernels that read it come after this one in the order of the stream.
    wg.word(words, at).store(value, Ordering::Relaxed);
}
