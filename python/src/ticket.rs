//! What stands for a saved state outside the world that keeps it.
//!
//! A ticket is a number in a tensor. Python keeps that tensor for as long as its graph may go backward; the tensor's deleter drops the
//! ticket, and the ticket has its world drop what it stands for. A copy of the tensor is only a copy of the number: it is good
//! while the original lives.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use deltalink::op::Config;
use deltalink::op::convolution::{Activation, ConvolutionConfig};
use deltalink::plan::Plan;

use crate::errors::Failure;
use crate::worker::Worker;

/// Which call left what.
pub enum Kept {
    /// An attention: kept beside the operation, by the number of its call, since a backward call uses it up.
    Attention { config: Config, call: u64 },
    /// A convolution: kept beside the operation as well, in memory of its device.
    Convolution { config: ConvolutionConfig, activation: Activation, call: u64 },
}

impl Kept {
    fn name(&self) -> &'static str {
        match self {
            Kept::Attention { .. } => "attention",
            Kept::Convolution { .. } => "convolution",
        }
    }
}

/// What a backward call needs of its forward call, beside the tensors.
pub struct Ticket {
    number: i64,
    pub worker: Arc<Worker>,
    pub plan: Arc<Plan>,
    pub kept: Kept,
    /// Whether gradients of parameters are added up over the PEs.
    pub sum_parameters: bool,
}

static TICKETS: Mutex<BTreeMap<i64, Weak<Ticket>>> = Mutex::new(BTreeMap::new());

fn tickets() -> MutexGuard<'static, BTreeMap<i64, Weak<Ticket>>> {
    // Nothing panics while it is held.
    TICKETS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Ticket {
    /// A new ticket.
    pub fn new(worker: Arc<Worker>, plan: Arc<Plan>, kept: Kept, sum_parameters: bool) -> Arc<Self> {
        static NUMBERS: AtomicI64 = AtomicI64::new(1);
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let ticket = Arc::new(Self { number, worker, plan, kept, sum_parameters });
        tickets().insert(number, Arc::downgrade(&ticket));
        ticket
    }

    /// The ticket of this number.
    ///
    /// # Errors
    /// [`Failure::Spent`] if it is gone.
    pub fn find(number: i64) -> Result<Arc<Self>, Failure> {
        let found = tickets().get(&number).and_then(Weak::upgrade);
        found.ok_or(Failure::Spent { number })
    }

    /// Its number, at an address that stays while it lives.
    pub fn number(&self) -> &i64 {
        &self.number
    }

    /// The error of a call that is none of this ticket's kind.
    pub fn other(&self, want: &'static str) -> Failure {
        Failure::OtherSaved { number: self.number, found: self.kept.name(), want }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        tickets().remove(&self.number);
        // A closed world has dropped it already.
        drop(match &self.kept {
            Kept::Attention { config, call } => {
                let (config, call) = (config.clone(), *call);
                self.worker.post(Box::new(move |desk| desk.release(&config, call)))
            }
            Kept::Convolution { config, call, .. } => {
                let (config, call) = (config.clone(), *call);
                self.worker.post(Box::new(move |desk| desk.release_convolution(&config, call)))
            }
        });
    }
}
