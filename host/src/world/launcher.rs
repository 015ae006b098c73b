//! Which launcher started this process, and as which PE: what the variables say that launchers set.

use super::segment::HeapAddress;
use super::{WorldError, pmi};

/// Rank of a process that [`Launch`](super::Launch) started.
pub(super) const RANK: &str = "DELTALINK_RANK";
/// Number of PEs of its world.
pub(super) const SIZE: &str = "DELTALINK_SIZE";
/// The segment, as `pid:fd`.
pub(super) const HEAP: &str = "DELTALINK_HEAP";
/// The TCP port on which PEs under torchrun meet, instead of the one beside `MASTER_PORT`.
const PORT: &str = "DELTALINK_PORT";
/// What PMI-1 launchers set; a process started from inside such a world must not take them for its own.
pub(super) const PMI: [&str; 5] = ["PMI_RANK", "PMI_SIZE", "PMI_FD", "PMI_PORT", "PMI_ID"];

/// Who started this process.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// [`Launch`](super::Launch).
    Launch { rank: usize, size: usize, heap: HeapAddress },
    /// MPICH's `mpiexec.hydra`, `nvshmrun`.
    Pmi { address: pmi::Address, local_rank: Option<usize> },
    /// A launcher that gives each process its place and leaves the rest to them.
    Placed(Placed),
}

/// A process's place, and where the processes of its job can meet.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Placed {
    /// As errors name it.
    pub launcher: &'static str,
    pub rank: usize,
    pub size: usize,
    pub local_rank: Option<usize>,
    pub meeting: Meeting,
}

/// See [`super::rendezvous`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Meeting {
    /// A file named after the job.
    File { launcher: &'static str, job: String },
    /// A TCP port, beside torchrun's or the one that the user names.
    Tcp { host: String, master: u16, port: Option<u16> },
}

/// The environment, read through a function so that tests can make one up.
struct Variables<F>(F);

