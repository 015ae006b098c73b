//! What the backward pass gets from later layers and what it returns.

use crate::error::InputError;
use crate::inputs::{Beta, Dims, Gate, Inputs, StateLayout, first, unravel};
use crate::tensor::{Buffer, Dtype, Tensor, TensorView, TensorViewMut};

/// Upstream gradients: of a scalar loss L with respect to the results of the forward pass. Of the whole batch, or of what
/// one PE holds of it.
#[derive(Clone, Debug)]
pub struct Upstream<'a> {
    /// dL/do, `[B,T,HV,V]`, in the element type of o.
    pub d_o: TensorView<'a>,
    /// dL/dht, f32, in the shape and layout of the final states; absent means zero.
    /// On a PE of a context-parallel group: one row for each sequence that ends there.
    pub d_final_state: Option<TensorView<'a>>,
}

impl Upstream<'_> {
    /// Checks the shapes against the sizes of the inputs and the layout and number (`rows`) of the final states, and that
    /// `d_final_state` is f32. The element type of `d_o` is left to the caller.
    ///
    /// # Errors
    /// [`InputError`], which names the tensor (`do` or `dht`), what was found and what is needed.
    pub fn check(&self, dims: &Dims, layout: StateLayout, rows: usize) -> Result<(), InputError> {
        let Dims { b, t, hv, k, v, .. } = *dims;
        expect_shape("do", &self.d_o, [b, t, hv, v])?;
        let Some(dht) = &self.d_final_state else { return Ok(()) };
        let want = match layout {
            StateLayout::KFirst => [rows, hv, k, v],
            StateLayout::VFirst => [rows, hv, v, k],
        };
        expect_shape("dht", dht, want)?;
        if dht.dtype() != Dtype::F32 {
            return Err(InputError::Dtype { name: "dht", found: dht.dtype(), want: Dtype::F32.to_string() });
        }
        Ok(())
    }
}

impl Upstream<'_> {
    /// Checks values: no NaN or infinity anywhere.
    ///
    /// # Errors
    /// [`InputError::NonFinite`] with the place of the first one.
    pub fn check_values(&self) -> Result<(), InputError> {
        for (name, x) in [("do", Some(&self.d_o)), ("dht", self.d_final_state.as_ref())] {
            if let Some((x, at)) = x.and_then(|x| Some((x, first(x, |y| !y.is_finite())?))) {
                return Err(InputError::NonFinite { name, index: unravel(at, x.shape()), value: x.get(at) });
            }
        }
        Ok(())
    }
}

/// The sum of what PEs return as their shares of the gradient of a parameter (`da_log`, `ddt_bias`), in the order
/// in which they come, so that the same order gives the same bits. `None` if there are none.
///
/// # Panics
/// If their shapes differ, or one is not f32.
pub fn add_shares<'a>(shares: impl IntoIterator<Item = &'a Tensor>) -> Option<Tensor> {
    let mut shares = shares.into_iter();
    let mut sum = shares.next()?.clone();
    for share in shares {
        assert_eq!(sum.shape, share.shape, "shares of one parameter");
        let (Buffer::F32(sum), Buffer::F32(share)) = (&mut sum.data, &share.data) else {
            panic!("shares of a gradient are f32")
        };
        sum.iter_mut().zip(share).for_each(|(sum, x)| *sum += x);
    }
    Some(sum)
}

fn expect_shape(name: &'static str, x: &TensorView<'_>, want: [usize; 4]) -> Result<(), InputError> {
    if x.shape().len() != want.len() {
        return Err(InputError::Rank { name, shape: x.shape().to_vec(), want: want.len() });
    }
    if x.shape() != want {
        return Err(InputError::Shape { name, shape: x.shape().to_vec(), want: want.to_vec() });
    }
    Ok(())
}

