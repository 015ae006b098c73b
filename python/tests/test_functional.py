"""Options of kda and gdn against plain PyTorch in float64, outputs and all gradients."""

import pytest
import reference
import torch
from conftest import relative

import deltalink

# Two chunks of 16 tokens, the second one not full.
B, T, H, HV, K, V = 1, 23, 2, 4, 16, 32


def random_inputs(op="kda", b=B, t=T, n=None, dtype=torch.float32, gate=False, v_first=False):
    shape = (b, t, HV, K) if op == "kda" else (b, t, HV)
    x = {
        "q": torch.randn(b, t, H, K),
        "k": torch.randn(b, t, H, K),
        "v": torch.randn(b, t, HV, V),
        "g": torch.randn(shape) if gate else -torch.rand(shape),
        "beta": torch.rand(b, t, HV),
    }
    x = {name: tensor.to(dtype) for name, tensor in x.items()}
    x["initial_state"] = torch.randn(b if n is None else n, HV, *((V, K) if v_first else (K, V)))
    if gate:
        x["A_log"] = 0.5 * torch.randn(HV)
        x["dt_bias"] = torch.randn(shape[2:])
    return {name: tensor.requires_grad_() for name, tensor in x.items()}


def loss_of(o, state):
    def weighted(x, first, last):
        return (x.double() * torch.linspace(first, last, x.numel(), dtype=torch.float64, device=x.device).view(x.shape)).sum()

    return weighted(o, -1, 1) + weighted(state, 1, 2)


def gradients(leaves, o, state):
    found = torch.autograd.grad(loss_of(o, state), list(leaves.values()))
    return {"o": o.detach(), "state": state.detach(), **dict(zip(leaves, found))}


def expected(op, leaves, *, gate=None, bound=None, factor=0, l2norm=False, v_first=False, cu_seqlens=None, scale=None):
    wide = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    g, q, k, beta, h0 = (wide[name] for name in ("g", "q", "k", "beta", "initial_state"))
    if gate == "softplus":
        g = reference.softplus_gate(g, wide["A_log"], wide.get("dt_bias"))
    elif gate == "lower_bound":
        g = reference.lower_bound_gate(g, bound, wide.get("A_log"), wide.get("dt_bias"))
    if factor:
        beta = factor * torch.sigmoid(beta)
    if l2norm:
        q, k = reference.l2norm(q), reference.l2norm(k)
    h0 = h0.transpose(-1, -2) if v_first else h0
    o, state = reference.delta_rule(q, k, wide["v"], g, beta, scale, h0, cu_seqlens)
    return gradients(wide, o, state.transpose(-1, -2) if v_first else state)


def compare(found, wanted, limit):
    assert found.keys() == wanted.keys()
    distances = {name: relative(found[name], wanted[name]) for name in wanted}
    assert all(distance < limit for distance in distances.values()), distances


CASES = {
    "plain": {},
    "l2norm": {"l2norm": True},
    "scale": {"scale": 0.3},
    "softplus": {"gate": "softplus"},
    "lower_bound": {"gate": "lower_bound", "bound": -3.0},
    "sigmoid": {"factor": 1},
    "negative_eigenvalues": {"factor": 2, "l2norm": True},
    "v_first": {"v_first": True},
    "packed": {"cu_seqlens": [0, 5, 5, 22, 23]},
    "all": {"gate": "softplus", "factor": 2, "l2norm": True, "v_first": True, "cu_seqlens": [0, 18, 23]},
}


# GDN has no lower bound.
@pytest.mark.parametrize("op, case", [(op, case) for op in ("kda", "gdn") for case in CASES if (op, case) != ("gdn", "lower_bound")])
def test_options(op, case):
    options = CASES[case]
    cu_seqlens = options.get("cu_seqlens")
    leaves = random_inputs(
        op,
        b=1 if cu_seqlens else 2,
        n=len(cu_seqlens) - 1 if cu_seqlens else None,
        gate="gate" in options,
        v_first=options.get("v_first", False),
    )
    arguments = {
        "scale": options.get("scale"),
        "use_qk_l2norm_in_kernel": options.get("l2norm", False),
        "use_gate_in_kernel": "gate" in options,
        "use_beta_sigmoid_in_kernel": bool(options.get("factor")),
        "allow_neg_eigval": options.get("factor") == 2,
        "state_v_first": options.get("v_first", False),
        "cu_seqlens": None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32),
        "output_final_state": True,
        "chunk_size": 16,
    }
    if "bound" in options:
        arguments["lower_bound"] = options["bound"]
    found = gradients(leaves, *getattr(deltalink, op)(**leaves, **arguments))
    compare(found, expected(op, leaves, **options), 2e-5)


