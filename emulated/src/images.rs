//! Images of matrices, as the bodies for Hopper keep them in global memory.

use half::bf16;
use kernels_gpu::hopper::{IMAGE, PANEL, RECORD, RECORD_A, RECORD_AQK, RECORD_KG, RECORD_QG, RECORD_W};

/// Rows of a panel and of an image.
pub const ROWS: usize = 64;
/// Elements of a panel, an image and a record.
pub const PANEL_LEN: usize = PANEL as usize / 2;
/// See [`PANEL_LEN`].
pub const IMAGE_LEN: usize = IMAGE as usize / 2;
/// See [`PANEL_LEN`].
pub const RECORD_LEN: usize = RECORD as usize / 2;

/// Where element (r, c) lies in panels of 64 columns whose 16-byte pieces are permuted by `piece ^ (row % 8)`.
fn place(r: usize, c: usize) -> usize {
    let (panel, c) = (c / 64, c % 64);
    panel * PANEL_LEN + r * 64 + ((c / 8) ^ (r % 8)) * 8 + c % 8
}

/// The image of a row-major matrix of 64 rows.
fn put(image: &mut [bf16], matrix: &[bf16]) {
    let cols = matrix.len() / ROWS;
    (0..matrix.len()).for_each(|i| image[place(i / cols, i % cols)] = matrix[i]);
}

/// The row-major matrix of an image.
pub fn get(image: &[bf16]) -> Vec<bf16> {
    let cols = image.len() / ROWS;
    (0..image.len()).map(|i| image[place(i / cols, i % cols)]).collect()
}

/// Records of rows, as images.
pub fn records(rows: &[bf16]) -> Vec<bf16> {
    let mut all = vec![bf16::ZERO; rows.len()];
    let ends = [RECORD_A, RECORD_QG, RECORD_AQK, RECORD_KG, RECORD];
    for (image, rows) in all.chunks_exact_mut(RECORD_LEN).zip(rows.chunks_exact(RECORD_LEN)) {
        for (start, end) in [RECORD_W, RECORD_A, RECORD_QG, RECORD_AQK, RECORD_KG].into_iter().zip(ends) {
            let part = start as usize / 2..end as usize / 2;
            put(&mut image[part.clone()], &rows[part]);
        }
    }
    all
}
