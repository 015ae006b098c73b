//! What the operation is asked to compute: tensors, gate, step size, states.

use crate::error::InputError;
use crate::tensor::{Data, Dtype, Location, TensorView};

/// Which delta rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// Kimi Delta Attention: a decay per key channel.
    Kda,
    /// Gated DeltaNet: a decay per head.
    Gdn,
}

impl std::fmt::Display for Op {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Op::Kda => "kda",
            Op::Gdn => "gdn",
        })
    }
}

/// Where the log decay comes from. `g` has shape `[B,T,HV,K]` for KDA and `[B,T,HV]` for GDN.
#[derive(Clone, Debug)]
pub enum Gate<'a> {
    /// `g` itself, natural logarithm, at most 0.
    Given(TensorView<'a>),
    /// `g = -exp(a_log) * softplus(raw + dt_bias)`.
    Softplus {
        /// Gate input, shape of `g`.
        raw: TensorView<'a>,
        /// `[HV]`.
        a_log: TensorView<'a>,
        /// `[HV,K]` (KDA) or `[HV]` (GDN); absent means zero.
        dt_bias: Option<TensorView<'a>>,
    },
    /// `g = bound * sigmoid(exp(a_log) * (raw + dt_bias))`, KDA only.
    LowerBound {
        /// Gate input, shape of `g`.
        raw: TensorView<'a>,
        /// `[HV]`; absent means `exp(a_log) = 1`.
        a_log: Option<TensorView<'a>>,
        /// `[HV,K]`; absent means zero.
        dt_bias: Option<TensorView<'a>>,
        /// The bound, below 0.
        bound: f32,
    },
}

/// Where the step size beta (`[B,T,HV]`) comes from.
#[derive(Clone, Debug)]
pub enum Beta<'a> {
    /// beta itself.
    Given(TensorView<'a>),
    /// `beta = factor * sigmoid(logits)`; factor 2 allows negative eigenvalues.
    Logits {
        /// Logits, `[B,T,HV]`.
        logits: TensorView<'a>,
        /// 1 or 2.
        factor: f32,
    },
}

/// How a state is laid out in the caller's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum StateLayout {
    /// `[N,HV,K,V]`.
    #[default]
    KFirst,
    /// `[N,HV,V,K]`.
    VFirst,
}

/// The inputs of one call: of the whole batch, or of what one PE holds of it.
#[derive(Clone, Debug)]
pub struct Inputs<'a> {
    /// Which delta rule.
    pub op: Op,
    /// `[B,T,H,K]`.
    pub q: TensorView<'a>,
    /// `[B,T,H,K]`.
    pub k: TensorView<'a>,
    /// `[B,T,HV,V]`.
    pub v: TensorView<'a>,
    /// Log decay.
    pub gate: Gate<'a>,
    /// Step size.
    pub beta: Beta<'a>,
    /// Factor of q; absent means `K^-0.5`.
    pub scale: Option<f32>,
    /// Normalise the rows of q and k: `x / sqrt(sum(x^2) + 1e-6)`.
    pub l2norm: bool,
    /// f32 `[N,HV,K,V]` or `[N,HV,V,K]`; absent means zero.
    /// On a PE of a context-parallel group: one row for each sequence that starts there.
    pub initial_state: Option<TensorView<'a>>,
    /// Layout of the initial and of the final state.
    pub state_layout: StateLayout,
}

impl<'a> Inputs<'a> {
    /// Inputs of Kimi Delta Attention with the log decay `g` `[B,T,HV,K]` and `beta` `[B,T,HV]` themselves; everything
    /// else as it is by default. The tensors are all arrays (`&Array`, `ArrayView`) or all [`TensorView`]s.
    ///
    /// Options are set with the fields: `Inputs { l2norm: true, ..Inputs::kda(&q, &k, &v, &g, &beta)? }`.
    ///
    /// # Errors
    /// [`InputError::NotContiguous`] if an array is not in row-major order.
    pub fn kda<E: Into<InputError>>(
        q: impl TryInto<TensorView<'a>, Error = E>,
        k: impl TryInto<TensorView<'a>, Error = E>,
        v: impl TryInto<TensorView<'a>, Error = E>,
        g: impl TryInto<TensorView<'a>, Error = E>,
        beta: impl TryInto<TensorView<'a>, Error = E>,
    ) -> Result<Self, InputError> {
        Ok(Self {
            op: Op::Kda,
            q: view(q)?,
            k: view(k)?,
            v: view(v)?,
            gate: Gate::Given(view(g)?),
            beta: Beta::Given(view(beta)?),
            scale: None,
            l2norm: false,
            initial_state: None,
            state_layout: StateLayout::default(),
        })
    }