/// Gradients with respect to everything that [`crate::inputs::Inputs`] holds, each in the shape of its input.
///
/// Gradients of tensors that are read as they stand (raw q and k where the rows are normalised, gate inputs, logits of beta)
/// are those of the tensors as given. Element types: `dq`, `dk`, `dv` as their inputs, everything else f32. The f64 reference
/// has plain vectors (`Gradients<Vec<f64>>`) of the same shapes and layouts.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients<T = Tensor> {
    /// `[B,T,H,K]`, summed over the value heads of a group.
    pub dq: T,
    /// `[B,T,H,K]`, summed over the value heads of a group.
    pub dk: T,
    /// `[B,T,HV,V]`.
    pub dv: T,
    /// Of g itself, or of the raw gate input; f32 `[B,T,HV,K]` (KDA) or `[B,T,HV]` (GDN).
    pub dg: T,
    /// Of beta itself, or of its logits; f32 `[B,T,HV]`.
    pub dbeta: T,
    /// f32 `[HV]`, if the gate has `A_log`. On a PE: this PE's share of the sum over tokens.
    pub da_log: Option<T>,
    /// f32, shape of `dt_bias`, if the gate has one. On a PE: this PE's share of the sum over tokens.
    pub ddt_bias: Option<T>,
    /// f32, shape and layout of the initial states, if there are any.
    pub d_initial_state: Option<T>,
}

impl<T> Gradients<T> {
    /// Every gradient under its name in files: `dq`, `dk`, `dv`, `dg` (`dg_raw` of a gate's raw input), `dbeta`
    /// (`dbeta_logits` of logits), `dA_log`, `ddt_bias`, `dh0`.
    pub fn named(&self, inputs: &Inputs<'_>) -> Vec<(&'static str, &T)> {
        let dg = match inputs.gate {
            Gate::Given(_) => "dg",
            Gate::Softplus { .. } | Gate::LowerBound { .. } => "dg_raw",
        };
        let dbeta = match inputs.beta {
            Beta::Given(_) => "dbeta",
            Beta::Logits { .. } => "dbeta_logits",
        };
        let always = [("dq", &self.dq), ("dk", &self.dk), ("dv", &self.dv), (dg, &self.dg), (dbeta, &self.dbeta)];
        let optional = [("dA_log", &self.da_log), ("ddt_bias", &self.ddt_bias), ("dh0", &self.d_initial_state)];
        let present = optional.into_iter().filter_map(|(name, x)| x.as_ref().map(|x| (name, x)));
        always.into_iter().chain(present).collect()
    }

    /// The same gradients, each passed through `f`, unless that fails.
    ///
    /// # Errors
    /// What `f` returns.
    pub fn try_map<U, E>(&self, mut f: impl FnMut(&T) -> Result<U, E>) -> Result<Gradients<U>, E> {
        Ok(Gradients {
            dq: f(&self.dq)?,
            dk: f(&self.dk)?,
            dv: f(&self.dv)?,
            dg: f(&self.dg)?,
            dbeta: f(&self.dbeta)?,
            da_log: self.da_log.as_ref().map(&mut f).transpose()?,
            ddt_bias: self.ddt_bias.as_ref().map(&mut f).transpose()?,
            d_initial_state: self.d_initial_state.as_ref().map(&mut f).transpose()?,
        })
    }

    /// As [`try_map`](Self::try_map), for what borrows the gradients to change them.
    ///
    /// # Errors
    /// What `f` returns.
    pub fn try_map_mut<'a, U, E>(
        &'a mut self,
        mut f: impl FnMut(&'a mut T) -> Result<U, E>,
    ) -> Result<Gradients<U>, E> {
        Ok(Gradients {
            dq: f(&mut self.dq)?,
            dk: f(&mut self.dk)?,
            dv: f(&mut self.dv)?,
            dg: f(&mut self.dg)?,
            dbeta: f(&mut self.dbeta)?,
            da_log: self.da_log.as_mut().map(&mut f).transpose()?,
            ddt_bias: self.ddt_bias.as_mut().map(&mut f).transpose()?,
            d_initial_state: self.d_initial_state.as_mut().map(&mut f).transpose()?,
        })
    }

    /// The same gradients, each passed through `f`.
    pub fn map<U>(&self, mut f: impl FnMut(&T) -> U) -> Gradients<U> {
        Gradients {
            dq: f(&self.dq),
            dk: f(&self.dk),
            dv: f(&self.dv),
            dg: f(&self.dg),
            dbeta: f(&self.dbeta),
            da_log: self.da_log.as_ref().map(&mut f),
            ddt_bias: self.ddt_bias.as_ref().map(&mut f),
            d_initial_state: self.d_initial_state.as_ref().map(&mut f),
        }
    }
}

