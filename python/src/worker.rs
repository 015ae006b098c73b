//! The thread that owns a PE.
//!
//! A PE's operations borrow it, keep scratch memory and must be called in one order, while Python calls from many threads (autograd
//! has its own) and drops what it holds on any. So a PE and its operations live on the stack of one thread, and whoever wants
//! something sends it a job.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use deltalink::op::convolution::ConvolutionConfig;
use deltalink::op::{Config, OpError};
use deltalink::world::{Pe, WorldError};

use crate::device::{AnyAttention, AnyConvolution, Device, Wanted};
use crate::errors::Failure;

/// What a thread does with its PE.
type Job = Box<dyn for<'pe> FnOnce(&mut Desk<'pe>) + Send>;

/// What the thread of a world works with.
pub struct Desk<'pe> {
    pub pe: &'pe Pe,
    pub device: Device<'pe>,
    /// Whether the world ends together with the other PEs, where it can.
    together: bool,
    /// One operation for each set of options: they have slots and agreements of their own.
    operations: Vec<(Config, AnyAttention<'pe>)>,
    convolutions: Vec<(ConvolutionConfig, AnyConvolution<'pe>)>,
}

impl<'pe> Desk<'pe> {
    /// The operation with these options.
    ///
    /// # Errors
    /// [`OpError`] if an option is out of range, or the device has no room for another one.
    pub fn operation(&mut self, config: &Config) -> Result<&mut AnyAttention<'pe>, OpError> {
        let found = self.operations.iter().position(|(options, _)| options == config);
        let index = match found {
            Some(index) => index,
            None => {
                self.operations.push((config.clone(), self.device.attention(config)?));
                self.operations.len() - 1
            }
        };
        Ok(&mut self.operations[index].1)
    }

    /// The short convolution with these options.
    ///
    /// # Errors
    /// [`Failure`] if the device has no room for another one.
    pub fn convolution(&mut self, config: &ConvolutionConfig) -> Result<&mut AnyConvolution<'pe>, Failure> {
        let found = self.convolutions.iter().position(|(options, _)| options == config);
        let index = match found {
            Some(index) => index,
            None => {
                self.convolutions.push((config.clone(), self.device.convolution(config)?));
                self.convolutions.len() - 1
            }
        };
        Ok(&mut self.convolutions[index].1)
    }

    /// Drops what call number `call` of the operation saved; it may be gone.
    pub fn release(&mut self, config: &Config, call: u64) {
        if let Some((_, operation)) = self.operations.iter_mut().find(|(options, _)| options == config) {
            operation.release(call);
        }
    }

    /// Drops what call number `call` of the short convolution saved; it may be gone.
    pub fn release_convolution(&mut self, config: &ConvolutionConfig, call: u64) {
        if let Some((_, operation)) = self.convolutions.iter_mut().find(|(options, _)| options == config) {
            operation.release(call);
        }
    }
}

/// The way to the thread.
struct Open {
    jobs: Sender<Job>,
    thread: JoinHandle<()>,
}

/// A PE and its thread.
pub struct Worker {
    /// Unique in this process, from 1.
    pub number: u64,
    pub rank: usize,
    pub size: usize,
    process: u32,
    open: Mutex<Option<Open>>,
}

impl Worker {
    /// Starts the thread of the PE that `join` brings into its world, on the thread itself, with the device that is wanted. Returns
    /// when it has.
    ///
    /// # Errors
    /// [`Failure`] if the system refuses the thread, the device cannot be used, or [`WorldError`] of `join`.
    pub fn start(
        wanted: Wanted,
        join: impl FnOnce() -> Result<Pe, WorldError> + Send + 'static,
    ) -> Result<Arc<Self>, Failure> {
        static WORLDS: AtomicU64 = AtomicU64::new(0);
        let (jobs, inbox) = channel::<Job>();
        let (tell, told) = sync_channel(1);
        let body = move || {
            // Where nobody is left to tell, nobody cares.
            let pe = match join() {
                Ok(pe) => pe,
                Err(error) => return drop(tell.send(Err(Failure::from(error)))),
            };
            match Device::start(&pe, wanted) {
                Ok(device) => {
                    if tell.send(Ok((pe.rank(), pe.size()))).is_ok() {
                        serve(&pe, device, &inbox);
                    }
                }
                Err(error) => {
                    pe.report_failure(&error.to_string());
                    drop(tell.send(Err(error)));
                }
            }
        };
        let thread = std::thread::Builder::new().name("deltalink".into()).spawn(body);
        let thread = thread.map_err(|error| Failure::Thread { reason: error.to_string() })?;
        let joined = told.recv().map_err(|_| Failure::Panic { message: "joining a world panicked".into() })?;
        let (rank, size) = joined?;
        let number = WORLDS.fetch_add(1, Ordering::Relaxed) + 1;
        let open = Mutex::new(Some(Open { jobs, thread }));
        Ok(Arc::new(Self { number, rank, size, process: std::process::id(), open }))
    }

    /// Has the thread do `job` and waits for what it returns. Without the GIL, please.
    ///
    /// # Errors
    /// [`Failure`] of the job, or if the world is closed or the job panicked.
    pub fn call<T: Send + 'static>(
        &self,
        job: impl for<'pe> FnOnce(&mut Desk<'pe>) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let here = std::process::id();
        if here != self.process {
            return Err(Failure::Forked { made: self.process, here });
        }
        let (tell, told) = sync_channel(1);
        let job = move |desk: &mut Desk<'_>| {
            let pe = desk.pe;
            // The job and all that it holds are gone before the answer leaves.
            let result = catch_unwind(AssertUnwindSafe(|| job(desk))).unwrap_or_else(|payload| {
                let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
                let message = text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default();
                pe.report_failure(&format!("panicked: {message}"));
                Err(Failure::Panic { message })
            });
            // Nobody left to tell, if the caller was stopped.
            drop(tell.send(result));
        };
        self.post(Box::new(job))?;
        told.recv().unwrap_or(Err(Failure::Closed))
    }

    /// Has the thread do `job` some time. Never waits, needs no GIL.
    ///
    /// # Errors
    /// [`Failure::Closed`] if the world is closed.
    pub fn post(&self, job: Job) -> Result<(), Failure> {
        let open = self.open();
        let jobs = open.as_ref().map(|open| &open.jobs).ok_or(Failure::Closed)?;
        jobs.send(job).map_err(|_| Failure::Closed)
    }

    /// Whether it takes calls.
    pub fn is_open(&self) -> bool {
        self.open().is_some()
    }

    /// Leaves the world and ends the thread, after what it is doing. Waits for other PEs on GPUs only, where NVSHMEM ends together,
    /// and not even there unless `together`.
    pub fn close(&self, together: bool) {
        if !together {
            // A closed world has no more to end.
            drop(self.post(Box::new(|desk| desk.together = false)));
        }
        let open = self.open().take();
        if let Some(Open { jobs, thread }) = open {
            drop(jobs);
            // A thread that panicked has told so where it was called.
            drop(thread.join());
        }
    }

    fn open(&self) -> MutexGuard<'_, Option<Open>> {
        // Nothing panics while it is held.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Does jobs until nobody is left to send any, then leaves the world.
fn serve<'pe>(pe: &'pe Pe, device: Device<'pe>, inbox: &Receiver<Job>) {
    let mut desk = Desk { pe, device, together: true, operations: Vec::new(), convolutions: Vec::new() };
    while let Ok(job) = inbox.recv() {
        job(&mut desk);
    }
    let Desk { device, together, operations, convolutions, .. } = desk;
    drop((operations, convolutions));
    device.close(together);
}
