//! `deltalink doctor --self-test`: whether messages between two PEs arrive as they were sent, for a second or two, and whether calls
//! on tensors of the device do what ordinary ones do.

use std::time::{Duration, Instant};

use super::super::bench::comm::{CommBenchError, Exchanged, exchange_for};
use super::resident::{self, Both, Compared, ResidentError};
use super::{Finding, Status};
use crate::op::Device;

/// How long messages are exchanged on each device.
const DURATION: Duration = Duration::from_secs(2);

/// A finding for the CPU, and one for GPUs if this build can use them and `gpus` are there.
pub(super) fn findings(gpus: usize) -> Vec<Finding> {
    let mut all = vec![finding("self-test on the CPU", test(Device::Cpu, DURATION))];
    all.extend(comparisons("self-test of enqueued calls", "the CPU", resident::on_cpu()));
    if cfg!(feature = "cuda") && gpus > 0 {
        let on = if gpus > 1 { "two GPUs" } else { "one GPU" };
        all.push(finding(&format!("self-test on {on}"), test(Device::Cuda, DURATION)));
        #[cfg(feature = "cuda")]
        all.extend(comparisons("self-test of streams and graphs", on, resident::on_gpus()));
    } else if gpus > 0 {
        all.push(Finding::new("self-test on GPUs", Status::Note, "this build has no GPU support").advice(
            "build it with `cargo build --release --features cuda` (after `cargo xtask setup`) to test the GPUs too",
        ));
    }
    all
}

fn test(device: Device, duration: Duration) -> Result<(Exchanged, Duration), CommBenchError> {
    let begin = Instant::now();
    Ok((exchange_for(device, duration)?, begin.elapsed()))
}

/// The verdict.
pub(super) fn finding(item: &str, outcome: Result<(Exchanged, Duration), CommBenchError>) -> Finding {
    match outcome {
        Ok((Exchanged { messages, .. }, took)) => Finding::new(
            item,
            Status::Ok,
            format!("2 PEs, {messages} messages in {:.1} s, all arrived as they were sent", took.as_secs_f64()),
        ),
        Err(error) => Finding::new(item, Status::Failed, error.to_string()).advice(
            "results of several PEs cannot be trusted on this device; what is missing above may be the cause, else please report it with this output",
        ),
    }
}

/// The verdicts on calls on tensors of the device.
fn comparisons(test: &str, on: &str, outcome: Result<Both, ResidentError>) -> Vec<Finding> {
    match outcome {
        Ok([rule, convolution]) => vec![
            comparison(&format!("{test} on {on}"), rule),
            comparison(&format!("{test} of the short convolution on {on}"), convolution),
        ],
        Err(error) => {
            let advice = "calls with tensors on this device cannot be trusted; please report it with this output";
            vec![Finding::new(format!("{test} on {on}"), Status::Failed, error.to_string()).advice(advice)]
        }
    }
}

fn comparison(item: &str, Compared { pes, calls, captured }: Compared) -> Finding {
    let captured = captured.map(|kernels| {
        format!("; a captured forward and backward call are {kernels} launches, and no copies or fills")
    });
    let pes = if pes == 1 { "1 PE".to_owned() } else { format!("{pes} PEs") };
    let found = format!("{pes}, {calls} calls bit for bit as ordinary ones{}", captured.unwrap_or_default());
    Finding::new(item, Status::Ok, found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_on_the_cpu() {
        let outcome = test(Device::Cpu, Duration::from_millis(100)).expect("arrived");
        assert!(outcome.0.messages > 100, "{outcome:?}");
        let finding = finding("self-test on the CPU", Ok(outcome));
        assert_eq!(finding.status, Status::Ok);
        assert!(finding.found.starts_with("2 PEs, "), "{}", finding.found);
    }

    #[test]
    fn what_did_not_arrive_is_a_failure() {
        let wrong = CommBenchError::Wrong { bytes: 64, blocks: 1, wrong: 3, partner: 1 };
        let finding = finding("self-test on the CPU", Err(wrong));
        assert_eq!(finding.status, Status::Failed);
        assert!(finding.found.contains("3 elements did not arrive as PE 1 had sent them"), "{}", finding.found);
        assert!(finding.advice.expect("advice").contains("cannot be trusted"));
    }
}
