//! Memory for results, and whether the tensors of a call lie where it can use them.

use super::{Forward, Report};
use crate::error::InputError;
use crate::gradients::Gradients;
use crate::inputs::{Dims, Inputs, StateLayout};
use crate::plan::RankPlan;
use crate::tensor::{Dtype, Location, Tensor, TensorView, TensorViewMut};
use crate::trace::Trace;

/// Memory that the caller gives for the results of a forward call, in shapes and types of [`Forward`]. All of it is written.
#[derive(Debug)]
pub struct ForwardOut<'a> {
    /// `[B,T,HV,V]`, in the element type of q.
    pub o: TensorViewMut<'a>,
    /// f32 `[n,HV,K,V]` (or `[n,HV,V,K]`) for the `n` sequences that end on this PE; there if
    /// [`Config::final_state`](super::Config::final_state) asks for it, and only then.
    pub final_state: Option<TensorViewMut<'a>>,
}

/// Memory that the caller gives for the results of a backward call, in shapes and types of [`Gradients::zeros`]. All of it is
/// written.
pub type BackwardOut<'a> = Gradients<TensorViewMut<'a>>;

/// What a call returns whose results go into the caller's memory.
#[derive(Clone, Debug)]
pub struct Done {
    /// Counts and times.
    pub report: Report,
    /// The timeline, if [`Config::trace`](super::Config::trace) asks for it.
    pub trace: Option<Trace>,
}

impl Forward {
    /// Zeros for the results of a call.
    pub(super) fn zeros(inputs: &Inputs<'_>, dims: &Dims, rank: &RankPlan, final_state: bool) -> Self {
        let [o, states] = shapes(inputs, dims, rank);
        let final_state = final_state.then(|| Tensor::zeros(Dtype::F32, &states));
        Forward { o: Tensor::zeros(inputs.dtype(), &o), final_state, report: Report::default(), trace: None }
    }

    /// The results as memory.
    pub(super) fn out(&mut self) -> ForwardOut<'_> {
        ForwardOut { o: self.o.view_mut(), final_state: self.final_state.as_mut().map(Tensor::view_mut) }
    }
}

/// Shapes of the outputs and of the final states of a PE.
pub(super) fn shapes(inputs: &Inputs<'_>, dims: &Dims, rank: &RankPlan) -> [[usize; 4]; 2] {
    let (Dims { b, t, hv, k, v, .. }, rows) = (*dims, rank.ends.len());
    let states = match inputs.state_layout {
        StateLayout::KFirst => [rows, hv, k, v],
        StateLayout::VFirst => [rows, hv, v, k],
    };
    [[b, t, hv, v], states]
}

impl ForwardOut<'_> {
    /// Checks shapes, types and presence.
    pub(super) fn check(
        &self,
        inputs: &Inputs<'_>,
        dims: &Dims,
        rank: &RankPlan,
        final_state: bool,
    ) -> Result<(), InputError> {
        let [o, states] = shapes(inputs, dims, rank);
        expect("o", Some(&self.o), Some((&o, inputs.dtype())), "o is always computed")?;
        let why = "Config::final_state decides whether final states are computed";
        expect("final_state", self.final_state.as_ref(), final_state.then_some((&states, Dtype::F32)), why)
    }

    pub(super) fn named(&self) -> Vec<(&'static str, &TensorViewMut<'_>)> {
        let states = self.final_state.as_ref().map(|states| ("final_state", states));
        std::iter::once(("o", &self.o)).chain(states).collect()
    }
}

