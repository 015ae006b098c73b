//! Random upstream gradients.

use super::{Spec, Stream, normal};
use crate::gradients::Upstream;
use crate::inputs::StateLayout;
use crate::tensor::{Buffer, Dtype, Tensor};

/// Generated upstream gradients: the tensors that [`RandomUpstream::view`] borrows.
#[derive(Clone, Debug)]
pub struct RandomUpstream {
    d_o: Tensor,
    d_final_state: Option<Tensor>,
}

impl RandomUpstream {
    /// What the backward pass gets.
    pub fn view(&self) -> Upstream<'_> {
        Upstream { d_o: self.d_o.view(), d_final_state: self.d_final_state.as_ref().map(Tensor::view) }
    }
}

impl Spec {
    /// Draws upstream gradients of the results, standard normal: `do` in the element type of o, and, if asked for, `dht` (the
    /// same ones in either layout of the states).
    pub fn generate_upstream(&self, final_state: bool) -> RandomUpstream {
        let shape = vec![self.b, self.t, self.hv, self.v];
        let d_o = normal(self.rng(Stream::Output), shape.iter().product());
        RandomUpstream {
            d_o: Tensor { shape, data: Buffer::from_f64(self.dtype, d_o) },
            d_final_state: final_state.then(|| self.states(Stream::FinalState)),
        }
    }

    /// Random states of all sequences, the same ones in either layout.
    pub(super) fn states(&self, stream: Stream) -> Tensor {
        let (n, hv, k, v) = (self.sequences(), self.hv, self.k, self.v);
        let k_first = normal(self.rng(stream), n * hv * k * v);
        let (shape, data) = match self.state_layout {
            StateLayout::KFirst => (vec![n, hv, k, v], k_first),
            StateLayout::VFirst => {
                let transposed = k_first.chunks_exact(k * v).flat_map(|s| (0..k * v).map(|i| s[i % k * v + i / k]));
                (vec![n, hv, v, k], transposed.collect())
            }
        };
        Tensor { shape, data: Buffer::from_f64(Dtype::F32, data) }
    }
}