    /// Inputs of Gated DeltaNet, as [`Inputs::kda`], with `g` `[B,T,HV]`.
    ///
    /// # Errors
    /// As [`Inputs::kda`].
    pub fn gdn<E: Into<InputError>>(
        q: impl TryInto<TensorView<'a>, Error = E>,
        k: impl TryInto<TensorView<'a>, Error = E>,
        v: impl TryInto<TensorView<'a>, Error = E>,
        g: impl TryInto<TensorView<'a>, Error = E>,
        beta: impl TryInto<TensorView<'a>, Error = E>,
    ) -> Result<Self, InputError> {
        Ok(Self { op: Op::Gdn, ..Self::kda(q, k, v, g, beta)? })
    }
}

fn view<'a, E: Into<InputError>>(x: impl TryInto<TensorView<'a>, Error = E>) -> Result<TensorView<'a>, InputError> {
    x.try_into().map_err(Into::into)
}

/// The sizes that follow from [`Inputs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// Batch.
    pub b: usize,
    /// Tokens per batch row.
    pub t: usize,
    /// Query/key heads.
    pub h: usize,
    /// Value heads, a multiple of `h`.
    pub hv: usize,
    /// Key channels.
    pub k: usize,
    /// Value channels.
    pub v: usize,
}

impl Inputs<'_> {
    /// Checks every rank, shape and element type that does not depend on a plan, and returns the sizes.
    ///
    /// # Errors
    /// [`InputError`], which names the tensor, what was found and what is needed.
    pub fn dims(&self) -> Result<Dims, InputError> {
        let four = |name: &'static str, x: &TensorView<'_>| match *x.shape() {
            [a, b, c, d] => Ok([a, b, c, d]),
            _ => Err(InputError::Rank { name, shape: x.shape().to_vec(), want: 4 }),
        };
        let [b, t, h, k] = four("q", &self.q)?;
        expect_shape("k", &self.k, &[b, t, h, k])?;
        let [vb, vt, hv, v] = four("v", &self.v)?;
        expect_shape("v", &self.v, &[b, t, hv, v])?;
        debug_assert_eq!((vb, vt), (b, t));
        if h == 0 || hv == 0 || hv % h != 0 {
            return Err(InputError::Heads { h, hv });
        }
        for (name, x) in [("K", k), ("V", v)] {
            if x == 0 || x > 256 || x % 16 != 0 {
                return Err(InputError::HeadDim { name, found: x });
            }
        }
        for (name, x) in [("k", &self.k), ("v", &self.v)] {
            if x.dtype() != self.q.dtype() {
                return Err(InputError::Dtype { name, found: x.dtype(), want: self.q.dtype().to_string() });
            }
        }
        let dims = Dims { b, t, h, hv, k, v };
        let g_shape: &[usize] = match self.op {
            Op::Kda => &[b, t, hv, k],
            Op::Gdn => &[b, t, hv],
        };
        let bias_shape: &[usize] = match self.op {
            Op::Kda => &[hv, k],
            Op::Gdn => &[hv],
        };
        match &self.gate {
            Gate::Given(g) => expect_shape("g", g, g_shape)?,
            Gate::Softplus { raw, a_log, dt_bias } => {
                expect_shape("g_raw", raw, g_shape)?;
                expect_f32("A_log", a_log, &[hv])?;
                if let Some(bias) = dt_bias {
                    expect_f32("dt_bias", bias, bias_shape)?;
                }
            }
            Gate::LowerBound { raw, a_log, dt_bias, bound } => {
                if self.op == Op::Gdn {
                    return Err(InputError::LowerBoundGdn);
                }
                if !(bound.is_finite() && *bound < 0.0) {
                    return Err(InputError::LowerBound { found: *bound });
                }
                expect_shape("g_raw", raw, g_shape)?;
                if let Some(a_log) = a_log {
                    expect_f32("A_log", a_log, &[hv])?;
                }
                if let Some(bias) = dt_bias {
                    expect_f32("dt_bias", bias, bias_shape)?;
                }
            }
        }
        match &self.beta {
            Beta::Given(beta) => expect_shape("beta", beta, &[b, t, hv])?,
            Beta::Logits { logits, factor } => {
                if *factor != 1.0 && *factor != 2.0 {
                    return Err(InputError::BetaFactor { found: *factor });
                }
                expect_shape("beta", logits, &[b, t, hv])?;
            }
        }
        if let Some(scale) = self.scale
            && !scale.is_finite()
        {
            return Err(InputError::Scale { found: scale });
        }
        if let Some(h0) = &self.initial_state {
            let [n, ..] = four("h0", h0)?;
            let want = match self.state_layout {
                StateLayout::KFirst => [n, hv, k, v],
                StateLayout::VFirst => [n, hv, v, k],
            };
            expect_f32("h0", h0, &want)?;
        }
        Ok(dims)
    }

    /// Every tensor under its name in errors and files.
    pub fn tensors(&self) -> Vec<(&'static str, &TensorView<'_>)> {
        let (g, a_log, dt_bias) = match &self.gate {
            Gate::Given(g) => (("g", g), None, None),
            Gate::Softplus { raw, a_log, dt_bias } => (("g_raw", raw), Some(a_log), dt_bias.as_ref()),
            Gate::LowerBound { raw, a_log, dt_bias, .. } => (("g_raw", raw), a_log.as_ref(), dt_bias.as_ref()),
        };
        let (Beta::Given(beta) | Beta::Logits { logits: beta, .. }) = &self.beta;
        let optional = [("A_log", a_log), ("dt_bias", dt_bias), ("h0", self.initial_state.as_ref())];
        let present = optional.into_iter().filter_map(|(name, x)| Some((name, x?)));
        [("q", &self.q), ("k", &self.k), ("v", &self.v), ("beta", beta), g].into_iter().chain(present).collect()
    }

    /// The same call with another tensor in place of each: what `place` makes of it and of its name, see
    /// [`tensors`](Self::tensors).
    ///
    /// # Errors
    /// What `place` returns.
    pub fn with_tensors<'b, E>(
        &self,
        mut place: impl FnMut(&'static str, &TensorView<'_>) -> Result<TensorView<'b>, E>,
    ) -> Result<Inputs<'b>, E> {
        let (q, k, v) = (place("q", &self.q)?, place("k", &self.k)?, place("v", &self.v)?);
        let mut optional = |name, x: Option<&TensorView<'_>>| x.map(|x| place(name, x)).transpose();
        let initial_state = optional("h0", self.initial_state.as_ref())?;
        let gate = match &self.gate {
            Gate::Given(g) => Gate::Given(place("g", g)?),
            Gate::Softplus { raw, a_log, dt_bias } => Gate::Softplus {
                dt_bias: optional("dt_bias", dt_bias.as_ref())?,
                raw: place("g_raw", raw)?,
                a_log: place("A_log", a_log)?,
            },
            Gate::LowerBound { raw, a_log, dt_bias, bound } => Gate::LowerBound {
                a_log: optional("A_log", a_log.as_ref())?,
                dt_bias: optional("dt_bias", dt_bias.as_ref())?,
                raw: place("g_raw", raw)?,
                bound: *bound,
            },
        };
        let beta = match &self.beta {
            Beta::Given(beta) => Beta::Given(place("beta", beta)?),
            Beta::Logits { logits, factor } => Beta::Logits { logits: place("beta", logits)?, factor: *factor },
        };
        let Inputs { op, scale, l2norm, state_layout, .. } = *self;
        Ok(Inputs { op, q, k, v, gate, beta, scale, l2norm, initial_state, state_layout })
    }

    /// Checks that all tensors lie in memory of the host, for what reads them there.
    ///
    /// # Errors
    /// [`InputError::Location`] with the first one that does not.
    pub fn check_on_host(&self) -> Result<(), InputError> {
        let elsewhere = self.tensors().into_iter().find(|(_, x)| x.location() != Location::Host);
        match elsewhere {
            Some((name, x)) => Err(InputError::Location {
                name,
                found: x.location(),
                want: Location::Host,
                why: "and is read on the host here",
            }),
            None => Ok(()),
        }
    }

    /// Checks values: no NaN or infinity anywhere, and no positive `g`. Tensors on GPUs are not looked at: reading them takes
    /// as long as computing with them.
    ///
    /// # Errors
    /// [`InputError::NonFinite`] or [`InputError::PositiveGate`] with the place of the first one.
    pub fn check_values(&self, allow_nonfinite: bool) -> Result<(), InputError> {
        if !allow_nonfinite {
            for (name, x) in self.tensors() {
                if let Some(at) = first(x, |y| !y.is_finite()) {
                    return Err(InputError::NonFinite { name, index: unravel(at, x.shape()), value: x.get(at) });
                }
            }
        }
        if let Gate::Given(g) = &self.gate
            && let Some(at) = first(g, |y| y > 0.0)
        {
            return Err(InputError::PositiveGate { index: unravel(at, g.shape()), value: g.get(at) });
        }
        Ok(())
    }

    /// The factor of q.
    pub fn scale_or_default(&self, dims: &Dims) -> f32 {
        self.scale.unwrap_or_else(|| (dims.k as f32).powf(-0.5))
    }

    /// Element type of q, k, v and o.
    pub fn dtype(&self) -> Dtype {
        self.q.dtype()
    }
}

