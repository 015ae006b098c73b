//! A file in the user's runtime folder, named after the job: PE 0 writes it, the others read it, and PE 0 removes it once
//! all have joined.
//!
//! It appears in one piece (written under another name, then renamed). One that an earlier world of the same job number
//! left behind is recognised by its process being gone, and read past until PE 0 replaces it.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::super::segment::{HeapAddress, Segment};
use super::super::{WorldError, WorldOptions, machine};
use super::{Deadline, Note};

/// Longer files are no notes.
const LONGEST: u64 = 4096;

/// A job of a launcher, and where its processes meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct Job {
    path: PathBuf,
}

/// The file of PE 0, removed when dropped.
#[derive(Debug)]
pub(in super::super) struct Posted {
    path: PathBuf,
    text: String,
}

impl Job {
    /// Job `id` of launcher `launcher`; files go to `runtime` (`XDG_RUNTIME_DIR`) if that is a folder, else to `/tmp`.
    pub fn new(launcher: &str, id: &str, runtime: Option<&str>) -> Self {
        let folder = runtime.map(Path::new).filter(|folder| folder.is_dir()).unwrap_or(Path::new("/tmp"));
        let user = rustix::process::getuid().as_raw();
        let word = |text: &str| text.replace(|c: char| !(c.is_ascii_alphanumeric() || "-.".contains(c)), "_");
        Self { path: folder.join(format!("deltalink-{user}-{}-{}", word(launcher), word(id))) }
    }

    /// On PE 0: tells the others where the segment is.
    pub fn post(&self, note: &Note) -> Result<Posted, WorldError> {
        let text = note.to_string();
        let draft = self.path.with_extension(format!("{}.new", std::process::id()));
        let written = (|| {
            // Of a process with this number that died here.
            match std::fs::remove_file(&draft) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft)?;
            file.write_all(text.as_bytes())?;
            std::fs::rename(&draft, &self.path)
        })();
        written.map_err(|error| {
            // The draft is of no use to anybody; the first error is what counts.
            let _ = std::fs::remove_file(&draft);
            self.error(error.to_string())
        })?;
        Ok(Posted { path: self.path.clone(), text })
    }

    /// On PE `rank`, not 0: waits for PE 0's segment and opens it.
    pub fn open(&self, rank: usize, size: usize, options: &WorldOptions) -> Result<Segment, WorldError> {
        let deadline = Deadline::after(options.timeout);
        let mut seen = "it did not appear".to_owned();
        loop {
            match self.look(rank, size, options) {
                Ok(segment) => return Ok(segment),
                Err(Look::Final(error)) => return Err(error),
                Err(Look::Again(why)) => seen = why,
                Err(Look::Absent) => {}
            }
            if deadline.passed() {
                return Err(self.error(format!("{seen} within {:.1?}; did PE 0 start?", options.timeout)));
            }
            deadline.pause();
        }
    }

    fn look(&self, rank: usize, size: usize, options: &WorldOptions) -> Result<Segment, Look> {
        let refused = |error: std::io::Error| match error.kind() {
            ErrorKind::NotFound => Look::Absent,
            _ => Look::Final(self.error(error.to_string())),
        };
        let file = File::open(&self.path).map_err(refused)?;
        let owner = file.metadata().map_err(refused)?.uid();
        if owner != rustix::process::getuid().as_raw() {
            return Err(Look::Final(self.error(format!("it belongs to user {owner}"))));
        }
        let mut text = String::new();
        file.take(LONGEST).read_to_string(&mut text).map_err(refused)?;
        let Some(note) = Note::parse(&text) else {
            return Err(Look::Again("what is there is not a note of PE 0".into()));
        };
        // A note of an earlier boot is as stale as one of a dead process: both are replaced if PE 0 starts here.
        if note.machine != machine() {
            return Err(Look::Again(format!("there is one from another machine or boot ({})", note.machine)));
        }
        if !note.heap.process_lives() {
            return Err(Look::Again(format!("there is an old one ({}), whose process is gone", note.heap)));
        }
        let heap = note.heap_for(rank, size).map_err(Look::Final)?;
        match Segment::open(heap, size, options.heap_bytes) {
            Ok(segment) => Ok(segment),
            // The number of a dead process may have gone to another one.
            Err(WorldError::Open { reason, .. } | WorldError::Foreign { reason, .. }) => {
                Err(Look::Again(format!("there is one ({heap}) that leads to no segment ({reason})")))
            }
            Err(error) => Err(Look::Final(error)),
        }
    }

    fn error(&self, reason: String) -> WorldError {
        WorldError::Rendezvous { place: self.path.display().to_string(), reason }
    }
}

