//! Plans, as Python sees them.

use std::sync::Arc;

use deltalink::plan::{Cuts, Plan as Inner};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;

use crate::errors::Failure;

/// Who holds which tokens of which sequence.
#[pyclass(frozen)]
pub struct Plan {
    pub inner: Arc<Inner>,
}

impl Plan {
    fn rank(&self, rank: usize) -> PyResult<&deltalink::plan::RankPlan> {
        let pes = self.inner.pes();
        self.inner.ranks.get(rank).ok_or_else(|| PyIndexError::new_err(format!("rank {rank} of a plan for {pes}")))
    }
}

/// `cuts` are the offsets between the ranks; without them all get as many tokens, but for the remainder.
fn resolve(pes: usize, cuts: Option<Vec<usize>>) -> Cuts {
    cuts.map_or_else(|| Cuts::equal(pes), Cuts::at)
}

#[pymethods]
impl Plan {
    /// A plan for packed sequences.
    #[staticmethod]
    fn packed(cu_seqlens: Vec<usize>, pes: usize, cuts: Option<Vec<usize>>) -> PyResult<Self> {
        let inner = Inner::packed(&cu_seqlens, &resolve(pes, cuts)).map_err(Failure::from)?;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// A plan for `b` rows of `t` tokens.
    #[staticmethod]
    fn batch(b: usize, t: usize, pes: usize, cuts: Option<Vec<usize>>) -> PyResult<Self> {
        let inner = Inner::batch(b, t, &resolve(pes, cuts)).map_err(Failure::from)?;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Number of ranks.
    #[getter]
    fn pes(&self) -> usize {
        self.inner.pes()
    }

    /// The offsets of all ranks' tokens, 0 and T included.
    #[getter]
    fn cuts(&self) -> Vec<usize> {
        self.inner.cuts.clone()
    }

    /// Rows of a rank's tensors, and tokens in each.
    fn shape(&self, rank: usize) -> PyResult<(usize, usize)> {
        let rank = self.rank(rank)?;
        Ok((rank.batch, rank.tokens))
    }

    /// Sequences that start on a rank: the rows of its initial states.
    fn starts(&self, rank: usize) -> PyResult<Vec<usize>> {
        Ok(self.rank(rank)?.starts.clone())
    }

    /// Sequences that end on a rank: the rows of its final states.
    fn ends(&self, rank: usize) -> PyResult<Vec<usize>> {
        Ok(self.rank(rank)?.ends.clone())
    }
}
