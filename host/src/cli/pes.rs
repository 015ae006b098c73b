//! The PEs of a command: processes that a launcher started, processes that the command starts itself, or threads.

use std::fmt::Display;
use std::time::Duration;

use super::{Exit, Invocation};
use crate::world::{ExitReport, Launch, Pe, RunError, WorldError, WorldOptions};

/// What a PE is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum World {
    /// A thread (also: virtual). On GPUs several may share one.
    #[value(alias = "virtual")]
    Threads,
    /// A process.
    Processes,
}

impl Display for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            World::Threads => "threads",
            World::Processes => "processes",
        })
    }
}

/// The PEs are not those that were asked for, or could not be started.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum PesError {
    #[error(
        "--pes asks for {asked} PEs, the launcher started {launched}; leave --pes out, or start as many processes (-n {asked})"
    )]
    LauncherSize { asked: usize, launched: usize },
    #[error(
        "--world threads was asked for in one of {size} processes of a launcher, each of which is a PE; \
         leave --world out, or start the program without the launcher"
    )]
    ThreadsInLauncher { size: usize },
    #[error("{0}")]
    Processes(ExitReport),
    #[error(transparent)]
    World(#[from] WorldError),
}

/// Refuses options that contradict the launcher that started `pe`.
pub(super) fn fits_launcher(pe: &Pe, world: Option<World>, pes: Option<usize>) -> Result<(), PesError> {
    let launched = pe.size();
    if world == Some(World::Threads) {
        return Err(PesError::ThreadsInLauncher { size: launched });
    }
    match pes.filter(|&asked| asked != launched) {
        Some(asked) => Err(PesError::LauncherSize { asked, launched }),
        None => Ok(()),
    }
}

/// Runs `body` as one PE if a launcher, or this program, started this process as one; otherwise `None`. What PE 0 returns is
/// what is to be said; an error of another PE becomes [`Exit::Failed`].
///
/// The inner result of `body` is that of PEs that end in good order, its error makes the world fail.
pub(super) fn if_launched<E: From<WorldError> + Display>(
    options: &WorldOptions,
    body: impl FnOnce(&Pe) -> Result<Result<Exit, E>, E>,
) -> Option<Result<Exit, E>> {
    let pe = match Pe::from_environment(options) {
        // A PE died before all had joined: PE 0 learns of it too, and says so.
        Err(WorldError::PeFailed { rank, message }) if started_as_other_than_pe_0() => {
            tracing::debug!(rank, message, "the world failed while PEs joined; PE 0 says why");
            return Some(Ok(Exit::Failed));
        }
        Err(error) => return Some(Err(error.into())),
        Ok(None) => return None,
        Ok(Some(pe)) => pe,
    };
    let rank = pe.rank();
    let outcome = pe.run(body).unwrap_or_else(|error| {
        if rank > 0 {
            // A launcher stops all processes when one ends badly: PE 0 needs the time to say why.
            std::thread::sleep(Duration::from_millis(500));
        }
        Err(match error {
            RunError::Pe { error, .. } => error,
            RunError::World(error) => error.into(),
            RunError::Panic { rank, message } => WorldError::PeFailed { rank, message }.into(),
        })
    });
    Some(outcome.or_else(|error| {
        if rank == 0 {
            return Err(error);
        }
        tracing::debug!(rank, %error, "stopped; PE 0 says why");
        Ok(Exit::Failed)
    }))
}

/// Whether this program started this process as a PE that leaves reporting to PE 0.
fn started_as_other_than_pe_0() -> bool {
    std::env::var("DELTALINK_RANK").is_ok_and(|rank| rank != "0")
}

/// What each PE found out by itself, if none refused: the inner error is this PE's own refusal or that of the first PE that
/// has one, and leaves the world in good order.
pub(super) fn agree<T, E: From<WorldError> + Display>(
    pe: &Pe,
    what: &str,
    mine: Result<T, E>,
) -> Result<Result<T, E>, E> {
    let refused = mine.as_ref().err().map(ToString::to_string).unwrap_or_default();
    let all = pe.all_gather(what, refused.as_bytes())?;
    let Ok(mine) = mine else { return Ok(mine) };
    if let Some((rank, refused)) = all.iter().enumerate().find(|(_, refused)| !refused.is_empty()) {
        let message = String::from_utf8_lossy(refused).into_owned();
        return Ok(Err(WorldError::PeFailed { rank, message }.into()));
    }
    Ok(Ok(mine))
}

/// Starts this program again as each of `pes` PEs and waits for them. They write what there is to say.
pub(super) fn launch(pes: usize, options: &WorldOptions, invocation: &Invocation) -> Result<Exit, PesError> {
    let report = Launch::new(pes, options, &invocation.program).args(invocation.args.iter().cloned()).run()?;
    if report.success() {
        return Ok(Exit::Success);
    }
    match report.exits.first().and_then(|exit| exit.status.code()) {
        Some(1) => Ok(Exit::Wrong),
        Some(2) => Ok(Exit::Failed),
        _ => Err(PesError::Processes(report)),
    }
}