/// As [`ForwardOut::check`].
pub(super) fn check_gradients(out: &BackwardOut<'_>, inputs: &Inputs<'_>) -> Result<(), InputError> {
    let want = Gradients::shapes(inputs);
    let why = "there is a gradient for each input that there is";
    let operands = [
        ("dq", &out.dq, &want.dq, inputs.q.dtype()),
        ("dk", &out.dk, &want.dk, inputs.k.dtype()),
        ("dv", &out.dv, &want.dv, inputs.v.dtype()),
        ("dg", &out.dg, &want.dg, Dtype::F32),
        ("dbeta", &out.dbeta, &want.dbeta, Dtype::F32),
    ];
    for (name, found, shape, dtype) in operands {
        expect(name, Some(found), Some((shape, dtype)), why)?;
    }
    let optional = [
        ("dA_log", &out.da_log, &want.da_log),
        ("ddt_bias", &out.ddt_bias, &want.ddt_bias),
        ("dh0", &out.d_initial_state, &want.d_initial_state),
    ];
    for (name, found, shape) in optional {
        expect(name, found.as_ref(), shape.as_ref().map(|shape| (&**shape, Dtype::F32)), why)?;
    }
    Ok(())
}

/// Checks a result's presence, shape and type; `why` says what decides about its presence.
pub(super) fn expect(
    name: &'static str,
    found: Option<&TensorViewMut<'_>>,
    want: Option<(&[usize], Dtype)>,
    why: &'static str,
) -> Result<(), InputError> {
    let (found, (shape, dtype)) = match (found, want) {
        (Some(found), Some(want)) => (found, want),
        (None, None) => return Ok(()),
        (found, _) => return Err(InputError::Result { name, given: found.is_some(), why }),
    };
    if found.shape() != shape {
        return Err(InputError::Shape { name, shape: found.shape().to_vec(), want: shape.to_vec() });
    }
    if found.dtype() != dtype {
        return Err(InputError::Dtype { name, found: found.dtype(), want: dtype.to_string() });
    }
    Ok(())
}

/// Where a call's tensors may lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Places {
    /// Where kernels use tensors in place.
    pub device: Location,
    /// Whether nothing can be copied there, because the call returns before its work is done.
    pub in_place: bool,
}

/// A tensor by name, and the memory that it takes.
struct Taken {
    name: &'static str,
    location: Location,
    start: u64,
    end: u64,
}

impl Places {
    /// Checks that tensors lie where they can be used, aligned, and no result where something else does.
    pub fn check(
        self,
        inputs: &[(&'static str, &TensorView<'_>)],
        results: &[(&'static str, &TensorViewMut<'_>)],
    ) -> Result<(), InputError> {
        let taken = |name, location, start, bytes: usize| Taken { name, location, start, end: start + bytes as u64 };
        let read = inputs
            .iter()
            .map(|(name, x)| (taken(name, x.location(), x.address(), x.len() * x.dtype().size()), x.dtype()));
        let written = results.iter().map(|(name, x)| (taken(name, x.location(), x.address(), x.byte_len()), x.dtype()));
        let mut all = Vec::with_capacity(inputs.len() + results.len());
        for (tensor, dtype) in written.chain(read).filter(|(tensor, _)| tensor.start < tensor.end) {
            self.check_one(&tensor, dtype)?;
            all.push(tensor);
        }
        let results = results.iter().filter(|(_, x)| !x.is_empty()).count();
        for (i, result) in all[..results].iter().enumerate() {
            let shares = |other: &&Taken| {
                other.location == result.location && other.start < result.end && result.start < other.end
            };
            if let Some(other) = all[i + 1..].iter().find(shares) {
                let location = result.location;
                return Err(InputError::Overlap { result: result.name, other: other.name, location });
            }
        }
        Ok(())
    }

    fn check_one(self, tensor: &Taken, dtype: Dtype) -> Result<(), InputError> {
        let Taken { name, location: found, start, .. } = *tensor;
        let why = match found {
            Location::Host if self.device != found && self.in_place => {
                "and a call that only enqueues its work uses tensors where they lie"
            }
            Location::Gpu(_) if self.device != found => "where this PE does not compute",
            _ => {
                let align = found.align(dtype);
                return if start.is_multiple_of(align) {
                    Ok(())
                } else {
                    Err(InputError::Alignment { name, address: start, align })
                };
            }
        };
        Err(InputError::Location { name, found, want: self.device, why })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(address: u64, len: usize, location: Location) -> TensorView<'static> {
        // SAFETY: nobody reads it.
        unsafe { TensorView::from_raw(address, &[len], Dtype::Bf16, location) }.unwrap()
    }

