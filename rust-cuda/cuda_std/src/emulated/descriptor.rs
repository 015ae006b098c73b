//! Matrix descriptors of `wgmma`, and the numbers in the memory that they describe.

use half::{bf16, f16};

use super::fault::FaultKind;

/// Element type of operands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Half {
    Bf16,
    F16,
}

impl Half {
    pub(crate) fn widen(self, bits: u16) -> f32 {
        match self {
            Half::Bf16 => bf16::from_bits(bits).to_f32(),
            Half::F16 => f16::from_bits(bits).to_f32(),
        }
    }
}

/// An operand in shared memory, of 16 inner elements (K) and `outer` others (M or N), in 128-byte swizzled panels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operand {
    start: u32,
    leading: u32,
    stride: u32,
    outer: u32,
    /// Whether rows of the memory run along M or N.
    outer_major: bool,
}

/// Inner elements of a product.
pub(crate) const INNER: u32 = 16;

impl Operand {
    /// What `descriptor` says (PTX ISA, "Matrix Descriptor Format" of wgmma): the address without its low 4 bits in bits 0
    /// to 13, the leading and the stride byte offset likewise in 16 to 29 and 32 to 45, the base offset in 49 to 51, the
    /// swizzle in 62 and 63.
    pub(crate) fn new(descriptor: u64, outer: u32, outer_major: bool) -> Result<Self, FaultKind> {
        let refuse = |why| Err(FaultKind::Descriptor { descriptor, why });
        let field = |at: u32| ((descriptor >> at & 0x3fff) as u32) << 4;
        let operand = Self { start: field(0), leading: field(16), stride: field(32), outer, outer_major };
        if descriptor >> 62 != 1 {
            return refuse("only the 128-byte swizzle is emulated");
        }
        if descriptor >> 49 & 7 != 0 || operand.start & 0x380 != 0 {
            return refuse("the panel is not aligned to 1024 bytes, and only a base offset of 0 is emulated");
        }
        let in_row = operand.start & 0x7f;
        if outer_major && in_row != 0 {
            return refuse("read by columns, only operands that begin where a panel does are emulated");
        }
        if in_row > 96 {
            return refuse("the operand would reach beyond the rows of 128 bytes");
        }
        Ok(operand)
    }

    /// Shared address of an element.
    fn address(&self, outer: u32, inner: u32) -> u32 {
        let (row, in_row) = if self.outer_major {
            (self.start + outer / 64 * self.leading + inner / 8 * self.stride + inner % 8 * 128, outer % 64 * 2)
        } else {
            (self.start + outer / 8 * self.stride + outer % 8 * 128, inner * 2)
        };
        let address = row + in_row;
        // The three bits that count rows of 128 bytes permute the 16-byte pieces of a row.
        address ^ (address >> 3 & 0x70)
    }

    /// Addresses of the pieces of 16 bytes that it consists of.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = u32> {
        let operand = *self;
        let (rows, per_row) = if self.outer_major { (INNER, self.outer / 8) } else { (self.outer, INNER / 8) };
        (0..rows).flat_map(move |row| {
            (0..per_row).map(move |piece| match operand.outer_major {
                true => operand.address(8 * piece, row),
                false => operand.address(row, 8 * piece),
            })
        })
    }

    /// Bytes of a piece.
    pub(crate) const PIECE: u32 = 16;

    /// Its numbers, `[inner][outer]`, of the bytes that `piece` gives for addresses of [`Operand::pieces`].
    pub(crate) fn numbers<'m>(&self, half: Half, piece: impl Fn(u32) -> &'m [u8], numbers: &mut [f32]) {
        let outer = self.outer as usize;
        for (number, at) in self.pieces().enumerate() {
            let bytes = piece(at);
            for i in 0..8 {
                let x = half.widen(u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]));
                let (inner, other) = if self.outer_major {
                    (number / (outer / 8), number % (outer / 8) * 8 + i)
                } else {
                    (number % 2 * 8 + i, number / 2)
                };
                numbers[inner * outer + other] = x;
            }
        }
    }
}
