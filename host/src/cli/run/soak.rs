//! `--repeat`: the same step many times, held against the first bit for bit.

use std::time::{Duration, Instant};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use crate::op::{Forward, OpError};

/// Differences that a PE describes; it counts all of them.
const DESCRIBED: usize = 3;

/// How often, and with which delays.
#[derive(Clone, Copy, Debug)]
pub(super) struct Soak {
    /// Steps, at least 1.
    pub repeat: usize,
    /// Longest delay before a step.
    pub jitter: Duration,
    /// Of the delays.
    pub seed: u64,
}

/// What came of it on one PE.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Outcome {
    /// Steps whose results differ from the first step's.
    different: usize,
    /// The first of them, in words.
    described: Vec<String>,
    /// How long each step took, delays before it not counted, in microseconds.
    steps_us: Vec<f64>,
}

impl Outcome {
    /// On its way to the PE that reports.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("numbers and strings serialise")
    }

    /// What [`encode`](Self::encode) made; or why it cannot be read.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        serde_json::from_slice(bytes).map_err(|error| error.to_string())
    }
}

/// What came of it on all PEs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SoakReport {
    /// Steps of each PE.
    pub repetitions: usize,
    /// Longest delay of a PE before a step, in microseconds.
    pub jitter_us: u64,
    /// Of the delays.
    pub seed: u64,
    /// Steps of any PE whose results differ in some bit from the same PE's first.
    pub different: usize,
    /// Longest step of any PE but the first, which allocates; it contains the waits for PEs that are late. In microseconds.
    pub slowest_us: f64,
    /// Its PE.
    pub slowest_pe: usize,
    /// Its number, from 0.
    pub slowest_repetition: usize,
    /// Median of all steps but the first ones, in microseconds.
    pub median_us: f64,
}

impl SoakReport {
    /// For eyes.
    pub(super) fn text(&self) -> String {
        let Self { repetitions, jitter_us, seed, different, slowest_us, slowest_pe, slowest_repetition, median_us } =
            self;
        let equal = match different {
            0 => "all the same bit for bit".to_owned(),
            _ => format!("{different} results DIFFER"),
        };
        format!(
            "{repetitions} repetitions, delays of up to {jitter_us} us (seed {seed}): {equal}; a step takes {median_us:.0} us \
             (median), the slowest {slowest_us:.0} us (PE {slowest_pe}, repetition {slowest_repetition})"
        )
    }
}

impl Soak {
    /// Repeats `step` on PE `rank` and returns what it returned first.
    pub fn run(
        &self,
        rank: usize,
        step: &mut dyn FnMut() -> Result<Forward, OpError>,
    ) -> Result<(Forward, Outcome), OpError> {
        let mut random = ChaCha8Rng::seed_from_u64(self.seed);
        random.set_stream(rank as u64);
        let mut outcome = Outcome::default();
        let mut timed = |outcome: &mut Outcome| {
            // Half of the PEs are on time, so that who waits for whom changes.
            if !self.jitter.is_zero() && random.random_bool(0.5) {
                std::thread::sleep(random.random_range(Duration::ZERO..=self.jitter));
            }
            let start = Instant::now();
            let result = step()?;
            outcome.steps_us.push(start.elapsed().as_secs_f64() * 1e6);
            Ok::<_, OpError>(result)
        };
        let first = timed(&mut outcome)?;
        for repetition in 1..self.repeat {
            let again = timed(&mut outcome)?;
            if let Some(what) = difference(&first, &again) {
                outcome.different += 1;
                if outcome.described.len() < DESCRIBED {
                    outcome.described.push(format!("PE {rank}, repetition {repetition}: {what}"));
                }
            }
        }
        Ok((first, outcome))
    }

    /// Puts the PEs' outcomes together, in the order of the ranks; with what differs, in words.
    pub fn report(&self, outcomes: &[Outcome]) -> (SoakReport, Vec<String>) {
        let steps =
            |pe: usize| outcomes[pe].steps_us.iter().copied().enumerate().skip(1).map(move |(i, us)| (us, pe, i));
        let mut all: Vec<_> = (0..outcomes.len()).flat_map(steps).collect();
        all.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (slowest_us, slowest_pe, slowest_repetition) = all.last().copied().unwrap_or_default();
        let report = SoakReport {
            repetitions: self.repeat,
            jitter_us: self.jitter.as_micros() as u64,
            seed: self.seed,
            different: outcomes.iter().map(|outcome| outcome.different).sum(),
            slowest_us,
            slowest_pe,
            slowest_repetition,
            median_us: all.get(all.len() / 2).map_or(0.0, |&(us, ..)| us),
        };
        (report, outcomes.iter().flat_map(|outcome| outcome.described.iter().cloned()).collect())
    }
}

/// Where `again` differs from `first`, if it does in any bit.
fn difference(first: &Forward, again: &Forward) -> Option<String> {
    let states = |forward: &Forward| forward.final_state.as_ref().map(|states| states.data.bytes().to_vec());
    let at = |name: &str, a: &[u8], b: &[u8]| {
        let byte = a.iter().zip(b).position(|(a, b)| a != b)?;
        Some(format!("{name} differs from the first in byte {byte} of {}", a.len()))
    };
    let (a, b) = (states(first).unwrap_or_default(), states(again).unwrap_or_default());
    at("o", first.o.data.bytes(), again.o.data.bytes()).or_else(|| at("ht", &a, &b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::Report;
    use crate::tensor::{Buffer, Tensor};

    fn result(o: f32, ht: f32) -> Forward {
        let tensor = |x| Tensor { shape: vec![1, 1, 1, 1], data: Buffer::F32(vec![x]) };
        Forward { o: tensor(o), final_state: Some(tensor(ht)), report: Report::default(), trace: None }
    }

    #[test]
    fn every_bit_counts_and_the_first_result_stays() {
        let soak = Soak { repeat: 4, jitter: Duration::ZERO, seed: 1 };
        let mut results = [result(1.0, 2.0), result(1.0, 2.0), result(1.0, -2.0), result(-1.0, 2.0)].into_iter();
        let (first, outcome) = soak.run(5, &mut || Ok(results.next().unwrap())).unwrap();
        assert_eq!(first.o.data.to_f64(), [1.0]);
        assert_eq!(Outcome::decode(&outcome.encode()), Ok(outcome.clone()));
        let (report, texts) = soak.report(&[outcome.clone(), outcome]);
        assert_eq!((report.repetitions, report.different, texts.len()), (4, 4, 4));
        assert_eq!(texts[0], "PE 5, repetition 2: ht differs from the first in byte 3 of 4");
        assert_eq!(texts[1], "PE 5, repetition 3: o differs from the first in byte 3 of 4");
    }

    #[test]
    fn the_slowest_step_is_named_and_first_steps_do_not_count() {
        let soak = Soak { repeat: 3, jitter: Duration::from_micros(7), seed: 9 };
        let outcome = |steps: &[f64]| Outcome { steps_us: steps.to_vec(), ..Outcome::default() };
        let (report, texts) = soak.report(&[outcome(&[900.0, 3.0, 1.0]), outcome(&[800.0, 2.0, 8.0])]);
        assert_eq!((report.slowest_us, report.slowest_pe, report.slowest_repetition), (8.0, 1, 2));
        assert_eq!((report.median_us, report.jitter_us, report.seed, texts), (3.0, 7, 9, Vec::new()));
    }
}
