"""The operations as torch sees them: opaque custom operators with gradients.

An operator takes and returns tensors and numbers only, so that it works under ``torch.compile``, checkpoints and autocast alike. What a
forward call saves is one of its outputs, a tensor of one number whose memory is the saved state's ticket: whoever keeps
tensors for backward keeps that, and when it goes the saved state goes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _native
from .errors import DeviceError, InputError
from .parallel import _ints, batch_plan, context, packed_plan
from .worlds import alone

_LOCAL = {"mode": "overlap", "recompute": "all", "checked": False, "allow_nonfinite": False, "sum_parameters": False}


def _here(device: torch.device, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise DeviceError(f"{name} is on {tensor.device}, the operation computes on {device}; move it there")


_GPU_ALIGN = 16
"""Bytes to which kernels on GPUs need tensors aligned; torch aligns whole tensors to more."""


def _bare(tensor: Tensor | None) -> Tensor | None:
    """The elements alone, in row-major order. A tensor that is not in that order, or not aligned as its device needs it, is copied."""
    if tensor is None:
        return None
    bare = tensor.detach().contiguous()
    return bare.clone() if bare.is_cuda and bare.data_ptr() % _GPU_ALIGN else bare


def _place(number: int, x: Tensor, cu_seqlens: Tensor | None):
    """World, plan and options of a call: those of context ``number``, or of this process alone (0)."""
    if number:
        cp = context(number)
        return cp.world, cp.plan, cp.options
    if cu_seqlens is None:
        return alone(x.device), batch_plan(x.shape[0], x.shape[1], 1, None), _LOCAL
    return alone(x.device), packed_plan(_ints("cu_seqlens", cu_seqlens), 1, None), _LOCAL


def _stream(device: torch.device) -> int:
    """The stream into which work on a device goes."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _rows_out(number: int, x: Tensor, cu_seqlens: Tensor | None):
    """Final states of a call."""
    if number:
        return context(number).ends_here
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _arguments(op, q, k, v, g, beta, a_log, dt_bias, initial_state, scale, l2norm, gate, lower_bound, beta_factor, v_first):
    return {
        "op": op,
        "q": _bare(q),
        "k": _bare(k),
        "v": _bare(v),
        "g": _bare(g),
        "beta": _bare(beta),
        "a_log": _bare(a_log),
        "dt_bias": _bare(dt_bias),
        "initial_state": _bare(initial_state),
        "scale": scale,
        "l2norm": l2norm,
        "gate": gate,
        "lower_bound": lower_bound,
        "beta_factor": beta_factor,
        "state_v_first": v_first,
    }