impl<F: Fn(&str) -> Option<String>> Variables<F> {
    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.is_empty())
    }

    fn first(&self, names: &[&'static str]) -> Option<(&'static str, String)> {
        names.iter().find_map(|&name| Some((name, self.get(name)?)))
    }

    /// A number that must be there because `because` is.
    fn number<N: std::str::FromStr>(&self, name: &str, want: &str, because: &str) -> Result<N, WorldError> {
        match self.optional(name, want)? {
            Some(number) => Ok(number),
            None => Err(WorldError::MissingVariable { name: name.into(), because: because.into() }),
        }
    }

    fn optional<N: std::str::FromStr>(&self, name: &str, want: &str) -> Result<Option<N>, WorldError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = value.trim().parse();
        number.map(Some).map_err(|_| WorldError::Variable { name: name.into(), value, want: want.into() })
    }

    fn place(&self, rank_name: &str, size_name: &str) -> Result<(usize, usize), WorldError> {
        let size: usize = self.number(size_name, "a number of PEs", rank_name)?;
        let rank: usize = self.number(rank_name, "a rank", size_name)?;
        if rank >= size {
            let want = format!("below {size_name}, which is {size}");
            return Err(WorldError::Variable { name: rank_name.into(), value: rank.to_string(), want });
        }
        Ok((rank, size))
    }

    fn local_rank(&self, name: &str) -> Result<Option<usize>, WorldError> {
        self.optional(name, "a rank")
    }

    /// Refuses a world of `size` of which this machine has only as many as `variable` says.
    fn one_machine(&self, launcher: &'static str, size: usize, variable: &'static str) -> Result<(), WorldError> {
        match self.optional::<usize>(variable, "a number of PEs")? {
            Some(here) if here < size => {
                Err(WorldError::SeveralMachines { launcher, size, variable, value: here.to_string() })
            }
            _ => Ok(()),
        }
    }

    fn launch(&self) -> Result<Option<Origin>, WorldError> {
        let Some(value) = self.get(HEAP) else {
            return match self.first(&[RANK, SIZE]) {
                Some((because, _)) => Err(WorldError::MissingVariable { name: HEAP.into(), because: because.into() }),
                None => Ok(None),
            };
        };
        let (rank, size) = self.place(RANK, SIZE)?;
        if let Some(first) = self.get("PMI_SIZE").and_then(|text| text.parse().ok()).filter(|&first| first != size) {
            return Err(WorldError::SizesDiffer { first_source: "PMI_SIZE", first, second_source: SIZE, second: size });
        }
        match HeapAddress::parse(&value) {
            Some(heap) => Ok(Some(Origin::Launch { rank, size, heap })),
            None => Err(WorldError::Variable { name: HEAP.into(), value, want: "pid:fd".into() }),
        }
    }

    fn pmi(&self) -> Result<Option<Origin>, WorldError> {
        let local_rank = self.local_rank("MPI_LOCALRANKID")?;
        if self.get("PMI_FD").is_some() {
            let (rank, size) = self.place("PMI_RANK", "PMI_SIZE")?;
            let fd = self.number("PMI_FD", "a file descriptor", "PMI_RANK")?;
            return Ok(Some(Origin::Pmi { address: pmi::Address::Inherited { fd, rank, size }, local_rank }));
        }
        if let Some(address) = self.get("PMI_PORT") {
            let id = self.number("PMI_ID", "a number", "PMI_PORT")?;
            return Ok(Some(Origin::Pmi { address: pmi::Address::Port { address, id }, local_rank }));
        }
        Ok(None)
    }

    fn open_mpi(&self) -> Result<Option<Origin>, WorldError> {
        const LAUNCHER: &str = "Open MPI";
        let (rank_name, size_name) = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
        if self.first(&[rank_name, size_name]).is_none() {
            return Ok(None);
        }
        let (rank, size) = self.place(rank_name, size_name)?;
        self.one_machine(LAUNCHER, size, "OMPI_COMM_WORLD_LOCAL_SIZE")?;
        let Some((_, job)) = self.first(&["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"]) else {
            let name = "PMIX_NAMESPACE (or OMPI_MCA_ess_base_jobid)".into();
            return Err(WorldError::MissingVariable { name, because: rank_name.into() });
        };
        let local_rank = self.local_rank("OMPI_COMM_WORLD_LOCAL_RANK")?;
        let meeting = Meeting::File { launcher: "ompi", job };
        Ok(Some(Origin::Placed(Placed { launcher: LAUNCHER, rank, size, local_rank, meeting })))
    }

    fn torchrun(&self) -> Result<Option<Origin>, WorldError> {
        const LAUNCHER: &str = "torchrun";
        // Both names are common words: only together do they mean a launcher.
        if self.get("RANK").is_none() || self.get("WORLD_SIZE").is_none() {
            return Ok(None);
        }
        let (rank, size) = self.place("RANK", "WORLD_SIZE")?;
        self.one_machine(LAUNCHER, size, "LOCAL_WORLD_SIZE")?;
        let port = |name: &str| self.optional::<u16>(name, "a port");
        let Some(host) = self.get("MASTER_ADDR") else {
            return Err(WorldError::MissingVariable { name: "MASTER_ADDR".into(), because: "RANK".into() });
        };
        let master = self.number("MASTER_PORT", "a port", "MASTER_ADDR")?;
        let meeting = Meeting::Tcp { host, master, port: port(PORT)? };
        let local_rank = self.local_rank("LOCAL_RANK")?;
        Ok(Some(Origin::Placed(Placed { launcher: LAUNCHER, rank, size, local_rank, meeting })))
    }

    fn slurm(&self) -> Result<Option<Origin>, WorldError> {
        const LAUNCHER: &str = "Slurm";
        // Only srun sets a step; a batch script has the other variables too, and is one process.
        let Some((_, step)) = self.first(&["SLURM_STEP_ID", "SLURM_STEPID"]) else { return Ok(None) };
        if self.get("SLURM_PROCID").is_none() {
            return Ok(None);
        }
        let size_name = match self.get("SLURM_STEP_NUM_TASKS") {
            Some(_) => "SLURM_STEP_NUM_TASKS",
            None => "SLURM_NTASKS",
        };
        let (rank, size) = self.place("SLURM_PROCID", size_name)?;
        // The shell of an interactive job is a step of one task; programs started from it are nobody's PEs.
        if size == 1 {
            return Ok(None);
        }
        if let Some((variable, value)) = self.first(&["SLURM_STEP_NUM_NODES", "SLURM_NNODES"])
            && value != "1"
        {
            return Err(WorldError::SeveralMachines { launcher: LAUNCHER, size, variable, value });
        }
        let Some(job) = self.get("SLURM_JOB_ID") else {
            return Err(WorldError::MissingVariable { name: "SLURM_JOB_ID".into(), because: "SLURM_STEP_ID".into() });
        };
        let meeting = Meeting::File { launcher: "slurm", job: format!("{job}.{step}") };
        let local_rank = self.local_rank("SLURM_LOCALID")?;
        Ok(Some(Origin::Placed(Placed { launcher: LAUNCHER, rank, size, local_rank, meeting })))
    }
}

