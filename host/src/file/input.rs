//! Input files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype as Stored, TensorView as StoredView};

use super::{FileError, GateForm, Settings};
use crate::gradients::Upstream;
use crate::inputs::{Beta, Gate, Inputs};
use crate::tensor::{Buffer, Dtype, Tensor};

/// The inputs, and whatever else a file holds, in memory.
#[derive(Clone, Debug)]
pub struct InputFile {
    path: PathBuf,
    settings: Settings,
    tensors: BTreeMap<String, Tensor>,
    cu_seqlens: Option<Vec<usize>>,
    cuts: Option<Vec<usize>>,
    metadata: BTreeMap<String, String>,
}

/// Tensors that no computation can do without; the gate and beta have alternatives and are checked apart.
const ALWAYS: [&str; 3] = ["q", "k", "v"];
/// Tensors that are inputs of the forward or of the backward pass; all others are expected results.
const INPUTS: [&str; 12] = ["q", "k", "v", "g", "g_raw", "A_log", "dt_bias", "beta", "beta_logits", "h0", "do", "dht"];
/// Inputs in the caller's element type. The decay, its parameters and the states and their gradients stay in f32.
const IN_DTYPE: [&str; 7] = ["q", "k", "v", "g_raw", "beta", "beta_logits", "do"];

impl InputFile {
    /// Reads the file at `path`.
    ///
    /// # Errors
    /// [`FileError`], if it is absent, not readable, not safetensors, or lacks something.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, FileError> {
        let path = path.as_ref();
        let bytes = std::fs::read(path).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => FileError::Missing { path: path.to_owned() },
            _ => FileError::Read { path: path.to_owned(), source },
        })?;
        Self::from_bytes(path, &bytes)
    }

    /// Reads a file from memory; `name` stands for its path in messages.
    ///
    /// # Errors
    /// [`FileError`], as [`InputFile::load`].
    pub fn from_bytes(name: impl AsRef<Path>, bytes: &[u8]) -> Result<Self, FileError> {
        let path = name.as_ref().to_owned();
        let foreign =
            |e: safetensors::SafeTensorError| FileError::Foreign { path: path.clone(), reason: e.to_string() };
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(foreign)?;
        let stored = SafeTensors::deserialize(bytes).map_err(foreign)?;
        let metadata: BTreeMap<_, _> = header.metadata().clone().unwrap_or_default().into_iter().collect();

        let (mut tensors, mut cu_seqlens, mut cuts) = (BTreeMap::new(), None, None);
        for (name, view) in stored.tensors() {
            match name.as_str() {
                "cu_seqlens" => cu_seqlens = Some(offsets(&path, &name, &view)?),
                "rank_token_offsets" => cuts = Some(offsets(&path, &name, &view)?),
                _ => match floats(&view) {
                    Some(data) => _ = tensors.insert(name, Tensor { shape: view.shape().to_vec(), data }),
                    None if INPUTS.contains(&name.as_str()) => {
                        return Err(wrong_dtype(&path, &name, &view, "F32, BF16 or F16"));
                    }
                    None => {} // some other program's tensor
                },
            }
        }
        let file = Self { settings: Settings::parse(&path, &metadata)?, path, tensors, cu_seqlens, cuts, metadata };
        file.check_present()?;
        Ok(file)
    }

    fn check_present(&self) -> Result<(), FileError> {
        let need = |name: &'static str, why: &'static str| {
            if self.tensors.contains_key(name) {
                return Ok(());
            }
            let present = self.tensors.keys().cloned().collect();
            Err(FileError::MissingTensor { path: self.path.clone(), name, why, present })
        };
        for name in ALWAYS {
            need(name, "every input file needs q, k and v")?;
        }
        match self.settings.gate {
            GateForm::Given => need("g", "it is the log decay; or set the metadata gate and give g_raw")?,
            GateForm::Softplus => {
                need("g_raw", "the metadata gate is softplus, which needs it")?;
                need("A_log", "the metadata gate is softplus, which needs it")?;
            }
            GateForm::LowerBound(_) => need("g_raw", "the metadata gate is lower_bound, which needs it")?,
        }
        if !self.tensors.contains_key("beta_logits") {
            need("beta", "give beta (after the sigmoid) or beta_logits (before it)")?;
        }
        if self.tensors.contains_key("dht") {
            need("do", "dht is there, and the backward pass needs do as well")?;
        }
        Ok(())
    }

    /// The inputs. `beta` is used if the file holds both `beta` and `beta_logits`.
    pub fn inputs(&self) -> Inputs<'_> {
        // `check_present` has seen every tensor that is indexed here.
        let view = |name: &str| self.tensors[name].view();
        let optional = |name: &str| self.tensors.get(name).map(Tensor::view);
        let settings = &self.settings;
        Inputs {
            op: settings.op,
            q: view("q"),
            k: view("k"),
            v: view("v"),
            gate: match settings.gate {
                GateForm::Given => Gate::Given(view("g")),
                GateForm::Softplus => {
                    Gate::Softplus { raw: view("g_raw"), a_log: view("A_log"), dt_bias: optional("dt_bias") }
                }
                GateForm::LowerBound(bound) => Gate::LowerBound {
                    raw: view("g_raw"),
                    a_log: optional("A_log"),
                    dt_bias: optional("dt_bias"),
                    bound,
                },
            },
            beta: match optional("beta") {
                Some(beta) => Beta::Given(beta),
                None => Beta::Logits {
                    logits: view("beta_logits"),
                    factor: if settings.allow_neg_eigval { 2.0 } else { 1.0 },
                },
            },
            scale: settings.scale,
            l2norm: settings.l2norm,
            initial_state: optional("h0"),
            state_layout: settings.layout,
        }
    }

    /// The upstream gradients `do` and, if the file has it, `dht`; `None` without `do`.
    pub fn upstream(&self) -> Option<Upstream<'_>> {
        let d_o = self.tensors.get("do")?.view();
        Some(Upstream { d_o, d_final_state: self.tensors.get("dht").map(Tensor::view) })
    }

    /// `[N+1]` offsets of packed sequences.
    pub fn cu_seqlens(&self) -> Option<Vec<usize>> {
        self.cu_seqlens.clone()
    }

    /// `[P+1]` token offsets of the ranks that the file was made for.
    pub fn cuts(&self) -> Option<Vec<usize>> {
        self.cuts.clone()
    }

    /// An expected result (`o`, `ht`, `dq`, `s_in`, ...); inputs are not found here.
    pub fn expected(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name).filter(|_| !INPUTS.contains(&name))
    }

    /// The metadata that changes what is computed.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// All metadata.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Where the file came from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The same problem with q, k, v, the gate input, beta and `do` rounded to `dtype`; `g`, `A_log`, `dt_bias`, `h0` and `dht` become f32, expected results stay as they are.
    pub fn to_dtype(mut self, dtype: Dtype) -> Self {
        for (name, tensor) in &mut self.tensors {
            if INPUTS.contains(&name.as_str()) {
                *tensor = tensor.to_dtype(if IN_DTYPE.contains(&name.as_str()) { dtype } else { Dtype::F32 });
            }
        }
        self
    }
}

