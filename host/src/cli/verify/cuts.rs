//! Where the cuts of a case are.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use crate::generate::Spec;

/// A way to place cuts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CutKind {
    /// Equal shares.
    Equal,
    /// At multiples of the chunk length from the start of their sequence.
    Aligned,
    /// Anywhere.
    Anywhere,
    /// Some PEs hold one token, some none.
    Scarce,
}

impl CutKind {
    /// All of them.
    pub const ALL: [CutKind; 4] = [CutKind::Equal, CutKind::Aligned, CutKind::Anywhere, CutKind::Scarce];

    /// P - 1 ascending offsets.
    pub fn cuts(self, spec: &Spec, pes: usize, chunk: usize, rng: &mut ChaCha8Rng) -> Vec<usize> {
        let t = spec.t;
        let equal = (1..pes).map(|rank| rank * t / pes);
        match self {
            CutKind::Equal => equal.collect(),
            CutKind::Aligned => equal.map(|cut| align(spec, cut, chunk)).collect(),
            CutKind::Anywhere => {
                let mut cuts: Vec<usize> = (1..pes).map(|_| rng.random_range(0..=t)).collect();
                cuts.sort_unstable();
                cuts
            }
            CutKind::Scarce => {
                let middle = rng.random_range(0..=t);
                let offset = |rank: usize| [0, 0, 1][rank % 3] + rank / 3;
                (1..pes).map(|rank| (middle + offset(rank)).min(t)).collect()
            }
        }
    }
}

/// The last multiple of `chunk` from the start of a sequence that is at most `cut`.
fn align(spec: &Spec, cut: usize, chunk: usize) -> usize {
    let starts = spec.cu_seqlens.as_deref().unwrap_or(&[0]);
    let start = starts.iter().copied().filter(|&start| start <= cut).max().unwrap_or(0);
    start + (cut - start) / chunk * chunk
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn cuts_ascend_within_the_tokens() {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        for t in [1, 5, 131] {
            let spec = Spec { t, ..Spec::default() };
            for kind in CutKind::ALL {
                for pes in 1..=8 {
                    let cuts = kind.cuts(&spec, pes, 16, &mut rng);
                    assert!(cuts.len() == pes - 1 && cuts.is_sorted() && cuts.iter().all(|&cut| cut <= t), "{cuts:?}");
                }
            }
        }
    }

    #[test]
    fn aligned_cuts_count_from_the_start_of_their_sequence() {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        let spec = Spec { t: 300, cu_seqlens: Some(vec![0, 70, 70, 300]), ..Spec::default() };
        assert_eq!(CutKind::Aligned.cuts(&spec, 4, 32, &mut rng), [70, 70 + 64, 70 + 128]);
        assert_eq!(CutKind::Aligned.cuts(&spec, 8, 32, &mut rng)[0], 32);
    }

    #[test]
    fn scarce_cuts_leave_pes_with_one_token_and_with_none() {
        let spec = Spec { t: 300, ..Spec::default() };
        let cuts = CutKind::Scarce.cuts(&spec, 8, 32, &mut ChaCha8Rng::seed_from_u64(3));
        let held: Vec<usize> = cuts.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(held.contains(&0) && held.contains(&1), "{cuts:?}");
    }
}
