use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::compare::Error;
use crate::tensor::{Buffer, Dtype, Tensor};

/// Tensors of a random convolution.
#[derive(Clone)]
struct Case {
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    initial: Tensor,
    activation: Activation,
    cu: Option<Vec<usize>>,
    dy: Vec<f64>,
    d_final: Vec<f64>,
}

fn random(rng: &mut ChaCha8Rng, shape: &[usize]) -> Tensor {
    let values: Vec<f64> = (0..shape.iter().product()).map(|_| rng.random_range(-1.5..1.5)).collect();
    Tensor { shape: shape.to_vec(), data: Buffer::from_f64(Dtype::F32, values) }
}

impl Case {
    fn new(b: usize, t: usize, w: usize, cu: Option<&[usize]>, activation: Activation) -> Self {
        let (mut rng, d) = (ChaCha8Rng::seed_from_u64((10 * t + w) as u64), 3);
        let n = cu.map_or(b, |cu| cu.len() - 1);
        Self {
            x: random(&mut rng, &[b, t, d]),
            weight: random(&mut rng, &[d, w]),
            bias: random(&mut rng, &[d]),
            initial: random(&mut rng, &[n, d, w - 1]),
            activation,
            cu: cu.map(<[usize]>::to_vec),
            dy: random(&mut rng, &[b, t, d]).data.to_f64(),
            d_final: random(&mut rng, &[n, d, w - 1]).data.to_f64(),
        }
    }

    fn view(&self) -> Convolution<'_> {
        Convolution {
            x: self.x.view(),
            weight: self.weight.view(),
            bias: Some(self.bias.view()),
            activation: self.activation,
            initial_state: Some(self.initial.view()),
            cu_seqlens: self.cu.as_deref(),
        }
    }

    fn loss(&self) -> f64 {
        let found = convolution(&self.view()).unwrap();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        dot(&found.y, &self.dy) + dot(&found.final_state, &self.d_final)
    }
}

/// Shapes: sequences shorter than the taps reach, empty ones, batches.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for w in 2..=8 {
        for activation in [Activation::None, Activation::Silu] {
            cases.push(Case::new(2, 5, w, None, activation));
            cases.push(Case::new(1, 14, w, Some(&[0, 1, 1, 4, 13, 14]), activation));
        }
    }
    cases
}

#[test]
fn the_last_tap_is_the_token_itself_and_the_state_lies_before_it() {
    let tensor = |shape: &[usize], values: &[f32]| Tensor { shape: shape.to_vec(), data: Buffer::F32(values.to_vec()) };
    let (x, weight) = (tensor(&[1, 3, 1], &[1., 2., 3.]), tensor(&[1, 3], &[100., 10., 1.]));
    let (bias, state) = (tensor(&[1], &[0.5]), tensor(&[1, 1, 2], &[7., 8.]));
    let plain = Convolution {
        x: x.view(),
        weight: weight.view(),
        bias: None,
        activation: Activation::None,
        initial_state: None,
        cu_seqlens: None,
    };
    let found = convolution(&plain).unwrap();
    assert_eq!((found.y, found.final_state), (vec![1., 12., 123.], vec![2., 3.]));
    let all = Convolution { bias: Some(bias.view()), initial_state: Some(state.view()), ..plain.clone() };
    assert_eq!(convolution(&all).unwrap().y, [781.5, 812.5, 123.5]);
    let short = Convolution { x: x.view().rows(0, 1).reshape(&[3, 1, 1]).unwrap(), ..plain.clone() };
    assert_eq!(convolution(&short).unwrap().final_state, [0., 1., 0., 2., 0., 3.], "three rows of one token");
    let silu = convolution(&Convolution { activation: Activation::Silu, ..plain }).unwrap();
    assert!((silu.y[0] - 1.0 / (1.0 + (-1.0f64).exp())).abs() < 1e-15, "{:?}", silu.y);
}

#[test]
fn gradients_are_what_differences_of_the_loss_say() {
    const STEP: f64 = 1e-3;
    for case in cases() {
        let found = convolution_backward(&case.view(), &case.dy, Some(&case.d_final)).unwrap();
        let gradients = [found.dx, found.dweight, found.dbias.unwrap(), found.d_initial_state.unwrap()];
        for (which, gradient) in gradients.iter().enumerate() {
            for (at, expected) in gradient.iter().enumerate() {
                // Differences of fourth order; the steps are those that f32 can hold.
                let moved = |step: f64| {
                    let mut moved = case.clone();
                    let tensor = [&mut moved.x, &mut moved.weight, &mut moved.bias, &mut moved.initial];
                    let Buffer::F32(values) = &mut tensor.into_iter().nth(which).unwrap().data else {
                        panic!("the tensors are f32")
                    };
                    values[at] = (f64::from(values[at]) + step) as f32;
                    (f64::from(values[at]), moved.loss())
                };
                let difference = |step: f64| {
                    let ((high, above), (low, below)) = (moved(step), moved(-step));
                    (above - below) / (high - low)
                };
                let found = (4.0 * difference(STEP) - difference(2.0 * STEP)) / 3.0;
                assert!((found - expected).abs() < 1e-7, "tensor {which}, element {at}: {found} {expected}");
            }
        }
    }
}

