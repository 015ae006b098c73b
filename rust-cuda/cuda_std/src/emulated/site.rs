//! Which instruction a thread is at.

use core::fmt;
use core::panic::Location;

/// An instruction at a place of the source, with its immediate operands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Site {
    pub(crate) name: &'static str,
    pub(crate) at: &'static Location<'static>,
    pub(crate) immediates: [i32; 5],
}

impl Site {
    /// The instruction `name` at the caller's place.
    #[track_caller]
    pub(crate) fn here(name: &'static str) -> Self {
        Self { name, at: Location::caller(), immediates: [0; 5] }
    }

    /// With immediate operands.
    pub(crate) fn with(mut self, immediates: [i32; 5]) -> Self {
        self.immediates = immediates;
        self
    }
}

impl PartialEq for Site {
    fn eq(&self, other: &Self) -> bool {
        let same_place = core::ptr::eq(self.at, other.at) || self.at == other.at;
        same_place && self.name == other.name && self.immediates == other.immediates
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}:{}", self.name, self.at.file(), self.at.line())?;
        match self.immediates.iter().rposition(|&x| x != 0) {
            Some(last) => write!(f, " with {:?}", &self.immediates[..=last]),
            None => Ok(()),
        }
    }
}
