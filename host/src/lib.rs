//! Context-parallel linear attention for Kimi Delta Attention (KDA) and Gated DeltaNet (GDN): a sequence is cut over
//! several processing elements (PEs), and what one PE's tokens mean for the next ones leaves from inside the kernel, head by
//! head, while other heads still compute.
//!
//! # How data flows
//! A [`plan::Plan`] follows from the sequences and the cuts alone, so every PE computes it for itself. On each PE
//! [`op::ContextParallel::forward`] checks the [`inputs::Inputs`] and launches three kernels. `prep` does what lies inside a
//! chunk of up to 64 tokens. `scan_push` walks each head's chunks and keeps two things up to date: the state S as if nothing
//! came before, and the transition M by which whatever came before would enter; when a head is done it writes both straight
//! into slots in the symmetric [`heap`] of the PEs that need them, and signals. `fix_out` waits for the signals, composes
//! `S_in <- S + M S_in` over the earlier PEs, and adds what `S_in` contributes to the outputs and to the final state.
//!
//! # The whole batch in one process
//! [`op::whole::forward`] cuts tensors up, runs a thread for each PE and puts the results together.
//! ```
//! use deltalink::{inputs::Inputs, op::Config, op::whole, plan::Cuts, plan::Plan, world::WorldOptions};
//! use ndarray::{Array3, Array4};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // 200 tokens, 2 heads, K = V = 32: two packed sequences of 150 and 50 tokens.
//! let x = Array4::from_shape_fn((1, 200, 2, 32), |(_, t, h, c)| ((7 * t + 3 * h + c * c) as f32).sin());
//! let log_decay = Array4::from_elem((1, 200, 2, 32), -0.01_f32);
//! let beta = Array3::from_elem((1, 200, 2), 0.5_f32);
//! let inputs = Inputs { l2norm: true, ..Inputs::kda(&x, &x, &x, &log_decay, &beta)? };
//!
//! // Two PEs; the cut lies inside the first sequence.
//! let plan = Plan::packed(&[0, 150, 200], &Cuts::at(vec![100]))?;
//! let result = whole::forward(&plan, &inputs, &Config::default(), &WorldOptions::default())?;
//! let states = result.final_state.expect("asked for by default");
//! assert_eq!((result.o.shape, states.shape), (vec![1, 200, 2, 32], vec![2, 2, 32, 32]));
//! # let one = Plan::packed(&[0, 150, 200], &Cuts::equal(1))?;
//! # let one = whole::forward(&one, &inputs, &Config::default(), &WorldOptions::default())?;
//! # let error = deltalink::compare::Error::of(&result.o.data.to_f64(), &one.o.data.to_f64());
//! # assert!(error.within(1e-5), "{error}");
//! # assert!(result.reports[0].bytes_sent == 2 * 4 * 32 * 32, "{:?}", result.reports);
//! # Ok(())
//! # }
//! ```
//!
//! # Every PE for itself
//! In a program whose PEs hold their own tokens, each makes one [`op::ContextParallel`] and calls it in the same order as the
//! others. Here the PEs are threads; processes get their [`world::Pe`] from [`world::Pe::from_environment`].
//! ```
//! use deltalink::{inputs::Inputs, op::Config, op::ContextParallel, plan::Cuts, plan::Plan};
//! use deltalink::world::{WorldOptions, run_threads};
//! use ndarray::{Array3, Array4};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let plan = Plan::batch(1, 300, &Cuts::equal(2))?;
//! let parts = run_threads(2, &WorldOptions::default(), |pe| {
//!     let tokens = plan.ranks[pe.rank()].tokens;
//!     let x = Array4::from_elem((1, tokens, 1, 16), 0.25_f32); // this PE's q, k and v
//!     let step = Array3::from_elem((1, tokens, 1), 0.5_f32);
//!     let decay = step.mapv(|x| -0.1 * x);
//!     let mut op = ContextParallel::new(pe, Config::default())?;
//!     op.forward(&plan, &Inputs::gdn(&x, &x, &x, &decay, &step)?)
//! })?;
//! assert!(parts[0].report.bytes_sent > 0);
//! assert_eq!(parts[1].o.shape, [1, 150, 1, 16]);
//! # Ok(())
//! # }
//! ```
//!
//! # Training
//! [`op::ContextParallel::forward_saving`] returns what [`op::ContextParallel::backward`] takes: the states that this PE received,
//! and no more unless asked to. Gradients of states flow from the end of a sequence to its start, over the same plan
//! [the other way round](plan::Plan::mirrored): each PE walks its tokens backward from a zero gradient, sends the result, goes on with
//! what needs no other PE, and then walks from what has arrived. Gradients of `A_log` and `dt_bias` are each PE's share of a sum, which the
//! program adds up. [`op::whole::backward`] does all of it for tensors in one process.
//! ```
//! use deltalink::{gradients::Upstream, inputs::Inputs, op::Config, op::whole, plan::Cuts, plan::Plan};
//! use deltalink::world::WorldOptions;
//! use ndarray::{Array3, Array4};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let x = Array4::from_shape_fn((1, 90, 2, 16), |(_, t, h, c)| ((5 * t + 3 * h + c) as f32).cos());
//! let log_decay = Array4::from_elem((1, 90, 2, 16), -0.02_f32);
//! let beta = Array3::from_elem((1, 90, 2), 0.25_f32);
//! let inputs = Inputs { l2norm: true, ..Inputs::kda(&x, &x, &x, &log_decay, &beta)? };
//!
//! // The gradient of sum(o^2) / 2 is o itself; three PEs.
//! let plan = Plan::batch(1, 90, &Cuts::equal(3))?;
//! let o = whole::forward(&plan, &inputs, &Config::default(), &WorldOptions::default())?.o;
//! let upstream = Upstream { d_o: o.view(), d_final_state: None };
//! let found = whole::backward(&plan, &inputs, &upstream, &Config::default(), &WorldOptions::default())?;
//! assert_eq!(found.gradients.dq.shape, [1, 90, 2, 16]);
//! // The last PE receives a state and no gradient: it keeps the state until it goes backward.
//! assert_eq!(found.saved_bytes[2], 2 * 16 * 16 * 4);
//! # let p = deltalink::reference::Problem::new(&inputs, None)?;
//! # let expected = deltalink::reference::backward(&p, &upstream)?;
//! # for checked in deltalink::compare::gradients(&inputs, &p, &found.gradients.to_f64(), &expected) {
//! #     assert!(checked.mismatch.is_none(), "{checked:?}");
//! # }
//! # Ok(())
//! # }
//! ```
//!
//! # Modules
//! * [`inputs`], [`tensor`]: what a call gets. [`plan`]: who holds which tokens and who needs whose summary.
//! * [`op`]: the operation, forward and backward, its modes, and its reports. [`gradients`]: what goes into and comes out of a
//!   backward call. [`exec`]: launching kernels, on the CPU and on GPUs (feature `cuda`).
//! * [`world`], [`heap`]: PEs as threads or processes, and the memory that they share.
//! * [`trace`]: timelines, and the figures that say how much of the communication was hidden.
//! * [`reference`](mod@reference), [`compare`], [`generate`], [`file`](mod@file): the f64 reference, distances from it, random problems, and
//!   problems in files.
//! * [`cli`]: the `deltalink` command.
//!
//! The kernels, the tile DSL in which they are written, and the protocol by which summaries travel are in the crate
//! `kernels_gpu`. Decisions and their reasons, and a picture of what flows between PEs, are in `docs/design.md` of the repository.

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;

pub mod cli;
pub mod compare;
pub mod error;
pub mod exec;
pub mod file;
pub mod generate;
pub mod gradients;
pub mod heap;
pub mod inputs;
pub mod op;
pub mod plan;
pub mod reference;
pub mod tensor;
pub mod trace;
pub mod world;
