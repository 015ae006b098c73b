//! The client side of PMI-1, the line protocol in which MPICH's launchers speak to the processes they start.
//!
//! One line `cmd=NAME key=value ..` each way. Used: `init`, `get_my_kvsname`, `put`, `barrier_in`, `get`, `finalize`, and
//! `initack` when the launcher gives a port instead of an open descriptor.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::WorldError;

/// A launcher that sends more than this without a line end does not speak PMI-1.
const LONGEST_LINE: usize = 64 << 10;
/// The launcher answers the farewell by itself, without other PEs; a launcher that died must not hold up the end.
const FAREWELL: Duration = Duration::from_secs(2);

/// How the launcher can be reached.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Address {
    /// `PMI_FD`, `PMI_RANK`, `PMI_SIZE`.
    Inherited { fd: i32, rank: usize, size: usize },
    /// `PMI_PORT`, `PMI_ID`.
    Port { address: String, id: usize },
}

/// A byte stream whose reads can be bounded in time.
trait Connection: Read + Write + Send + Sync {
    fn bound(&self, timeout: Duration) -> std::io::Result<()>;
}

impl Connection for UnixStream {
    fn bound(&self, timeout: Duration) -> std::io::Result<()> {
        self.set_read_timeout(Some(timeout))
    }
}

impl Connection for TcpStream {
    fn bound(&self, timeout: Duration) -> std::io::Result<()> {
        self.set_read_timeout(Some(timeout))
    }
}

/// A connection to the launcher after `init`.
pub(super) struct Client {
    connection: Box<dyn Connection>,
    received: Vec<u8>,
    timeout: Duration,
    space: String,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("space", &self.space).finish_non_exhaustive()
    }
}

impl Client {
    /// Connects, and returns this process's rank and the number of processes too.
    pub(super) fn connect(address: &Address, timeout: Duration) -> Result<(Self, usize, usize), WorldError> {
        let failed = |reason: std::io::Error| WorldError::Pmi { command: "connect".into(), reason: reason.to_string() };
        match address {
            &Address::Inherited { fd, rank, size } => {
                // SAFETY: borrowed for this call only, which fails if the descriptor is not open.
                let inherited = unsafe { BorrowedFd::borrow_raw(fd) };
                // A copy, so that nothing else that knows the number can be closed or be closed under us.
                let own = inherited.try_clone_to_owned().map_err(failed)?;
                let mut client = Self::over(Box::new(UnixStream::from(own)), timeout);
                client.init()?;
                Ok((client, rank, size))
            }
            Address::Port { address, id } => {
                let stream = TcpStream::connect(address).map_err(failed)?;
                let mut client = Self::over(Box::new(stream), timeout);
                let (rank, size) = client.introduce(*id)?;
                client.init()?;
                Ok((client, rank, size))
            }
        }
    }

    fn over(connection: Box<dyn Connection>, timeout: Duration) -> Self {
        Self { connection, received: Vec::new(), timeout, space: String::new() }
    }

    /// Says over a port which process this is; the launcher answers with its place.
    fn introduce(&mut self, id: usize) -> Result<(usize, usize), WorldError> {
        let command = format!("cmd=initack pmiid={id}");
        self.ask(&command, "initack")?;
        let (mut rank, mut size) = (None, None);
        // `set` lines carry one value each: size, rank, debug.
        for _ in 0..3 {
            let line = self.line(&command, self.timeout)?;
            rank = rank.or(field(&line, "rank").and_then(|text| text.parse().ok()));
            size = size.or(field(&line, "size").and_then(|text| text.parse().ok()));
        }
        match (rank, size) {
            (Some(rank), Some(size)) if rank < size => Ok((rank, size)),
            _ => Err(WorldError::Pmi { command, reason: format!("it answered rank {rank:?} of {size:?}") }),
        }
    }

    fn init(&mut self) -> Result<(), WorldError> {
        self.ask("cmd=init pmi_version=1 pmi_subversion=1", "response_to_init")?;
        let command = "cmd=get_my_kvsname";
        let line = self.ask(command, "my_kvsname")?;
        self.space = value(&line, "kvsname", command)?;
        Ok(())
    }

    /// Publishes `value` under `key`, for all processes after the next [`barrier`](Self::barrier).
    pub(super) fn put(&mut self, key: &str, value: &str) -> Result<(), WorldError> {
        let command = format!("cmd=put kvsname={} key={key} value={value}", self.space);
        self.ask(&command, "put_result").map(drop)
    }

    /// Waits for all processes.
    pub(super) fn barrier(&mut self) -> Result<(), WorldError> {
        self.ask("cmd=barrier_in", "barrier_out").map(drop)
    }

    /// What was published under `key`.
    pub(super) fn get(&mut self, key: &str) -> Result<String, WorldError> {
        let command = format!("cmd=get kvsname={} key={key}", self.space);
        let line = self.ask(&command, "get_result")?;
        value(&line, "value", &command)
    }

    /// Tells the launcher that this process ends well. Its answer does not matter: the work is done.
    pub(super) fn finalize(mut self) {
        self.timeout = FAREWELL;
        let _ = self.ask("cmd=finalize", "finalize_ack");
    }

