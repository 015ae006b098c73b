//! A forward step on one PE: `prep`, `scan_push`, `join_parts` where segments are walked in parts, `fix_out`.

use std::time::{Duration, Instant};

use kernels_gpu::fixup;
use kernels_gpu::hopper;
use kernels_gpu::params::{Beside, FixParams, JoinParams, Records, ScanParams, Tensor as Param};
use kernels_gpu::scan::own_len;
use kernels_gpu::tile::host::Checker;

use super::channel::Channel;
use super::cuts::{CUT_WORDS, CutTable, Rows};
use super::images::{Form, Images, Work};
use super::launched::Launched;
use super::saved::{Kept, SavedMemory};
use super::step::{ChannelParts, Common, Step, TableParts, optional, part};
use super::tables::HostTables;
use super::{ForwardOut, Mode, OpError, Recompute};
use crate::exec::cpu::code;
use crate::exec::{Blocks, Body, ExecError, Executor, Grid, Scratch, Slot};
use crate::inputs::Dims;
use crate::tensor::Dtype;

/// A forward step's tables, and what the host must know of them.
#[derive(Clone, Copy)]
pub(super) struct ForwardTables {
    parts: TableParts,
    channel: ChannelParts,
    scan: Work,
    join: Work,
    fix: Work,
    chunks: usize,
    joins: bool,
    corrects: bool,
}

/// Where the tensors of a step lie.
#[derive(Clone, Copy)]
struct Memory {
    records: Records,
    o: Param,
    finals: Param,
    o_local: Param,
    q_tilde: Param,
    own: Param,
    state_in: Param,
    transitions: Param,
}