/// Why there is no segment yet.
enum Look {
    Absent,
    Again(String),
    Final(WorldError),
}

impl Drop for Posted {
    fn drop(&mut self) {
        // Only its own: a later world of the job may have replaced it. If it cannot be removed it is stale, which the
        // next world finds out.
        if std::fs::read_to_string(&self.path).is_ok_and(|text| text == self.text) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl HeapAddress {
    /// Whether the process that holds the file exists.
    fn process_lives(self) -> bool {
        Path::new(&format!("/proc/{}", self.pid())).exists()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const SHORT: Duration = Duration::from_millis(60);

    fn options() -> WorldOptions {
        WorldOptions { heap_bytes: 4096, timeout: SHORT }
    }

    fn job(folder: &tempfile::TempDir) -> Job {
        Job::new("Open MPI", "12/3@x", folder.path().to_str())
    }

    #[test]
    fn the_name_has_user_launcher_and_job() {
        let folder = tempfile::tempdir().expect("folder");
        let name = job(&folder).path.file_name().expect("name").to_string_lossy().into_owned();
        assert_eq!(name, format!("deltalink-{}-Open_MPI-12_3_x", rustix::process::getuid().as_raw()));
        assert!(Job::new("Slurm", "1.0", Some("/no/such/folder")).path.starts_with("/tmp"));
    }

    #[test]
    fn a_posted_segment_is_found_and_its_note_goes_with_its_owner() {
        let folder = tempfile::tempdir().expect("folder");
        let segment = Segment::shared(2, 4096).expect("memfd");
        let note = Note::new(segment.address().expect("has a file"), 2);
        let posted = job(&folder).post(&note).expect("written");
        let open = |size| job(&folder).open(1, size, &options());
        assert_eq!(open(2).expect("opens").size(), 2);
        assert!(matches!(open(3), Err(WorldError::SizesDiffer { first: 2, second: 3, .. })));
        drop(posted);
        assert_eq!(std::fs::read_dir(folder.path()).expect("folder").count(), 0);
        let error = open(2).expect_err("gone").to_string();
        assert!(error.contains("it did not appear within 60.0ms; did PE 0 start?"), "{error}");
    }

    #[test]
    fn what_an_earlier_world_left_is_read_past_and_replaced() {
        let folder = tempfile::tempdir().expect("folder");
        let segment = Segment::shared(2, 4096).expect("memfd");
        let address = segment.address().expect("has a file");
        let heap = |text| HeapAddress::parse(text).expect("pid:fd");
        let mine = std::process::id();
        let stale = [
            (Note { heap: heap("4194999:3"), ..Note::new(address, 2) }, "whose process is gone"),
            (Note { heap: heap(&format!("{mine}:1000000")), ..Note::new(address, 2) }, "leads to no segment"),
            (Note { machine: "an-older-boot".into(), ..Note::new(address, 2) }, "another machine or boot"),
        ];
        for (note, want) in stale {
            // As a world that was killed leaves it.
            std::mem::forget(job(&folder).post(&note).expect("written"));
            let error = job(&folder).open(1, 2, &options()).expect_err("stale").to_string();
            assert!(error.contains(want), "{error}");
            let posted = job(&folder).post(&Note::new(address, 2)).expect("replaces it");
            job(&folder).open(1, 2, &options()).expect("opens");
            drop(posted);
        }
        std::fs::write(&job(&folder).path, "something else").expect("written");
        let error = job(&folder).open(1, 2, &options()).expect_err("no note").to_string();
        assert!(error.contains("not a note of PE 0"), "{error}");
    }

    #[test]
    fn a_note_of_a_later_world_is_not_removed() {
        let folder = tempfile::tempdir().expect("folder");
        let segment = Segment::shared(2, 4096).expect("memfd");
        let address = segment.address().expect("has a file");
        let first = job(&folder).post(&Note::new(address, 2)).expect("written");
        let second = job(&folder).post(&Note::new(address, 3)).expect("written");
        drop(first);
        assert!(job(&folder).path.exists());
        drop(second);
        assert!(!job(&folder).path.exists());
    }
}
