//! `--repeat`: the same step many times, held against the first bit for bit.

use std::time::{Duration, Instant};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use crate::op::whole::PartBackward;
use crate::op::{Forward, OpError};
use crate::tensor::Tensor;

/// Differences that a PE describes; it counts all of them.
const DESCRIBED: usize = 3;

/// How often, and with which delays.
#[derive(Clone, Copy, Debug)]
pub(super) struct Soak {
    /// Steps, at least 1.
    pub repeat: usize,
    /// Longest delay before a call.
    pub jitter: Duration,
    /// Of the delays.
    pub seed: u64,
}

/// A step; it calls its argument between two calls of an operation, where a PE may be late as well.
pub(super) type Step<'a, R> = dyn FnMut(&mut dyn FnMut()) -> Result<R, OpError> + 'a;

/// What a step returns, as far as it must be the same each time.
pub(super) trait Results {
    /// By name, in the order in which they are compared.
    fn tensors(&self) -> Vec<(&'static str, &Tensor)>;
}

impl Results for Forward {
    fn tensors(&self) -> Vec<(&'static str, &Tensor)> {
        [("o", &self.o)].into_iter().chain(self.final_state.as_ref().map(|ht| ("ht", ht))).collect()
    }
}

impl Results for PartBackward {
    fn tensors(&self) -> Vec<(&'static str, &Tensor)> {
        let all = &self.backward.gradients;
        let of_tokens = [("dq", &all.dq), ("dk", &all.dk), ("dv", &all.dv), ("dg", &all.dg), ("dbeta", &all.dbeta)];
        let others = [("dA_log", &all.da_log), ("ddt_bias", &all.ddt_bias), ("dh0", &all.d_initial_state)];
        let others = others.into_iter().filter_map(|(name, x)| Some((name, x.as_ref()?)));
        self.forward.tensors().into_iter().chain(of_tokens).chain(others).collect()
    }
}

/// What came of it on one PE.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Outcome {
    /// Steps whose results differ from the first step's.
    different: usize,
    /// The first of them, in words.
    described: Vec<String>,
    /// How long each step took, delays not counted, in microseconds.
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
    /// Whether a step is a forward and a backward call, not a forward call alone.
    pub backward: bool,
    /// Longest delay of a PE before a call, in microseconds.
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
        let Self {
            repetitions, jitter_us, seed, different, slowest_us, slowest_pe, slowest_repetition, median_us, ..
        } = self;
        let what = if self.backward { " of forward and backward" } else { "" };
        let equal = match different {
            0 => "all the same bit for bit".to_owned(),
            _ => format!("{different} results DIFFER"),
        };
        format!(
            "{repetitions} repetitions{what}, delays of up to {jitter_us} us (seed {seed}): {equal}; a step takes {median_us:.0} us \
             (median), the slowest {slowest_us:.0} us (PE {slowest_pe}, repetition {slowest_repetition})"
        )
    }
}

impl Soak {
    /// One step, nothing to compare it with.
    pub const ONCE: Soak = Soak { repeat: 1, jitter: Duration::ZERO, seed: 0 };

    /// Repeats `step` on PE `rank` and returns what it returned first.
    pub fn run<R: Results>(&self, rank: usize, step: &mut Step<'_, R>) -> Result<(R, Outcome), OpError> {
        let mut random = ChaCha8Rng::seed_from_u64(self.seed);
        random.set_stream(rank as u64);
        // Half of the PEs are on time, so that who waits for whom changes.
        let mut delay = || {
            if !self.jitter.is_zero() && random.random_bool(0.5) {
                std::thread::sleep(random.random_range(Duration::ZERO..=self.jitter));
            }
        };
        let mut outcome = Outcome::default();
        let mut timed = |outcome: &mut Outcome| {
            delay();
            let (start, mut delayed) = (Instant::now(), Duration::ZERO);
            let result = step(&mut || {
                let start = Instant::now();
                delay();
                delayed += start.elapsed();
            })?;
            outcome.steps_us.push(start.elapsed().saturating_sub(delayed).as_secs_f64() * 1e6);
            Ok::<_, OpError>(result)
        };
        let first = timed(&mut outcome)?;
        for repetition in 1..self.repeat {
            let again = timed(&mut outcome)?;
            if let Some(what) = difference(&first.tensors(), &again.tensors()) {
                outcome.different += 1;
                if outcome.described.len() < DESCRIBED {
                    outcome.described.push(format!("PE {rank}, repetition {repetition}: {what}"));
                }
            }
        }
        Ok((first, outcome))
    }