fn expect_shape(name: &'static str, x: &TensorView<'_>, want: &[usize]) -> Result<(), InputError> {
    if x.shape().len() != want.len() {
        return Err(InputError::Rank { name, shape: x.shape().to_vec(), want: want.len() });
    }
    if x.shape() != want {
        return Err(InputError::Shape { name, shape: x.shape().to_vec(), want: want.to_vec() });
    }
    Ok(())
}

fn expect_f32(name: &'static str, x: &TensorView<'_>, want: &[usize]) -> Result<(), InputError> {
    expect_shape(name, x, want)?;
    if x.dtype() != Dtype::F32 {
        return Err(InputError::Dtype { name, found: x.dtype(), want: "f32".into() });
    }
    Ok(())
}

/// The first element, in row-major order, for which `bad` holds; none is looked for on GPUs.
pub(crate) fn first(x: &TensorView<'_>, bad: impl Fn(f64) -> bool) -> Option<usize> {
    fn find<T: Copy>(x: &[T], bad: impl Fn(T) -> bool) -> Option<usize> {
        // A piece is tested without an early end, so that the test vectorises: inputs are large, and good.
        const PIECE: usize = 256;
        let holds_bad = |piece: &[T]| piece.iter().fold(false, |any, &y| any | bad(y));
        let start = PIECE * x.chunks(PIECE).position(holds_bad)?;
        x[start..].iter().position(|&y| bad(y)).map(|offset| start + offset)
    }
    match x.host()? {
        Data::F32(x) => find(x, |y| bad(f64::from(y))),
        Data::Bf16(x) => find(x, |y| bad(f64::from(f32::from_bits(u32::from(y.to_bits()) << 16)))),
        Data::F16(x) => find(x, |y| bad(y.to_f64())),
    }
}

