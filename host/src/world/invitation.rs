//! Worlds whose processes know each other already, such as those of a training framework's process group: one makes the memory,
//! tells the others in words that the framework carries, and they come in.

use std::sync::Arc;

use super::segment::{HeapAddress, Segment};
use super::{Pe, Place, WorldError, WorldOptions, machine};

/// The memory of a world that nobody has joined yet, made by the process that will be PE 0.
///
/// ```
/// use deltalink::world::{Invitation, WorldOptions};
///
/// let options = WorldOptions { heap_bytes: 1 << 16, ..WorldOptions::default() };
/// let invitation = Invitation::new(1, &options)?;
/// let words = invitation.words()?; // to the others; they call `Invitation::accept(&words, rank, size, &options)`
/// # assert!(words.contains(':'));
/// let pe = invitation.join()?;
/// assert_eq!((pe.rank(), pe.size()), (0, 1));
/// # Ok::<(), deltalink::world::WorldError>(())
/// ```
#[derive(Debug)]
pub struct Invitation {
    segment: Segment,
    options: WorldOptions,
}

impl Invitation {
    /// Makes the memory of a world of `size` PEs. Not collective.
    ///
    /// # Errors
    /// [`WorldError`] if there is no memory for the heaps.
    pub fn new(size: usize, options: &WorldOptions) -> Result<Self, WorldError> {
        Ok(Self { segment: Segment::shared(size, options.heap_bytes)?, options: options.clone() })
    }

    /// What the other processes need to come in, as a line of text. Good until PE 0 has left the world.
    ///
    /// # Errors
    /// [`WorldError::Unsupported`] where processes cannot share memory.
    pub fn words(&self) -> Result<String, WorldError> {
        let address = self.segment.address().ok_or(WorldError::Unsupported { what: "a world of processes" })?;
        Ok(format!("{address}@{}", machine()))
    }

    /// Joins as PE 0. Returns when all PEs have joined.
    ///
    /// # Errors
    /// [`WorldError`] if a PE does not join in time.
    pub fn join(self) -> Result<Pe, WorldError> {
        Pe::join(Arc::new(self.segment), Self::place(0), self.options.timeout, None)
    }

    /// Joins as PE `rank` of `size` the world that `words` tell of. Returns when all PEs have joined.
    ///
    /// # Errors
    /// [`WorldError`] if the words are no invitation, come from another machine or from a world made with other options, or if
    /// a PE does not join in time.
    pub fn accept(words: &str, rank: usize, size: usize, options: &WorldOptions) -> Result<Pe, WorldError> {
        if rank >= size {
            let want = format!("below the number of PEs, which is {size}");
            return Err(WorldError::Variable { name: "the rank".into(), value: rank.to_string(), want });
        }
        let parts = words.split_once('@').and_then(|(heap, machine)| Some((HeapAddress::parse(heap)?, machine)));
        let Some((heap, found)) = parts else {
            let (name, value) = ("the invitation to a world".into(), words.into());
            return Err(WorldError::Variable { name, value, want: "pid:fd@machine".into() });
        };
        let want = machine();
        if found != want {
            return Err(WorldError::OtherMachine { rank, found: found.into(), want });
        }
        let segment = Segment::open(heap, size, options.heap_bytes)?;
        Pe::join(Arc::new(segment), Self::place(rank), options.timeout, None)
    }

    /// All PEs are on one machine.
    fn place(rank: usize) -> Place {
        Place { rank, local_rank: rank, launcher: "the program" }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const OPTIONS: WorldOptions = WorldOptions { heap_bytes: 1 << 16, timeout: Duration::from_secs(60) };

    #[test]
    fn who_is_invited_comes_in() {
        let invitation = Invitation::new(3, &OPTIONS).expect("memory");
        let words = invitation.words().expect("Linux");
        let sums = std::thread::scope(|scope| {
            let others: Vec<_> = (1..3)
                .map(|rank| {
                    let words = &words;
                    scope.spawn(move || {
                        let pe = Invitation::accept(words, rank, 3, &OPTIONS)?;
                        pe.all_gather("ranks", &[rank as u8])
                    })
                })
                .collect();
            let pe = invitation.join().expect("all come");
            let mine = pe.all_gather("ranks", &[0]);
            let others = others.into_iter().map(|other| other.join().expect("no panic"));
            std::iter::once(mine).chain(others).collect::<Result<Vec<_>, _>>().expect("all take part")
        });
        assert_eq!(sums, vec![vec![vec![0_u8], vec![1], vec![2]]; 3]);
    }

    #[test]
    fn other_words_are_refused() {
        let refused = |words: &str, rank| Invitation::accept(words, rank, 2, &OPTIONS).unwrap_err().to_string();
        assert!(refused("hello", 1).contains("pid:fd@machine"));
        assert!(refused("1:2@elsewhere", 1).contains("different machines (boot elsewhere and "));
        assert!(refused("1:2@elsewhere", 2).contains("below the number of PEs, which is 2"));
    }

    #[test]
    fn worlds_of_other_sizes_are_refused() {
        let invitation = Invitation::new(2, &OPTIONS).expect("memory");
        let words = invitation.words().expect("Linux");
        let error = Invitation::accept(&words, 1, 3, &OPTIONS).unwrap_err();
        assert!(error.to_string().contains("was made with"), "{error}");
    }
}
