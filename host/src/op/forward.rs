//! A forward step on one PE: `prep`, `scan_push`, `fix_out`.

use std::time::{Duration, Instant};

use kernels_gpu::fixup;
use kernels_gpu::hopper;
use kernels_gpu::params::{FixParams, Records, ScanParams, Tensor as Param};
use kernels_gpu::scan::own_len;
use kernels_gpu::tile::host::Checker;

use super::channel::Channel;
use super::saved::{Kept, SavedMemory};
use super::step::{Common, Step, TableParts, WordParts, WorkParts, optional, part};
use super::tables::HostTables;
use super::{Forward, Mode, OpError, Recompute};
use crate::exec::cpu::code;
use crate::exec::{Blocks, Body, ExecError, Executor, Grid, Image, Scratch, Slot};
use crate::inputs::Dims;
use crate::tensor::{Dtype, Tensor};

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
    /// Runs the step; with `save`, keeps what its backward step needs.
    pub fn forward<X: Executor>(
        &self,
        exec: &mut X,
        channel: Option<&mut Channel>,
        save: bool,
    ) -> Result<(Forward, Option<SavedMemory<X>>), OpError> {
        let (config, rank) = (self.config, self.rank());
        let Dims { b, t, hv, k, v, .. } = *self.dims;
        let dtype = self.inputs.dtype();
        let element = dtype.size();
        let sizes = self.sizes();
        let body = self.body(exec);
        let (scan_blocks, walkers) = self.scan_blocks(body, rank.receiving().next().is_some());
        let tables = HostTables::new(rank, config.mode, config.chunk, hv as u32, &self.layout, walkers as u32);
        let mut o = Tensor::zeros(dtype, &[b, t, hv, v]);
        let mut finals = config.final_state.then(|| Tensor::zeros(Dtype::F32, &self.state_shape(rank.ends.len())));
        let mut saved = if save { Some(self.save(exec, tables.chunks.len())?) } else { None };
        let memory = self.memory(exec, &tables, &mut o, finals.as_mut(), saved.as_mut())?;

        let channel = channel.map(|channel| {
            channel.advance();
            &*channel
        });
        let mut image = Image::default();
        let table_parts = TableParts::push(&mut image, &tables);
        let (scan_work, fix_work) =
            (WorkParts::push(&mut image, &tables.scan), WorkParts::push(&mut image, &tables.fix));
        let parts = WordParts::push(&mut image, channel, config.trace);
        let base = exec.put_image(&image)?;
        let device_tables = table_parts.at(base, sizes);
        let device_channel = self.channel_params(exec, &parts, base)?;
        let trace = parts.trace_buffer(base);

        let (v_first, m_dtype) = (self.v_first(), code(self.m_dtype()) as u32);
        let prep_params = self.prep_params(exec, device_tables, memory.records, trace)?;
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
            items: scan_work.items.at(base),
            ticket: scan_work.ticket.at(base),
            channel: device_channel,
            trace,
            v_first,
            m_dtype,
        };
        let fix_params = FixParams {
            tables: device_tables,
            o_local,
            q_tilde,
            own,
            state_in,
            o: o_param,
            finals: finals_param,
            items: fix_work.items.at(base),
            ticket: fix_work.ticket.at(base),
            channel: device_channel,
            trace,
            v_first,
            m_dtype,
            m_transposed: 0,
            pad: 0,
        };
        let mut checker = Checker::new();
        let checked = config.checked && exec.checks();
        if checked {
            self.expect_outputs(&mut checker, &memory);
        }
        let peer_failed = || self.pe.failed_peer().is_some();
        let mut common = Common::new(self.inputs, checked.then_some(&checker), &peer_failed);

        let on_host = self.waits_on_host(exec);
        if on_host || self.aligned {
            // Allocating may wait for what runs on the device of another PE.
            self.pe.barrier("memory for the step")?;
        }
        common.launch(exec, self.prep_blocks(body, tables.chunks.len()), &prep_params)?;
        if on_host && config.mode == Mode::Exact {
            // Each scan waits for that of the PE before it.
            for turn in 0..self.pe.size() {
                if turn == self.pe.rank() {
                    common.launch(exec, scan_blocks, &scan_params)?;
                    exec.get_image(&mut image, &peer_failed)?;
                }
                self.pe.barrier("scans in turn")?;
            }
        } else {
            common.launch(exec, scan_blocks, &scan_params)?;
        }
        if on_host && config.mode == Mode::Overlap {
            exec.get_image(&mut image, &peer_failed)?;
            self.pe.barrier("scans of the step")?;
        }

        let mut exchange = Duration::ZERO;
        if let (Mode::Bulk, Some(channel)) = (config.mode, channel) {
            exec.get_image(&mut image, &peer_failed)?;
            self.check_trap(exec)?;
            let start = Instant::now();
            self.exchange(exec, channel)?;
            exchange = start.elapsed();
        }
        if !tables.fix.is_empty() {
            let shared_bytes = match body {
                Body::Portable => fixup::shared_bytes(k, config.chunk, element),
                Body::Hopper => hopper::FIX_SHARED,
            };
            let blocks = Blocks { grid: Grid::Resident, body, warpgroups: fixup::WARPGROUPS, shared_bytes };
            common.launch(exec, blocks, &fix_params)?;
        }
        exec.get_image(&mut image, &peer_failed)?;
        self.check_trap(exec)?;
        common.finish()?;
        exec.fetch(Slot::Output, &mut o)?;
        if let Some(finals) = &mut finals {
            exec.fetch(Slot::FinalState, finals)?;
        }
        let report = self.report(exec, &image, &parts, &common, exchange)?;
        let trace = self.timeline(exec, "forward", &image, &parts);
        Ok((Forward { o, final_state: finals, report, trace }, saved))
    }

    /// Memory for what the backward step needs of a rank with `chunks` chunks.
    fn save<X: Executor>(&self, exec: &mut X, chunks: usize) -> Result<SavedMemory<X>, ExecError> {
        let Dims { hv, k, v, .. } = *self.dims;
        let receiving = self.rank().receiving().count() * hv;
        // M goes back with a segment's gradient unless the sequence ends there, and is not used in exact mode.
        let forwards = self.rank().receiving().any(|(segment, _)| segment.send.is_some());
        let transitions = if forwards && self.config.mode != Mode::Exact { receiving * k * k } else { 0 };
        let (operands, decay) = self.record_lens(chunks);
        let records = match self.config.recompute {
            Recompute::All => None,
            Recompute::States => {
                Some((Kept::new(exec, operands, self.inputs.dtype())?, Kept::new(exec, decay, Dtype::F32)?))
            }
        };
        Ok(SavedMemory {
            state_in: Kept::new(exec, receiving * v * k, Dtype::F32)?,
            transitions: Kept::new(exec, transitions, self.m_dtype())?,
            records,
        })
    }

    /// Results and scratch memory.
    fn memory<X: Executor>(
        &self,
        exec: &mut X,
        tables: &HostTables,
        o: &mut Tensor,
        finals: Option<&mut Tensor>,
        saved: Option<&mut SavedMemory<X>>,
    ) -> Result<Memory, ExecError> {
        let Dims { hv, k, v, .. } = *self.dims;
        let (rank, dtype, sizes) = (self.rank(), self.inputs.dtype(), self.sizes());
        // In exact mode nothing is corrected.
        let corrects = self.config.mode != Mode::Exact;
        let corrected = rank.receiving().filter(|_| corrects).map(|(s, _)| s.start + s.len).max().unwrap_or(0);
        let receiving = rank.receiving().filter(|_| corrects).count() * hv;
        let (operands, decay) = self.record_lens(tables.chunks.len());
        let (mut state_in, mut transitions, mut records) = (None, Param::absent(), None);
        if let Some(saved) = saved {
            state_in = Some(saved.state_in.param());
            transitions = saved.transitions.param();
            records = saved.records(sizes);
        }
        Ok(Memory {
            records: match records {
                Some(records) => records,
                None => Records {
                    operands: exec.scratch(Scratch::Operands, operands, dtype)?,
                    decay: exec.scratch(Scratch::Decay, decay, Dtype::F32)?,
                    sizes,
                },
            },
            o: exec.output(Slot::Output, o)?,
            finals: match finals {
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
    fn expect_outputs(&self, checker: &mut Checker, memory: &Memory) {
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
        for (segment, _) in self.rank().receiving().filter(|_| self.config.mode != Mode::Exact) {
            let (start, len) = (segment.start * hv, segment.len * hv);
            checker.expect_written("o_local", part(&memory.o_local, start * v, len * v));
            checker.expect_written("q_tilde", part(&memory.q_tilde, start * k, len * k));
        }
    }
}
