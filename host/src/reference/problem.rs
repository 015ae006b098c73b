//! The inputs, widened to f64 and with everything done that happens once per token and needs no state.

use std::ops::Range;

use super::activation::{Slopes, log_decay, normalise_rows, step_size};
use crate::error::InputError;
use crate::inputs::{Dims, Inputs, Op, StateLayout};
use crate::tensor::TensorView;

/// The tokens `start..end` of one sequence, counted over the flattened `[B*T]` tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// First token.
    pub start: usize,
    /// One past the last token; equal to `start` for an empty sequence.
    pub end: usize,
}

impl Sequence {
    /// The tokens as a range.
    pub fn tokens(&self) -> Range<usize> {
        self.start..self.end
    }
}

/// The inputs do not describe a computation.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum ProblemError {
    #[error(transparent)]
    Input(#[from] InputError),
    #[error("cu_seqlens is given and B = {b}; packed sequences need B = 1, with all tokens in one row")]
    PackedBatch { b: usize },
    #[error("cu_seqlens is {found:?}; it must start at 0, never decrease and end at T = {t}")]
    CuSeqlens { found: Vec<usize>, t: usize },
    #[error("h0 has {found} rows, there are {want} sequences; it needs one row per sequence")]
    StateRows { found: usize, want: usize },
}

/// A problem in f64: q and k normalised if asked, gate and beta activated, initial states K-first.
#[derive(Clone, Debug)]
pub struct Problem {
    /// Which delta rule.
    pub op: Op,
    /// Sizes.
    pub dims: Dims,
    /// Factor of q.
    pub scale: f64,
    /// The sequences, in order: the packed ones, or one per batch row.
    pub sequences: Vec<Sequence>,
    pub(super) q: Vec<f64>,
    pub(super) k: Vec<f64>,
    v: Vec<f64>,
    g: Vec<f64>,
    beta: Vec<f64>,
    h0: Option<Vec<f64>>,
    /// Layout of the states that the caller sees.
    pub(super) layout: StateLayout,
    /// What of the activations the backward pass needs.
    pub(super) slopes: Slopes,
}

impl Problem {
    /// Widens and activates `inputs`. `cu_seqlens` (`[N+1]`, B = 1) packs N sequences into one row; without it every batch
    /// row is a sequence.
    ///
    /// # Errors
    /// [`ProblemError`], if shapes, types, `cu_seqlens` or the number of initial states do not fit together.
    pub fn new(inputs: &Inputs<'_>, cu_seqlens: Option<&[usize]>) -> Result<Self, ProblemError> {
        let dims = inputs.dims()?;
        inputs.check_on_host()?;
        let sequences = sequences(dims.b, dims.t, cu_seqlens)?;
        if let Some(h0) = &inputs.initial_state
            && h0.shape()[0] != sequences.len()
        {
            return Err(ProblemError::StateRows { found: h0.shape()[0], want: sequences.len() });
        }
        let mut q = inputs.q.to_f64();
        let mut k = inputs.k.to_f64();
        let normalise = |x: &mut [f64]| inputs.l2norm.then(|| normalise_rows(x, dims.k));
        let (q_norm, k_norm) = (normalise(&mut q), normalise(&mut k));
        let (g, gate) = log_decay(inputs.op, &inputs.gate, &dims);
        let (beta, beta_slope) = step_size(&inputs.beta);
        Ok(Self {
            op: inputs.op,
            dims,
            scale: inputs.scale.map_or_else(|| (dims.k as f64).powf(-0.5), f64::from),
            sequences,
            q,
            k,
            v: inputs.v.to_f64(),
            g,
            beta,
            h0: inputs.initial_state.as_ref().map(|h0| k_first(h0, inputs.state_layout, &dims)),
            layout: inputs.state_layout,
            slopes: Slopes { q_norm, k_norm, gate, beta: beta_slope },
        })
    }

    /// Query row `[K]` that value head `head` reads at `token`.
    pub fn q(&self, token: usize, head: usize) -> &[f64] {
        &self.q[self.shared_head(token, head) * self.dims.k..][..self.dims.k]
    }

    /// Key row `[K]` that value head `head` reads at `token`.
    pub fn k(&self, token: usize, head: usize) -> &[f64] {
        &self.k[self.shared_head(token, head) * self.dims.k..][..self.dims.k]
    }

    /// Value row `[V]`.
    pub fn v(&self, token: usize, head: usize) -> &[f64] {
        &self.v[(token * self.dims.hv + head) * self.dims.v..][..self.dims.v]
    }

