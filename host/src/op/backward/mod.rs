//! A backward step on one PE.
//!
//! Gradients of states flow from the end of a sequence to its start, so this PE's messages follow the
//! [mirror](crate::plan::Plan::mirrored) of the plan. The launches, in an order that gives other PEs what they wait for
//! first and does everything else before it waits itself:
//!
//! 1. `prep`, unless its records were kept;
//! 2. `scan_back` of what waits for nobody: it sends M and dS_ext of segments in the middle of their sequence, and the finished
//!    gradient of segments whose sequence ends here. In exact mode that is all of them, and each waits for the next PE's;
//! 3. `scan_states`, the forward walk again, from the states that the forward step kept;
//! 4. `fix_out` merges what has arrived: `dS_out <- dS_ext + M^T dS_out`, from the last PE of the sequence to the next one;
//! 5. `scan_back` from those gradients;
//! 6. `grad`, chunk by chunk, and `reduce`, sums over the value heads of a group and over chunks.

mod blocks;
mod memory;
mod tables;

use std::time::{Duration, Instant};

use kernels_gpu::backward::reduce;
use kernels_gpu::fixup;
use kernels_gpu::params::{FixParams, ScanBackParams, StatesParams, Tensor as Param};
use kernels_gpu::tile::host::Checker;

use super::channel::Channel;
use super::saved::SavedMemory;
use super::step::{Common, Step, TableParts, WordParts, WorkParts, optional};
use super::tables::HostTables;
use super::{Backward, Mode, OpError};
use crate::exec::cpu::code;
use crate::exec::{Executor, Grid, Image, Slot};
use crate::gradients::Upstream;
use crate::plan::RankPlan;
use tables::{BackTables, state_items};

/// A backward step: `step` follows the mirrored plan.
pub(super) struct BackwardStep<'a> {
    pub step: Step<'a>,
    /// This PE's part of the plan as it is.
    pub forward_rank: &'a RankPlan,
    pub upstream: &'a Upstream<'a>,
}

