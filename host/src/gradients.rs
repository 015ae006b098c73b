//! What the backward pass gets from later layers and what it returns.

use crate::tensor::{Tensor, TensorView};

/// Upstream gradients: of a scalar loss L with respect to the results of the forward pass. Of the whole batch, or of what
/// one PE holds of it.
#[derive(Clone, Debug)]
pub struct Upstream<'a> {
    /// dL/do, `[B,T,HV,V]`, in the element type of o.
    pub d_o: TensorView<'a>,
    /// dL/dht, f32, in the shape and layout of the final states; absent means zero.
    /// On a PE of a context-parallel group: one row for each sequence that ends there.
    pub d_final_state: Option<TensorView<'a>>,
}

/// Gradients with respect to everything that [`crate::inputs::Inputs`] holds, each in the shape of its input.
///
/// Gradients of tensors that are read as they stand (raw q and k where the rows are normalised, gate inputs, logits of beta)
/// are those of the tensors as given. Element types: `dq`, `dk`, `dv` as their inputs, everything else f32.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// `[B,T,H,K]`, summed over the value heads of a group.
    pub dq: Tensor,
    /// `[B,T,H,K]`, summed over the value heads of a group.
    pub dk: Tensor,
    /// `[B,T,HV,V]`.
    pub dv: Tensor,
    /// Of g itself, or of the raw gate input; f32 `[B,T,HV,K]` (KDA) or `[B,T,HV]` (GDN).
    pub dg: Tensor,
    /// Of beta itself, or of its logits; f32 `[B,T,HV]`.
    pub dbeta: Tensor,
    /// f32 `[HV]`, if the gate has `A_log`. On a PE: this PE's share of the sum over tokens.
    pub da_log: Option<Tensor>,
    /// f32, shape of `dt_bias`, if the gate has one. On a PE: this PE's share of the sum over tokens.
    pub ddt_bias: Option<Tensor>,
    /// f32, shape and layout of the initial states, if there are any.
    pub d_initial_state: Option<Tensor>,
}