    fn ask(&mut self, command: &str, want: &str) -> Result<String, WorldError> {
        let failed = |reason: String| WorldError::Pmi { command: command.into(), reason };
        self.connection.write_all(format!("{command}\n").as_bytes()).map_err(|error| failed(error.to_string()))?;
        let line = self.line(command, self.timeout)?;
        if field(&line, "cmd") != Some(want) {
            return Err(failed(format!("it answered `{line}` instead of {want}")));
        }
        match field(&line, "rc") {
            None | Some("0") => Ok(line),
            Some(_) => Err(failed(format!("it answered `{line}`"))),
        }
    }

    fn line(&mut self, command: &str, timeout: Duration) -> Result<String, WorldError> {
        let failed = |reason: String| WorldError::Pmi { command: command.into(), reason };
        let start = Instant::now();
        loop {
            if let Some(end) = self.received.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                return Ok(String::from_utf8_lossy(&line[..end]).into_owned());
            }
            if self.received.len() > LONGEST_LINE {
                return Err(failed("its answer has no line end".into()));
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(failed(format!("no answer within {timeout:.1?}; did every process of the world start?")));
            }
            self.connection.bound(left).map_err(|error| failed(error.to_string()))?;
            let mut bytes = [0; 1024];
            match self.connection.read(&mut bytes) {
                Ok(0) => return Err(failed("it closed the connection".into())),
                Ok(count) => self.received.extend_from_slice(&bytes[..count]),
                // The bound passed, or a signal came: the loop decides.
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) => {
                }
                Err(error) => return Err(failed(error.to_string())),
            }
        }
    }
}

/// The value of `key=value` in a line of such words.
fn field<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    line.split_ascii_whitespace().find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
}

fn value(line: &str, key: &str, command: &str) -> Result<String, WorldError> {
    let missing = || WorldError::Pmi { command: command.into(), reason: format!("its answer `{line}` has no {key}") };
    field(line, key).map(str::to_string).ok_or_else(missing)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::os::fd::AsRawFd;
    use std::thread;

    use super::*;

    const SHORT: Duration = Duration::from_millis(100);

    /// A launcher that expects and answers the given lines, then hangs up.
    fn launcher(stream: UnixStream, script: &'static [(&'static str, &'static str)]) -> thread::JoinHandle<()> {
        thread::spawn(move || {
            let mut lines = BufReader::new(stream.try_clone().expect("clone")).lines();
            for (want, answer) in script {
                assert_eq!(lines.next().expect("a line").expect("readable"), *want);
                (&stream).write_all(answer.as_bytes()).expect("written");
            }
        })
    }

    const INIT: [(&str, &str); 2] = [
        ("cmd=init pmi_version=1 pmi_subversion=1", "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n"),
        ("cmd=get_my_kvsname", "cmd=my_kvsname kvsname=kvs_7_0\n"),
    ];

    #[test]
    fn a_process_publishes_and_reads() {
        let (mine, theirs) = UnixStream::pair().expect("pair");
        let served = launcher(
            theirs,
            &[
                INIT[0],
                INIT[1],
                ("cmd=put kvsname=kvs_7_0 key=heap value=12:3", "cmd=put_result rc=0 msg=success\n"),
                ("cmd=barrier_in", "cmd=barrier_out\n"),
                ("cmd=get kvsname=kvs_7_0 key=heap", "cmd=get_result rc=0 msg=success value=12:3\n"),
                ("cmd=finalize", "cmd=finalize_ack\n"),
            ],
        );
        let address = Address::Inherited { fd: mine.as_raw_fd(), rank: 1, size: 2 };
        let (mut client, rank, size) = Client::connect(&address, Duration::from_secs(10)).expect("connects");
        assert_eq!((rank, size), (1, 2));
        client.put("heap", "12:3").expect("put");
        client.barrier().expect("barrier");
        assert_eq!(client.get("heap").expect("get"), "12:3");
        client.finalize();
        served.join().expect("served");
    }

    #[test]
    fn a_process_learns_its_place_over_a_port() {
        let (mine, theirs) = UnixStream::pair().expect("pair");
        let served = launcher(
            theirs,
            &[("cmd=initack pmiid=3", "cmd=initack\ncmd=set size=4\ncmd=set rank=3\ncmd=set debug=0\n")],
        );
        let mut client = Client::over(Box::new(mine), Duration::from_secs(10));
        assert_eq!(client.introduce(3), Ok((3, 4)));
        served.join().expect("served");
    }

    #[test]
    fn what_the_launcher_does_wrong_is_named() {
        let cases: [(&'static [(&str, &str)], &str); 4] = [
            (&[("cmd=barrier_in", "cmd=barrier_out rc=-1\n")], "answered `cmd=barrier_out rc=-1`"),
            (&[("cmd=barrier_in", "cmd=put_result\n")], "instead of barrier_out"),
            (&[("cmd=barrier_in", "cmd=barr")], "closed the connection"),
            (&[], "`cmd=barrier_in` ("),
        ];
        for (script, want) in cases {
            let (mine, theirs) = UnixStream::pair().expect("pair");
            let served = launcher(theirs, script);
            let error =
                Client::over(Box::new(mine), Duration::from_secs(10)).barrier().expect_err("refused").to_string();
            assert!(error.contains(want), "{error}");
            served.join().expect("served");
        }
    }

    #[test]
    fn a_silent_launcher_is_not_awaited_forever() {
        let (mine, _theirs) = UnixStream::pair().expect("pair");
        let error = Client::over(Box::new(mine), SHORT).barrier().expect_err("silent").to_string();
        assert!(error.contains("no answer within 100.0ms"), "{error}");
    }
}
