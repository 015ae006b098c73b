//! What an operation's kernels leave for its host: counts, time stamps, the wait that was given up, cuts of transitions.
//!
//! One block of device memory for all steps of the operation, forward and backward. Counts are those of the latest step. A trap
//! stays: after it no step of the operation goes on, and no later one waits for the first one's missing message as well.

use kernels_gpu::params::{Array, Cut, Stamp, StepStats, TraceBuffer};
use kernels_gpu::protocol::TrapRecord;

use super::cuts::{CutTable, Cuts, ROOM, Rows};
use crate::exec::{ExecError, Executor, KeptMemory};

/// Stamps that a traced step has room for.
const STAMPS: usize = 1 << 16;

/// Words before the stamps: counts, the cursor of the stamps, an epoch for steps that have no channel, the trap, notes of cuts.
const COUNTS: usize = size_of::<StepStats>() / size_of::<u64>();
const CURSOR: usize = COUNTS;
const NO_EPOCH: usize = CURSOR + 1;
const TRAP: usize = NO_EPOCH + 1;
const NOTES_AT: usize = (TRAP + size_of::<TrapRecord>() / size_of::<u64>()).next_multiple_of(2);
const STAMPS_AT: usize = NOTES_AT + (ROOM * size_of::<Cut>() / size_of::<u64>()).next_multiple_of(2);

/// Where they lie, for kernels.
#[derive(Clone, Copy, Debug)]
pub(super) struct VitalSigns {
    base: u64,
    traced: bool,
}

impl VitalSigns {
    fn words(self, first: usize, len: usize) -> Array {
        Array { addr: self.base + (first * size_of::<u64>()) as u64, len: len as u64 }
    }

    /// One [`StepStats`].
    pub fn stats(self) -> Array {
        self.words(0, COUNTS)
    }

    /// What every step counts from zero.
    pub fn counts(self) -> Array {
        self.words(0, COUNTS + 1)
    }

    /// One [`TrapRecord`].
    pub fn trap(self) -> Array {
        Array { len: 1, ..self.words(TRAP, 1) }
    }

    /// The epoch of steps without a channel, 0.
    pub fn no_epoch(self) -> Array {
        self.words(NO_EPOCH, 1)
    }

    /// Room for stamps, if the operation is traced.
    pub fn trace_buffer(self) -> TraceBuffer {
        let (stamps, cursor) = if self.traced { (STAMPS, 1) } else { (0, 0) };
        TraceBuffer {
            stamps: Array { len: stamps as u64, ..self.words(STAMPS_AT, 0) },
            cursor: self.words(CURSOR, cursor),
        }
    }
}

/// The memory.
pub(super) struct Vitals<X: Executor> {
    traced: bool,
    /// Of the latest forward step; the memory is its [`CutTable::shared`].
    pub cuts: CutTable<X>,
}

impl<X: Executor> Vitals<X> {
    /// All clear.
    pub fn new(exec: &mut X, traced: bool) -> Result<Self, ExecError> {
        let stamps = if traced { STAMPS * size_of::<Stamp>() } else { 0 };
        let mut memory = exec.keep(STAMPS_AT * size_of::<u64>() + stamps)?;
        exec.write(&mut memory, 0, &[0; STAMPS_AT * size_of::<u64>()])?;
        Ok(Self { traced, cuts: CutTable::within(memory, NOTES_AT * size_of::<u64>()) })
    }

    pub fn signs(&mut self) -> VitalSigns {
        VitalSigns { base: self.cuts.shared().address(), traced: self.traced }
    }

    /// Bytes that they take.
    pub fn bytes(&self) -> usize {
        self.cuts.bytes()
    }

    /// What the latest step counted, and what it noted of cuts if it had `rows`, after its launches.
    pub fn left(&mut self, exec: &mut X, rows: Option<&Rows>) -> Result<(StepStats, Option<Cuts>), ExecError> {
        let mut words = [0_u64; COUNTS];
        let cuts = self.cuts.read_with(exec, bytemuck::cast_slice_mut(&mut words), rows)?;
        Ok((bytemuck::cast_slice(&words)[0], cuts))
    }

    /// The stamps of the latest step, and how many it asked for, after its launches.
    pub fn stamps(&mut self, exec: &mut X) -> Result<(Vec<Stamp>, u64), ExecError> {
        let mut asked = [0_u64];
        let memory = self.cuts.shared();
        exec.read(memory, CURSOR * size_of::<u64>(), bytemuck::cast_slice_mut(&mut asked))?;
        let count = if self.traced { STAMPS.min(asked[0] as usize) } else { 0 };
        let mut stamps = vec![<Stamp as bytemuck::Zeroable>::zeroed(); count];
        exec.read(memory, STAMPS_AT * size_of::<u64>(), bytemuck::cast_slice_mut(&mut stamps))?;
        Ok((stamps, asked[0]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::cpu::Cpu;

    #[test]
    fn signs_lie_apart_and_begin_clear() {
        let mut exec = Cpu::new(1).unwrap();
        for traced in [false, true] {
            let mut vitals = Vitals::new(&mut exec, traced).unwrap();
            let signs = vitals.signs();
            let trace = signs.trace_buffer();
            assert_eq!((trace.stamps.len > 0, trace.cursor.len), (traced, u64::from(traced)));
            assert_eq!(signs.counts().addr, signs.stats().addr);
            assert_eq!(signs.no_epoch().addr, signs.counts().addr + 8 * signs.counts().len);
            assert!(signs.trap().addr + size_of::<TrapRecord>() as u64 <= trace.stamps.addr);
            let end = trace.stamps.addr + trace.stamps.len * size_of::<Stamp>() as u64;
            assert_eq!(end, signs.stats().addr + vitals.bytes() as u64);
            assert_eq!(vitals.left(&mut exec, None).unwrap().0, StepStats::default());
            assert!(vitals.stamps(&mut exec).unwrap().0.is_empty());
        }
    }
}
