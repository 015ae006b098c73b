//! What can be wrong with a file.

use std::path::PathBuf;

/// A file cannot be used; the message says which file, what was found in it and what it needs.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum FileError {
    #[error("{} does not exist; check the path", path.display())]
    Missing { path: PathBuf },
    #[error("{} cannot be read: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error(
        "{} is not a whole safetensors file ({reason}); it must be one with the tensors q, k, v, beta (or beta_logits) and \
         g (or g_raw)",
        path.display()
    )]
    Foreign { path: PathBuf, reason: String },
    #[error("{} has no tensor {name}; {why}. It has: {}", path.display(), present.join(", "))]
    MissingTensor { path: PathBuf, name: &'static str, why: &'static str, present: Vec<String> },
    #[error("{}: tensor {name} has element type {found}, it needs {want}", path.display())]
    Dtype { path: PathBuf, name: String, found: String, want: &'static str },
    #[error("{}: {name} holds {value}; it must hold token offsets, which are not negative", path.display())]
    Offset { path: PathBuf, name: String, value: i64 },
    #[error(
        "{}: metadata {key} is {}, it must be {want}",
        path.display(),
        found.as_ref().map_or("absent".to_owned(), |found| format!("{found:?}"))
    )]
    Metadata { path: PathBuf, key: &'static str, found: Option<String>, want: &'static str },
    #[error("{} cannot be written: {source}; name a file in a folder that exists and that you may write to", path.display())]
    NotWritable { path: PathBuf, source: std::io::Error },
    #[error("{} could not be written: {reason}; what was there before, if anything, is unchanged", path.display())]
    Write { path: PathBuf, reason: String },
}