impl Step<'_> {
    /// Launches the step, whose results go to `out`; with `save`, keeps what its backward step needs.
    pub fn forward<X: Executor>(
        &self,
        exec: &mut X,
        images: &mut Images<X, ForwardTables>,
        channel: Option<&mut Channel>,
        noted: &mut CutTable<X>,
        (out, save): (&mut ForwardOut<'_>, bool),
    ) -> Result<(Launched, Option<SavedMemory<X>>), OpError> {
        let (config, rank) = (self.config, self.rank());
        let Dims { hv, k, .. } = *self.dims;
        let dtype = self.inputs.dtype();
        let element = dtype.size();
        let sizes = self.sizes();
        let body = self.body(exec);
        let rows = Rows::of(self);
        let (scan_blocks, walkers) = self.scan_blocks(body, rank.receiving().next().is_some() || rows.rows() > 0);
        let channel = channel.map(|channel| {
            channel.advance();
            &*channel
        });
        let form = Form::new(self.plan, self.layout, self.parts, [walkers, 0]);
        let (placed, tables) = images.place(exec, &form, |draft| {
            let tables = HostTables::new(rank, config, self.parts, hv as u32, &self.layout, walkers as u32);
            ForwardTables {
                parts: TableParts::push(&mut draft.image, &tables),
                channel: ChannelParts::push(&mut draft.image, channel),
                scan: draft.push_work(&tables.scan),
                join: draft.push_work(&tables.join),
                fix: draft.push_work(&tables.fix),
                chunks: tables.chunks.len(),
                joins: !tables.join.is_empty(),
                corrects: !tables.fix.is_empty(),
            }
        })?;
        let cuts = noted.place(exec, rows.entries())?;
        let mut saved = if save { Some(self.save(exec, tables.chunks, &rows)?) } else { None };
        let memory = self.memory(exec, tables.chunks, &rows, out, saved.as_mut())?;
        let device_tables = tables.parts.at(placed, sizes);
        let device_channel = self.channel_params(exec, &tables.channel, placed, channel);
        let trace = self.vitals.trace_buffer();
        let ((scan_items, scan_ticket), (fix_items, fix_ticket)) = (placed.work(tables.scan), placed.work(tables.fix));
        let (join_items, join_ticket) = placed.work(tables.join);

        let (v_first, m_dtype) = (self.v_first(), code(self.m_dtype()) as u32);
        let prep_params = self.prep_params(exec, device_tables, memory.records, trace)?;
        // Columns of M begin with what is known of all chunks.
        let beside = if walkers > 1 { None } else { self.beside(exec, (body, tables.chunks), false)? };
        let Memory { records, o: o_param, finals: finals_param, o_local, q_tilde, own, state_in, transitions } = memory;
        let scan_params = ScanParams {
            tables: device_tables,
            records,
            v: exec.input(Slot::V, &self.inputs.v)?,
            o: o_param,
            o_local,
            q_tilde,
            initial: optional(exec, Slot::InitialState, self.inputs.initial_state.as_ref())?,
            finals: finals_param,
            own,
            state_in: if config.mode == Mode::Exact { state_in } else { Param::absent() },
            transitions,
            cuts,
            items: scan_items,
            ticket: scan_ticket,
            channel: device_channel,
            beside: beside.unwrap_or_else(Beside::none),
            trace,
            v_first,
            m_dtype,
            tolerance: config.cut_tolerance,
            pad: 0,
        };
        let fix_params = FixParams {
            tables: device_tables,
            o_local,
            q_tilde,
            own,
            state_in,
            transitions,
            o: o_param,
            finals: finals_param,
            cuts,
            items: fix_items,
            ticket: fix_ticket,
            channel: device_channel,
            trace,
            v_first,
            m_dtype,
            m_transposed: 0,
            pad: 0,
        };
        let join_params = JoinParams { fix: FixParams { items: join_items, ticket: join_ticket, ..fix_params } };
        let fix_shared = fixup::shared_bytes(k, config.chunk, element);
        let mut checker = Checker::new();
        let checked = config.checked && exec.checks();
        if checked {
            self.expect_outputs(&mut checker, &memory, &rows);
        }
        let peer_failed = || self.pe.failed_peer().is_some();
        let mut common = Common::new(self.inputs, checked.then_some(&checker), &peer_failed);

        let on_host = self.waits_on_host(exec);
        if on_host || self.aligned {
            // Allocating may wait for what runs on the device of another PE.
            self.pe.barrier("memory for the step")?;
        }
        self.begin(exec, placed, channel)?;
        let prep_blocks = self.prep_blocks(body, tables.chunks);
        if on_host && config.mode == Mode::Exact {
            common.launch(exec, prep_blocks, &prep_params)?;
            // Each scan waits for that of the PE before it.
            for turn in 0..self.pe.size() {
                if turn == self.pe.rank() {
                    common.launch(exec, scan_blocks, &scan_params)?;
                    exec.wait(&peer_failed)?;
                }
                self.pe.barrier("scans in turn")?;
            }
        } else {
            common.launch_walk(exec, beside, [prep_blocks, scan_blocks], &prep_params, &scan_params)?;
        }
        if tables.joins {
            common.launch(exec, (Grid::Resident, fixup::WARPGROUPS, fix_shared), &join_params)?;
        }
        if on_host && config.mode == Mode::Overlap {
            exec.wait(&peer_failed)?;
            self.pe.barrier("scans of the step")?;
        }

        if let Some(saved) = &mut saved {
            saved.keep_cuts(exec, cuts)?;
        }
        let mut exchange = Duration::ZERO;
        if let (Mode::Bulk, Some(channel)) = (config.mode, channel) {
            exec.wait(&peer_failed)?;
            self.check_trap(exec)?;
            let start = Instant::now();
            let empty = noted.read(exec, &rows)?.empty_to_send(rank);
            self.exchange(exec, channel, &empty)?;
            exchange = start.elapsed();
        }
        if tables.corrects {
            let shared_bytes = match body {
                Body::Portable => fix_shared,
                Body::Hopper => hopper::FIX_SHARED,
            };
            let blocks = Blocks { grid: Grid::Resident, body, warpgroups: fixup::WARPGROUPS, shared_bytes };
            common.launch(exec, blocks, &fix_params)?;
        }
        if checked && rows.entries() > 0 {
            self.check_trap(exec)?;
            noted.read(exec, &rows)?.excuse(&checker, &rows, config.chunk, &memory.o_local, &memory.q_tilde);
        }
        common.finish(exec, self)?;
        Ok((Launched { exchange, cuts: Some(rows), ..self.launched(exec, "forward", common) }, saved))
    }

    /// Memory for what the backward step needs of a rank with `chunks` chunks.
    fn save<X: Executor>(&self, exec: &mut X, chunks: usize, rows: &Rows) -> Result<SavedMemory<X>, ExecError> {
        let Dims { hv, k, v, .. } = *self.dims;
        // In exact mode states are kept of segments only.
        let receiving = rows.rows().max(self.rank().receiving().count() * hv);
        // M goes back with a segment's gradient unless the sequence ends there, and from part to part; it is not used in exact mode.
        let forwards = self.rank().receiving().any(|(segment, _)| segment.send.is_some()) || self.parts.most() > 1;
        let transitions = if forwards && self.config.mode != Mode::Exact { receiving * k * k } else { 0 };
        // From part to part M does not travel, and has no reason to be narrow.
        let transitions_dtype = if self.parts.most() > 1 { Dtype::F32 } else { self.m_dtype() };
        let notes = if transitions > 0 { rows.entries() } else { 0 };
        let (operands, decay) = self.record_lens(chunks);
        let records = match self.config.recompute {
            Recompute::All => None,
            Recompute::States => {
                Some((Kept::new(exec, operands, self.inputs.dtype())?, Kept::new(exec, decay, Dtype::F32)?))
            }
        };
        Ok(SavedMemory {
            state_in: Kept::new(exec, receiving * v * k, Dtype::F32)?,
            transitions: Kept::new(exec, transitions, transitions_dtype)?,
            cuts: Kept::new(exec, notes * CUT_WORDS, Dtype::F32)?,
            records,
        })
    }

    /// Results and scratch memory.
    fn memory<X: Executor>(
        &self,
        exec: &mut X,
        chunks: usize,
        rows: &Rows,
        out: &mut ForwardOut<'_>,
        saved: Option<&mut SavedMemory<X>>,
    ) -> Result<Memory, ExecError> {
        let Dims { hv, k, v, .. } = *self.dims;
        let (dtype, sizes) = (self.inputs.dtype(), self.sizes());
        let corrected = rows.walks().iter().map(|walk| walk.start + walk.len).max().unwrap_or(0);
        let receiving = rows.rows();
        let (operands, decay) = self.record_lens(chunks);
        let cuts = self.config.cut_tolerance > 0.0 && receiving > 0;
        let factors = if cuts { 2 * chunks * hv } else { 0 };
        let (mut state_in, mut transitions, mut records) = (None, Param::absent(), None);
        if let Some(saved) = saved {
            state_in = Some(saved.state_in.param());
            transitions = saved.transitions.param();
            records = saved.records(sizes);
        }
        let records = match records {
            Some(records) => records,
            None => Records {
                operands: exec.scratch(Scratch::Operands, operands, dtype)?,
                decay: exec.scratch(Scratch::Decay, decay, Dtype::F32)?,
                factors: Param::absent(),
                sizes,
            },
        };
        Ok(Memory {
            records: Records { factors: exec.scratch(Scratch::Factors, factors, Dtype::F32)?, ..records },
            o: exec.output(Slot::Output, &mut out.o)?,
            finals: match &mut out.final_state {
                Some(finals) => exec.output(Slot::FinalState, finals)?,
                None => Param::absent(),
            },
            o_local: exec.scratch(Scratch::OLocal, corrected * hv * v, Dtype::F32)?,
            q_tilde: exec.scratch(Scratch::QTilde, corrected * hv * k, dtype)?,
            own: exec.scratch(Scratch::Own, receiving * own_len(&self.layout), Dtype::F32)?,
            state_in: match state_in {
                Some(state_in) => state_in,
                None => exec.scratch(Scratch::StateIn, receiving * v * k, Dtype::F32)?,
            },
            transitions,
        })
    }

    /// Tells the checker what the step must write.
    fn expect_outputs(&self, checker: &mut Checker, memory: &Memory, rows: &Rows) {
        let Dims { hv, k, v, .. } = *self.dims;
        let outputs = [
            ("records", &memory.records.operands),
            ("decay", &memory.records.decay),
            ("o", &memory.o),
            ("final_state", &memory.finals),
        ];
        for (name, tensor) in outputs.into_iter().filter(|(_, tensor)| tensor.is_present()) {
            checker.expect_written(name, *tensor);
        }
        for walk in rows.walks() {
            let (start, len) = (walk.start * hv, walk.len * hv);
            checker.expect_written("o_local", part(&memory.o_local, start * v, len * v));
            checker.expect_written("q_tilde", part(&memory.q_tilde, start * k, len * k));
        }
    }
}
