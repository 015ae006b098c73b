//! What the tests of the tile DSL share: tensors in host memory, and a launch of one small kernel.
#![allow(dead_code)] // every test file uses its own part

use std::time::Instant;

use half::{bf16, f16};
use kernels_gpu::element::{DtypeCode, Element};
use kernels_gpu::params::Tensor;
use kernels_gpu::tile::Warpgroup;
use kernels_gpu::tile::host::{BlockRunner, Checker, Fault, LaunchContext};

/// The element types of global memory.
pub const DTYPES: [DtypeCode; 3] = [DtypeCode::F32, DtypeCode::Bf16, DtypeCode::F16];

/// A test kernel.
pub type Kernel<P> = fn(&mut Warpgroup<'_>, &P);

/// A tensor in "global" memory.
pub struct Buffer {
    words: Vec<u64>,
    len: usize,
    dtype: DtypeCode,
}

impl Buffer {
    /// `values`, rounded to `dtype`.
    pub fn of(dtype: DtypeCode, values: &[f32]) -> Self {
        let mut words = vec![0u64; (values.len() * dtype.size()).div_ceil(8)];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        for (place, &x) in bytes.chunks_exact_mut(dtype.size()).zip(values) {
            match dtype {
                DtypeCode::F32 => place.copy_from_slice(&x.to_ne_bytes()),
                DtypeCode::Bf16 => place.copy_from_slice(&bf16::from_f32(x).to_ne_bytes()),
                DtypeCode::F16 => place.copy_from_slice(&f16::from_f32(x).to_ne_bytes()),
            }
        }
        Self { words, len: values.len(), dtype }
    }

    /// `len` times the same value.
    pub fn filled(dtype: DtypeCode, len: usize, value: f32) -> Self {
        Self::of(dtype, &vec![value; len])
    }

    /// `len` random values between -1 and 1.
    pub fn random(dtype: DtypeCode, len: usize, seed: u64) -> Self {
        Self::between(dtype, len, seed, -1.0, 1.0)
    }

    /// `len` random values between `low` and `high`.
    pub fn between(dtype: DtypeCode, len: usize, seed: u64, low: f32, high: f32) -> Self {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d;
        let values: Vec<f32> = (0..len)
            .map(|_| {
                // xorshift64*: enough for operands.
                state ^= state >> 12;
                state ^= state << 25;
                state ^= state >> 27;
                let unit = (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40) as f32 / (1u64 << 24) as f32;
                low + (high - low) * unit
            })
            .collect();
        Self::of(dtype, &values)
    }

    /// The tensor, for launch parameters. Kernels may write through it while `self` lives.
    pub fn tensor(&mut self) -> Tensor {
        Tensor::new(self.words.as_mut_ptr() as u64, self.len, self.dtype)
    }

    /// Element `i`, widened.
    pub fn get(&self, i: usize) -> f32 {
        assert!(i < self.len);
        let size = self.dtype.size();
        let bytes: &[u8] = bytemuck::cast_slice(&self.words);
        let place = &bytes[i * size..][..size];
        match self.dtype {
            DtypeCode::F32 => f32::from_ne_bytes(place.try_into().unwrap()),
            DtypeCode::Bf16 => bf16::from_ne_bytes(place.try_into().unwrap()).to_f32(),
            DtypeCode::F16 => f16::from_ne_bytes(place.try_into().unwrap()).to_f32(),
        }
    }

    /// All elements, widened.
    pub fn values(&self) -> Vec<f32> {
        (0..self.len).map(|i| self.get(i)).collect()
    }
}

/// `x` as an element of type `dtype` holds it.
pub fn round_to(dtype: DtypeCode, x: f32) -> f32 {
    Buffer::of(dtype, &[x]).get(0)
}

/// Runs one block in checked mode.
pub fn run<P: 'static>(warpgroups: usize, params: &P, kernel: Kernel<P>) -> Result<(), Fault> {
    run_with(&mut BlockRunner::new(), warpgroups, params, kernel)
}

/// Runs one block in checked mode on a runner that has run others before.
pub fn run_with<P: 'static>(
    runner: &mut BlockRunner,
    warpgroups: usize,
    params: &P,
    kernel: Kernel<P>,
) -> Result<(), Fault> {
    let checker = Checker::new();
    launch(runner, Some(&checker), warpgroups, 1, params, kernel)
}

/// Runs the blocks of a grid one after the other.
pub fn launch<P: 'static>(
    runner: &mut BlockRunner,
    checker: Option<&Checker>,
    warpgroups: usize,
    grid: usize,
    params: &P,
    kernel: Kernel<P>,
) -> Result<(), Fault> {
    let context =
        LaunchContext { kernel: "test", warpgroups, grid, origin: Instant::now(), checker, peer_failed: &|| false };
    (0..grid).try_for_each(|block| runner.run(&context, block, kernel, params))
}

/// Relative rounding error of an element type.
pub fn epsilon<E: Element>() -> f64 {
    match E::CODE {
        DtypeCode::F32 => f64::from(f32::EPSILON),
        DtypeCode::Bf16 => 1.0 / 256.0,
        DtypeCode::F16 => 1.0 / 2048.0,
    }
}

/// Asserts that every element is the expected one up to `relative` times its size and `absolute`.
#[track_caller]
pub fn assert_close(what: &str, found: &[f32], expected: &[f64], relative: f64, absolute: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (&x, &y)) in found.iter().zip(expected).enumerate() {
        let allowed = relative * y.abs() + absolute;
        assert!((f64::from(x) - y).abs() <= allowed, "{what}: element {i} is {x:e}, expected {y:e}");
    }
}