    /// Natural-log decay of every key channel, `[K]`; GDN's single decay is repeated.
    pub fn g(&self, token: usize, head: usize) -> &[f64] {
        &self.g[(token * self.dims.hv + head) * self.dims.k..][..self.dims.k]
    }

    /// Step size.
    pub fn beta(&self, token: usize, head: usize) -> f64 {
        self.beta[token * self.dims.hv + head]
    }

    /// Initial state `[K,V]` of a sequence, zero if none was given.
    pub fn initial_state(&self, sequence: usize, head: usize) -> Vec<f64> {
        let size = self.dims.k * self.dims.v;
        match &self.h0 {
            Some(h0) => h0[(sequence * self.dims.hv + head) * size..][..size].to_vec(),
            None => vec![0.0; size],
        }
    }

    /// Whether initial states were given.
    pub(super) fn has_initial_state(&self) -> bool {
        self.h0.is_some()
    }

    /// Largest `|dg / d raw|` (1 where g itself is given) and `|dg / d A_log|` (0 without one): by so much errors of dg grow on
    /// their way to the gradients of the gate's input and parameters.
    pub fn gate_steepness(&self) -> (f64, f64) {
        let largest = |x: &[f64]| x.iter().map(|x| x.abs()).fold(0.0, f64::max);
        match &self.slopes.gate {
            None => (1.0, 0.0),
            Some(slopes) => (largest(&slopes.raw), slopes.a_log.as_deref().map_or(0.0, largest)),
        }
    }

    /// The sequence that owns `token` of the flattened tokens.
    pub fn sequence_of(&self, token: usize) -> Option<usize> {
        self.sequences.iter().position(|s| s.tokens().contains(&token))
    }

    /// Row of q and k: HV / H neighbouring value heads share one query/key head.
    pub(super) fn shared_head(&self, token: usize, head: usize) -> usize {
        token * self.dims.h + head / (self.dims.hv / self.dims.h)
    }
}

/// The sequences of `[B,T]` tokens: the packed ones, or one per batch row.
pub(super) fn sequences(b: usize, t: usize, cu_seqlens: Option<&[usize]>) -> Result<Vec<Sequence>, ProblemError> {
    let Some(cu) = cu_seqlens else {
        return Ok((0..b).map(|b| Sequence { start: b * t, end: (b + 1) * t }).collect());
    };
    if b != 1 {
        return Err(ProblemError::PackedBatch { b });
    }
    if cu.first() != Some(&0) || cu.last() != Some(&t) || !cu.is_sorted() {
        return Err(ProblemError::CuSeqlens { found: cu.to_vec(), t });
    }
    Ok(cu.windows(2).map(|w| Sequence { start: w[0], end: w[1] }).collect())
}

/// States `[N,HV,K,V]`.
pub(super) fn k_first(state: &TensorView<'_>, layout: StateLayout, dims: &Dims) -> Vec<f64> {
    let data = state.to_f64();
    match layout {
        StateLayout::KFirst => data,
        StateLayout::VFirst => data
            .chunks_exact(dims.v * dims.k)
            .flat_map(|s| (0..dims.k * dims.v).map(|i| s[i % dims.v * dims.k + i / dims.v]))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dims(b: usize, t: usize) -> Dims {
        Dims { b, t, h: 1, hv: 2, k: 16, v: 16 }
    }

    #[test]
    fn sequences_follow_batch_rows_or_cu_seqlens() {
        let rows = sequences(2, 5, None).unwrap();
        assert_eq!(rows, [Sequence { start: 0, end: 5 }, Sequence { start: 5, end: 10 }]);
        let packed = sequences(1, 5, Some(&[0, 2, 2, 5])).unwrap();
        assert_eq!(packed.iter().map(|s| s.end - s.start).collect::<Vec<_>>(), [2, 0, 3]);
    }

    #[test]
    fn bad_cu_seqlens_are_refused() {
        for cu in [&[][..], &[0, 4], &[1, 5], &[0, 3, 2, 5]] {
            let error = sequences(1, 5, Some(cu)).unwrap_err();
            assert!(matches!(error, ProblemError::CuSeqlens { t: 5, .. }), "{cu:?}: {error}");
        }
        assert_eq!(sequences(2, 5, Some(&[0, 5])), Err(ProblemError::PackedBatch { b: 2 }));
    }

    #[test]
    fn v_first_states_are_transposed() {
        let d = Dims { k: 3, v: 2, ..dims(1, 1) };
        let data: [f32; 6] = [0., 1., 2., 10., 11., 12.]; // row v holds channels k
        let view = TensorView::new(&[1, 1, 2, 3], &data[..]).unwrap();
        assert_eq!(k_first(&view, StateLayout::VFirst, &d), [0., 10., 1., 11., 2., 12.]);
    }
}