@torch.library.custom_op("deltalink::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    a_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    op: str,
    scale: float | None,
    l2norm: bool,
    gate: str,
    lower_bound: float,
    beta_factor: float,
    v_first: bool,
    chunk: int,
    output_final_state: bool,
    save: bool,
    cp: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, final states (empty if not asked for) and the ticket of the saved state (empty if not asked for)."""
    world, plan, options = _place(cp, q, cu_seqlens)
    _here(world.device, q=q, k=k, v=v, g=g, beta=beta, A_log=a_log, dt_bias=dt_bias, initial_state=initial_state)
    arguments = _arguments(op, q, k, v, g, beta, a_log, dt_bias, initial_state, scale, l2norm, gate, lower_bound, beta_factor, v_first)
    options = {**options, "chunk": chunk}
    o, final_state = torch.empty_like(v, memory_format=torch.contiguous_format), None
    if output_final_state:
        rows = len(plan.ends(world.rank))
        final_state = q.new_empty(_state_shape(rows, q, v, v_first), dtype=torch.float32)
    saved = _native.attention_forward(world._native, plan, arguments, options, o, final_state, save, _stream(q.device))
    return (
        o,
        q.new_empty(0, dtype=torch.float32) if final_state is None else final_state,
        torch.empty(0, dtype=torch.int64) if saved is None else torch.from_dlpack(saved),
    )


def _state_shape(rows, q: Tensor, v: Tensor, v_first: bool) -> tuple:
    heads, channels, values = v.shape[2], q.shape[3], v.shape[3]
    return (rows, heads, values, channels) if v_first else (rows, heads, channels, values)


@attention.register_fake
def _(q, k, v, g, beta, a_log, dt_bias, initial_state, cu_seqlens, op, scale, l2norm, gate, lower_bound, beta_factor, v_first, chunk,
      output_final_state, save, cp):  # fmt: skip
    shape = _state_shape(_rows_out(cp, q, cu_seqlens), q, v, v_first) if output_final_state else (0,)
    saved = torch.empty(1 if save else 0, dtype=torch.int64, device="cpu")
    return q.new_empty(v.shape), q.new_empty(shape, dtype=torch.float32), saved


@torch.library.custom_op("deltalink::attention_backward", mutates_args=())
def attention_backward(
    d_o: Tensor,
    d_final_state: Tensor | None,
    saved: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    a_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    op: str,
    scale: float | None,
    l2norm: bool,
    gate: str,
    lower_bound: float,
    beta_factor: float,
    v_first: bool,
) -> list[Tensor]:
    """Gradients of q, k, v, g, beta, ``A_log``, ``dt_bias`` and the initial states; those of what is absent are empty."""
    arguments = _arguments(op, q, k, v, g, beta, a_log, dt_bias, initial_state, scale, l2norm, gate, lower_bound, beta_factor, v_first)
    with_a, with_bias = (a_log, dt_bias) if gate != "given" else (None, None)
    optional = {"da_log": with_a, "ddt_bias": with_bias, "d_initial_state": initial_state}
    optional = {name: None if x is None else q.new_empty(x.shape, dtype=torch.float32) for name, x in optional.items()}
    always = {"dq": q, "dk": k, "dv": v}
    always = {name: torch.empty_like(x, memory_format=torch.contiguous_format) for name, x in always.items()}
    always |= {name: x.new_empty(x.shape, dtype=torch.float32) for name, x in (("dg", g), ("dbeta", beta))}
    sums = _native.attention_backward(_number(saved), arguments, _bare(d_o), _bare(d_final_state), always | optional, _stream(q.device))
    for name, total in zip(("da_log", "ddt_bias"), sums):
        if total is not None:
            optional[name] = torch.from_dlpack(total).to(q.device)
    found = [x.to(like.dtype) for x, like in zip(always.values(), (q, k, v, g, beta))]
    return found + [q.new_empty(0, dtype=torch.float32) if x is None else x for x in optional.values()]


@attention_backward.register_fake
def _(d_o, d_final_state, saved, q, k, v, g, beta, a_log, dt_bias, initial_state, op, scale, l2norm, gate, lower_bound, beta_factor,
      v_first):  # fmt: skip
    with_bias = None if gate == "given" else dt_bias
    with_a = None if gate == "given" else a_log
    always = [x.new_empty(x.shape) for x in (q, k, v, g, beta)]
    return always + [q.new_empty(0 if x is None else x.shape, dtype=torch.float32) for x in (with_a, with_bias, initial_state)]


def _number(saved: Tensor) -> int:
    if saved.numel() != 1:
        raise InputError("the forward call of this backward call did not save; was it called where no gradient was asked for?")
    return int(saved.item())


def _keep(ctx, inputs, output) -> None:
    (*tensors, cu_seqlens, op, scale, l2norm, gate, lower_bound, beta_factor, v_first, chunk, final, save, cp) = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.call = (op, scale, l2norm, gate, lower_bound, beta_factor, v_first)
    ctx.final = final
    ctx.o_dtype = output[0].dtype
    ctx.mark_non_differentiable(output[2])


def _attention_gradients(ctx, d_o, d_final_state, _):
    *tensors, saved = ctx.saved_tensors
    d_final_state = d_final_state.float() if ctx.final else None
    gradients = attention_backward(d_o.to(ctx.o_dtype), d_final_state, saved, *tensors, *ctx.call)
    # A_log and dt_bias that the gate does not read have no gradient.
    gradients = [None if x is None or y.numel() != x.numel() else y for x, y in zip(tensors, gradients)]
    return (*gradients, *[None] * 12)


attention.register_autograd(_attention_gradients, setup_context=_keep)


@torch.library.custom_op("deltalink::convolutions", mutates_args=())
def convolutions(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    initial_states: Sequence[Tensor],
    cu_seqlens: Tensor | None,
    silu: bool,
    output_final_state: bool,
    save: bool,
    cp: int,
) -> list[Tensor]:
    """Outputs of all convolutions, then their final states (if asked for), then the ticket of what was saved (empty if not asked for).

    There are as many biases and initial states as convolutions, or none.
    """
    world, plan, options = _place(cp, xs[0], cu_seqlens)
    for name, tensors in (("x", xs), ("weight", weights), ("bias", biases), ("initial_state", initial_states)):
        for tensor in tensors:
            _here(world.device, **{name: tensor})
    flags = (options["checked"], options["allow_nonfinite"], options["sum_parameters"])
    calls = _convolution_arguments(xs, weights, biases, initial_states)
    ys = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in xs]
    rows = len(plan.ends(world.rank))
    states = _convolution_states(rows, xs, weights) if output_final_state else []
    results = list(zip(ys, states or [None] * len(xs)))
    saved = _native.convolution_forward(world._native, plan, calls, results, silu, *flags, save, _stream(xs[0].device))
    return [*ys, *states, torch.empty(0, dtype=torch.int64) if saved is None else torch.from_dlpack(saved)]


def _convolution_states(rows, xs, weights) -> list[Tensor]:
    """Memory for the states after ``rows`` sequences."""
    return [x.new_empty((rows, x.shape[-1], max(w.shape[-1] - 1, 0))) for x, w in zip(xs, weights)]


def _convolution_arguments(xs, weights, biases, initial_states):
    biases = list(biases) or [None] * len(xs)
    initial_states = list(initial_states) or [None] * len(xs)
    return [tuple(_bare(x) for x in call) for call in zip(xs, weights, biases, initial_states, strict=True)]


@convolutions.register_fake
def _(xs, weights, biases, initial_states, cu_seqlens, silu, output_final_state, save, cp):
    ys = [x.new_empty(x.shape) for x in xs]
    states = _convolution_states(_rows_out(cp, xs[0], cu_seqlens), xs, weights) if output_final_state else []
    return [*ys, *states, torch.empty(1 if save else 0, dtype=torch.int64, device="cpu")]


@torch.library.custom_op("deltalink::convolutions_backward", mutates_args=())
def convolutions_backward(
    d_ys: Sequence[Tensor],
    d_final_states: Sequence[Tensor],
    saved: Tensor,
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    initial_states: Sequence[Tensor],
) -> list[Tensor]:
    """Gradients of all x, all weights, and of biases and initial states where there are any."""
    calls = _convolution_arguments(xs, weights, biases, initial_states)
    d_final_states = list(d_final_states) or [None] * len(xs)
    upstream = [(_bare(dy), _bare(d_final)) for dy, d_final in zip(d_ys, d_final_states, strict=True)]
    d_xs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in xs]
    # The others are sums and states, in float32.
    d_weights, d_biases, d_initial = (
        [x.new_empty(x.shape, dtype=torch.float32) for x in like] for like in (weights, biases, initial_states)
    )
    results = list(zip(d_xs, d_weights, d_biases or [None] * len(xs), d_initial or [None] * len(xs)))
    sums = _native.convolution_backward(_number(saved), calls, upstream, results, _stream(xs[0].device))
    for i, (weight, bias) in enumerate(sums):
        if weight is not None:
            d_weights[i] = torch.from_dlpack(weight).to(xs[0].device)
        if bias is not None:
            d_biases[i] = torch.from_dlpack(bias).to(xs[0].device)
    found = [*d_xs, *d_weights, *d_biases, *d_initial]
    return [x.to(like.dtype) for x, like in zip(found, (*xs, *weights, *biases, *initial_states), strict=True)]


@convolutions_backward.register_fake
def _(d_ys, d_final_states, saved, xs, weights, biases, initial_states):
    return [x.new_empty(x.shape) for likes in (xs, weights, biases, initial_states) for x in likes]


def _keep_convolutions(ctx, inputs, output) -> None:
    xs, weights, biases, initial_states, _, _, final, *_ = inputs
    ctx.counts = [len(x) for x in (xs, weights, biases, initial_states)]
    ctx.final = final
    ctx.save_for_backward(*xs, *weights, *biases, *initial_states, output[-1])
    ctx.mark_non_differentiable(output[-1])


def _convolution_gradients(ctx, d_outputs):
    *tensors, saved = ctx.saved_tensors
    lists = _split(tensors, ctx.counts)
    n = ctx.counts[0]
    d_ys = [dy.to(x.dtype) for dy, x in zip(d_outputs[:n], lists[0])]
    d_finals = [d.to(x.dtype) for d, x in zip(d_outputs[n : 2 * n], lists[0])] if ctx.final else []
    gradients = convolutions_backward(d_ys, d_finals, saved, *lists)
    return (*_split(gradients, ctx.counts), *[None] * 5)


def _split(tensors, counts):
    lists, begin = [], 0
    for count in counts:
        lists.append(list(tensors[begin : begin + count]))
        begin += count
    return lists


convolutions.register_autograd(_convolution_gradients, setup_context=_keep_convolutions)
