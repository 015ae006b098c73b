//! One PE's gradients as bytes, on their way to the PE that reports.
//!
//! Little-endian: the length of the results of the forward call in 8 bytes and these as `parts` has them, then the length of
//! the header in 8 bytes, the header as JSON, the gradients, the timeline as Chrome trace JSON.

use serde::{Deserialize, Serialize};

use super::super::parts;
use crate::gradients::Gradients;
use crate::op::whole::PartBackward;
use crate::op::{Backward, Report};
use crate::tensor::{Dtype, Tensor};
use crate::trace::Trace;

#[derive(Serialize, Deserialize)]
struct Header {
    saved_bytes: usize,
    /// In the order of [`list`]; `None` where there is no gradient.
    tensors: Vec<Option<(Dtype, Vec<usize>)>>,
    has_trace: bool,
    report: Report,
}

/// All gradients in a fixed order.
fn list(gradients: &Gradients) -> [Option<&Tensor>; 8] {
    let Gradients { dq, dk, dv, dg, dbeta, da_log, ddt_bias, d_initial_state } = gradients;
    let [da_log, ddt_bias, dh0] = [da_log, ddt_bias, d_initial_state].map(Option::as_ref);
    [Some(dq), Some(dk), Some(dv), Some(dg), Some(dbeta), da_log, ddt_bias, dh0]
}

/// The bytes of `part`.
pub(in crate::cli) fn encode(part: &PartBackward) -> Vec<u8> {
    let PartBackward { forward, saved_bytes, backward } = part;
    let forward = parts::encode(forward);
    let tensors = list(&backward.gradients);
    let header = Header {
        saved_bytes: *saved_bytes,
        tensors: tensors.map(|x| x.map(|x| (x.data.dtype(), x.shape.clone()))).to_vec(),
        has_trace: backward.trace.is_some(),
        report: backward.report.clone(),
    };
    let header = serde_json::to_vec(&header).expect("numbers and strings serialise");
    let mut bytes = Vec::new();
    for piece in [forward, header] {
        bytes.extend((piece.len() as u64).to_le_bytes());
        bytes.extend(piece);
    }
    bytes.extend(tensors.into_iter().flatten().flat_map(|x| x.data.bytes()));
    if let Some(trace) = &backward.trace {
        trace.to_chrome(&mut bytes).expect("a Vec takes all bytes");
    }
    bytes
}

/// What [`encode`] was given, without [`Report::kernels`]; or why it cannot be read.
pub(in crate::cli) fn decode(bytes: &[u8]) -> Result<PartBackward, String> {
    let mut rest = bytes;
    let mut take = |n: usize| rest.split_off(..n).ok_or_else(|| format!("it ends after {} bytes", bytes.len()));
    let mut piece = || {
        let length = take(8)?.try_into().map_or(0, u64::from_le_bytes) as usize;
        take(length)
    };
    let forward = parts::decode(piece()?)?;
    let header: Header = serde_json::from_slice(piece()?).map_err(|error| error.to_string())?;
    let mut tensors = Vec::new();
    for described in &header.tensors {
        tensors.push(match described {
            None => None,
            Some((dtype, shape)) => {
                let mut tensor = Tensor::zeros(*dtype, shape);
                let into = tensor.data.bytes_mut();
                into.copy_from_slice(take(into.len())?);
                Some(tensor)
            }
        });
    }
    let trace = header.has_trace.then(|| Trace::from_chrome(rest).map_err(|error| error.to_string())).transpose()?;
    let tensors: [Option<Tensor>; 8] = tensors.try_into().map_err(|_| "it does not hold 8 gradients".to_owned())?;
    let [Some(dq), Some(dk), Some(dv), Some(dg), Some(dbeta), da_log, ddt_bias, d_initial_state] = tensors else {
        return Err("a gradient is missing".to_owned());
    };
    let gradients = Gradients { dq, dk, dv, dg, dbeta, da_log, ddt_bias, d_initial_state };
    let backward = Backward { gradients, report: header.report, trace };
    Ok(PartBackward { forward, saved_bytes: header.saved_bytes, backward })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::Forward;
    use crate::tensor::Buffer;

    fn part() -> PartBackward {
        let tensor = |x: f32| Tensor { shape: vec![1, 2, 1, 1], data: Buffer::F32(vec![x, -x]) };
        let report = Report { tokens: 2, bytes_sent: 77, ..Report::default() };
        let forward = Forward { o: tensor(0.5), final_state: None, report: report.clone(), trace: None };
        let half = Tensor { shape: vec![1, 1, 1, 1], data: Buffer::from_f64(Dtype::Bf16, [3.0]) };
        let gradients = Gradients {
            dq: tensor(1.0),
            dk: half,
            dv: tensor(3.0),
            dg: tensor(4.0),
            dbeta: tensor(5.0),
            da_log: None,
            ddt_bias: Some(tensor(f32::INFINITY)),
            d_initial_state: None,
        };
        let backward = Backward { gradients, report, trace: Some(Trace::new("backward", "block")) };
        PartBackward { forward, saved_bytes: 123, backward }
    }

    #[test]
    fn a_part_survives_the_way() {
        let (sent, got) = (part(), decode(&encode(&part())).unwrap());
        assert_eq!((got.saved_bytes, &got.forward.o), (123, &sent.forward.o));
        assert_eq!(got.backward.gradients, sent.backward.gradients);
        assert_eq!((&got.backward.report, &got.backward.trace), (&sent.backward.report, &sent.backward.trace));
    }

    #[test]
    fn a_part_that_is_cut_off_is_refused() {
        let bytes = encode(&part());
        for len in [0, 9, 40, bytes.len() / 2, bytes.len() - 2] {
            assert!(decode(&bytes[..len]).is_err(), "{len} of {} bytes", bytes.len());
        }
    }
}
