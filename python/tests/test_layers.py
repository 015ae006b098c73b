"""Layers: parameters as in flash-linear-attention, outputs and gradients as plain PyTorch has them."""

import pytest
import reference
import torch
from conftest import relative

from deltalink.errors import InputError
from deltalink.nn import GatedDeltaNet, KimiDeltaAttention

HIDDEN, HEADS, VALUE_HEADS, KEYS = 48, 2, 4, 16

KDA_SHAPES = {
    "A_log": [4],
    "dt_bias": [64],
    "q_proj.weight": [32, 48],
    "k_proj.weight": [32, 48],
    "v_proj.weight": [64, 48],
    "q_conv1d.weight": [32, 1, 4],
    "k_conv1d.weight": [32, 1, 4],
    "v_conv1d.weight": [64, 1, 4],
    "f_proj.0.weight": [16, 48],
    "f_proj.1.weight": [64, 16],
    "b_proj.weight": [4, 48],
    "g_proj.0.weight": [16, 48],
    "g_proj.1.weight": [64, 16],
    "g_proj.1.bias": [64],
    "o_norm.weight": [16],
    "o_proj.weight": [48, 64],
}

GDN_SHAPES = {
    "A_log": [4],
    "dt_bias": [4],
    "q_proj.weight": [32, 48],
    "k_proj.weight": [32, 48],
    "v_proj.weight": [128, 48],
    "a_proj.weight": [4, 48],
    "b_proj.weight": [4, 48],
    "q_conv1d.weight": [32, 1, 4],
    "k_conv1d.weight": [32, 1, 4],
    "v_conv1d.weight": [128, 1, 4],
    "g_proj.weight": [128, 48],
    "o_norm.weight": [32],
    "o_proj.weight": [48, 128],
}


def make(kind, **options):
    sizes = {"hidden_size": HIDDEN, "head_dim": KEYS, "num_heads": HEADS, "num_v_heads": VALUE_HEADS}
    layer = {"kda": KimiDeltaAttention, "gdn": GatedDeltaNet}[kind](**sizes, **options)
    for parameter in layer.parameters():
        # Initial values would leave much of a layer close to nothing.
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return layer


def expected(kind, layer, x, cu_seqlens=None):
    p = {name: value.detach().double().requires_grad_() for name, value in layer.state_dict().items()}
    x = x.detach().double().requires_grad_()
    o = reference.layer(
        p,
        kind,
        x,
        heads=HEADS,
        value_heads=VALUE_HEADS,
        keys=KEYS,
        values=layer.head_v_dim,
        lower_bound=getattr(layer, "lower_bound", None),
        neg_eigval=layer.allow_neg_eigval,
        cu_seqlens=cu_seqlens,
    )
    return o, x, p


@pytest.mark.parametrize(
    "kind, shapes, absent",
    [
        ("kda", KDA_SHAPES, {}),
        ("gdn", GDN_SHAPES, {}),
        ("kda", KDA_SHAPES, {"use_short_conv": False}),
        ("gdn", GDN_SHAPES, {"use_gate": False}),
    ],
)
def test_parameters_are_those_of_checkpoints(kind, shapes, absent):
    wanted = {
        name: shape
        for name, shape in shapes.items()
        if not ("use_short_conv" in absent and "conv1d" in name) and not ("use_gate" in absent and "g_proj" in name)
    }
    state = make(kind, **absent).state_dict()
    assert {name: list(value.shape) for name, value in state.items()} == wanted


@pytest.mark.parametrize("kind", ["kda", "gdn"])
def test_convolution_biases_have_names(kind):
    state = make(kind, conv_bias=True).state_dict()
    assert {name for name in state if "conv1d.bias" in name} == {f"{x}_conv1d.bias" for x in "qkv"}


@pytest.mark.parametrize(
    "kind, options",
    [
        ("kda", {}),
        ("kda", {"safe_gate": True, "lower_bound": -5.0, "allow_neg_eigval": True, "conv_bias": True}),
        ("kda", {"use_short_conv": False, "expand_v": 2}),
        ("gdn", {}),
        ("gdn", {"use_gate": False, "allow_neg_eigval": True}),
        ("gdn", {"use_short_conv": False, "conv_size": 3, "expand_v": 1}),
    ],
)
@pytest.mark.parametrize("cu_seqlens", [None, [0, 8, 19]])
def test_outputs_and_gradients(kind, options, cu_seqlens):
    layer = make(kind, **options)
    x = torch.randn(1 if cu_seqlens else 2, 19, HIDDEN, requires_grad=True)
    o, attentions, state = layer(x, cu_seqlens=cu_seqlens)
    assert attentions is None and state is None
    wide_o, wide_x, p = expected(kind, layer, x, cu_seqlens)
    assert relative(o, wide_o) < 1e-5
    weights = torch.linspace(-1, 1, o.numel()).view(o.shape)
    (o * weights).sum().backward()
    (wide_o * weights).sum().backward()
    distances = {name: relative(value.grad, p[name].grad) for name, value in layer.named_parameters()}
    distances["x"] = relative(x.grad, wide_x.grad)
    assert all(distance < 5e-5 for distance in distances.values()), distances


@pytest.mark.parametrize("kind", ["kda", "gdn"])
def test_a_sequence_in_pieces(kind):
    layer = make(kind)
    x = torch.randn(2, 29, HIDDEN)
    whole, _, _ = layer(x)
    state, pieces = None, []
    for piece in x.split([10, 1, 18], dim=1):
        o, _, state = layer(piece, past_key_values=state, use_cache=True)
        pieces.append(o)
    assert state.recurrent.shape == (2, VALUE_HEADS, layer.head_v_dim, KEYS)
    assert relative(torch.cat(pieces, 1), whole) < 1e-5


@pytest.mark.parametrize("kind", ["kda", "gdn"])
def test_padding_is_left_out(kind):
    layer = make(kind)
    x = torch.randn(2, 20, HIDDEN)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :7] = 0
    o, _, state = layer(x, attention_mask=mask, use_cache=True)
    alone, _, _ = layer(x[:1, 7:])
    assert torch.equal(o[0, :7], torch.zeros(7, HIDDEN))
    assert relative(o[:1, 7:], alone) < 1e-5
    assert relative(o[1:], layer(x[1:])[0]) < 1e-5
    assert state.recurrent.shape[0] == 2


def test_wrong_layers_are_refused():
    with pytest.raises(InputError, match="num_v_heads = 3 is not a multiple of num_heads = 2"):
        KimiDeltaAttention(hidden_size=32, head_dim=16, num_heads=2, num_v_heads=3)
    with pytest.raises(InputError, match="would be 12.8; choose head_dim and expand_v"):
        GatedDeltaNet(hidden_size=32, head_dim=16, num_heads=2, expand_v=0.8)
    layer = make("kda")
    with pytest.raises(InputError, match="no attention matrix"):
        layer(torch.randn(1, 4, HIDDEN), output_attentions=True)
    with pytest.raises(InputError, match="it must be \\[B, T\\] = \\[1, 4\\]"):
        layer(torch.randn(1, 4, HIDDEN), attention_mask=torch.ones(1, 5))
    with pytest.raises(InputError, match="leave it out"):
        layer(torch.randn(1, 4, HIDDEN), attention_mask=torch.ones(1, 4), cu_seqlens=[0, 4])
