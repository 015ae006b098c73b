//! The backward pass chunk by chunk, in the WY form: matrices in place of tokens.

use std::ops::Range;

use ndarray::{Array2, Axis, s};

use super::chunked::{Chunk, decayed, rows};
use super::seeds::Seeds;
use super::{HeadGradients, Problem};

/// Gradients of one run of tokens of one value head, from the state `s_in` `[K,V]` before it and the gradient `ds_out` of
/// the state after it. The run is cut into chunks from its start.
pub(super) fn walk(
    p: &Problem,
    seeds: &Seeds,
    head: usize,
    tokens: Range<usize>,
    chunk: usize,
    s_in: &[f64],
    ds_out: &[f64],
) -> HeadGradients {
    let shape = (p.dims.k, p.dims.v);
    let mut state = Array2::from_shape_vec(shape, s_in.to_vec()).expect("a state is [K,V]");
    let mut ds = Array2::from_shape_vec(shape, ds_out.to_vec()).expect("a state's gradient is [K,V]");
    let mut kept = Vec::new();
    for start in tokens.clone().step_by(chunk) {
        let range = start..(start + chunk).min(tokens.end);
        let next = Chunk::new(p, head, range.clone()).forward(&state).1;
        kept.push((range, std::mem::replace(&mut state, next)));
    }
    let mut found = HeadGradients::zeros(p, tokens.len(), &[]);
    for (range, state) in kept.into_iter().rev() {
        let chunk = Chunk::new(p, head, range.clone());
        let d_o = rows(&range, p.dims.v, |t| seeds.d_o(p, t, head));
        let first = range.start - tokens.start;
        let gradients = backward(&chunk, p.scale, &state, &d_o, &ds);
        let put = |to: &mut [f64], from: &Array2<f64>| {
            let start = first * from.ncols();
            to[start..start + from.len()].iter_mut().zip(from.iter()).for_each(|(to, from)| *to = *from);
        };
        put(&mut found.dq, &gradients.dq);
        put(&mut found.dk, &gradients.dk);
        put(&mut found.dv, &gradients.dv);
        put(&mut found.dg, &gradients.dg);
        put(&mut found.dbeta, &gradients.dbeta);
        ds = gradients.ds;
    }
    found.d_state = ds.iter().copied().collect();
    found
}

/// Gradients of one chunk of n tokens.
struct ChunkGradients {
    /// `[n,K]`.
    dq: Array2<f64>,
    /// `[n,K]`.
    dk: Array2<f64>,
    /// `[n,V]`.
    dv: Array2<f64>,
    /// `[n,K]`.
    dg: Array2<f64>,
    /// `[n,1]`.
    dbeta: Array2<f64>,
    /// `[K,V]`, of the state before the chunk.
    ds: Array2<f64>,
}

/// Back over one chunk, from the state `state` before it and the gradients `d_o` `[n,V]` of its outputs and `ds` of the state
/// after it. `c.q` has the factor `scale` in it, and so has every product with it here.
fn backward(c: &Chunk, scale: f64, state: &Array2<f64>, d_o: &Array2<f64>, ds: &Array2<f64>) -> ChunkGradients {
    let n = c.k.nrows();
    let rowsum = |x: Array2<f64>| x.sum_axis(Axis(1)).insert_axis(Axis(1));
    let strict = |mut x: Array2<f64>| {
        x.indexed_iter_mut().for_each(|((i, j), x)| *x = if j < i { *x } else { 0.0 });
        x
    };
    let a = c.inverse();
    let w = a.dot(&(&c.k * &c.decay * &c.beta));
    let v_new = a.dot(&(&c.v * &c.beta)) - w.dot(state);

    // o = qg S + Aqk v_new,  S' = Diag(exp G_last) S + kg^T v_new
    let d_v_new = c.aqk.t().dot(d_o) + c.kg.dot(ds);
    let d_aqk = d_o.dot(&v_new.t()); // its lower triangle counts, with the diagonal
    let dq_inter = &c.decay * &d_o.dot(&state.t());
    let dk_end = &c.to_end * &v_new.dot(&ds.t());

    // v_new = A (beta v) - A (beta exp(G) k) S,  A = (I + Akk)^-1
    let dw = -d_v_new.dot(&state.t());
    let da = strict((d_v_new.dot(&c.v.t()) + dw.dot(&(&c.k * &c.decay).t())) * c.beta.t());
    let (dvb, dkb) = (a.t().dot(&d_v_new), a.t().dot(&dw));
    let d_akk = -strict(a.t().dot(&da).dot(&a.t()));

    // Aqk_ij = q_i . k_j exp(G_i - G_j),  Akk_ij = beta_i k_i . k_j exp(G_i - G_j)
    let zeros = || Array2::<f64>::zeros(c.k.raw_dim());
    let (mut dq_intra, mut dk_row, mut dk_column) = (zeros(), zeros(), zeros());
    for i in 0..n {
        for j in 0..=i {
            let kj = decayed(c.k.row(j), c.g.row(i), c.g.row(j));
            dq_intra.row_mut(i).scaled_add(d_aqk[[i, j]], &kj);
            dk_row.row_mut(i).scaled_add(d_akk[[i, j]], &kj);
            let qi = decayed(c.q.row(i), c.g.row(i), c.g.row(j));
            let ki = decayed(c.k.row(i), c.g.row(i), c.g.row(j));
            dk_column.row_mut(j).scaled_add(d_aqk[[i, j]], &qi);
            dk_column.row_mut(j).scaled_add(d_akk[[i, j]] * c.beta[[i, 0]], &ki);
        }
    }

    // What each factor exp(G_i), exp(-G_j), exp(G_last - G_j) stands beside says what its exponent's gradient is.
    let dk_start = &c.beta * &c.decay * &dkb;
    let dk_row_beta = &c.beta * &dk_row;
    let mut dg = &c.q * &(&dq_inter + &dq_intra) + &c.k * &(&dk_start + &dk_row_beta - &dk_column - &dk_end);
    let decay_end = c.g.row(n - 1).mapv(f64::exp);
    let last = (state * ds).sum_axis(Axis(1)) * &decay_end + (&c.k * &dk_end).sum_axis(Axis(0));
    dg.row_mut(n - 1).zip_mut_with(&last, |dg, last| *dg += last);
    // g_i is part of G of every later token of the chunk.
    for i in (0..n - 1).rev() {
        let (mut here, later) = dg.multi_slice_mut((s![i, ..], s![i + 1, ..]));
        here += &later;
    }

    ChunkGradients {
        dbeta: rowsum(&dvb * &c.v) + rowsum(&dkb * &c.k * &c.decay) + rowsum(&dk_row * &c.k),
        dq: scale * (dq_inter + dq_intra),
        dk: dk_end + dk_start + dk_row_beta + dk_column,
        dv: &c.beta * &dvb,
        dg,
        ds: ds * &decay_end.insert_axis(Axis(1)) + c.qg.t().dot(d_o) - w.t().dot(&d_v_new),
    }
}
