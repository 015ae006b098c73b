"""What is refused, and how it is said."""

import pytest
import torch
from test_functional import random_inputs

import deltalink
from deltalink.errors import DeltalinkError, DeviceError, InputError, PlanError


def refused(error, match, **changes):
    leaves = {name: x.detach() for name, x in random_inputs().items()}
    options = {name: value for name, value in changes.items() if name not in leaves}
    leaves.update({name: value for name, value in changes.items() if name in leaves})
    with pytest.raises(error, match=match) as found:
        deltalink.kda(**leaves, **options)
    assert isinstance(found.value, DeltalinkError)
    # It may be repeated.
    deltalink.kda(**{name: x.detach() for name, x in random_inputs().items()})


def test_shapes():
    refused(InputError, r"k has shape \[1, 23, 2, 32\], the other tensors ask for \[1, 23, 2, 16\]", k=torch.randn(1, 23, 2, 32))
    refused(InputError, r"q has 3 dimensions \(shape \[23, 2, 16\]\), it needs 4", q=torch.randn(23, 2, 16))
    refused(InputError, r"g has 3 dimensions", g=torch.zeros(1, 23, 4))
    refused(InputError, r"h0 has 2 rows, the plan has 1 sequences that start on this PE", initial_state=torch.randn(2, 4, 16, 32))


def test_values():
    nan = torch.randn(1, 23, 2, 16)
    nan[0, 5, 1, 3] = float("nan")
    refused(InputError, r"q\[0, 5, 1, 3\] is NaN; clean the input", q=nan)
    refused(InputError, r"g\[0, 0, 0, 0\] is 1; the log decay must be at most 0", g=torch.ones(1, 23, 4, 16))
    refused(InputError, r"scale is inf; it must be finite", scale=float("inf"))


def test_element_types():
    refused(InputError, "q has elements of type int64; tensors must be float32, bfloat16 or float16", q=torch.ones(1, 23, 2, 16).long())
    refused(InputError, "q has elements of type float64", q=torch.ones(1, 23, 2, 16).double())
    refused(InputError, "k has element type bf16, it needs f32", k=torch.ones(1, 23, 2, 16).bfloat16())
    refused(InputError, "h0 has element type bf16, it needs f32", initial_state=torch.randn(1, 4, 16, 32).bfloat16())


def test_integers_have_no_gradients():
    # PyTorch itself holds this; an integer tensor reaches no operation with a gradient asked for.
    with pytest.raises(RuntimeError, match="floating point"):
        torch.ones(1, 23, 2, 16, dtype=torch.int64).requires_grad_()


def test_devices():
    refused(DeviceError, "v is on meta, q on cpu; move all tensors of a call to one device", v=torch.randn(1, 23, 4, 32, device="meta"))
    with pytest.raises(DeviceError, match="a world on meta was asked for; worlds compute on cpu and cuda"):
        deltalink.init(device="meta")
    with pytest.raises(DeviceError, match="weight of convolution 0 is on meta, x on cpu"):
        deltalink.causal_conv1d(torch.randn(1, 9, 4), torch.randn(4, 3, device="meta"))


def test_tensors_that_are_not_where_the_world_computes(monkeypatch):
    cp = deltalink.ContextParallel(cu_seqlens=[0, 23])
    monkeypatch.setattr(cp.world, "device", torch.device("cuda:0"))
    leaves = {name: x.detach() for name, x in random_inputs().items()}
    with pytest.raises(DeviceError, match="q is on cpu, the operation computes on cuda:0; move it there"):
        deltalink.kda(**leaves, cp=cp)
    with pytest.raises(DeviceError, match="x is on cpu, the operation computes on cuda:0"):
        deltalink.causal_conv1d(leaves["q"][:, :, 0], torch.randn(16, 4), cp=cp)


