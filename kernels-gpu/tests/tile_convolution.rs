//! Operations of the short convolution against plain loops in f64, and what checked mode says when they are misused.

mod common;

use common::{Buffer, DTYPES, assert_close, run};
use kernels_gpu::element::DtypeCode;
use kernels_gpu::params::{Matrix, Tensor};
use kernels_gpu::tile::host::FaultKind;
use kernels_gpu::tile::{CONVOLUTION_CHANNELS, ConvolutionBack, ConvolutionRun, MAX_TAPS, Warpgroup};

/// A run of 6 tokens of 5 channels in the middle of a wider tensor, and 2 tokens after it.
const TOKENS: usize = 6;
const GIVEN: usize = 8;
const COLS: usize = 5;
const ROW: usize = 9;

#[derive(Clone, Copy)]
struct Params {
    x: Tensor,
    before: Tensor,
    weight: Tensor,
    bias: Tensor,
    dy: Tensor,
    after: Tensor,
    y: Tensor,
    dz: Tensor,
    dx: Tensor,
    d_before: Tensor,
    sums: Tensor,
    width: usize,
    silu: bool,
}

fn rows(tensor: &Tensor, count: usize) -> Matrix {
    tensor.matrix(2, count, COLS, ROW, 1)
}

fn the_run(p: &Params) -> ConvolutionRun {
    ConvolutionRun {
        x: rows(&p.x, GIVEN),
        // As a state lies in memory: channel by channel.
        before: p.before.matrix(0, p.width - 1, COLS, 1, p.width - 1),
        weight: p.weight.matrix(0, p.width, COLS, 1, p.width),
        bias: p.bias.matrix(0, 1, COLS, 0, 1),
        silu: p.silu,
    }
}

fn all(wg: &mut Warpgroup<'_>, p: &Params) {
    let run = the_run(p);
    wg.convolve(rows(&p.y, TOKENS), &run);
    wg.convolve_gradient(rows(&p.dz, GIVEN), &run, rows(&p.dy, GIVEN));
    // Of the W-1 rows after the run two are given; of the rest the first is dz.
    let given = GIVEN.min(TOKENS + p.width - 1);
    let behind = TOKENS + p.width - 1 - given;
    let back = ConvolutionBack {
        dy: rows(&p.dy, given),
        after: rows(&p.after, behind),
        real: 1,
        dx: rows(&p.dx, TOKENS),
        d_before: p.d_before.matrix(0, p.width - 1, COLS, 1, p.width - 1),
        sums: p.sums.matrix(0, p.width + 1, COLS, COLS, 1),
    };
    wg.convolve_back(&back, &ConvolutionRun { x: rows(&p.x, given), ..run });
}

#[test]
fn outputs_and_gradients_are_those_of_plain_loops() {
    for (dtype, width, silu) in
        DTYPES.into_iter().flat_map(|d| (2..=MAX_TAPS).flat_map(move |w| [(d, w, false), (d, w, true)]))
    {
        let wide = DtypeCode::F32;
        let random = |dtype, len, seed| Buffer::between(dtype, len, seed, -1.5, 1.5);
        let (mut x, mut dy) = (random(dtype, GIVEN * ROW, 1), random(dtype, GIVEN * ROW, 2));
        let (mut before, mut weight) = (random(dtype, (width - 1) * COLS, 3), random(wide, width * COLS, 4));
        let (mut bias, mut after) = (random(dtype, COLS, 5), random(wide, MAX_TAPS * ROW, 6));
        let zeros = |len| Buffer::filled(wide, len, 0.0);
        let (mut y, mut dz, mut dx) = (zeros(GIVEN * ROW), zeros(GIVEN * ROW), zeros(GIVEN * ROW));
        let (mut d_before, mut sums) = (zeros((width - 1) * COLS), zeros((width + 1) * COLS));
        let params = Params {
            x: x.tensor(),
            before: before.tensor(),
            weight: weight.tensor(),
            bias: bias.tensor(),
            dy: dy.tensor(),
            after: after.tensor(),
            y: y.tensor(),
            dz: dz.tensor(),
            dx: dx.tensor(),
            d_before: d_before.tensor(),
            sums: sums.tensor(),
            width,
            silu,
        };
        run(1, &params, all).unwrap();

        let reach = width - 1;
        let at = |buffer: &Buffer, r: usize, c: usize| f64::from(buffer.get(2 + r * ROW + c));
        let tap = |w: usize, c: usize| f64::from(weight.get(c * width + w));
        // Position on the line of the W-1 rows before and the tokens.
        let input = |place: usize, c: usize| match place.checked_sub(reach) {
            Some(r) => at(&x, r, c),
            None => f64::from(before.get(c * reach + place)),
        };
        let sigmoid = |z: f64| 1.0 / (1.0 + (-z).exp());
        let z =
            |r: usize, c: usize| f64::from(bias.get(c)) + (0..width).map(|w| tap(w, c) * input(r + w, c)).sum::<f64>();
        let gradient = |r: usize, c: usize| {
            let slope = if silu { sigmoid(z(r, c)) * (1.0 + z(r, c) * sigmoid(-z(r, c))) } else { 1.0 };
            slope * at(&dy, r, c)
        };
        let given = GIVEN.min(TOKENS + reach);
        let upstream = |r: usize, c: usize| match r {
            r if r < given => gradient(r, c),
            r if r == given => at(&after, 0, c),
            _ => 0.0,
        };
        let label = format!("{dtype:?}, {width} taps, SiLU {silu}");
        let check = |what: &str, found: Vec<f64>, expected: Vec<f64>| {
            let found: Vec<f32> = found.into_iter().map(|x| x as f32).collect();
            assert_close(&format!("{what}: {label}"), &found, &expected, 1e-5, 1e-5);
        };
        let each = |count: usize| (0..count).flat_map(|r| (0..COLS).map(move |c| (r, c)));
        let of = |f: &dyn Fn(usize, usize) -> f64, count: usize| each(count).map(|(r, c)| f(r, c)).collect::<Vec<_>>();
        let output = |r, c| if silu { z(r, c) * sigmoid(z(r, c)) } else { z(r, c) };
        check("y", of(&|r, c| at(&y, r, c), TOKENS), of(&output, TOKENS));
        check("dz", of(&|r, c| at(&dz, r, c), GIVEN), of(&gradient, GIVEN));
        // dx of the line, the rows before included: place p is seen by rows p - reach ..= p of the tokens.
        let dx_at = |place: usize, c: usize| {
            let rows = (place.max(reach) - reach)..=place;
            let seen: f64 = rows.map(|r| tap(place - r, c) * upstream(r, c)).sum();
            let direct = if place > given { at(&after, place - given, c) } else { 0.0 };
            seen + direct
        };
        check("dx", of(&|r, c| at(&dx, r, c), TOKENS), of(&|r, c| dx_at(r + reach, c), TOKENS));
        let found = of(&|r, c| f64::from(d_before.get(c * reach + r)), reach);
        check("d_before", found, of(&dx_at, reach));
        let share = |w: usize, c: usize| {
            (0..TOKENS).map(|r| gradient(r, c) * if w < width { input(r + w, c) } else { 1.0 }).sum::<f64>()
        };
        check("sums", of(&|w, c| f64::from(sums.get(w * COLS + c)), width + 1), of(&share, width + 1));
    }
}

