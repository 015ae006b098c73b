//! Tiles in shared memory and their elements.

use core::marker::PhantomData;

use cuda_std::ptx;
use half::{bf16, f16};

use crate::element::Element;

/// A tile in shared memory, or a part or the transpose of one. Copying the handle copies no data.
pub struct Shared<E> {
    addr: u32,
    rows: u32,
    cols: u32,
    row_stride: u32,
    col_stride: u32,
    element: PhantomData<E>,
}

impl<E> Clone for Shared<E> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<E> Copy for Shared<E> {}

/// How an element lies in shared memory.
pub trait DeviceElement: Element {
    /// Loads the element at a shared address and widens it.
    ///
    /// # Safety
    /// The address must be that of such an element.
    unsafe fn load(addr: u32) -> f32;
    /// Rounds and stores.
    ///
    /// # Safety
    /// The address must be that of such an element.
    unsafe fn store(addr: u32, x: f32);
    /// Rounds and stores four that lie side by side.
    ///
    /// # Safety
    /// The address must be that of such elements, aligned to their size together.
    unsafe fn store_four(addr: u32, x: [f32; 4]);
}

impl DeviceElement for f32 {
    #[inline(always)]
    unsafe fn load(addr: u32) -> f32 {
        // SAFETY: by contract.
        unsafe { ptx::ld_shared_f32(addr) }
    }
    #[inline(always)]
    unsafe fn store(addr: u32, x: f32) {
        // SAFETY: by contract.
        unsafe { ptx::st_shared_f32(addr, x) }
    }
    #[inline(always)]
    unsafe fn store_four(addr: u32, x: [f32; 4]) {
        // SAFETY: by contract.
        unsafe { ptx::st_shared_v4_f32(addr, x[0], x[1], x[2], x[3]) }
    }
}
impl DeviceElement for bf16 {
    #[inline(always)]
    unsafe fn load(addr: u32) -> f32 {
        // SAFETY: by contract.
        f32::from_bits(u32::from(unsafe { ptx::ld_shared_b16(addr) }) << 16)
    }
    #[inline(always)]
    unsafe fn store(addr: u32, x: f32) {
        // SAFETY: by contract.
        unsafe { ptx::st_shared_b16(addr, ptx::cvt_rn_bf16_f32(x)) }
    }
    #[inline(always)]
    unsafe fn store_four(addr: u32, x: [f32; 4]) {
        // SAFETY: by contract.
        unsafe { ptx::st_shared_v2_u32(addr, ptx::cvt_rn_bf16x2_f32(x[1], x[0]), ptx::cvt_rn_bf16x2_f32(x[3], x[2])) }
    }
}
impl DeviceElement for f16 {
    #[inline(always)]
    unsafe fn load(addr: u32) -> f32 {
        // SAFETY: by contract.
        unsafe { ptx::cvt_f32_f16(ptx::ld_shared_b16(addr)) }
    }
    #[inline(always)]
    unsafe fn store(addr: u32, x: f32) {
        // SAFETY: by contract.
        unsafe { ptx::st_shared_b16(addr, ptx::cvt_rn_f16_f32(x)) }
    }
    #[inline(always)]
    unsafe fn store_four(addr: u32, x: [f32; 4]) {
        // SAFETY: by contract.
        unsafe { ptx::st_shared_v2_u32(addr, ptx::cvt_rn_f16x2_f32(x[1], x[0]), ptx::cvt_rn_f16x2_f32(x[3], x[2])) }
    }
}

impl<E: Element> Shared<E> {
    #[inline(always)]
    pub(super) fn new(addr: u32, rows: u32, cols: u32, row_stride: u32) -> Self {
        Self { addr, rows, cols, row_stride, col_stride: 1, element: PhantomData }
    }

    /// Rows.
    #[inline(always)]
    pub fn rows(&self) -> usize {
        self.rows as usize
    }

    /// Columns.
    #[inline(always)]
    pub fn cols(&self) -> usize {
        self.cols as usize
    }

    /// Extents as the device's own integers.
    #[inline(always)]
    pub(super) fn extent(&self) -> (u32, u32) {
        (self.rows, self.cols)
    }

    /// Element strides of rows and columns.
    #[inline(always)]
    pub(super) fn strides(&self) -> (u32, u32) {
        (self.row_stride, self.col_stride)
    }

    /// Shared address of element (r, c).
    #[inline(always)]
    pub(crate) fn at(&self, r: u32, c: u32) -> u32 {
        self.addr + (r * self.row_stride + c * self.col_stride) * E::CODE.size() as u32
    }

    /// The `rows` x `cols` part that starts at (`row`, `col`).
    #[inline(always)]
    pub fn part(&self, row: usize, col: usize, rows: usize, cols: usize) -> Self {
        Self { addr: self.at(row as u32, col as u32), rows: rows as u32, cols: cols as u32, ..*self }
    }

    /// Columns `start .. start + count`.
    #[inline(always)]
    pub fn columns(&self, start: usize, count: usize) -> Self {
        self.part(0, start, self.rows(), count)
    }

    /// Rows `start .. start + count`.
    #[inline(always)]
    pub fn row_range(&self, start: usize, count: usize) -> Self {
        self.part(start, 0, count, self.cols())
    }

    /// The transpose.
    #[inline(always)]
    pub fn t(&self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..*self }
    }

    #[inline(always)]
    pub(super) fn retype<F>(&self) -> Shared<F> {
        let Self { addr, rows, cols, row_stride, col_stride, .. } = *self;
        Shared { addr, rows, cols, row_stride, col_stride, element: PhantomData }
    }
}
