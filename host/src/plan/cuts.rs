//! Where the token axis is cut into one contiguous range for each PE.

use super::error::{MAX_PES, PlanError};

/// How to cut `0..T` into P ranges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cuts(Kind);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Equal(usize),
    At(Vec<usize>),
    Offsets(Vec<usize>),
}

impl Cuts {
    /// `pes` ranges whose lengths differ by at most one token; the first ranges take the remainder.
    pub fn equal(pes: usize) -> Self {
        Self(Kind::Equal(pes))
    }

    /// Cuts at the P - 1 given token offsets. They may repeat, and may be 0 or T: that leaves PEs without tokens.
    pub fn at(inner: Vec<usize>) -> Self {
        Self(Kind::At(inner))
    }

    /// The P + 1 offsets themselves, 0 and T included: for callers whose tokens are shared out already.
    pub fn offsets(offsets: Vec<usize>) -> Self {
        Self(Kind::Offsets(offsets))
    }

    /// The P + 1 offsets for `tokens` tokens.
    ///
    /// # Errors
    /// [`PlanError`] if there are no PEs or too many, or if the offsets descend or do not cover `0..tokens`.
    pub fn resolve(&self, tokens: usize) -> Result<Vec<usize>, PlanError> {
        let pes = match &self.0 {
            Kind::Equal(pes) => *pes,
            Kind::At(inner) => inner.len() + 1,
            Kind::Offsets(offsets) => offsets.len().saturating_sub(1),
        };
        match pes {
            0 => return Err(PlanError::NoPes),
            1..=MAX_PES => {}
            _ => return Err(PlanError::TooManyPes { pes }),
        }
        let offsets: Vec<usize> = match &self.0 {
            // One PE takes whatever there is, also nothing.
            Kind::Equal(_) if pes > tokens && pes > 1 => return Err(PlanError::MorePesThanTokens { pes, tokens }),
            Kind::Equal(_) => (0..=pes).map(|r| r * (tokens / pes) + r.min(tokens % pes)).collect(),
            Kind::At(inner) => {
                for (i, &found) in inner.iter().enumerate() {
                    if found > tokens {
                        return Err(PlanError::CutBeyondEnd { index: i, found, tokens });
                    }
                }
                std::iter::once(0).chain(inner.iter().copied()).chain(std::iter::once(tokens)).collect()
            }
            Kind::Offsets(offsets) => {
                let (first, last) = (offsets[0], offsets[pes]);
                if first != 0 || last != tokens {
                    return Err(PlanError::CutsCover { first, last, tokens });
                }
                offsets.clone()
            }
        };
        // Counted as the caller counts: `at` leaves out the leading 0.
        let skipped = usize::from(matches!(self.0, Kind::At(_)));
        for (i, pair) in offsets.windows(2).enumerate() {
            if pair[1] < pair[0] {
                return Err(PlanError::CutsOrder { index: i + 1 - skipped, previous: pair[0], found: pair[1] });
            }
        }
        Ok(offsets)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_cuts_give_the_remainder_to_the_first_ranks() {
        assert_eq!(Cuts::equal(4).resolve(10), Ok(vec![0, 3, 6, 8, 10]));
        assert_eq!(Cuts::equal(3).resolve(3), Ok(vec![0, 1, 2, 3]));
        assert_eq!(Cuts::equal(1).resolve(0), Ok(vec![0, 0]));
    }

    #[test]
    fn equal_cuts_refuse_more_pes_than_tokens() {
        let e = Cuts::equal(4).resolve(3).unwrap_err();
        assert_eq!(
            e.to_string(),
            "4 PEs were asked for and there are only 3 tokens to share out; ask for at most 3 PEs, or give explicit cuts, which may leave PEs empty"
        );
        assert_eq!(Cuts::equal(2).resolve(0), Err(PlanError::MorePesThanTokens { pes: 2, tokens: 0 }));
    }

    #[test]
    fn explicit_cuts_may_leave_ranks_empty() {
        assert_eq!(Cuts::at(vec![0, 4, 4, 9]).resolve(9), Ok(vec![0, 0, 4, 4, 9, 9]));
        assert_eq!(Cuts::at(vec![]).resolve(9), Ok(vec![0, 9]));
        assert_eq!(Cuts::offsets(vec![0, 4, 9]).resolve(9), Cuts::at(vec![4]).resolve(9));
    }

    #[test]
    fn wrong_cuts_are_named_by_the_callers_index() {
        assert_eq!(Cuts::at(vec![5, 3]).resolve(9), Err(PlanError::CutsOrder { index: 1, previous: 5, found: 3 }));
        assert_eq!(
            Cuts::offsets(vec![0, 5, 3, 9]).resolve(9),
            Err(PlanError::CutsOrder { index: 2, previous: 5, found: 3 })
        );
        assert_eq!(Cuts::at(vec![3, 10]).resolve(9), Err(PlanError::CutBeyondEnd { index: 1, found: 10, tokens: 9 }));
        assert_eq!(Cuts::offsets(vec![1, 9]).resolve(9), Err(PlanError::CutsCover { first: 1, last: 9, tokens: 9 }));
        assert_eq!(Cuts::offsets(vec![0, 8]).resolve(9), Err(PlanError::CutsCover { first: 0, last: 8, tokens: 9 }));
    }

    #[test]
    fn the_number_of_pes_is_bounded() {
        assert_eq!(Cuts::equal(0).resolve(9), Err(PlanError::NoPes));
        assert_eq!(Cuts::offsets(vec![]).resolve(9), Err(PlanError::NoPes));
        assert_eq!(Cuts::offsets(vec![0]).resolve(0), Err(PlanError::NoPes));
        assert_eq!(Cuts::equal(1025).resolve(9999), Err(PlanError::TooManyPes { pes: 1025 }));
        assert!(Cuts::equal(1024).resolve(1024).is_ok());
    }
}
