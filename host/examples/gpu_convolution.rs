//! The short convolution on the GPUs of this machine against the CPU back end, and how fast its kernels are: run it where
//! kernels or instructions have changed. `gpu_convolution [PES [DEVICE]]`: 2 PEs if not given, dealt out to the GPUs; on the device `cpu` it compares PEs on
//! the CPU back end with one PE there, and measures nothing.

use std::error::Error;

use deltalink::compare::{Error as Distance, Regime, tolerance};
use deltalink::op::convolution::whole::{self, WholeConvolution, WholeConvolutionBackward};
use deltalink::op::convolution::{Activation, ConvolutionConfig, ConvolutionInput, ConvolutionUpstream};
use deltalink::op::{Device, Report};
use deltalink::plan::{Cuts, Plan};
use deltalink::tensor::{Buffer, Dtype, Tensor};
use deltalink::world::WorldOptions;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Tensors of q, k or v.
struct Tensors {
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    initial: Tensor,
    dy: Tensor,
    d_final: Tensor,
}

/// A random call on packed sequences.
struct Call {
    cu_seqlens: Vec<usize>,
    tensors: Vec<Tensors>,
}

impl Call {
    fn new(cu_seqlens: &[usize], channels: &[usize], width: usize, dtype: Dtype) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(width as u64);
        let mut random = |dtype, shape: &[usize]| {
            let values = (0..shape.iter().product()).map(|_| rng.random_range(-1.5..1.5));
            Tensor { shape: shape.to_vec(), data: Buffer::from_f64(dtype, values) }
        };
        let (n, t, reach) = (cu_seqlens.len() - 1, cu_seqlens[cu_seqlens.len() - 1], width - 1);
        let tensors = channels.iter().map(|&d| Tensors {
            x: random(dtype, &[1, t, d]),
            weight: random(Dtype::F32, &[d, width]),
            bias: random(dtype, &[d]),
            initial: random(dtype, &[n, d, reach]),
            dy: random(dtype, &[1, t, d]),
            d_final: random(Dtype::F32, &[n, d, reach]),
        });
        Self { tensors: tensors.collect(), cu_seqlens: cu_seqlens.to_vec() }
    }

    fn run(&self, cuts: &Cuts, device: Device) -> Result<(WholeConvolution, WholeConvolutionBackward), Box<dyn Error>> {
        let plan = Plan::packed(&self.cu_seqlens, cuts)?;
        let inputs = self.tensors.iter().map(|t| ConvolutionInput {
            x: t.x.view(),
            weight: t.weight.view(),
            bias: Some(t.bias.view()),
            initial_state: Some(t.initial.view()),
        });
        let upstream =
            self.tensors.iter().map(|t| ConvolutionUpstream { dy: t.dy.view(), d_final_state: Some(t.d_final.view()) });
        let (inputs, upstream): (Vec<_>, Vec<_>) = (inputs.collect(), upstream.collect());
        let (config, options) = (ConvolutionConfig { device, ..ConvolutionConfig::default() }, WorldOptions::default());
        let forward = whole::forward(&plan, &inputs, Activation::Silu, &config, &options)?;
        let backward = whole::backward(&plan, &inputs, Activation::Silu, &upstream, &config, &options)?;
        Ok((forward, backward))
    }
}

/// Largest relative RMS errors of results in the tensors' type, and of those in f32.
fn distances(
    found: &(WholeConvolution, WholeConvolutionBackward),
    want: &(WholeConvolution, WholeConvolutionBackward),
) -> (f64, f64) {
    let distance = |found: &Tensor, want: &Tensor| Distance::of(&found.data.to_f64(), &want.data.to_f64()).rel_rms;
    let (mut narrow, mut wide) = (0.0f64, 0.0f64);
    for (found, want) in found.0.outputs.iter().zip(&want.0.outputs) {
        narrow = narrow.max(distance(&found.y, &want.y));
        if let (Some(found), Some(want)) = (&found.final_state, &want.final_state) {
            // Copies of inputs.
            wide = wide.max(distance(found, want));
        }
    }
    for (found, want) in found.1.gradients.iter().zip(&want.1.gradients) {
        narrow = narrow.max(distance(&found.dx, &want.dx));
        wide = wide.max(distance(&found.dweight, &want.dweight));
        for (found, want) in [(&found.dbias, &want.dbias), (&found.d_initial_state, &want.d_initial_state)] {
            if let (Some(found), Some(want)) = (found, want) {
                wide = wide.max(distance(found, want));
            }
        }
    }
    (narrow, wide)
}

fn print_times(title: &str, reports: &[Report], bytes: f64) {
    for (rank, report) in reports.iter().enumerate() {
        for kernel in &report.kernels {
            let seconds = kernel.time.as_secs_f64();
            println!(
                "{title}, PE {rank}: {} {:.1} us, {:.0} GB/s of tokens; sent {} messages, {} bytes",
                kernel.kernel,
                seconds * 1e6,
                bytes / reports.len() as f64 / seconds / 1e9,
                report.messages,
                report.bytes_sent
            );
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let pes: usize = std::env::args().nth(1).map_or(Ok(2), |text| text.parse())?;
    let device = match std::env::args().nth(2).as_deref() {
        None | Some("cuda") => Device::Cuda,
        Some("cpu") => Device::Cpu,
        Some(other) => return Err(format!("the device is cuda or cpu, not {other}").into()),
    };
    let mut failed = 0;
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        for width in 2..=8 {
            let call = Call::new(&[0, 300, 301, 301, 1000], &[200, 64, 129], width, dtype);
            let want = call.run(&Cuts::equal(1), Device::Cpu)?;
            for cuts in [Cuts::equal(1), Cuts::equal(pes), Cuts::at((1..pes).map(|i| 600 + i).collect())] {
                let (narrow, wide) = distances(&call.run(&cuts, device)?, &want);
                let good = narrow <= tolerance(dtype, Regime::Ordinary) && wide <= 1e-5;
                failed += usize::from(!good);
                let verdict = if good { "pass" } else { "FAIL" };
                println!("{dtype}, {width} taps, cuts {cuts:?}: {narrow:.1e}, in f32 {wide:.1e}: {verdict}");
            }
        }
    }
    if device == Device::Cuda {
        measure(pes)?;
    }
    if failed > 0 { Err(format!("{failed} comparisons failed").into()) } else { Ok(()) }
}

fn measure(pes: usize) -> Result<(), Box<dyn Error>> {
    let (t, d) = (8192, 4096);
    let call = Call::new(&[0, t], &[d; 3], 4, Dtype::Bf16);
    for round in ["first call", "again"] {
        let (forward, backward) = call.run(&Cuts::equal(pes), Device::Cuda)?;
        let bytes = (t * 3 * d * 2) as f64;
        print_times(&format!("forward, {round}"), &forward.reports, 2.0 * bytes);
        print_times(&format!("backward, {round}"), &backward.reports, 3.0 * bytes);
    }
    Ok(())
}
