//! Chunk by chunk, in the WY form: what the kernels compute, with matrices in place of tokens.

use std::ops::Range;

use ndarray::{Array1, Array2, ArrayView1, Axis};
use rayon::prelude::*;

use super::{HeadOutputs, Outputs, Problem, heads};

/// The WY form with chunks of `chunk` tokens. Chunks start afresh at every sequence; the last one may be shorter.
///
/// # Panics
/// If `chunk` is 0.
pub fn chunked(p: &Problem, chunk: usize) -> Outputs {
    assert!(chunk > 0, "a chunk needs at least one token");
    let (k, v) = (p.dims.k, p.dims.v);
    let parts = heads(p)
        .into_par_iter()
        .map(|(n, head)| {
            let mut state = Array2::from_shape_vec((k, v), p.initial_state(n, head)).expect("a state is [K,V]");
            let tokens = p.sequences[n].tokens();
            let mut o = Vec::with_capacity(tokens.len() * v);
            for start in tokens.clone().step_by(chunk) {
                let chunk = Chunk::new(p, head, start..(start + chunk).min(tokens.end));
                let (rows, next) = chunk.forward(&state);
                o.extend(rows.iter());
                state = next;
            }
            HeadOutputs { o, state: state.iter().copied().collect() }
        })
        .collect();
    Outputs::gather(p, parts)
}

/// What one chunk of n tokens is before any state comes to it.
pub(super) struct Chunk {
    /// `[n,K]`, with the factor scale.
    pub q: Array2<f64>,
    /// `[n,K]`.
    pub k: Array2<f64>,
    /// `[n,V]`.
    pub v: Array2<f64>,
    /// `[n,1]`.
    pub beta: Array2<f64>,
    /// `[n,K]`: `G_i`, the sum of g up to and including token i.
    pub g: Array2<f64>,
    /// `[n,K]`: `exp(G_i)`.
    pub decay: Array2<f64>,
    /// `[n,K]`: `exp(G_last - G_i)`.
    pub to_end: Array2<f64>,
    /// `[n,K]`: `scale q exp(G)`.
    pub qg: Array2<f64>,
    /// `[n,K]`: `k exp(G_last - G)`.
    pub kg: Array2<f64>,
    /// `[n,n]`, zero above the diagonal: `scale q_i . k_j exp(G_i - G_j)`.
    pub aqk: Array2<f64>,
    /// `[n,n]`, only what lies below the diagonal is used: `beta_i k_i . k_j exp(G_i - G_j)`.
    pub akk: Array2<f64>,
}

impl Chunk {
    pub fn new(p: &Problem, head: usize, tokens: Range<usize>) -> Self {
        let q = p.scale * rows(&tokens, p.dims.k, |t| p.q(t, head));
        let k = rows(&tokens, p.dims.k, |t| p.k(t, head));
        let v = rows(&tokens, p.dims.v, |t| p.v(t, head));
        let beta = Array1::from_iter(tokens.clone().map(|t| p.beta(t, head))).insert_axis(Axis(1));

        let mut g = rows(&tokens, p.dims.k, |t| p.g(t, head));
        g.accumulate_axis_inplace(Axis(0), |before, g| *g += before);
        let decay = g.mapv(f64::exp);
        let to_end = (&g.row(g.nrows() - 1) - &g).mapv(f64::exp);

        // Both triangles weigh token j by its decay up to token i. The exponents are differences, so they are never positive.
        let n = k.nrows();
        let (mut akk, mut aqk) = (Array2::zeros((n, n)), Array2::zeros((n, n)));
        for i in 0..n {
            for j in 0..=i {
                let kj = decayed(k.row(j), g.row(i), g.row(j));
                aqk[[i, j]] = q.row(i).dot(&kj);
                akk[[i, j]] = beta[[i, 0]] * k.row(i).dot(&kj);
            }
        }
        Self { qg: &q * &decay, kg: &k * &to_end, q, k, v, beta, g, decay, to_end, aqk, akk }
    }

    /// `o` `[n,V]` and the state after the chunk, from the state `s` before it.
    pub fn forward(&self, s: &Array2<f64>) -> (Array2<f64>, Array2<f64>) {
        let u = solve_unit_lower(&self.akk, &self.v * &self.beta); // A (beta v), with A = (I + strict_lower(Akk))^-1
        let w = solve_unit_lower(&self.akk, &self.k * &self.decay * &self.beta); // A (beta exp(G) k)
        let v_new = u - w.dot(s);
        let o = self.qg.dot(s) + self.aqk.dot(&v_new);
        let last = self.decay.row(self.decay.nrows() - 1).insert_axis(Axis(1));
        (o, s * &last + self.kg.t().dot(&v_new))
    }

    /// `A = (I + strict_lower(Akk))^-1`, `[n,n]`.
    pub fn inverse(&self) -> Array2<f64> {
        solve_unit_lower(&self.akk, Array2::eye(self.akk.nrows()))
    }
}

/// The rows of `tokens`, stacked.
pub(super) fn rows<'a>(tokens: &Range<usize>, width: usize, row: impl Fn(usize) -> &'a [f64]) -> Array2<f64> {
    let data = tokens.clone().flat_map(row).copied().collect();
    Array2::from_shape_vec((tokens.len(), width), data).expect("every row has `width` elements")
}

/// `k exp(to - from)`, channel by channel.
pub(super) fn decayed(k: ArrayView1<'_, f64>, to: ArrayView1<'_, f64>, from: ArrayView1<'_, f64>) -> Array1<f64> {
    ndarray::Zip::from(k).and(to).and(from).map_collect(|k, to, from| k * (to - from).exp())
}

/// `(I + strict_lower(l))^-1 x` by forward substitution; the diagonal of `l` and what lies above it are not read.
fn solve_unit_lower(l: &Array2<f64>, mut x: Array2<f64>) -> Array2<f64> {
    for i in 1..x.nrows() {
        let (above, mut rest) = x.view_mut().split_at(Axis(0), i);
        let mut row = rest.row_mut(0);
        for (j, known) in above.rows().into_iter().enumerate() {
            row.scaled_add(-l[[i, j]], &known);
        }
    }
    x
}

#[cfg(test)]
mod tests {
    use ndarray::array;

    use super::*;

    #[test]
    fn forward_substitution_inverts_the_unit_lower_triangle() {
        // 9 marks what must not be read.
        let l = array![[9., 9., 9.], [0.5, 9., 9.], [-2., 3., 9.]];
        let x = array![[1., 2.], [3., 4.], [5., 6.]];
        let unit = array![[1., 0., 0.], [0.5, 1., 0.], [-2., 3., 1.]];
        assert_eq!(unit.dot(&solve_unit_lower(&l, x.clone())), x);
    }
}
