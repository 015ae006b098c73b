//! Tensors in safetensors files: inputs (with expected results, if the file is a test vector) and outputs.
//!
//! | tensor | type | shape | |
//! |---|---|---|---|
//! | `q`, `k` | float | `[B,T,H,K]` | |
//! | `v` | float | `[B,T,HV,V]` | |
//! | `g` | float | KDA `[B,T,HV,K]`, GDN `[B,T,HV]` | log decay, if metadata `gate` is `none` or absent |
//! | `g_raw` | float | as `g` | gate input, otherwise |
//! | `A_log`, `dt_bias` | F32 | `[HV]`; KDA `[HV,K]`, GDN `[HV]` | gate parameters; `A_log` is needed by `softplus` |
//! | `beta` or `beta_logits` | float | `[B,T,HV]` | after or before the sigmoid |
//! | `h0` | F32 | `[N,HV,K,V]` or `[N,HV,V,K]` | optional |
//! | `do` | float | `[B,T,HV,V]` | optional, upstream gradient of o; the backward pass needs it |
//! | `dht` | F32 | as `h0` | optional, upstream gradient of the final states |
//! | `cu_seqlens` | I64 or I32 | `[N+1]` | optional, packs sequences into B = 1 |
//! | `rank_token_offsets` | I64 or I32 | `[P+1]` | optional, tokens of each rank |
//!
//! "float" is F32, BF16 or F16. Every other tensor of these types is kept as an expected result: `o`, `ht`, and the gradients
//! `dq`, `dk`, `dv`, `dg` (or `dg_raw`), `dA_log`, `ddt_bias`, `dbeta` (or `dbeta_logits`), `dh0` have the shapes of what they
//! are the gradients of. Metadata, all strings:
//! `op` (`kda`, `gdn`; required), `scale` (absent: `K^-0.5`), `use_qk_l2norm`, `allow_neg_eigval` (absent: `false`), `gate`
//! (`none`, `softplus`, `lower_bound`), `lower_bound`, `layout` (`K-first`, `V-first`).

mod error;
mod input;
mod metadata;
mod output;

pub use error::FileError;
pub use input::InputFile;
pub use metadata::{GateForm, Settings};
pub use output::{Entry, check_writable, gradient_entries, save};

#[cfg(test)]
mod tests;
