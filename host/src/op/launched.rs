//! A step after its launches: whether it went well, what it counted, how long it took.

use std::time::Duration;

use kernels_gpu::protocol::{Expired, TrapRecord};

use super::cuts::Rows;
use super::error::ExpiredWait;
use super::vitals::Vitals;
use super::{KernelTime, OpError, Report, report};
use crate::exec::Executor;
use crate::trace::Trace;
use crate::world::{Pe, WorldError};

/// What is known of a step when its launches have been made.
#[derive(Clone, Debug)]
pub(super) struct Launched {
    /// Forward or backward.
    pub title: &'static str,
    /// Its kernels, in order.
    pub kernels: Vec<&'static str>,
    /// How long the host exchanged summaries, in bulk mode.
    pub exchange: Duration,
    pub tokens: usize,
    pub hv: usize,
    /// Parts of the segment that was cut into most.
    pub parts: usize,
    /// Whether PEs waited for each other on the host.
    pub on_host: bool,
    /// Forward: what its notes of cuts are of.
    pub cuts: Option<Rows>,
}

/// The wait that expired in a kernel of an operation, if one did; another PE's failure as the error, if that was the reason.
pub(super) fn expired<X: Executor>(exec: &X, pe: &Pe) -> Result<Option<Expired>, WorldError> {
    let trap = exec.trap();
    // A kernel that is writing the record stores SET last.
    if trap.state != TrapRecord::SET {
        return Ok(None);
    }
    match pe.failed_peer() {
        Some((rank, message)) => Err(WorldError::PeFailed { rank, message }),
        None => Ok(Some(trap.expired)),
    }
}

/// The error of a wait that expired in a kernel of an operation with `hv` value heads; another PE's failure, if that was the
/// reason.
pub(super) fn check_trap<X: Executor>(exec: &X, pe: &Pe, hv: usize) -> Result<(), OpError> {
    match expired(exec, pe)? {
        Some(expired) => Err(OpError::Expired(ExpiredWait { expired, hv: hv as u32 })),
        None => Ok(()),
    }
}

impl Launched {
    /// Waits for its end.
    pub fn complete<X: Executor>(&self, exec: &mut X, pe: &Pe) -> Result<(), OpError> {
        exec.wait(&|| pe.failed_peer().is_some())?;
        check_trap(exec, pe, self.hv)
    }

    /// Counts and times of the step, which is the latest one and has ended. `tables`: bytes of scratch that the executor does not
    /// know of.
    pub fn report<X: Executor>(
        &self,
        exec: &mut X,
        pe: &Pe,
        vitals: &mut Vitals<X>,
        tables: usize,
    ) -> Result<Report, OpError> {
        let (stats, cuts) = vitals.left(exec, self.cuts.as_ref())?;
        let mut report =
            Report { tokens: self.tokens, parts: self.parts, exposed_wait: self.exchange, ..Report::default() };
        let times = exec.take_times()?;
        let kernels = self.kernels.iter().zip(times.launches).map(|(&kernel, time)| KernelTime { kernel, time });
        report.kernels = kernels.collect();
        report.device_time = times.span;
        report.count(&stats, exec.concurrency());
        if let Some((cuts, rows)) = cuts.zip(self.cuts.as_ref()) {
            cuts.count(&mut report.cut, rows);
        }
        let total: Duration = report.kernels.iter().map(|k| k.time).sum();
        report.compute = (total + self.exchange).saturating_sub(report.exposed_wait + report.slot_wait);
        report.scratch_bytes = exec.scratch_bytes() + tables;
        report.heap_bytes = exec.heap_bytes(pe);
        report.peak_device_bytes = exec.peak_device_bytes(pe);
        report.waits = exec.waits();
        Ok(report)
    }

    /// The timeline of the step, which is the latest one and has ended.
    pub fn timeline<X: Executor>(&self, exec: &mut X, pe: &Pe, vitals: &mut Vitals<X>) -> Result<Trace, OpError> {
        let (stamps, asked) = vitals.stamps(exec)?;
        let on_host = if self.on_host { ", PEs that share a device wait on the host" } else { "" };
        let title = format!("{}{on_host}", self.title);
        Ok(report::timeline(&title, pe.rank(), &stamps, asked, self.hv))
    }
}