impl BackwardStep<'_> {
    /// Runs the step with what the forward step saved.
    pub fn run<X: Executor>(
        &self,
        exec: &mut X,
        channel: Option<&mut Channel>,
        saved: &mut SavedMemory<X>,
    ) -> Result<Backward, OpError> {
        let step = &self.step;
        let (config, sizes) = (step.config, step.sizes());
        let hv = step.dims.hv;
        let body = step.body(exec);
        let (scan, walkers) = self.scan_blocks(body);
        let (states_blocks, state_walkers) = self.states_blocks(body);
        let tables = HostTables::segments(self.forward_rank, config.chunk);
        let back = BackTables::new(step.rank(), config.mode, config.chunk, hv as u32, &step.layout, walkers as u32);
        let states = state_items(tables.segments.len() as u32, hv as u32, &step.layout, state_walkers as u32);
        let mut gradients = self.gradients();
        let chunks = tables.chunks.len();
        let memory = self.memory(exec, body, chunks, &mut gradients, saved)?;

        let channel = channel.map(|channel| {
            channel.advance();
            &*channel
        });
        let mut image = Image::default();
        let (table_parts, back_parts) =
            (TableParts::push(&mut image, &tables), TableParts::push(&mut image, &back.tables));
        let state_work = WorkParts::push(&mut image, &states);
        let (first_work, second_work) =
            (WorkParts::push(&mut image, &back.first), WorkParts::push(&mut image, &back.second));
        let merge_work = WorkParts::push(&mut image, &back.merges);
        let parts = WordParts::push(&mut image, channel, config.trace);
        let base = exec.put_image(&image)?;
        let trace = parts.trace_buffer(base);
        let (v_first, m_dtype) = (step.v_first(), code(step.m_dtype()) as u32);

        let prep_params = step.prep_params(exec, table_parts.at(base, sizes), memory.records, trace)?;
        let v = exec.input(Slot::V, &step.inputs.v)?;
        let d_o = exec.input(Slot::DOutput, &self.upstream.d_o)?;
        let states_params = StatesParams {
            tables: prep_params.tables,
            records: memory.records,
            v,
            initial: optional(exec, Slot::InitialState, step.inputs.initial_state.as_ref())?,
            state_in: memory.state_in,
            states: memory.states,
            v_new: memory.v_new,
            items: state_work.items.at(base),
            ticket: state_work.ticket.at(base),
            trace,
            v_first,
            pad: 0,
        };
        let first = ScanBackParams {
            tables: back_parts.at(base, sizes),
            records: memory.records,
            d_o,
            initial: optional(exec, Slot::DFinalState, self.upstream.d_final_state.as_ref())?,
            finals: memory.d_initial,
            state_out: memory.state_out,
            transitions: memory.transitions,
            d_states: memory.d_states,
            d_v_new: memory.d_v_new,
            items: first_work.items.at(base),
            ticket: first_work.ticket.at(base),
            channel: step.channel_params(exec, &parts, base)?,
            trace,
            v_first,
            m_dtype,
        };
        let second = ScanBackParams { items: second_work.items.at(base), ticket: second_work.ticket.at(base), ..first };
        let absent = Param::absent();
        let merge_params = FixParams {
            tables: first.tables,
            o_local: absent,
            q_tilde: absent,
            own: absent,
            state_in: memory.state_out,
            o: absent,
            finals: absent,
            items: merge_work.items.at(base),
            ticket: merge_work.ticket.at(base),
            channel: first.channel,
            trace,
            v_first,
            m_dtype,
            m_transposed: 1,
            pad: 0,
        };
        let grad_params = memory.grad_params(prep_params, v, d_o);

        let mut checker = Checker::new();
        let checked = config.checked && exec.checks();
        if checked {
            memory.expect_outputs(&mut checker);
        }
        let peer_failed = || step.pe.failed_peer().is_some();
        let mut common = Common::new(step.inputs, checked.then_some(&checker), &peer_failed);

        let on_host = step.waits_on_host(exec);
        if on_host || step.aligned {
            // Allocating may wait for what runs on the device of another PE.
            step.pe.barrier("memory for the step")?;
        }
        if !memory.records_were_kept {
            common.launch(exec, step.prep_blocks(body, chunks), &prep_params)?;
        }
        if on_host && config.mode == Mode::Exact {
            // Each scan waits for that of the PE after it.
            for turn in (0..step.pe.size()).rev() {
                if turn == step.pe.rank() {
                    common.launch(exec, scan, &first)?;
                    exec.get_image(&mut image, &peer_failed)?;
                }
                step.pe.barrier("scans in turn")?;
            }
        } else if !back.first.is_empty() {
            common.launch(exec, scan, &first)?;
        }
        common.launch(exec, states_blocks, &states_params)?;
        if on_host && config.mode == Mode::Overlap {
            exec.get_image(&mut image, &peer_failed)?;
            step.pe.barrier("scans of the step")?;
        }

        let mut exchange = Duration::ZERO;
        if let (Mode::Bulk, Some(channel)) = (config.mode, channel) {
            exec.get_image(&mut image, &peer_failed)?;
            step.check_trap(exec)?;
            let start = Instant::now();
            step.exchange(exec, channel)?;
            exchange = start.elapsed();
        }
        if !back.merges.is_empty() {
            let shared = fixup::shared_bytes(step.dims.k, config.chunk, step.inputs.dtype().size());
            common.launch(exec, (Grid::Resident, fixup::WARPGROUPS, shared), &merge_params)?;
            common.launch(exec, scan, &second)?;
        }
        common.launch(exec, self.grad_blocks(body, chunks), &grad_params)?;
        for params in self.sums(&memory, chunks, trace) {
            let blocks = Grid::Blocks(reduce::blocks(params.rows as usize));
            common.launch(exec, (blocks, reduce::WARPGROUPS, reduce::shared_bytes(params.cols as usize)), &params)?;
        }
        exec.get_image(&mut image, &peer_failed)?;
        step.check_trap(exec)?;
        common.finish()?;
        memory::fetch(exec, &mut gradients)?;
        let report = step.report(exec, &image, &parts, &common, exchange)?;
        let trace = step.timeline(exec, "backward", &image, &parts);
        Ok(Backward { gradients, report, trace })
    }
}
