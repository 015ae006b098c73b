//! Output files, which are whole or not there.

use std::borrow::Cow;
use std::collections::HashMap;
use std::io::Write;
use std::path::Path;

use safetensors::View;
use safetensors::tensor::Dtype as Stored;
use tempfile::{Builder, NamedTempFile};

use super::FileError;
use crate::gradients::Gradients;
use crate::inputs::Inputs;
use crate::tensor::{Dtype, Tensor};

/// One tensor of an output file.
#[derive(Clone, Copy, Debug)]
pub enum Entry<'a> {
    /// Floating-point elements.
    Tensor(&'a Tensor),
    /// A vector of token offsets.
    Offsets(&'a [i64]),
}

/// The entries for gradients with respect to `inputs`, under the names by which [`super::InputFile::expected`] finds them.
pub fn gradient_entries<'a>(gradients: &'a Gradients, inputs: &Inputs<'_>) -> Vec<(&'static str, Entry<'a>)> {
    gradients.named(inputs).into_iter().map(|(name, tensor)| (name, Entry::Tensor(tensor))).collect()
}

/// Checks, before anything is computed, that [`save`] will be able to write `path`: creates a temporary file beside it and
/// removes it again.
///
/// # Errors
/// [`FileError::NotWritable`].
pub fn check_writable(path: impl AsRef<Path>) -> Result<(), FileError> {
    temporary_beside(path.as_ref()).map(drop)
}

/// Writes `tensors` and `metadata` as safetensors: into a temporary file beside `path`, which is then renamed, so that a
/// reader never sees half a file.
///
/// # Errors
/// [`FileError::NotWritable`] or [`FileError::Write`]; a file that was at `path` before is unchanged then.
pub fn save(
    path: impl AsRef<Path>,
    tensors: &[(&str, Entry<'_>)],
    metadata: &[(&str, String)],
) -> Result<(), FileError> {
    let path = path.as_ref();
    let failed = |reason: String| FileError::Write { path: path.to_owned(), reason };
    let mut temporary = temporary_beside(path)?;
    let entries = tensors.iter().map(|&(name, entry)| (name, Serialised::new(entry)));
    let metadata: HashMap<_, _> = metadata.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
    let bytes = safetensors::serialize(entries, Some(metadata)).map_err(|e| failed(e.to_string()))?;
    temporary.write_all(&bytes).map_err(|e| failed(e.to_string()))?;
    temporary.as_file().sync_all().map_err(|e| failed(e.to_string()))?;
    temporary.persist(path).map_err(|e| failed(e.error.to_string()))?;
    Ok(())
}

/// A temporary file in the folder of `path` with the permissions that a new file would get.
fn temporary_beside(path: &Path) -> Result<NamedTempFile, FileError> {
    let not_writable = |source| FileError::NotWritable { path: path.to_owned(), source };
    if path.is_dir() || path.file_name().is_none() {
        return Err(not_writable(std::io::Error::from(std::io::ErrorKind::IsADirectory)));
    }
    let folder = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let mut builder = Builder::new();
    builder.prefix(".deltalink-").suffix(".tmp");
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666)); // less the umask
    builder.tempfile_in(folder).map_err(not_writable)
}

/// An [`Entry`] as safetensors wants to see it.
struct Serialised<'a> {
    dtype: Stored,
    shape: Cow<'a, [usize]>,
    bytes: Cow<'a, [u8]>,
}

impl<'a> Serialised<'a> {
    fn new(entry: Entry<'a>) -> Self {
        match entry {
            Entry::Tensor(tensor) => Self {
                dtype: match tensor.data.dtype() {
                    Dtype::F32 => Stored::F32,
                    Dtype::Bf16 => Stored::BF16,
                    Dtype::F16 => Stored::F16,
                },
                shape: Cow::Borrowed(&tensor.shape),
                bytes: Cow::Borrowed(tensor.data.bytes()),
            },
            Entry::Offsets(values) => Self {
                dtype: Stored::I64,
                shape: Cow::Owned(vec![values.len()]),
                bytes: Cow::Borrowed(bytemuck::cast_slice(values)),
            },
        }
    }
}

impl View for Serialised<'_> {
    fn dtype(&self) -> Stored {
        self.dtype
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }
    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}