    /// Puts the PEs' outcomes together, in the order of the ranks; with what differs, in words. `backward`: whether steps had
    /// backward calls.
    pub fn report(&self, outcomes: &[Outcome], backward: bool) -> (SoakReport, Vec<String>) {
        let steps =
            |pe: usize| outcomes[pe].steps_us.iter().copied().enumerate().skip(1).map(move |(i, us)| (us, pe, i));
        let mut all: Vec<_> = (0..outcomes.len()).flat_map(steps).collect();
        all.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (slowest_us, slowest_pe, slowest_repetition) = all.last().copied().unwrap_or_default();
        let report = SoakReport {
            repetitions: self.repeat,
            backward,
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
fn difference(first: &[(&str, &Tensor)], again: &[(&str, &Tensor)]) -> Option<String> {
    if first.len() != again.len() {
        return Some(format!("it has {} results, the first has {}", again.len(), first.len()));
    }
    first.iter().zip(again).find_map(|((name, a), (_, b))| {
        let (a, b) = (a.data.bytes(), b.data.bytes());
        if a.len() != b.len() {
            return Some(format!("{name} has {} bytes, the first has {}", b.len(), a.len()));
        }
        let byte = a.iter().zip(b).position(|(a, b)| a != b)?;
        Some(format!("{name} differs from the first in byte {byte} of {}", a.len()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{Case, Spec};
    use crate::gradients::{Gradients, Upstream};
    use crate::op::whole::backward_by;
    use crate::op::{Backward, Config, Report};
    use crate::plan::{Cuts, Plan};
    use crate::tensor::Buffer;
    use crate::world::WorldOptions;

    const FOUR: Soak = Soak { repeat: 4, ..Soak::ONCE };

    fn tensor(x: f32) -> Tensor {
        Tensor { shape: vec![1, 1, 1, 1], data: Buffer::F32(vec![x]) }
    }

    fn result(o: f32, ht: f32) -> Forward {
        Forward { o: tensor(o), final_state: Some(tensor(ht)), report: Report::default(), trace: None }
    }

    /// Of a step with all gradients, in the order of [`Results`], after o and ht.
    fn step(x: [f32; 10]) -> PartBackward {
        let [o, ht, x @ ..] = x;
        let [dq, dk, dv, dg, dbeta, da_log, ddt_bias, dh0] = x.map(tensor);
        let [da_log, ddt_bias, d_initial_state] = [da_log, ddt_bias, dh0].map(Some);
        let gradients = Gradients { dq, dk, dv, dg, dbeta, da_log, ddt_bias, d_initial_state };
        let backward = Backward { gradients, report: Report::default(), trace: None };
        PartBackward { forward: result(o, ht), saved_bytes: 0, backward }
    }

    #[test]
    fn every_bit_counts_and_the_first_result_stays() {
        let mut results = [result(1.0, 2.0), result(1.0, 2.0), result(1.0, -2.0), result(-1.0, 2.0)].into_iter();
        let (first, outcome) = FOUR.run(5, &mut |_| Ok(results.next().unwrap())).unwrap();
        assert_eq!(first.o.data.to_f64(), [1.0]);
        assert_eq!(Outcome::decode(&outcome.encode()), Ok(outcome.clone()));
        let (report, texts) = FOUR.report(&[outcome.clone(), outcome], false);
        assert_eq!((report.repetitions, report.different, texts.len()), (4, 4, 4));
        assert_eq!(texts[0], "PE 5, repetition 2: ht differs from the first in byte 3 of 4");
        assert_eq!(texts[1], "PE 5, repetition 3: o differs from the first in byte 3 of 4");
    }

    #[test]
    fn every_gradient_counts() {
        let names = ["o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0"];
        for (i, name) in names.iter().enumerate() {
            let mut changed = [1.0; 10];
            changed[i] = 1.0 + f32::EPSILON;
            let mut results = [[1.0; 10], changed].map(step).into_iter();
            let twice = Soak { repeat: 2, ..Soak::ONCE };
            let (_, outcome) = twice.run(0, &mut |_| Ok(results.next().unwrap())).unwrap();
            assert_eq!(
                outcome.described,
                [format!("PE 0, repetition 1: {name} differs from the first in byte 0 of 4")]
            );
        }
    }

    /// Two PEs compute, late at random; one of them once reports a gradient that is off by a bit.
    #[test]
    fn a_perturbed_step_among_right_ones_is_found() {
        let soak = Soak { repeat: 6, jitter: Duration::from_micros(200), seed: 3 };
        let case: Case = Spec { t: 24, h: 1, hv: 1, k: 16, v: 16, ..Spec::default() }.generate();
        let inputs = case.inputs();
        let upstream = Upstream { d_o: inputs.v.clone(), d_final_state: None };
        let plan = Plan::batch(1, 24, &Cuts::equal(2)).unwrap();
        let body = |perturbed: Option<usize>| {
            let outcomes =
                backward_by(&plan, &inputs, &upstream, &Config::default(), &WorldOptions::default(), |pe, step| {
                    let mut repetition = 0;
                    let (_, outcome) = soak.run(pe.rank(), &mut |between: &mut dyn FnMut()| {
                        let mut part = step(between)?;
                        if pe.rank() == 1 && perturbed == Some(repetition) {
                            part.backward.gradients.dk.data.bytes_mut()[40] ^= 1;
                        }
                        repetition += 1;
                        Ok(part)
                    })?;
                    Ok(outcome)
                });
            soak.report(&outcomes.unwrap(), true)
        };
        let (report, texts) = body(None);
        assert_eq!((report.different, texts), (0, Vec::new()));
        let (report, texts) = body(Some(4));
        assert_eq!((report.different, report.backward), (1, true));
        assert_eq!(texts, ["PE 1, repetition 4: dk differs from the first in byte 40 of 768"]);
        assert!(
            report.text().contains("6 repetitions of forward and backward")
                && report.text().contains("1 results DIFFER")
        );
    }

    #[test]
    fn the_slowest_step_is_named_and_first_steps_do_not_count() {
        let soak = Soak { repeat: 3, jitter: Duration::from_micros(7), seed: 9 };
        let outcome = |steps: &[f64]| Outcome { steps_us: steps.to_vec(), ..Outcome::default() };
        let (report, texts) = soak.report(&[outcome(&[900.0, 3.0, 1.0]), outcome(&[800.0, 2.0, 8.0])], false);
        assert_eq!((report.slowest_us, report.slowest_pe, report.slowest_repetition), (8.0, 1, 2));
        assert_eq!((report.median_us, report.jitter_us, report.seed, texts), (3.0, 7, 9, Vec::new()));
    }
}
