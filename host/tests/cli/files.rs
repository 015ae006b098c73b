//! Input files made for a test.

use std::path::{Path, PathBuf};

use deltalink::file::{Entry, save};
use deltalink::tensor::{Buffer, Dtype, Tensor};
use tempfile::TempDir;

/// A folder with one small GDN problem, of which tests spoil a part.
pub struct Problem {
    pub folder: TempDir,
    pub tensors: Vec<(&'static str, Tensor)>,
    pub offsets: Vec<(&'static str, Vec<i64>)>,
    pub metadata: Vec<(&'static str, String)>,
}

impl Problem {
    /// `t` tokens, H = HV = 2, K = V = 16, f32.
    pub fn new(t: usize) -> Self {
        let tensor = |seed: usize, shape: &[usize], map: fn(f64) -> f64| {
            let len: usize = shape.iter().product();
            // A fractional part of multiples of an irrational number: evenly spread over (-1, 1).
            let value = |i: usize| map((i * 7 + seed) as f64 * 0.754_877_666_246_692_8 % 1.0 * 2.0 - 1.0);
            Tensor { shape: shape.to_vec(), data: Buffer::from_f64(Dtype::F32, (0..len).map(value)) }
        };
        let tensors = vec![
            ("q", tensor(1, &[1, t, 2, 16], |x| 0.4 * x)),
            ("k", tensor(2, &[1, t, 2, 16], |x| 0.4 * x)),
            ("v", tensor(3, &[1, t, 2, 16], |x| x)),
            ("g", tensor(4, &[1, t, 2], |x| -0.02 - 0.01 * x)),
            ("beta", tensor(5, &[1, t, 2], |x| 0.5 + 0.4 * x)),
        ];
        let folder = tempfile::tempdir().expect("a temporary folder");
        Self { folder, tensors, offsets: Vec::new(), metadata: vec![("op", "gdn".into())] }
    }

    /// Replaces tensor `name`.
    pub fn tensor(mut self, name: &'static str, shape: &[usize], value: f64) -> Self {
        let len: usize = shape.iter().product();
        let data = Buffer::from_f64(Dtype::F32, std::iter::repeat_n(value, len));
        self.tensors.retain(|(other, _)| *other != name);
        self.tensors.push((name, Tensor { shape: shape.to_vec(), data }));
        self
    }

    /// Sets one element of tensor `name`.
    pub fn element(mut self, name: &str, index: usize, value: f32) -> Self {
        let (_, tensor) = self.tensors.iter_mut().find(|(other, _)| *other == name).expect("the tensor");
        let Buffer::F32(data) = &mut tensor.data else { panic!("{name} is not f32") };
        data[index] = value;
        self
    }

    /// Adds a vector of offsets, in place of a tensor of that name.
    pub fn offsets(mut self, name: &'static str, values: &[i64]) -> Self {
        self.tensors.retain(|(other, _)| *other != name);
        self.offsets.push((name, values.to_vec()));
        self
    }

    pub fn metadata(mut self, key: &'static str, value: &str) -> Self {
        self.metadata.retain(|(other, _)| *other != key);
        self.metadata.push((key, value.into()));
        self
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes the file and returns its path as an argument.
    pub fn input(&self) -> String {
        let tensors = self.tensors.iter().map(|(name, tensor)| (*name, Entry::Tensor(tensor)));
        let offsets = self.offsets.iter().map(|(name, values)| (*name, Entry::Offsets(values)));
        let entries: Vec<_> = tensors.chain(offsets).collect();
        let path = self.path("in.safetensors");
        save(&path, &entries, &self.metadata).expect("the input is written");
        argument(&path)
    }
}

pub fn argument(path: &Path) -> String {
    path.to_str().expect("UTF-8").to_owned()
}