impl Origin {
    /// Reads the environment through `get`. What is closest to this process counts: what started it as a PE of
    /// deltalink before the launcher around that, and launchers that run inside a Slurm job before Slurm.
    pub fn read(get: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, WorldError> {
        let variables = Variables(get);
        if let Some(origin) = variables.launch()? {
            return Ok(Some(origin));
        }
        if let Some(origin) = variables.pmi()? {
            return Ok(Some(origin));
        }
        if let Some(origin) = variables.open_mpi()? {
            return Ok(Some(origin));
        }
        if let Some(origin) = variables.torchrun()? {
            return Ok(Some(origin));
        }
        if let Some(origin) = variables.slurm()? {
            return Ok(Some(origin));
        }
        match variables.first(&["PMI_RANK", "PMI_SIZE"]) {
            Some((because, _)) => {
                Err(WorldError::MissingVariable { name: "PMI_FD (or PMI_PORT)".into(), because: because.into() })
            }
            None => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<Origin>, WorldError> {
        Origin::read(|name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string()))
    }

    #[test]
    fn own_processes_and_pmi_are_recognised() {
        assert_eq!(read(&[]), Ok(None));
        let heap = HeapAddress::parse("12:3").expect("pid:fd");
        assert_eq!(
            read(&[(RANK, "1"), (SIZE, "4"), (HEAP, "12:3"), ("PMI_SIZE", "4"), ("OMPI_COMM_WORLD_SIZE", "1")]),
            Ok(Some(Origin::Launch { rank: 1, size: 4, heap }))
        );
        let address = pmi::Address::Inherited { fd: 6, rank: 1, size: 2 };
        assert_eq!(
            read(&[("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("PMI_FD", "6"), ("MPI_LOCALRANKID", "1")]),
            Ok(Some(Origin::Pmi { address, local_rank: Some(1) }))
        );
        let address = pmi::Address::Port { address: "host:99".into(), id: 3 };
        assert_eq!(
            read(&[("PMI_PORT", "host:99"), ("PMI_ID", "3")]),
            Ok(Some(Origin::Pmi { address, local_rank: None }))
        );
    }

    const OPEN_MPI: [(&str, &str); 5] = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("PMIX_NAMESPACE", "3551002625"),
    ];
    const TORCHRUN: [(&str, &str); 5] = [
        ("RANK", "2"),
        ("WORLD_SIZE", "4"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29500"),
        ("LOCAL_RANK", "2"),
    ];
    const SLURM: [(&str, &str); 6] = [
        ("SLURM_PROCID", "3"),
        ("SLURM_NTASKS", "4"),
        ("SLURM_JOB_ID", "77"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_NNODES", "1"),
        ("SLURM_LOCALID", "3"),
    ];

    #[test]
    fn launchers_that_only_place_are_recognised() {
        let placed = |launcher, rank, size, meeting| {
            Ok(Some(Origin::Placed(Placed { launcher, rank, size, local_rank: Some(rank), meeting })))
        };
        let file = |launcher, job: &str| Meeting::File { launcher, job: job.into() };
        assert_eq!(read(&OPEN_MPI), placed("Open MPI", 1, 2, file("ompi", "3551002625")));
        assert_eq!(read(&SLURM), placed("Slurm", 3, 4, file("slurm", "77.0")));
        let tcp = |port| Meeting::Tcp { host: "127.0.0.1".into(), master: 29500, port };
        assert_eq!(read(&TORCHRUN), placed("torchrun", 2, 4, tcp(None)));
        assert_eq!(read(&[&TORCHRUN[..], &[(PORT, "4000")]].concat()), placed("torchrun", 2, 4, tcp(Some(4000))));
        // mpirun or torchrun inside a Slurm step are what started the process.
        assert_eq!(read(&[&SLURM[..], &OPEN_MPI[..]].concat()), read(&OPEN_MPI));
        assert_eq!(read(&[&SLURM[..], &TORCHRUN[..]].concat()), read(&TORCHRUN));
    }

    #[test]
    fn what_looks_like_a_launcher_and_is_none_is_left_alone() {
        assert_eq!(read(&[("RANK", "3")]), Ok(None));
        // A batch script, and the shell of an interactive job.
        assert_eq!(read(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_JOB_ID", "77")]), Ok(None));
        assert_eq!(
            read(&[
                ("SLURM_PROCID", "0"),
                ("SLURM_NTASKS", "4"),
                ("SLURM_STEP_NUM_TASKS", "1"),
                ("SLURM_STEP_ID", "0")
            ]),
            Ok(None)
        );
    }

    #[test]
    fn worlds_over_several_machines_are_refused() {
        let text = |variables: &[&[(&str, &str)]]| read(&variables.concat()).expect_err("refused").to_string();
        let of = |variables: &[(&'static str, &'static str)], name: &str, value: &'static str| {
            variables.iter().map(|&(key, old)| (key, if key == name { value } else { old })).collect::<Vec<_>>()
        };
        let open_mpi = of(&OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE", "1");
        assert!(text(&[&open_mpi]).contains("Open MPI has spread the 2 PEs over several machines"));
        assert!(text(&[&of(&SLURM, "SLURM_NNODES", "2")]).contains("(SLURM_NNODES=2); this world needs one machine"));
        assert!(text(&[&TORCHRUN, &[("LOCAL_WORLD_SIZE", "2")]]).contains("LOCAL_WORLD_SIZE=2"));
    }

    #[test]
    fn what_does_not_fit_together_is_named() {
        let text = |variables: &[(&str, &str)]| read(variables).expect_err("refused").to_string();
        assert!(text(&[(RANK, "1"), (SIZE, "4")]).contains("DELTALINK_HEAP is missing although DELTALINK_RANK is set"));
        assert!(text(&[(RANK, "4"), (SIZE, "4"), (HEAP, "1:1")]).contains("must be below DELTALINK_SIZE, which is 4"));
        assert!(
            text(&[(RANK, "x"), (SIZE, "4"), (HEAP, "1:1")]).contains("DELTALINK_RANK is \"x\"; it must be a rank")
        );
        assert!(
            text(&[(RANK, "0"), (SIZE, "4"), (HEAP, "11")]).contains("DELTALINK_HEAP is \"11\"; it must be pid:fd")
        );
        assert!(
            text(&[(RANK, "0"), (SIZE, "4"), (HEAP, "1:1"), ("PMI_SIZE", "2")])
                .contains("PMI_SIZE says 2 PEs, DELTALINK_SIZE says 4")
        );
        assert!(text(&[("PMI_RANK", "0"), ("PMI_SIZE", "2")]).contains("PMI_FD (or PMI_PORT) is missing"));
        assert!(text(&[("PMI_FD", "99999999999"), ("PMI_RANK", "0"), ("PMI_SIZE", "2")]).contains("a file descriptor"));
        assert!(text(&[("PMI_PORT", "host:99")]).contains("PMI_ID is missing although PMI_PORT is set"));
        assert!(text(&OPEN_MPI[..1]).contains("OMPI_COMM_WORLD_SIZE is missing"));
        assert!(text(&OPEN_MPI[..4]).contains("PMIX_NAMESPACE (or OMPI_MCA_ess_base_jobid) is missing"));
        assert!(text(&TORCHRUN[..2]).contains("MASTER_ADDR is missing although RANK is set"));
        assert!(text(&[&TORCHRUN[..3], &[("MASTER_PORT", "x")]].concat()).contains("MASTER_PORT is \"x\""));
        assert!(text(&[&SLURM[..2], &SLURM[3..]].concat()).contains("SLURM_JOB_ID is missing"));
    }
}
