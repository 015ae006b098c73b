"""The same mathematics in plain PyTorch, token by token in float64: independent of the library."""

import torch
from torch.nn import functional as F


def l2norm(x):
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def softplus_gate(raw, a_log, dt_bias=None):
    """``[.., HV, K]`` or ``[.., HV]`` raw, by the shape of ``dt_bias``."""
    if dt_bias is not None:
        raw = raw + dt_bias
    strength = a_log.exp()
    strength = strength.unsqueeze(-1) if raw.ndim == 4 else strength
    return -strength * torch.log1p(torch.exp(-raw.abs())) - strength * raw.clamp(min=0)


def lower_bound_gate(raw, bound, a_log=None, dt_bias=None):
    if dt_bias is not None:
        raw = raw + dt_bias
    if a_log is not None:
        raw = raw * a_log.exp().unsqueeze(-1)
    return bound * torch.sigmoid(raw)


def sequences(batch, tokens, cu_seqlens=None):
    """(row, first token, end) of every sequence."""
    if cu_seqlens is None:
        return [(row, 0, tokens) for row in range(batch)]
    return [(0, begin, end) for begin, end in zip(cu_seqlens[:-1], cu_seqlens[1:])]


def delta_rule(q, k, v, g, beta, scale=None, initial_state=None, cu_seqlens=None):
    """Outputs and final states; g is ``[B, T, HV, K]`` or ``[B, T, HV]``, states are ``[N, HV, K, V]``."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    if g.ndim == 3:
        g = g.unsqueeze(-1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    n = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    shape = (n, v.shape[2], q.shape[3], v.shape[3])
    states = v.new_zeros(shape) if initial_state is None else initial_state.double()
    # All rows of a batch are one token further each time; packed sequences come one after the other.
    pieces = [(slice(None), 0, q.shape[1])]
    if cu_seqlens is not None:
        pieces = [(slice(i, i + 1), cu_seqlens[i], cu_seqlens[i + 1]) for i in range(n)]
    outputs, last = [], []
    for rows, begin, end in pieces:
        state = states[rows]
        for t in range(begin, end):
            state = state * g[:, t].exp().unsqueeze(-1)
            error = v[:, t] - (state * k[:, t].unsqueeze(-1)).sum(-2)
            state = state + k[:, t].unsqueeze(-1) * (error * beta[:, t].unsqueeze(-1)).unsqueeze(-2)
            outputs.append(scale * (state * q[:, t].unsqueeze(-1)).sum(-2))
        last.append(state)
    return torch.stack(outputs, 1) if outputs else torch.zeros_like(v), torch.cat(last)


def convolution(x, weight, bias=None, initial_state=None, silu=False, cu_seqlens=None):
    """Outputs and final states ``[N, D, W - 1]`` of a depthwise causal convolution with weight ``[D, W]``."""
    x, weight = x.double(), weight.double()
    reach = weight.shape[1] - 1
    pieces, states = {}, []
    for n, (row, begin, end) in enumerate(sequences(x.shape[0], x.shape[1], cu_seqlens)):
        line = x.new_zeros(reach, x.shape[2])
        if initial_state is not None:
            line = initial_state[n].double().T
        line = torch.cat([line, x[row, begin:end]])
        y = sum(line[w : w + end - begin] * weight[:, w] for w in range(reach + 1))
        y = y if bias is None else y + bias.double()
        pieces.setdefault(row, []).append(F.silu(y) if silu else y)
        states.append(line[line.shape[0] - reach :].T)
    return torch.stack([torch.cat(pieces[row]) for row in sorted(pieces)]), torch.stack(states)


def gated_norm(o, gate, weight, eps, activation):
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps) * weight
    if gate is None:
        return o
    return o * (torch.sigmoid(gate) if activation == "sigmoid" else F.silu(gate))


def layer(parameters, kind, x, *, heads, value_heads, keys, values, lower_bound=None, neg_eigval=False, eps=1e-5, cu_seqlens=None):
    """A layer from its state dict (float64 tensors) and its sizes; ``kind`` is "kda" or "gdn"."""
    p = parameters
    x = x.double()
    outputs = []
    for name in "qkv":
        y = x @ p[f"{name}_proj.weight"].T
        if f"{name}_conv1d.weight" in p:
            bias = p.get(f"{name}_conv1d.bias")
            y, _ = convolution(y, p[f"{name}_conv1d.weight"][:, 0], bias, silu=True, cu_seqlens=cu_seqlens)
        else:
            y = F.silu(y)
        outputs.append(y)
    q, k, v = (y.unflatten(-1, (n, d)) for y, n, d in zip(outputs, (heads, heads, value_heads), (keys, keys, values)))
    beta = torch.sigmoid(x @ p["b_proj.weight"].T) * (2 if neg_eigval else 1)
    if kind == "kda":
        raw = (x @ p["f_proj.0.weight"].T @ p["f_proj.1.weight"].T).unflatten(-1, (value_heads, keys))
        bias = p["dt_bias"].view(value_heads, keys)
        if lower_bound is None:
            g = softplus_gate(raw, p["A_log"], bias)
        else:
            g = lower_bound_gate(raw, lower_bound, p["A_log"], bias)
        gate = x @ p["g_proj.0.weight"].T @ p["g_proj.1.weight"].T + p["g_proj.1.bias"]
        activation = "sigmoid"
    else:
        g = softplus_gate(x @ p["a_proj.weight"].T, p["A_log"], p["dt_bias"])
        gate = x @ p["g_proj.weight"].T if "g_proj.weight" in p else None
        activation = "silu"
    o, _ = delta_rule(l2norm(q), l2norm(k), v, g, beta, scale=keys**-0.5, cu_seqlens=cu_seqlens)
    gate = None if gate is None else gate.unflatten(-1, (value_heads, values))
    o = gated_norm(o, gate, p["o_norm.weight"], eps, activation)
    return o.flatten(-2) @ p["o_proj.weight"].T
