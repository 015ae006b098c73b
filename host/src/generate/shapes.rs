//! The one list of shapes that tests and `verify` walk through.

use super::Spec;

/// Small to large head dimensions (K = V and K != V), token counts around chunk borders, shared query/key heads, batches,
/// packed sequences with empty and one-token ones. Only shape fields differ from [`Spec::default`]; use them as
/// `Spec { dtype, decay, ..shape }`.
pub fn shapes() -> Vec<Spec> {
    let row = |b, t, h, hv, k, v| Spec { b, t, h, hv, k, v, ..Spec::default() };
    let packed = |cu: &[usize], h, hv, k, v| Spec {
        t: cu.last().copied().unwrap_or(0),
        cu_seqlens: Some(cu.to_vec()),
        h,
        hv,
        k,
        v,
        ..Spec::default()
    };
    vec![
        row(1, 1, 1, 1, 16, 16),
        row(1, 5, 1, 2, 16, 32),
        row(1, 63, 2, 2, 32, 16),
        row(1, 64, 1, 2, 64, 64),
        row(1, 65, 2, 4, 48, 80),
        row(2, 77, 2, 2, 80, 48),
        row(3, 130, 1, 3, 16, 64),
        row(1, 200, 1, 4, 112, 64),
        row(2, 128, 1, 1, 64, 112),
        row(1, 257, 2, 2, 128, 128),
        row(1, 192, 1, 2, 128, 256),
        row(1, 96, 1, 1, 256, 128),
        row(1, 70, 1, 1, 256, 256),
        packed(&[0, 0, 1, 66, 66, 130, 131], 1, 2, 32, 48),
        packed(&[0, 64, 128, 192], 2, 2, 64, 32),
        packed(&[0, 17, 150, 150], 1, 3, 48, 48),
        packed(&[0, 1, 2, 3, 200, 201], 2, 4, 16, 16),
        packed(&[0, 300], 1, 1, 128, 64),
    ]
}