/// The index in `shape` of element `flat` of its row-major order.
pub(crate) fn unravel(mut flat: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for (i, &n) in index.iter_mut().zip(shape).rev() {
        *i = flat % n;
        flat /= n;
    }
    index
}

#[cfg(test)]
mod tests {
    use ndarray::{Array3, Array4};

    use super::*;

    #[test]
    fn arrays_and_views_make_the_same_inputs() {
        let (x, g) = (Array4::<f32>::zeros((1, 5, 2, 16)), Array4::<f32>::zeros((1, 5, 4, 16)));
        let (v, beta) = (Array4::<f32>::zeros((1, 5, 4, 32)), Array3::<f32>::zeros((1, 5, 4)));
        let dims = Dims { b: 1, t: 5, h: 2, hv: 4, k: 16, v: 32 };
        let kda = Inputs::kda(&x, &x, &v, &g, &beta).unwrap();
        assert_eq!((kda.op, kda.dims()), (Op::Kda, Ok(dims)));
        // Gated DeltaNet has one decay for each head, so here the shape of g tells the two apart.
        let [q, v, h] = [x.view(), v.view(), g.view()].map(|a| TensorView::try_from(a).unwrap());
        let b = TensorView::try_from(&beta).unwrap();
        let gdn = Inputs::gdn(q.clone(), q.clone(), v.clone(), b.clone(), b.clone()).unwrap();
        assert_eq!((gdn.op, gdn.dims()), (Op::Gdn, Ok(dims)));
        let wrong = Inputs::gdn(q.clone(), q, v, h, b).unwrap().dims();
        assert_eq!(wrong, Err(InputError::Rank { name: "g", shape: vec![1, 5, 4, 16], want: 3 }));
    }

    #[test]
    fn an_array_in_another_order_makes_no_inputs() {
        let (x, beta) = (Array4::<f32>::zeros((1, 5, 2, 16)), Array3::<f32>::zeros((1, 5, 2)));
        let turned = Array4::<f32>::zeros((2, 5, 1, 16));
        let swapped = turned.view().permuted_axes([2, 1, 0, 3]);
        let error = Inputs::kda(x.view(), swapped, x.view(), x.view(), beta.view()).unwrap_err();
        assert_eq!(error, InputError::NotContiguous { shape: vec![1, 5, 2, 16] });
    }
}
