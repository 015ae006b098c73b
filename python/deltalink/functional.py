"""KDA and GDN on tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import ops
from .errors import DeviceError, InputError
from .parallel import ContextParallel, _ints


def _wants_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in the type of the autocast region around the call, if there is one."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in tensors)


def _together(**tensors: Tensor | None) -> None:
    """Refuses tensors on different devices. (PyTorch looks at some of them only.)"""
    name, first = next(iter(tensors.items()))
    for other, tensor in tensors.items():
        if tensor is not None and tensor.device != first.device:
            raise DeviceError(f"{other} is on {tensor.device}, {name} on {first.device}; move all tensors of a call to one device")


def _offsets(cu_seqlens: Tensor | Sequence[int] | None, cp: ContextParallel | None) -> Tensor | None:
    if cp is not None:
        if cu_seqlens is not None:
            raise InputError("cu_seqlens and cp were both given; the sequences are those that ContextParallel was made with")
        return None
    if cu_seqlens is None or isinstance(cu_seqlens, Tensor):
        return cu_seqlens
    return torch.tensor(_ints("cu_seqlens", cu_seqlens), dtype=torch.int64)


def _attention(
    op,
    q,
    k,
    v,
    g,
    beta,
    *,
    A_log,
    dt_bias,
    scale,
    initial_state,
    output_final_state,
    use_qk_l2norm_in_kernel,
    use_gate_in_kernel,
    use_beta_sigmoid_in_kernel,
    allow_neg_eigval,
    lower_bound,
    state_v_first,
    cu_seqlens,
    chunk_size,
    cp,
):
    if not use_gate_in_kernel:
        gate, a_log, bias = "given", None, None
    else:
        gate, a_log, bias = "softplus" if lower_bound is None else "lower_bound", A_log, dt_bias
        if A_log is None and lower_bound is None:
            raise InputError("use_gate_in_kernel needs A_log, of shape [HV], or lower_bound; pass one of them")
        a_log = None if A_log is None else A_log.float()
        if dt_bias is not None and op == "kda" and dt_bias.ndim == 1 and g.ndim == 4:
            # One vector for all heads and channels, as checkpoints have it.
            if dt_bias.numel() != g.shape[2] * g.shape[3]:
                raise InputError(f"dt_bias has {dt_bias.numel()} elements, g asks for {g.shape[2]} x {g.shape[3]}; give it [HV, K]")
            bias = dt_bias.reshape(g.shape[2], g.shape[3])
        bias = None if bias is None else bias.float()
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise InputError("allow_neg_eigval doubles the sigmoid of beta; pass use_beta_sigmoid_in_kernel=True as well, or double beta")
    _together(q=q, k=k, v=v, g=g, beta=beta, A_log=a_log, dt_bias=bias, initial_state=initial_state)
    factor = (2.0 if allow_neg_eigval else 1.0) if use_beta_sigmoid_in_kernel else 0.0
    q, k, v = _autocast(q, k, v)
    o, final_state, _ = ops.attention(
        q,
        k,
        v,
        g,
        beta,
        a_log,
        bias,
        initial_state,
        _offsets(cu_seqlens, cp),
        op,
        scale,
        use_qk_l2norm_in_kernel,
        gate,
        0.0 if lower_bound is None else float(lower_bound),
        factor,
        state_v_first,
        chunk_size,
        output_final_state,
        _wants_gradient(q, k, v, g, beta, a_log, bias, initial_state),
        0 if cp is None else cp.number,
    )
    return o, (final_state if output_final_state else None)


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    chunk_size: int = 64,
    cp: ContextParallel | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention. Names and meanings are those of flash-linear-attention's ``chunk_kda``.

    With a state ``S`` of K x V for each value head, every token does ``S <- Diag(exp g) S``, ``S <- S + beta k (v - S^T k)^T`` and
    returns ``scale S^T q``.

    Args:
        q, k: ``[B, T, H, K]`` in float32, bfloat16 or float16. K and V are multiples of 16 up to 256.
        v: ``[B, T, HV, V]`` in the type of q; HV is a multiple of H.
        g: Log decay, at most 0, ``[B, T, HV, K]``; with ``use_gate_in_kernel`` the gate's raw input.
        beta: Step size, ``[B, T, HV]``; with ``use_beta_sigmoid_in_kernel`` its logits.
        A_log: ``[HV]``; with ``use_gate_in_kernel``: ``g = -exp(A_log) softplus(g + dt_bias)``.
        dt_bias: ``[HV, K]`` or ``[HV * K]``; absent means 0.
        scale: Factor of q; by default ``K ** -0.5``.
        initial_state: float32 ``[N, HV, K, V]``, one for each sequence; with ``cp`` one for each of ``cp.starts``.
        output_final_state: Whether to return the state after each sequence; with ``cp`` after each of ``cp.ends``.
        use_qk_l2norm_in_kernel: Normalise the rows of q and k: ``x / sqrt(sum(x^2) + 1e-6)``.
        allow_neg_eigval: ``2 sigmoid(beta)`` in place of ``sigmoid(beta)``.
        safe_gate: Needs ``lower_bound``, and changes nothing more: every gate is safe here.
        lower_bound: With ``use_gate_in_kernel``: ``g = lower_bound sigmoid(exp(A_log) (g + dt_bias))``; ``A_log`` may be absent then.
        state_v_first: States are ``[N, HV, V, K]``.
        cu_seqlens: ``[N + 1]`` offsets of packed sequences, with B = 1.
        chunk_size: 16, 32 or 64.
        cp: Who holds which tokens; all tensors are this rank's share then. ``cu_seqlens`` is not given: ``cp`` has the sequences.

    Returns:
        Outputs ``[B, T, HV, V]`` in the type of q, and the final states or ``None``.

    Tensors that are not contiguous are copied. In an autocast region q, k and v are cast to its type. On a GPU the work goes into the
    current stream, and what goes wrong there raises at a later call. A call serves one backward call: a second one through the same
    graph, after ``retain_graph=True``, raises :class:`~deltalink.errors.SavedStateError`.
    """
    if safe_gate and lower_bound is None:
        raise InputError("safe_gate needs lower_bound, such as -5.0")
    return _attention(
        "kda",
        q,
        k,
        v,
        g,
        beta,
        A_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        cp=cp,
    )


def gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    chunk_size: int = 64,
    cp: ContextParallel | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet. Names and meanings are those of flash-linear-attention's ``chunk_gated_delta_rule``.

    As :func:`kda`, with one decay for all channels of a head: ``g`` is ``[B, T, HV]``, ``dt_bias`` ``[HV]``, and there is no lower bound.
    """
    return _attention(
        "gdn",
        q,
        k,
        v,
        g,
        beta,
        A_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=None,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        cp=cp,
    )