def test_options():
    refused(InputError, "chunk is 48; it must be 16, 32 or 64", chunk_size=48)
    refused(InputError, r"needs A_log, of shape \[HV\], or lower_bound", use_gate_in_kernel=True)
    refused(InputError, "safe_gate needs lower_bound", safe_gate=True)
    refused(InputError, "the lower bound of the gate is 2; it must be finite and below 0", use_gate_in_kernel=True, lower_bound=2.0)
    refused(InputError, "pass use_beta_sigmoid_in_kernel=True as well", allow_neg_eigval=True)
    refused(
        InputError,
        "dt_bias has 5 elements, g asks for 4 x 16",
        use_gate_in_kernel=True,
        A_log=torch.zeros(4),
        dt_bias=torch.zeros(5),
    )


def test_offsets():
    refused(PlanError, "cu_seqlens starts at 1; the first offset must be 0", cu_seqlens=[1, 23])
    refused(PlanError, r"cu_seqlens\[2\] = 4 is below cu_seqlens\[1\] = 9", cu_seqlens=[0, 9, 4])
    refused(InputError, r"tokens, the plan gives this PE \[1, 22\]", cu_seqlens=[0, 22], initial_state=None)
    refused(InputError, "cu_seqlens is a tensor of torch.float32 with 1 dimensions", cu_seqlens=torch.tensor([0.0, 23.0]))
    refused(InputError, r"cu_seqlens\[1\] is 2.5; it must be an integer", cu_seqlens=[0, 2.5])
    refused(InputError, r"cu_seqlens\[0\] is -1; it must not be negative", cu_seqlens=[-1, 23])


def test_contexts():
    with pytest.raises(InputError, match="pass either cu_seqlens, or batch_size and seq_len"):
        deltalink.ContextParallel()
    with pytest.raises(InputError, match="mode is 'fast'; choose one of 'overlap', 'bulk', 'exact'"):
        deltalink.ContextParallel(cu_seqlens=[0, 4], mode="fast")
    with pytest.raises(InputError, match="1 cuts for 1 ranks; pass 0"):
        deltalink.ContextParallel(cu_seqlens=[0, 4], cuts=[2])
    with pytest.raises(InputError, match="process_group is 'torchrun'; pass a process group, a DeviceMesh, \"env\" or None"):
        deltalink.ContextParallel("torchrun", cu_seqlens=[0, 4])
    cp = deltalink.ContextParallel(cu_seqlens=[0, 23])
    refused(InputError, "cu_seqlens and cp were both given", cu_seqlens=[0, 23], cp=cp)
    with pytest.raises(InputError, match="the tensor has 5 tokens along dimension 1, the sequences have 23"):
        cp.shard(torch.randn(1, 5, 3))
    assert repr(cp) == "ContextParallel(rank=0, size=1, cuts=[0, 23], mode='overlap')"


def test_other_options_for_the_same_world():
    deltalink.init()
    with pytest.raises(deltalink.errors.WorldError, match="asked for is \\(4096, 60.0, None\\)"):
        deltalink.init(heap_bytes=4096)


def test_tickets_of_another_kind():
    x, weight = torch.randn(1, 9, 4, requires_grad=True), torch.randn(4, 3)
    *_, saved = deltalink.ops.convolutions([x], [weight], [], [], None, False, False, True, 0)
    leaves = [x.detach() for x in random_inputs().values()]
    arguments = (*leaves[:5], None, None, leaves[5], "kda", None, False, "given", 0.0, 0.0, False)
    with pytest.raises(deltalink.errors.SavedStateError, match="was left by convolution, the call is one of attention"):
        deltalink.ops.attention_backward(torch.randn(1, 23, 4, 32), None, saved, *arguments)
    with pytest.raises(InputError, match="did not save"):
        deltalink.ops.attention_backward(torch.randn(1, 23, 4, 32), None, torch.empty(0, dtype=torch.int64), *arguments)
    with pytest.raises(deltalink.errors.SavedStateError, match="saved state 123456789 is not there"):
        deltalink.ops.attention_backward(torch.randn(1, 23, 4, 32), None, torch.tensor([123456789]), *arguments)
