//! A step's tables and words in one block of memory, so that they go to a device in one copy.

use bytemuck::{Pod, Zeroable};
use kernels_gpu::params::Array;

/// A place in an [`Image`].
#[derive(Clone, Copy, Debug)]
pub struct Part {
    offset: usize,
    len: usize,
}

impl Part {
    /// The array at this place, if the image lies at `base`.
    pub fn at(&self, base: u64) -> Array {
        Array { addr: base + self.offset as u64, len: self.len as u64 }
    }
}

/// The block under construction, and as read back.
#[derive(Clone, Debug, Default)]
pub struct Image {
    words: Vec<u64>,
}

impl Image {
    /// Appends values, aligned to 16 bytes.
    pub fn push<T: Pod>(&mut self, values: &[T]) -> Part {
        const { assert!(align_of::<T>() <= 8) };
        let offset = self.words.len().next_multiple_of(2) * 8;
        self.words.resize(offset / 8 + size_of_val(values).div_ceil(8), 0);
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
        bytes[offset..][..size_of_val(values)].copy_from_slice(bytemuck::cast_slice(values));
        Part { offset, len: values.len() }
    }

    /// Appends `count` zeros.
    pub fn push_zeroed<T: Pod>(&mut self, count: usize) -> Part {
        self.push(&vec![T::zeroed(); count])
    }

    /// The values at `part`.
    ///
    /// # Panics
    /// If they are not what was pushed there.
    pub fn get<T: Pod + Zeroable>(&self, part: Part) -> Vec<T> {
        let bytes: &[u8] = bytemuck::cast_slice(&self.words);
        bytemuck::pod_collect_to_vec(&bytes[part.offset..][..part.len * size_of::<T>()])
    }

    /// All of it.
    pub fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words)
    }

    /// All of it, to be overwritten with what kernels left.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_aligned_and_come_back() {
        let mut image = Image::default();
        let a = image.push(&[1u32, 2, 3]);
        let b = image.push_zeroed::<u64>(2);
        let c = image.push(&[7u64]);
        assert_eq!((a.at(256).addr, b.at(256).addr, c.at(256).addr), (256, 272, 288));
        assert_eq!(
            (image.get::<u32>(a), image.get::<u64>(b), image.get::<u64>(c)),
            (vec![1, 2, 3], vec![0, 0], vec![7])
        );
        image.bytes_mut()[16] = 9;
        assert_eq!(image.get::<u64>(b), [9, 0]);
    }

    #[test]
    fn an_empty_part_is_an_empty_array() {
        let mut image = Image::default();
        let none = image.push::<u32>(&[]);
        assert_eq!(none.at(64).len, 0);
        assert!(image.get::<u32>(none).is_empty());
    }
}
