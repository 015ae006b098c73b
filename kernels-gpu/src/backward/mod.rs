//! The kernels of a backward step. In this order, after `prep` has made the records of the chunks (again):
//!
//! 1. [`scan::scan_back`] with the items that wait for nothing: transitions and dS_ext of segments in the middle of their
//!    sequence, and everything of segments whose sequence ends here. What earlier PEs need leaves first.
//! 2. [`states::scan_states`], the forward walk again. It needs no other PE, so it hides the messages of the first step.
//! 3. [`fix_out`](crate::fixup::fix_out) with tables turned around, `m_transposed`, and items that only merge: the gradients of
//!    the states after segments that go on elsewhere.
//! 4. [`scan::scan_back`] with the other items, from those gradients. (In exact mode steps 1 and 4 are one, which waits for
//!    the gradient from the next PE, and there is no step 3.)
//! 5. [`grad::grad`]: all gradients, chunk by chunk, from the states and their gradients.
//! 6. [`reduce::reduce`]: sums over the value heads of a group and over chunks, and the norms of q and k.

mod gate;
pub mod grad;
pub mod reduce;
pub mod scan;
pub mod states;