def test_gate_biases_of_checkpoints_are_vectors():
    leaves = random_inputs(gate=True)
    flat = {**leaves, "dt_bias": leaves["dt_bias"].detach().flatten().requires_grad_()}
    options = {"use_gate_in_kernel": True, "output_final_state": True}
    one = gradients(leaves, *deltalink.kda(**leaves, **options))
    two = gradients(flat, *deltalink.kda(**flat, **options))
    assert torch.equal(one["o"], two["o"])
    assert two["dt_bias"].shape == (HV * K,)
    assert torch.equal(one["dt_bias"].flatten(), two["dt_bias"])


def test_lower_bound_without_strength():
    leaves = random_inputs(gate=True)
    del leaves["A_log"], leaves["dt_bias"]
    found = gradients(
        leaves,
        *deltalink.kda(**leaves, use_gate_in_kernel=True, safe_gate=True, lower_bound=-5.0, output_final_state=True),
    )
    compare(found, expected("kda", leaves, gate="lower_bound", bound=-5.0), 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_element_types(dtype):
    leaves = random_inputs(dtype=dtype)
    found = gradients(leaves, *deltalink.kda(**leaves, use_qk_l2norm_in_kernel=True, output_final_state=True))
    assert found["o"].dtype == found["q"].dtype == found["g"].dtype == dtype
    assert found["state"].dtype == found["initial_state"].dtype == torch.float32
    compare(found, expected("kda", leaves, l2norm=True), 2e-2)


def test_wide_gates_beside_narrow_tensors():
    leaves = random_inputs(dtype=torch.bfloat16)
    for name in ("g", "beta"):
        leaves[name] = leaves[name].detach().float().requires_grad_()
    found = gradients(leaves, *deltalink.kda(**leaves, output_final_state=True, use_qk_l2norm_in_kernel=True))
    assert found["g"].dtype == found["beta"].dtype == torch.float32
    compare(found, expected("kda", leaves, l2norm=True), 2e-2)


def test_tensors_in_another_order_are_copied():
    leaves = random_inputs()
    turned = {name: x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for name, x in leaves.items()}
    turned["q"] = torch.cat([leaves["q"], leaves["q"]], -1).detach()[..., :K].requires_grad_()
    assert not turned["q"].is_contiguous()
    one = gradients(leaves, *deltalink.kda(**leaves, output_final_state=True))
    two = gradients(turned, *deltalink.kda(**turned, output_final_state=True))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_only_the_asked_for_gradients():
    leaves = random_inputs()
    fixed = {name: x.detach() for name, x in leaves.items() if name != "v"}
    o, state = deltalink.kda(v=leaves["v"], **fixed)
    assert state is None
    o.sum().backward()
    assert leaves["v"].grad is not None and leaves["q"].grad is None


def test_a_loss_of_the_state_alone():
    leaves = random_inputs()
    _, state = deltalink.kda(**leaves, output_final_state=True)
    found = torch.autograd.grad(state.sum(), [leaves["k"], leaves["v"]])
    wide = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    _, state = reference.delta_rule(**wide)
    for one, two in zip(found, torch.autograd.grad(state.sum(), [wide["k"], wide["v"]])):
        assert relative(one, two) < 2e-5


def test_no_tokens():
    leaves = random_inputs(t=0)
    o, state = deltalink.kda(**leaves, output_final_state=True)
    assert o.shape == (B, 0, HV, V)
    assert torch.equal(state, leaves["initial_state"])
    state.sum().backward()
    assert torch.equal(leaves["initial_state"].grad, torch.ones(B, HV, K, V))
