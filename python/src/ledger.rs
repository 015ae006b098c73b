//! What native memory the package has handed out and not got back.
//!
//! Every piece is entered when it is handed out and crossed out when its last owner, usually a tensor's deleter, drops it: on any
//! thread, with or without the GIL, and after the module is gone.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::pyfunction;

/// What kind of memory a piece is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A buffer of the symmetric heap.
    Symmetric,
    /// A result of a call.
    Result,
    /// What a forward call saved for its backward call.
    Saved,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Symmetric => "symmetric",
            Kind::Result => "result",
            Kind::Saved => "saved",
        }
    }
}

#[derive(Clone, Debug)]
struct Piece {
    kind: Kind,
    /// The world that it belongs to; 0 if it needs none.
    world: u64,
    name: String,
    bytes: usize,
}

#[derive(Default)]
struct Ledger {
    next: u64,
    pieces: BTreeMap<u64, Piece>,
}

static LEDGER: Mutex<Ledger> = Mutex::new(Ledger { next: 1, pieces: BTreeMap::new() });

fn ledger() -> MutexGuard<'static, Ledger> {
    // Nothing panics between two related changes.
    LEDGER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A line of the ledger; dropping it crosses the piece out.
#[derive(Debug)]
pub struct Entry {
    number: u64,
}

impl Entry {
    /// Enters a piece of memory.
    pub fn new(kind: Kind, world: u64, name: &str, bytes: usize) -> Self {
        let mut ledger = ledger();
        let number = ledger.next;
        ledger.next += 1;
        ledger.pieces.insert(number, Piece { kind, world, name: name.to_owned(), bytes });
        Self { number }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        ledger().pieces.remove(&self.number);
    }
}

/// What is handed out, oldest first, as (kind, world, name, bytes). Results belong to no world (0).
#[pyfunction]
pub fn lent() -> Vec<(&'static str, u64, String, usize)> {
    ledger().pieces.values().map(|piece| (piece.kind.name(), piece.world, piece.name.clone(), piece.bytes)).collect()
}