impl Gradients<Vec<usize>> {
    /// The shapes of the gradients with respect to `inputs`, those of the inputs themselves.
    pub fn shapes(inputs: &Inputs<'_>) -> Self {
        let shape = |x: &TensorView<'_>| x.shape().to_vec();
        let (g, a_log, dt_bias) = match &inputs.gate {
            Gate::Given(g) => (g, None, None),
            Gate::Softplus { raw, a_log, dt_bias } => (raw, Some(a_log), dt_bias.as_ref()),
            Gate::LowerBound { raw, a_log, dt_bias, .. } => (raw, a_log.as_ref(), dt_bias.as_ref()),
        };
        let (Beta::Given(beta) | Beta::Logits { logits: beta, .. }) = &inputs.beta;
        Self {
            dq: shape(&inputs.q),
            dk: shape(&inputs.k),
            dv: shape(&inputs.v),
            dg: shape(g),
            dbeta: shape(beta),
            da_log: a_log.map(shape),
            ddt_bias: dt_bias.map(shape),
            d_initial_state: inputs.initial_state.as_ref().map(shape),
        }
    }
}

impl Gradients {
    /// Gradients of zero with respect to `inputs`.
    pub fn zeros(inputs: &Inputs<'_>) -> Self {
        let shapes = Gradients::shapes(inputs);
        let f32_zeros = |shape: &Vec<usize>| Tensor::zeros(Dtype::F32, shape);
        Self {
            dq: Tensor::zeros(inputs.q.dtype(), &shapes.dq),
            dk: Tensor::zeros(inputs.k.dtype(), &shapes.dk),
            dv: Tensor::zeros(inputs.v.dtype(), &shapes.dv),
            ..shapes.map(f32_zeros)
        }
    }

    /// The same gradients, as memory for a backward call.
    pub fn views_mut(&mut self) -> Gradients<TensorViewMut<'_>> {
        let views = self.try_map_mut(|tensor| Ok::<_, std::convert::Infallible>(tensor.view_mut()));
        match views {
            Ok(views) => views,
            Err(never) => match never {},
        }
    }

    /// All elements widened to f64.
    pub fn to_f64(&self) -> Gradients<Vec<f64>> {
        self.map(|tensor| tensor.data.to_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_added_up_in_order() {
        let share = |x: [f32; 2]| Tensor { shape: vec![2], data: Buffer::F32(x.to_vec()) };
        let sum = add_shares([&share([1.0, 1e8]), &share([2.0, -1e8]), &share([0.5, 0.25])]).unwrap();
        assert_eq!(sum, share([3.5, 0.25]));
        assert_eq!(add_shares([]), None);
    }

    #[test]
    fn upstream_gradients_that_are_not_finite_are_named() {
        let mut d_o = Tensor::zeros(Dtype::F32, &[1, 3, 2, 32]);
        let Buffer::F32(values) = &mut d_o.data else { unreachable!() };
        values[2 * 64 + 33] = f32::NAN;
        let error = Upstream { d_o: d_o.view(), d_final_state: None }.check_values().unwrap_err();
        assert!(error.to_string().starts_with("do[0, 2, 1, 1] is NaN"), "{error}");
    }

    #[test]
    fn upstream_gradients_must_fit_the_results() {
        let dims = Dims { b: 1, t: 3, h: 1, hv: 2, k: 16, v: 32 };
        let (d_o, dht) = (Tensor::zeros(Dtype::F32, &[1, 3, 2, 32]), Tensor::zeros(Dtype::F32, &[4, 2, 16, 32]));
        let upstream = Upstream { d_o: d_o.view(), d_final_state: Some(dht.view()) };
        assert_eq!(upstream.check(&dims, StateLayout::KFirst, 4), Ok(()));
        for (layout, rows, want) in
            [(StateLayout::VFirst, 4, vec![4, 2, 32, 16]), (StateLayout::KFirst, 3, vec![3, 2, 16, 32])]
        {
            let error = upstream.check(&dims, layout, rows).unwrap_err();
            assert_eq!(error, InputError::Shape { name: "dht", shape: vec![4, 2, 16, 32], want });
        }
        let half = dht.to_dtype(Dtype::Bf16);
        let error = Upstream { d_final_state: Some(half.view()), ..upstream.clone() };
        let error = error.check(&dims, StateLayout::KFirst, 4).unwrap_err();
        assert_eq!(error, InputError::Dtype { name: "dht", found: Dtype::Bf16, want: "f32".into() });
        let longer = Upstream { d_final_state: None, ..upstream }.check(&Dims { t: 4, ..dims }, StateLayout::KFirst, 4);
        assert!(matches!(longer, Err(InputError::Shape { name: "do", .. })), "{longer:?}");
    }
}
