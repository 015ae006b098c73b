//! Copies of rows, which on the device are made several elements at a time. Here they are what they stand for.

use super::{Acc, Shared, Warpgroup};
use crate::element::Element;
use crate::params::Matrix;

impl Warpgroup<'_> {
    /// As [`Warpgroup::load`].
    pub fn load_rows(&mut self, tile: Shared<f32>, source: Matrix) {
        self.load(tile, source);
    }

    /// Loads `source` rounded into `tile`, and into `rest` what that loses; where the tiles are larger they become zero.
    pub fn load_split<E: Element>(&mut self, tile: Shared<E>, rest: Shared<E>, source: Matrix) {
        self.load(tile, source);
        self.load_map(rest, source, 0.0, |x| x - E::round(x));
    }

    /// Copies `from` rounded into `tile`, and into `rest` what that loses.
    pub fn split<E: Element>(&mut self, tile: Shared<E>, rest: Shared<E>, from: Shared<f32>) {
        self.convert(tile, from, |x| x);
        self.convert(rest, from, |x| x - E::round(x));
    }

    /// As [`Warpgroup::store`].
    pub fn store_rows(&mut self, target: Matrix, tile: Shared<f32>) {
        self.store(target, tile);
    }
}

impl Acc {
    /// As [`Acc::add_global`].
    pub fn add_rows(&mut self, wg: &mut Warpgroup<'_>, matrix: Matrix) {
        self.add_global(wg, matrix);
    }
}
