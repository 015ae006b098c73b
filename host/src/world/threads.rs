//! PEs as threads of this process.

use std::sync::Arc;
use std::thread;

use super::segment::Segment;
use super::{Pe, Place, RunError, WorldError, WorldOptions, panic_message};

/// Runs `body` on `size` PEs, each a thread, and returns their values by rank.
///
/// A PE that returns an error or panics ends the waits of the others; the error returned is that of the PE that failed
/// first. No wait in here outlasts the timeout, so this returns as long as `body` blocks on nothing else.
///
/// # Errors
/// [`RunError`]: no world, or the first failure and its PE.
pub fn run_threads<T, E>(
    size: usize,
    options: &WorldOptions,
    body: impl Fn(&Pe) -> Result<T, E> + Sync,
) -> Result<Vec<T>, RunError<E>>
where
    T: Send,
    E: Send + std::fmt::Display + From<WorldError>,
{
    let segment = Arc::new(Segment::anonymous(size, options.heap_bytes).map_err(RunError::World)?);
    let run = |rank: usize| {
        let place = Place { rank, local_rank: rank, launcher: "the program" };
        let pe = Pe::join(Arc::clone(&segment), place, options.timeout, None);
        pe.map_err(|error| RunError::Pe { rank, error: E::from(error) })?.run(&body)
    };
    let mut outcomes: Vec<Result<T, RunError<E>>> = thread::scope(|scope| {
        let run = &run;
        let start = |rank| {
            let builder = thread::Builder::new().name(format!("PE {rank}"));
            builder.spawn_scoped(scope, move || run(rank)).map_err(|error| {
                let error = WorldError::Spawn { rank, program: "a thread".into(), reason: error.to_string() };
                segment.failure().report(rank, &error.to_string());
                RunError::World(error)
            })
        };
        let threads: Vec<_> = (0..size).map(start).collect();
        let join = |(rank, thread): (usize, Result<thread::ScopedJoinHandle<'_, _>, _>)| {
            let joined = thread?.join();
            joined.unwrap_or_else(|payload| Err(RunError::Panic { rank, message: panic_message(payload.as_ref()) }))
        };
        threads.into_iter().enumerate().map(join).collect()
    });

    let failure = segment.failure().get();
    // The first failure is the cause, the errors of the others follow from it.
    if let Some(cause) = failure.as_ref().map(|&(rank, _)| rank).filter(|&rank| outcomes[rank].is_err()) {
        outcomes.swap(0, cause);
    }
    let values: Vec<T> = outcomes.into_iter().collect::<Result<_, _>>()?;
    match failure {
        None => Ok(values),
        Some((rank, message)) => Err(RunError::World(WorldError::PeFailed { rank, message })),
    }
}