    fn result_at(address: u64, len: usize, location: Location) -> TensorViewMut<'static> {
        // SAFETY: nobody writes it.
        unsafe { TensorViewMut::from_raw(address, &[len], Dtype::Bf16, location) }.unwrap()
    }

    const GPU: Location = Location::Gpu(1);
    const IN_PLACE: Places = Places { device: GPU, in_place: true };

    #[test]
    fn tensors_of_other_devices_are_refused_by_name() {
        let (q, o) = (at(4096, 64, GPU), result_at(8192, 64, GPU));
        let check = |places: Places, q: &TensorView<'_>, o: &TensorViewMut<'_>| {
            places.check(&[("q", q)], &[("o", o)]).map_err(|error| error.to_string())
        };
        assert_eq!(check(IN_PLACE, &q, &o), Ok(()));
        let text = check(IN_PLACE, &at(4096, 64, Location::Gpu(0)), &o).unwrap_err();
        assert_eq!(text, "q lies on GPU 0, where this PE does not compute; copy it to GPU 1 first");
        let text = check(IN_PLACE, &q, &result_at(4096, 64, Location::Gpu(0))).unwrap_err();
        assert!(text.starts_with("o lies on GPU 0"), "{text}");
        let host = [0_u16; 64];
        // SAFETY: the array lives, and is not read.
        let on_host =
            unsafe { TensorView::from_raw(host.as_ptr() as u64, &[64], Dtype::Bf16, Location::Host) }.unwrap();
        let text = check(IN_PLACE, &on_host, &o).unwrap_err();
        assert!(text.contains("only enqueues its work") && text.ends_with("copy it to GPU 1 first"), "{text}");
        assert_eq!(check(Places { in_place: false, ..IN_PLACE }, &on_host, &o), Ok(()));
        let cpu = Places { device: Location::Host, in_place: true };
        assert!(check(cpu, &q, &o).unwrap_err().ends_with("copy it to the host first"));
    }

    #[test]
    fn parts_that_are_not_aligned_are_refused_by_name() {
        let rows = at(4096, 64, GPU).reshape(&[32, 2]).unwrap().rows(1, 9);
        let error = IN_PLACE.check(&[("beta", &rows)], &[]).unwrap_err();
        assert_eq!(error, InputError::Alignment { name: "beta", address: 4100, align: 16 });
    }

    #[test]
    fn results_have_memory_of_their_own() {
        let check = |inputs: &[u64], results: &[u64]| {
            let inputs: Vec<_> = inputs.iter().map(|&address| at(address, 64, GPU)).collect();
            let results: Vec<_> = results.iter().map(|&address| result_at(address, 64, GPU)).collect();
            let inputs: Vec<_> = inputs.iter().map(|x| ("v", x)).collect();
            let results: Vec<_> = results.iter().map(|x| ("o", x)).collect();
            IN_PLACE.check(&inputs, &results)
        };
        // Inputs may share memory among each other.
        assert_eq!(check(&[4096, 4096, 4112], &[4096 + 128 + 16, 8192]), Ok(()));
        let overlap = |other| Err(InputError::Overlap { result: "o", other, location: GPU });
        assert_eq!(check(&[4096], &[4096 + 112]), overlap("v"));
        assert_eq!(check(&[4096], &[4096 - 112]), overlap("v"));
        assert_eq!(check(&[], &[4096, 4096 + 112]), overlap("o"));
        // An address is one of its own on every device.
        let (q, o) = (at(4096, 64, Location::Host), result_at(4096, 64, GPU));
        let places = Places { in_place: false, ..IN_PLACE };
        assert_eq!(places.check(&[("q", &q)], &[("o", &o)]), Ok(()));
        assert_eq!(places.check(&[("q", &at(4096, 0, GPU))], &[("o", &o)]), Ok(()));
    }
}