#[test]
fn copies_are_exact_and_sums_complete() {
    for dtype in DTYPES {
        let (mut from, mut to) = (Buffer::random(dtype, 40, 7), Buffer::filled(dtype, 40, 9.0));
        let mut sum = Buffer::filled(DtypeCode::F32, 8, 9.0);
        let params = (from.tensor(), to.tensor(), sum.tensor());
        run(1, &params, |wg, (from, to, sum)| {
            wg.copy_rows(to.matrix(0, 5, 8, 8, 1), from.matrix(0, 3, 8, 1, 3));
            wg.sum_columns(sum.matrix(0, 1, 8, 0, 1), from.matrix(0, 5, 8, 8, 1));
        })
        .unwrap();
        for (r, c) in (0..5).flat_map(|r| (0..8).map(move |c| (r, c))) {
            assert_eq!(to.get(r * 8 + c), if r < 3 { from.get(r + 3 * c) } else { 0.0 }, "{dtype:?} ({r}, {c})");
        }
        let expected: Vec<f64> = (0..8).map(|c| (0..5).map(|r| f64::from(from.get(r * 8 + c))).sum()).collect();
        assert_close("sums", &sum.values(), &expected, 1e-6, 1e-6);
    }
}

#[test]
fn misuse_is_found() {
    let mut memory = Buffer::filled(DtypeCode::F32, 4 * CONVOLUTION_CHANNELS, 0.0);
    let tensor = memory.tensor();
    let fault = |kernel: fn(&mut Warpgroup<'_>, &Tensor)| run(1, &tensor, kernel).unwrap_err().kind;
    let shapes = fault(|wg, t| {
        let run = ConvolutionRun {
            x: t.matrix(0, 2, 4, 4, 1),
            before: t.matrix(0, 2, 4, 4, 1),
            weight: t.matrix(0, 2, 4, 1, 2),
            bias: t.matrix(0, 0, 0, 0, 1),
            silu: false,
        };
        wg.convolve(t.matrix(0, 2, 4, 4, 1), &run);
    });
    assert!(matches!(shapes, FaultKind::Shapes { op: "convolve", .. }), "{shapes}");
    let taps = fault(|wg, t| {
        let none = t.matrix(0, 0, 0, 0, 1);
        let run = ConvolutionRun {
            x: t.matrix(0, 2, 4, 4, 1),
            before: none,
            weight: t.matrix(0, 9, 4, 1, 9),
            bias: none,
            silu: false,
        };
        wg.convolve(t.matrix(0, 2, 4, 4, 1), &run);
    });
    assert!(matches!(taps, FaultKind::Shapes { op: "convolve", .. }), "{taps}");
    let rows = fault(|wg, t| {
        let none = t.matrix(0, 0, 0, 0, 1);
        let run = ConvolutionRun {
            x: t.matrix(0, 2, 4, 4, 1),
            before: none,
            weight: t.matrix(0, 2, 4, 1, 2),
            bias: none,
            silu: false,
        };
        wg.convolve(t.matrix(0, 3, 4, 4, 1), &run);
    });
    assert!(matches!(rows, FaultKind::Shapes { op: "convolve", .. }), "{rows}");
    let bounds = fault(|wg, t| {
        wg.copy_rows(t.matrix(0, 5, CONVOLUTION_CHANNELS, CONVOLUTION_CHANNELS, 1), t.matrix(0, 0, 0, 0, 1))
    });
    assert!(matches!(bounds, FaultKind::GlobalBounds { op: "copy_rows", .. }), "{bounds}");
    let columns = fault(|wg, t| wg.sum_columns(t.matrix(0, 1, 200, 0, 1), t.matrix(0, 2, 200, 200, 1)));
    assert!(matches!(columns, FaultKind::Shapes { op: "sum_columns", .. }), "{columns}");
}