/// The elements of a stored tensor, copied because the file does not align them.
fn floats(view: &StoredView<'_>) -> Option<Buffer> {
    let bytes = view.data();
    match view.dtype() {
        Stored::F32 => Some(Buffer::F32(bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect())),
        Stored::BF16 => Some(Buffer::Bf16(bytes.as_chunks().0.iter().map(|&b| bf16::from_le_bytes(b)).collect())),
        Stored::F16 => Some(Buffer::F16(bytes.as_chunks().0.iter().map(|&b| f16::from_le_bytes(b)).collect())),
        _ => None,
    }
}

fn offsets(path: &Path, name: &str, view: &StoredView<'_>) -> Result<Vec<usize>, FileError> {
    let values: Vec<i64> = match view.dtype() {
        Stored::I64 => view.data().as_chunks().0.iter().map(|&b| i64::from_le_bytes(b)).collect(),
        Stored::I32 => view.data().as_chunks().0.iter().map(|&b| i32::from_le_bytes(b).into()).collect(),
        _ => return Err(wrong_dtype(path, name, view, "I64 or I32")),
    };
    values
        .into_iter()
        .map(|value| {
            usize::try_from(value).map_err(|_| FileError::Offset {
                path: path.to_owned(),
                name: name.to_owned(),
                value,
            })
        })
        .collect()
}

fn wrong_dtype(path: &Path, name: &str, view: &StoredView<'_>, want: &'static str) -> FileError {
    FileError::Dtype { path: path.to_owned(), name: name.to_owned(), found: format!("{:?}", view.dtype()), want }
}
