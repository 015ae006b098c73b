//! Smaller worlds inside a world.

use std::sync::Arc;

use super::segment::{HeapAddress, Segment};
use super::{Pe, WorldError, WorldOptions};

impl Pe {
    /// A world of this one's first `size` PEs, with the same ranks; `None` on the others. What fails there ends that world and
    /// not this one. Collective over this world, with the same `size` and `options` everywhere.
    ///
    /// # Errors
    /// [`WorldError`] if there are not as many PEs, there is no memory for their heaps, or one does not join in time.
    pub fn subset(&self, size: usize, options: &WorldOptions) -> Result<Option<Self>, WorldError> {
        if size == 0 || size > self.size() {
            return Err(WorldError::Size { found: size, max: self.size() });
        }
        // PE 0 makes the memory; whether it could is for all to know.
        let made = (self.rank() == 0).then(|| Segment::shared(size, options.heap_bytes));
        let said = match &made {
            None => String::new(),
            Some(Ok(segment)) => segment.address().map(|address| address.to_string()).unwrap_or_default(),
            Some(Err(error)) => error.to_string(),
        };
        let all = self.all_gather("memory of a smaller world", said.as_bytes())?;
        let segment = match made {
            Some(made) => made?,
            None => {
                let said = String::from_utf8_lossy(&all[0]);
                let Some(address) = HeapAddress::parse(&said) else {
                    return Err(WorldError::PeFailed { rank: 0, message: said.into_owned() });
                };
                if self.rank() >= size {
                    return Ok(None);
                }
                Segment::open(address, size, options.heap_bytes)?
            }
        };
        Self::join(Arc::new(segment), self.place, options.timeout, None).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::{RunError, run_threads};
    use super::*;

    const OPTIONS: WorldOptions = WorldOptions { heap_bytes: 1 << 16, timeout: Duration::from_secs(60) };

    #[test]
    fn smaller_worlds_follow_each_other() {
        let sums = run_threads(3, &OPTIONS, |pe| -> Result<Vec<usize>, WorldError> {
            let mut sums = Vec::new();
            for size in [2, 3, 1, 2] {
                if let Some(few) = pe.subset(size, &OPTIONS)? {
                    assert_eq!((few.rank(), few.size()), (pe.rank(), size));
                    let all = few.all_gather("ranks", &[few.rank() as u8])?;
                    sums.push(all.iter().map(|rank| usize::from(rank[0])).sum());
                }
            }
            Ok(sums)
        });
        assert_eq!(sums.expect("succeeds"), [vec![1, 3, 0, 1], vec![1, 3, 1], vec![3]]);
    }

    #[test]
    fn a_failure_ends_the_smaller_world_only() {
        let outcome = run_threads(3, &OPTIONS, |pe| -> Result<bool, WorldError> {
            let failed = pe.subset(2, &OPTIONS)?.map(|few| {
                few.run(|few| match few.rank() {
                    0 => few.barrier("together"),
                    _ => Err(WorldError::PeFailed { rank: 1, message: "the disk is full".into() }),
                })
            });
            pe.barrier("afterwards")?;
            Ok(failed.is_some_and(|outcome| matches!(outcome, Err(RunError::Pe { .. }))))
        });
        assert_eq!(outcome.expect("the whole world goes on"), [true, true, false]);
    }

    #[test]
    fn a_world_does_not_grow() {
        let outcome = run_threads(2, &OPTIONS, |pe| pe.subset(3, &OPTIONS).map(drop));
        let error = outcome.expect_err("three of two").to_string();
        assert!(error.contains("a world of 3 PEs was asked for; it needs 1 to 2"), "{error}");
    }
}
