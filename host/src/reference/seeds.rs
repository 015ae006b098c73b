//! Upstream gradients in f64: where the backward pass starts.

use super::Problem;
use super::problem::k_first;
use crate::error::InputError;
use crate::gradients::Upstream;

/// Upstream gradients that fit a [`Problem`], widened to f64.
#[derive(Clone, Debug)]
pub struct Seeds {
    d_o: Vec<f64>,
    /// K-first.
    dht: Option<Vec<f64>>,
}

impl Seeds {
    /// Widens `upstream`, whose final-state gradients lie as the states of the inputs do.
    ///
    /// # Errors
    /// [`InputError`] if a shape or the type of the final-state gradients does not fit.
    pub fn new(p: &Problem, upstream: &Upstream<'_>) -> Result<Self, InputError> {
        upstream.check(&p.dims, p.layout, p.sequences.len())?;
        let dht = upstream.d_final_state.as_ref().map(|dht| k_first(dht, p.layout, &p.dims));
        Ok(Self { d_o: upstream.d_o.to_f64(), dht })
    }

    /// Gradient `[V]` of the output of `token`.
    pub fn d_o(&self, p: &Problem, token: usize, head: usize) -> &[f64] {
        &self.d_o[(token * p.dims.hv + head) * p.dims.v..][..p.dims.v]
    }

    /// Gradient `[K,V]` of the final state of a sequence, zero if none was given.
    pub fn d_final_state(&self, p: &Problem, sequence: usize, head: usize) -> Vec<f64> {
        let size = p.dims.k * p.dims.v;
        match &self.dht {
            Some(dht) => dht[(sequence * p.dims.hv + head) * size..][..size].to_vec(),
            None => vec![0.0; size],
        }
    }
}
