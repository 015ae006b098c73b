//! Many samples of one quantity in a few numbers.

use serde::Serialize;

/// Median and the tenths at both ends.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Number of samples.
    pub samples: usize,
    /// A tenth of the samples is not larger.
    pub p10: f64,
    /// Half of the samples are not larger.
    pub median: f64,
    /// A tenth of the samples is not smaller.
    pub p90: f64,
}

impl Summary {
    /// Of samples that are all finite; nothing of none.
    pub fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = |fraction| quantile(&sorted, fraction);
        Some(Self { samples: sorted.len(), p10: at(0.1)?, median: at(0.5)?, p90: at(0.9)? })
    }

    /// Of the quantity that is `f` of the sampled one, where `f` never grows (a rate of a time): the ends change places.
    pub fn inverted(&self, f: impl Fn(f64) -> f64) -> Self {
        Self { samples: self.samples, p10: f(self.p90), median: f(self.median), p90: f(self.p10) }
    }
}

/// Between the two samples that are nearest to this fraction of all, in proportion.
fn quantile(sorted: &[f64], fraction: f64) -> Option<f64> {
    let place = fraction * (sorted.len().checked_sub(1)?) as f64;
    let (below, above) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
    Some(below + (above - below) * place.fract())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_between_samples() {
        let summary = Summary::of(&[4.0, 1.0, 3.0, 2.0]).expect("samples");
        assert_eq!(summary.samples, 4);
        assert_eq!(summary.median, 2.5);
        assert!((summary.p10 - 1.3).abs() < 1e-12 && (summary.p90 - 3.7).abs() < 1e-12, "{summary:?}");
        let one = Summary::of(&[7.0]).expect("a sample");
        assert_eq!((one.p10, one.median, one.p90), (7.0, 7.0, 7.0));
        assert_eq!(Summary::of(&[]), None);
    }

    #[test]
    fn a_rate_is_low_where_the_time_is_long() {
        let times = Summary::of(&(1..=11).map(f64::from).collect::<Vec<_>>()).expect("samples");
        let rates = times.inverted(|time| 60.0 / time);
        assert_eq!((rates.p10, rates.median, rates.p90), (6.0, 10.0, 30.0));
    }
}
