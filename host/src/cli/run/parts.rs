//! One PE's result as bytes, on its way to the PE that reports.
//!
//! Little-endian: the length of the header in 8 bytes, the header as JSON, `o`, the final states, the timeline as Chrome
//! trace JSON. Both sides are the same program: they have compared versions before they computed.

use serde::{Deserialize, Serialize};

use crate::op::{Forward, Report};
use crate::tensor::{Dtype, Tensor};
use crate::trace::Trace;

#[derive(Serialize, Deserialize)]
struct Header {
    dtype: Dtype,
    o: Vec<usize>,
    states: Option<Vec<usize>>,
    has_trace: bool,
    report: Report,
}

/// The bytes of `part`.
pub(in crate::cli) fn encode(part: &Forward) -> Vec<u8> {
    let header = Header {
        dtype: part.o.data.dtype(),
        o: part.o.shape.clone(),
        states: part.final_state.as_ref().map(|states| states.shape.clone()),
        has_trace: part.trace.is_some(),
        report: part.report.clone(),
    };
    let header = serde_json::to_vec(&header).expect("numbers and strings serialise");
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.extend(part.o.data.bytes());
    bytes.extend(part.final_state.iter().flat_map(|states| states.data.bytes()));
    if let Some(trace) = &part.trace {
        trace.to_chrome(&mut bytes).expect("a Vec takes all bytes");
    }
    bytes
}

/// What [`encode`] was given, without [`Report::kernels`]; or why it cannot be read.
pub(in crate::cli) fn decode(bytes: &[u8]) -> Result<Forward, String> {
    let mut rest = bytes;
    let mut take = |n: usize| rest.split_off(..n).ok_or_else(|| format!("it ends after {} bytes", bytes.len()));
    let length = take(8)?.try_into().map_or(0, u64::from_le_bytes) as usize;
    let header: Header = serde_json::from_slice(take(length)?).map_err(|error| error.to_string())?;
    let mut tensor = |dtype, shape: &[usize]| -> Result<Tensor, String> {
        let mut tensor = Tensor::zeros(dtype, shape);
        let into = tensor.data.bytes_mut();
        into.copy_from_slice(take(into.len())?);
        Ok(tensor)
    };
    let o = tensor(header.dtype, &header.o)?;
    let final_state = header.states.map(|shape| tensor(Dtype::F32, &shape)).transpose()?;
    let trace = header.has_trace.then(|| Trace::from_chrome(rest).map_err(|error| error.to_string())).transpose()?;
    Ok(Forward { o, final_state, report: header.report, trace })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::tensor::Buffer;
    use crate::trace::{Args, Event, Kind};

    fn part() -> Forward {
        let mut trace = Trace::new("forward", "block");
        trace.events.push(Event {
            name: "scan".into(),
            kind: Kind::Compute,
            pe: 3,
            track: 1,
            start_ns: 1_000_000_000_000_001,
            end_ns: 1_000_000_000_000_777,
            args: Args { head: Some(2), ..Args::default() },
        });
        Forward {
            o: Tensor { shape: vec![1, 3, 1, 1], data: Buffer::from_f64(Dtype::Bf16, [1.0, -2.0, f64::NAN]) },
            final_state: Some(Tensor { shape: vec![1, 1, 1, 2], data: Buffer::F32(vec![0.1, f32::MIN]) }),
            report: Report {
                tokens: 3,
                bytes_sent: 8,
                messages: 1,
                compute: Duration::from_nanos(12_345),
                exposed_wait: Duration::from_secs(7),
                ..Report::default()
            },
            trace: Some(trace),
        }
    }

    #[test]
    fn a_part_survives_the_way() {
        let sent = part();
        let got = decode(&encode(&sent)).unwrap();
        assert_eq!(got.o.data.bytes(), sent.o.data.bytes());
        assert_eq!((&got.o.shape, &got.final_state, &got.report), (&sent.o.shape, &sent.final_state, &sent.report));
        assert_eq!(got.trace, sent.trace);

        let empty = Forward { final_state: None, trace: None, ..sent };
        let got = decode(&encode(&empty)).unwrap();
        assert_eq!((got.final_state, got.trace), (None, None));
    }

    #[test]
    fn a_part_that_is_cut_off_is_refused() {
        let bytes = encode(&part());
        for len in [0, 7, 8, 40, bytes.len() - 2] {
            assert!(decode(&bytes[..len]).is_err(), "{len} of {} bytes", bytes.len());
        }
        assert_eq!(decode(&[]).unwrap_err(), "it ends after 0 bytes");
    }
}