#[test]
fn packed_sequences_do_not_see_each_other() {
    let case = Case::new(1, 14, 4, Some(&[0, 1, 1, 4, 13, 14]), Activation::Silu);
    let (found, gradients) =
        (convolution(&case.view()).unwrap(), convolution_backward(&case.view(), &case.dy, None).unwrap());
    let flat = case.x.view().reshape(&[14, 3]).unwrap();
    let mut sum = vec![0.0; 12];
    for (n, range) in case.cu.as_ref().unwrap().windows(2).enumerate() {
        let (start, end) = (range[0], range[1]);
        let alone = Convolution {
            x: flat.rows(start, end).reshape(&[1, end - start, 3]).unwrap(),
            initial_state: Some(case.initial.view().rows(n, n + 1)),
            cu_seqlens: None,
            ..case.view()
        };
        let (rows, states) = (3 * start..3 * end, 9 * n..9 * (n + 1));
        let expected = convolution(&alone).unwrap();
        assert_eq!(found.y[rows.clone()], expected.y);
        assert_eq!(found.final_state[states.clone()], expected.final_state);
        let expected = convolution_backward(&alone, &case.dy[rows.clone()], None).unwrap();
        assert_eq!(gradients.dx[rows], expected.dx);
        assert_eq!(gradients.d_initial_state.as_ref().unwrap()[states], expected.d_initial_state.unwrap());
        sum.iter_mut().zip(&expected.dweight).for_each(|(sum, dw)| *sum += dw);
    }
    assert!(Error::of(&sum, &gradients.dweight).rel_rms < 1e-14);
}

/// What context parallelism needs: a later rank starts from the last inputs of an earlier one, and gives their gradients back.
#[test]
fn two_halves_that_exchange_their_border_are_the_whole() {
    let case = Case::new(1, 9, 5, None, Activation::Silu);
    let whole = convolution(&case.view()).unwrap();
    let expected = convolution_backward(&case.view(), &case.dy, Some(&case.d_final)).unwrap();
    let flat = case.x.view().reshape(&[9, 3]).unwrap();
    for cut in 0..=9 {
        let part = |start: usize, end: usize| flat.rows(start, end).reshape(&[1, end - start, 3]).unwrap();
        let first = Convolution { x: part(0, cut), ..case.view() };
        let border = convolution(&first).unwrap();
        let state = Tensor { shape: vec![1, 3, 4], data: Buffer::from_f64(Dtype::F32, border.final_state) };
        let second = Convolution { x: part(cut, 9), initial_state: Some(state.view()), ..case.view() };
        let rest = convolution(&second).unwrap();
        assert_eq!([border.y, rest.y].concat(), whole.y, "cut {cut}");
        assert_eq!(rest.final_state, whole.final_state, "cut {cut}");

        let back = convolution_backward(&second, &case.dy[3 * cut..], Some(&case.d_final)).unwrap();
        let arrived = back.d_initial_state.unwrap();
        let front = convolution_backward(&first, &case.dy[..3 * cut], Some(&arrived)).unwrap();
        let dweight: Vec<f64> = front.dweight.iter().zip(&back.dweight).map(|(a, b)| a + b).collect();
        for (found, expected) in [
            (&[front.dx, back.dx].concat(), &expected.dx),
            (&dweight, &expected.dweight),
            (&front.d_initial_state.unwrap(), expected.d_initial_state.as_ref().unwrap()),
        ] {
            assert!(Error::of(found, expected).rel_rms < 1e-14, "cut {cut}");
        }
    }
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    let case = Case::new(1, 5, 4, None, Activation::None);
    let (narrow, wide) = (Tensor::zeros(Dtype::F32, &[3, 1]), Tensor::zeros(Dtype::F32, &[3, 9]));
    for (weight, taps) in [(&narrow, 1), (&wide, 9)] {
        let error = convolution(&Convolution { weight: weight.view(), ..case.view() }).unwrap_err();
        assert_eq!(error, ConvolutionError::Width { found: taps });
        assert!(error.to_string().ends_with("it must have 2 to 8"), "{error}");
    }
    let error = convolution(&Convolution { bias: Some(narrow.view()), ..case.view() }).unwrap_err();
    assert!(matches!(error, ConvolutionError::Input(InputError::Shape { name: "bias", .. })), "{error}");
    let error = convolution(&Convolution { initial_state: Some(narrow.view()), ..case.view() }).unwrap_err();
    assert!(matches!(error, ConvolutionError::Input(InputError::Shape { name: "initial_state", .. })), "{error}");
    let error = convolution(&Convolution { cu_seqlens: Some(&[0, 4]), ..case.view() }).unwrap_err();
    assert!(matches!(error, ConvolutionError::Problem(ProblemError::CuSeqlens { t: 5, .. })), "{error}");
    let error = convolution_backward(&case.view(), &case.dy[1..], None).unwrap_err();
    assert_eq!(error, ConvolutionError::Gradient { name: "dy", found: 14, want: 15 });
}
