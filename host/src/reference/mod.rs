//! The oracle: Kimi Delta Attention and Gated DeltaNet in f64, written to be read.
//!
//! Per value head, with the state `S` a K x V matrix, every token does
//!
//! ```text
//! S <- Diag(exp g_t) S                         decay first (GDN: one g for all channels)
//! S <- S + beta_t k_t (v_t - S^T k_t)^T        then erase and write
//! o_t = scale * S^T q_t                        the output sees the updated state
//! ```
//!
//! [`recurrent`] is this, token by token; [`chunked`] is the same in the WY form in which kernels compute it. The two share
//! only [`Problem`], so that each checks the other. [`segment_summary`], [`state_at`] and [`transition_weight`] say what
//! context parallelism sends: any run of tokens maps the state affinely, `S_out = M S_in + S_ext`.
//!
//! The backward pass has the same two forms: [`backward`] is the adjoint of the recurrence, [`backward_chunked`] that of the
//! chunks. [`gradient_summary`], [`state_gradient_after`] and [`segment_gradients`] say what context parallelism sends back:
//! `dS_in = M^T dS_out + dS_ext`, with the M of the forward pass.
//!
//! [`convolution`] is the short convolution that models put before q, k and v.
//!
//! Formulas: Yang et al., "Gated Delta Networks" (2024), and Kimi Team, "Kimi Linear" (2025).

mod activation;
mod adjoint;
mod adjoint_chunked;
mod backward;
mod chunked;
mod convolution;
mod problem;
mod recurrent;
mod seeds;
mod segment;
mod segment_backward;

pub use backward::{HeadGradients, backward, backward_chunked};
pub use chunked::chunked;
pub use convolution::{
    Activation, Convolution, ConvolutionError, ConvolutionGradients, ConvolutionOutputs, convolution,
    convolution_backward,
};
pub use problem::{Problem, ProblemError, Sequence};
pub use recurrent::recurrent;
pub use seeds::Seeds;
pub use segment::{TransitionWeight, segment_summary, state_at, transition_weight};
pub use segment_backward::{gradient_summary, segment_gradients, state_gradient_after};

/// What the forward pass returns.
#[derive(Clone, Debug, PartialEq)]
pub struct Outputs {
    /// `[B,T,HV,V]`.
    pub o: Vec<f64>,
    /// Final states `[N,HV,K,V]`, K-first whatever the layout of the initial states.
    pub ht: Vec<f64>,
}

impl Outputs {
    /// Puts together what [`heads`] computed.
    fn gather(p: &Problem, parts: Vec<HeadOutputs>) -> Self {
        let d = p.dims;
        let mut o = vec![0.0; d.b * d.t * d.hv * d.v];
        let mut ht = Vec::with_capacity(p.sequences.len() * d.hv * d.k * d.v);
        for (part, (sequence, head)) in parts.into_iter().zip(heads(p)) {
            for (token, row) in p.sequences[sequence].tokens().zip(part.o.chunks_exact(d.v)) {
                o[(token * d.hv + head) * d.v..][..d.v].copy_from_slice(row);
            }
            ht.extend(part.state);
        }
        Outputs { o, ht }
    }
}

/// One value head of one sequence: `o` is `[tokens,V]`, `state` is `[K,V]`.
struct HeadOutputs {
    o: Vec<f64>,
    state: Vec<f64>,
}

/// Every independent piece of work, as (sequence, value head), in the order of `ht`.
fn heads(p: &Problem) -> Vec<(usize, usize)> {
    (0..p.sequences.len()).flat_map(|n| (0..p.dims.hv).map(move |hv| (n, hv))).collect()
}
