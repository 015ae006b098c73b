//! A TCP port on which PE 0 tells each of the others, in one line, where the segment is.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;

use super::super::WorldError;
use super::super::segment::HeapAddress;
use super::{Deadline, Note};

/// Distance from `MASTER_PORT`, which torchrun's own store may hold.
const OFFSET: u16 = 77;
/// How long one caller may take to say who it is; others wait meanwhile.
const PATIENCE: Duration = Duration::from_secs(2);
const LONGEST: u64 = 4096;
const HELLO: &str = "deltalink-pe";

/// Where PE 0 can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct Port {
    host: String,
    port: u16,
}

impl Port {
    /// The port that belongs to `MASTER_ADDR` and `MASTER_PORT`: 77 above, or below where that is past the end.
    pub fn beside(host: &str, master: u16) -> Self {
        Self { host: host.into(), port: master.checked_add(OFFSET).unwrap_or(master - OFFSET) }
    }

    /// Port `port` (`DELTALINK_PORT`) of `host`.
    pub fn at(host: &str, port: u16) -> Self {
        Self { host: host.into(), port }
    }

    /// On PE 0: tells the `size - 1` others, each once, and returns when all have asked.
    pub fn serve(&self, note: &Note, timeout: Duration) -> Result<(), WorldError> {
        let listener = TcpListener::bind((self.host.as_str(), self.port)).map_err(|error| {
            self.error(format!("PE 0 cannot listen there: {error}; DELTALINK_PORT sets another port for all PEs"))
        })?;
        self.serve_on(&listener, note, timeout)
    }

    fn serve_on(&self, listener: &TcpListener, note: &Note, timeout: Duration) -> Result<(), WorldError> {
        let failed = |error: std::io::Error| self.error(error.to_string());
        listener.set_nonblocking(true).map_err(failed)?;
        let deadline = Deadline::after(timeout);
        // By rank; PE 0 is here.
        let mut told = vec![false; note.size];
        told[0] = true;
        while let Some(missing) = told.iter().position(|&told| !told) {
            match listener.accept() {
                // Whoever says nothing sensible is somebody else, and no reason to stop.
                Ok((stream, _)) => {
                    if let Some(rank) = answer(stream, note, deadline.left()).filter(|&rank| rank < note.size) {
                        told[rank] = true;
                    }
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                    if deadline.passed() {
                        return Err(self.error(format!("PE {missing} did not ask within {timeout:.1?}; did it start?")));
                    }
                    deadline.pause();
                }
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(())
    }

    /// On PE `rank`, not 0: asks PE 0, which may still be starting.
    pub fn ask(&self, rank: usize, size: usize, timeout: Duration) -> Result<HeapAddress, WorldError> {
        let deadline = Deadline::after(timeout);
        loop {
            let why = match self.connect(deadline.left()).and_then(|stream| question(stream, rank, deadline.left())) {
                Ok(line) => match Note::parse(&line) {
                    Some(note) => return note.heap_for(rank, size),
                    None => {
                        let reason = format!("something else answers there ({:?})", line.trim_end());
                        return Err(self.error(format!("{reason}; DELTALINK_PORT sets another port for all PEs")));
                    }
                },
                Err(error) => error,
            };
            if deadline.passed() {
                return Err(self.error(format!("no answer of PE 0 within {timeout:.1?} ({why})")));
            }
            deadline.pause();
        }
    }

    fn connect(&self, timeout: Duration) -> std::io::Result<TcpStream> {
        let mut last = ErrorKind::AddrNotAvailable.into();
        for address in (self.host.as_str(), self.port).to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, timeout.max(Duration::from_millis(1))) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn error(&self, reason: String) -> WorldError {
        WorldError::Rendezvous { place: format!("{}:{}", self.host, self.port), reason }
    }
}

fn line(stream: &TcpStream) -> std::io::Result<String> {
    let mut line = String::new();
    BufReader::new(stream.take(LONGEST)).read_line(&mut line)?;
    Ok(line)
}

/// PE 0's side of one call: the rank that was told.
fn answer(mut stream: TcpStream, note: &Note, left: Duration) -> Option<usize> {
    stream.set_nonblocking(false).ok()?;
    stream.set_read_timeout(Some(PATIENCE.min(left).max(Duration::from_millis(1)))).ok()?;
    let hello = line(&stream).ok()?;
    let rank = hello.strip_prefix(HELLO)?.trim().parse().ok()?;
    stream.write_all(format!("{note}\n").as_bytes()).ok()?;
    Some(rank)
}

/// The other side: PE 0's line.
fn question(mut stream: TcpStream, rank: usize, left: Duration) -> std::io::Result<String> {
    stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
    stream.write_all(format!("{HELLO} {rank}\n").as_bytes())?;
    let line = line(&stream)?;
    if line.is_empty() { Err(ErrorKind::UnexpectedEof.into()) } else { Ok(line) }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    fn note() -> Note {
        Note::new(HeapAddress::parse("12:3").expect("pid:fd"), 3)
    }

    /// A listener on a free port, and the port.
    fn listener() -> (TcpListener, Port) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("bound").port();
        (listener, Port::at("127.0.0.1", port))
    }

    #[test]
    fn the_port_lies_beside_the_masters() {
        assert_eq!(Port::beside("h", 29500).port, 29577);
        assert_eq!(Port::beside("h", 65500).port, 65423);
    }

    #[test]
    fn all_are_told_and_strangers_do_no_harm() {
        let (listener, port) = listener();
        let server = {
            let port = port.clone();
            thread::spawn(move || port.serve_on(&listener, &note(), LONG))
        };
        // Somebody who hangs up, and somebody who speaks another protocol.
        drop(port.connect(LONG).expect("listens"));
        port.connect(LONG).expect("listens").write_all(b"GET / HTTP/1.1\r\n").expect("sent");
        for rank in [2, 1] {
            assert_eq!(port.ask(rank, 3, LONG), Ok(note().heap));
        }
        assert_eq!(server.join().expect("serves"), Ok(()));
    }

    #[test]
    fn who_is_missing_is_named() {
        let (listener, port) = listener();
        let short = Duration::from_millis(100);
        let error = port.serve_on(&listener, &note(), short).expect_err("nobody came").to_string();
        assert!(error.contains("PE 1 did not ask within 100.0ms"), "{error}");
        let taken = port.serve(&note(), short).expect_err("taken").to_string();
        assert!(taken.contains("cannot listen there") && taken.contains("DELTALINK_PORT"), "{taken}");
        drop(listener);
        let error = port.ask(1, 3, short).expect_err("nobody there").to_string();
        assert!(error.contains("no answer of PE 0 within 100.0ms"), "{error}");
    }

    #[test]
    fn another_service_on_the_port_is_not_taken_for_pe_0() {
        let (listener, port) = listener();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("called");
            line(&stream).expect("a question");
            stream.write_all(b"-ERR unknown command\r\n").expect("sent");
        });
        let error = port.ask(1, 3, LONG).expect_err("no PE 0").to_string();
        assert!(error.contains("something else answers there (\"-ERR unknown command\")"), "{error}");
        server.join().expect("served");
    }
}
