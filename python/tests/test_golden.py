"""Operations against golden vectors that independent code made, forward and backward."""

import pytest
import torch
from conftest import golden_names, relative

import deltalink

# Largest relative RMS distances in float32, as for the library.
OUTPUT, GRADIENT = 1e-4, 1e-4


def call(case, dtype=torch.float32):
    """The operation on a golden case: (results by name, leaves by name)."""
    gate = case.meta["gate"]
    leaves = {name: case[name].to(dtype).requires_grad_() for name in ("q", "k", "v", "beta")}
    leaves["g"] = case["g" if gate == "none" else "g_raw"].to(dtype).requires_grad_()
    for name in ("A_log", "dt_bias", "h0"):
        if case.get(name) is not None:
            leaves[name] = case[name].clone().requires_grad_()
    options = {}
    if gate != "none":
        options = {"use_gate_in_kernel": True, "A_log": leaves["A_log"], "dt_bias": leaves["dt_bias"]}
    if gate == "lower_bound":
        options["lower_bound"] = float(case.meta["lower_bound"])
    function = {"kda": deltalink.kda, "gdn": deltalink.gdn}[case.meta["op"]]
    o, ht = function(
        *(leaves[name] for name in ("q", "k", "v", "g", "beta")),
        scale=float(case.meta["scale"]),
        initial_state=leaves.get("h0"),
        output_final_state=True,
        use_qk_l2norm_in_kernel=case.flag("use_qk_l2norm"),
        cu_seqlens=case.get("cu_seqlens"),
        **options,
    )
    loss = (o.float() * case["do"]).sum()
    if case.get("dht") is not None:
        loss = loss + (ht * case["dht"]).sum()
    loss.backward()
    return {"o": o, "ht": ht}, leaves


def expected_gradients(case):
    names = {"q": "dq", "k": "dk", "v": "dv", "beta": "dbeta", "A_log": "dA_log", "dt_bias": "ddt_bias", "h0": "dh0"}
    names["g"] = "dg" if case.meta["gate"] == "none" else "dg_raw"
    return names


def gate_floor(case, found, expected):
    """dg is a difference of large sums, so its error is relative to what is subtracted."""
    terms = max(float((case["q"] * case["dq"]).abs().max()), float((case["k"] * case["dk"]).abs().max()))
    return float((found - expected).abs().max()) <= GRADIENT * float(expected.abs().max()) + 2e-5 * terms


@pytest.mark.parametrize("name", golden_names())
def test_golden(golden, name):
    case = golden(name)
    results, leaves = call(case)
    for key, found in results.items():
        assert relative(found.detach(), case[key]) < OUTPUT, key
    for leaf, key in expected_gradients(case).items():
        if leaf not in leaves:
            continue
        found, expected = leaves[leaf].grad, case[key]
        close = relative(found, expected) < GRADIENT
        if leaf in ("g", "A_log", "dt_bias"):
            close = close or gate_floor(case, found, expected)
        assert close, (leaf, relative(found, expected))


@pytest.mark.parametrize("name", ["a_kda_t64_k64", "a_gdn_t64_k32v64"])
def test_golden_in_bfloat16(golden, name):
    case = golden(name)
    if case.meta.get("bf16_inputs") != "true":
        for key in ("q", "k", "v", "beta", "g", "do"):
            case.tensors[key] = case[key].bfloat16().float()
    results, leaves = call(case, torch.bfloat16)
    assert results["o"].dtype == leaves["q"].grad.dtype == leaves["g"].grad.dtype == torch.bfloat16
    assert results["ht"].dtype == torch.float32
    # g itself was rounded, which the golden results do not know of.
    assert relative(results["o"].detach(), case["o"]) < 2e-2
    assert relative(leaves["v"].grad, case["dv"]) < 2e-2
