//! A backward step on one PE.
//!
//! Gradients of states flow from the end of a sequence to its start, so this PE's messages follow the
//! [mirror](crate::plan::Plan::mirrored) of the plan. The launches, in an order that gives other PEs what they wait for
//! first and does everything else before it waits itself:
//!
//! 1. `prep`, unless its records were kept;
//! 2. `scan_back` of what waits for nobody: it sends M and dS_ext of segments in the middle of their sequence, and the finished
//!    gradient of segments whose sequence ends here. In exact mode that is all of them, and each waits for the next PE's;
//! 3. `join_parts`, where segments are walked in parts: from part to part where a sequence ends here, and dS_ext of segments in the
//!    middle, composed of their parts';
//! 4. `scan_states`, the forward walk again, from the states that the forward step kept;
//! 5. `fix_out` merges what has arrived: `dS_out <- dS_ext + M^T dS_out`, from the last PE of the sequence to the next one;
//! 6. `scan_back` from those gradients;
//! 7. `grad`, chunk by chunk, and `reduce`, sums over the value heads of a group and over chunks.

mod blocks;
mod memory;
mod tables;

use std::time::{Duration, Instant};

use kernels_gpu::backward::reduce::{self, Launch};
use kernels_gpu::fixup;
use kernels_gpu::params::{Beside, FixParams, JoinParams, ScanBackParams, StatesParams, Tensor as Param};
use kernels_gpu::tile::host::Checker;

use super::channel::Channel;
use super::images::{Form, Images, Work};
use super::launched::Launched;
use super::saved::SavedMemory;
use super::step::{ChannelParts, Common, Step, TableParts, optional};
use super::tables::{Form as TableForm, HostTables};
use super::{BackwardOut, Mode, OpError};
use crate::exec::cpu::code;
use crate::exec::{Executor, Grid, Slot};
use crate::gradients::Upstream;
use crate::plan::RankPlan;
pub(super) use memory::fetch;
use tables::{BackTables, state_items};

/// A backward step's tables, and what the host must know of them.
#[derive(Clone, Copy)]
pub(super) struct BackwardTables {
    parts: TableParts,
    back: TableParts,
    channel: ChannelParts,
    states: Work,
    first: Work,
    second: Work,
    joins: Work,
    merges: Work,
    chunks: usize,
    begins: bool,
    joins_any: bool,
    merges_any: bool,
    goes_on: bool,
}

/// A backward step: `step` follows the mirrored plan.
pub(super) struct BackwardStep<'a> {
    pub step: Step<'a>,
    /// This PE's part of the plan as it is.
    pub forward_rank: &'a RankPlan,
    pub upstream: &'a Upstream<'a>,
}

impl BackwardStep<'_> {
    /// Launches the step with what the forward step saved; the gradients go to `out`.
    pub fn launch<X: Executor>(
        &self,
        exec: &mut X,
        images: &mut Images<X, BackwardTables>,
        channel: Option<&mut Channel>,
        saved: &mut SavedMemory<X>,
        out: &mut BackwardOut<'_>,
    ) -> Result<Launched, OpError> {
        let step = &self.step;
        let (config, sizes) = (step.config, step.sizes());
        let hv = step.dims.hv;
        let body = step.body(exec);
        let (scan, walkers) = self.scan_blocks(body);
        let (states_blocks, state_walkers) = self.states_blocks(body);
        let channel = channel.map(|channel| {
            channel.advance();
            &*channel
        });
        let form = Form::new(step.plan, step.layout, step.parts, [walkers, state_walkers]);
        let (placed, tables) = images.place(exec, &form, |draft| {
            let (layout, parts) = (&step.layout, step.parts);
            let form = TableForm { chunk: config.chunk, parts, mirrored: false, keeps_own: false };
            let tables = HostTables::segments(self.forward_rank, form);
            let back = BackTables::new(step.rank(), config, parts, hv as u32, layout, walkers as u32);
            let states = state_items(&tables, hv as u32, layout, state_walkers as u32);
            BackwardTables {
                parts: TableParts::push(&mut draft.image, &tables),
                back: TableParts::push(&mut draft.image, &back.tables),
                channel: ChannelParts::push(&mut draft.image, channel),
                states: draft.push_work(&states),
                first: draft.push_work(&back.first),
                second: draft.push_work(&back.second),
                joins: draft.push_work(&back.joins),
                merges: draft.push_work(&back.merges),
                chunks: tables.chunks.len(),
                begins: !back.first.is_empty(),
                joins_any: !back.joins.is_empty(),
                merges_any: !back.merges.is_empty(),
                goes_on: !back.second.is_empty(),
            }
        })?;
        let chunks = tables.chunks;
        let memory = self.memory(exec, body, chunks, out, saved)?;
        let ((state_items, state_ticket), (first_items, first_ticket)) =
            (placed.work(tables.states), placed.work(tables.first));
        let ((second_items, second_ticket), (merge_items, merge_ticket)) =
            (placed.work(tables.second), placed.work(tables.merges));
        let (join_items, join_ticket) = placed.work(tables.joins);
        let trace = step.vitals.trace_buffer();
        let (v_first, m_dtype) = (step.v_first(), code(step.m_dtype()) as u32);

        let prep_params = step.prep_params(exec, tables.parts.at(placed, sizes), memory.records, trace)?;
        let on_host = step.waits_on_host(exec);
        let walks_at_once = tables.begins && !memory.records_were_kept && !on_host;
        let beside = if walks_at_once { step.beside(exec, (body, chunks), true)? } else { None };
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
            items: state_items,
            ticket: state_ticket,
            trace,
            v_first,
            pad: 0,
        };
        let first = ScanBackParams {
            tables: tables.back.at(placed, sizes),
            records: memory.records,
            d_o,
            initial: optional(exec, Slot::DFinalState, self.upstream.d_final_state.as_ref())?,
            finals: memory.d_initial,
            state_out: memory.state_out,
            transitions: memory.transitions,
            cuts: saved.cuts(),
            own: memory.own,
            d_states: memory.d_states,
            d_v_new: memory.d_v_new,
            items: first_items,
            ticket: first_ticket,
            channel: step.channel_params(exec, &tables.channel, placed, channel),
            beside: beside.unwrap_or_else(Beside::none),
            trace,
            v_first,
            m_dtype,
        };
        let second = ScanBackParams { items: second_items, ticket: second_ticket, ..first };
        let absent = Param::absent();
        let merge_params = FixParams {
            tables: first.tables,
            o_local: absent,
            q_tilde: absent,
            own: memory.own,
            state_in: memory.state_out,
            transitions: memory.transitions,
            o: absent,
            finals: absent,
            cuts: first.cuts,
            items: merge_items,
            ticket: merge_ticket,
            channel: first.channel,
            trace,
            v_first,
            m_dtype,
            m_transposed: 1,
            pad: 0,
        };
        let join_params = JoinParams { fix: FixParams { items: join_items, ticket: join_ticket, ..merge_params } };
        let merge_blocks = (
            Grid::Resident,
            fixup::WARPGROUPS,
            fixup::shared_bytes(step.dims.k, config.chunk, step.inputs.dtype().size()),
        );
        let grad_params = memory.grad_params(prep_params, v, d_o);

        let mut checker = Checker::new();
        let checked = config.checked && exec.checks();
        if checked {
            memory.expect_outputs(&mut checker);
        }
        let peer_failed = || step.pe.failed_peer().is_some();
        let mut common = Common::new(step.inputs, checked.then_some(&checker), &peer_failed);

        if on_host || step.aligned {
            // Allocating may wait for what runs on the device of another PE.
            step.pe.barrier("memory for the step")?;
        }
        step.begin(exec, placed, channel)?;
        let prep_blocks = step.prep_blocks(body, chunks);
        if !walks_at_once && !memory.records_were_kept {
            common.launch(exec, prep_blocks, &prep_params)?;
        }
        if on_host && config.mode == Mode::Exact {
            // Each scan waits for that of the PE after it.
            for turn in (0..step.pe.size()).rev() {
                if turn == step.pe.rank() {
                    common.launch(exec, scan, &first)?;
                    exec.wait(&peer_failed)?;
                }
                step.pe.barrier("scans in turn")?;
            }
        } else if walks_at_once {
            common.launch_walk(exec, beside, [prep_blocks, scan], &prep_params, &first)?;
        } else if tables.begins {
            common.launch(exec, scan, &first)?;
        }
        if tables.joins_any {
            common.launch(exec, merge_blocks, &join_params)?;
        }
        common.launch(exec, states_blocks, &states_params)?;
        if on_host && config.mode == Mode::Overlap {
            exec.wait(&peer_failed)?;
            step.pe.barrier("scans of the step")?;
        }

        let mut exchange = Duration::ZERO;
        if let (Mode::Bulk, Some(channel)) = (config.mode, channel) {
            exec.wait(&peer_failed)?;
            step.check_trap(exec)?;
            let start = Instant::now();
            let empty = saved.empty(exec, &step.layout)?;
            step.exchange(exec, channel, &empty)?;
            exchange = start.elapsed();
        }
        if tables.merges_any {
            common.launch(exec, merge_blocks, &merge_params)?;
        }
        if tables.goes_on {
            common.launch(exec, scan, &second)?;
        }
        common.launch(exec, self.grad_blocks(body, chunks), &grad_params)?;
        for params in self.sums(&memory, chunks, trace) {
            let Launch { blocks, shared_bytes } = reduce::launch(&params);
            common.launch(exec, (Grid::Blocks(blocks), reduce::WARPGROUPS, shared_bytes), &params)?;
        }
        common.finish(exec, step)?;
        Ok(Launched { exchange, ..step.launched(exec, "backward", common) })
    }
}
