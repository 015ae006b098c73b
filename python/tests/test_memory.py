"""Who holds which memory for how long."""

import gc
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from test_functional import random_inputs

import deltalink
from deltalink.errors import HeapError, InputError, SavedStateError, StillLentError, WorldError


@pytest.fixture
def world():
    """A world that no other test shares."""
    deltalink.shutdown(force=True)
    yield deltalink.init(heap_bytes=1 << 20)
    deltalink.shutdown(force=True)


def counts():
    gc.collect()
    stats = deltalink.memory_stats()
    return {kind: stats[f"{kind}_count"] for kind in ("symmetric", "result", "saved")}


def added_up():
    """Gradients of a weight and a bias, which the library adds up over ranks in memory of its own."""
    cp = deltalink.ContextParallel(cu_seqlens=[0, 9], parameter_gradients="sum")
    weight, bias = torch.randn(4, 3, requires_grad=True), torch.randn(4, requires_grad=True)
    y, _ = deltalink.causal_conv1d(torch.randn(1, 9, 4), weight, bias, cp=cp)
    return torch.autograd.grad(y.sum(), [weight, bias])


def test_results_are_counted_until_their_last_view_goes():
    deltalink.init()
    before = counts()
    dweight, dbias = added_up()
    assert counts() == {**before, "result": before["result"] + 2}
    names = [(piece.kind, piece.name) for piece in deltalink.lent()]
    assert names[-2:] == [("result", "dweight"), ("result", "dbias")]
    view = dweight[1:3]
    del dweight, dbias
    assert counts() == {**before, "result": before["result"] + 1}
    del view
    assert counts() == before


def test_saved_convolutions_are_counted():
    before = counts()
    y, state = deltalink.causal_conv1d(torch.randn(1, 9, 4), torch.randn(4, 3, requires_grad=True), output_final_state=True)
    assert counts() == {**before, "saved": before["saved"] + 1}
    assert deltalink.lent()[-1][::2] == ("saved", "convolution")
    del y, state
    assert counts() == before


def test_saved_states_are_counted():
    before = counts()
    o, _ = deltalink.kda(**random_inputs())
    assert counts() == {**before, "saved": before["saved"] + 1}
    assert deltalink.lent()[-1][::2] == ("saved", "kda")
    o.sum().backward()
    del o
    assert counts() == before


def test_a_graph_that_never_goes_backward_leaves_nothing():
    before = counts()
    o, _ = deltalink.kda(**random_inputs())
    loss = o.square().sum()
    del o
    assert counts()["saved"] == before["saved"] + 1
    del loss
    assert counts() == before


def test_a_thousand_steps_leave_nothing():
    before = counts()
    leaves = random_inputs(t=3)
    weight = torch.randn(16, 4, requires_grad=True)
    heap = deltalink.init().memory_stats()
    for step in range(1000):
        o, _ = deltalink.gdn(**{**leaves, "g": leaves["g"][..., 0]})
        if step % 3:
            # A loss that is dropped as well as one that is used.
            o.sum().backward()
        if step % 100 == 0:
            deltalink.causal_conv1d(leaves["q"][:, :, 0], weight)[0].sum().backward()
    del o
    for leaf in (*leaves.values(), weight):
        leaf.grad = None
    assert counts() == before
    assert deltalink.init().memory_stats() == heap


def test_symmetric_buffers_are_tensors_without_a_copy(world):
    empty = world.memory_stats()
    x = world.symmetric("x", (3, 5), torch.bfloat16)
    assert x.shape == (3, 5) and x.dtype == torch.bfloat16 and not x.any()
    assert [(piece.kind, piece.name, piece.bytes) for piece in world.lent()] == [("symmetric", "x", 30)]
    assert world.memory_stats()["live"] == empty["live"] + 1
    view, address = x[1:], x.data_ptr()
    x.fill_(2)
    del x
    assert torch.equal(view, torch.full((2, 5), 2, dtype=torch.bfloat16))
    assert world.memory_stats()["live"] == empty["live"] + 1
    del view
    assert world.memory_stats() | {"peak": 0} == empty | {"peak": 0}
    assert world.symmetric("y", (3, 5)).data_ptr() == address, "the place is free again"


@pytest.mark.parametrize("version", [None, (1, 0), (1, 3)])
def test_capsules_hold_the_buffer_whether_used_or_not(world, version):
    buffer = world._native.empty("x", [2, 3], "float32")
    assert buffer.__dlpack_device__() == (1, 0)
    used, unused = (buffer.__dlpack__(max_version=version) for _ in range(2))
    del buffer
    tensor = torch.utils.dlpack.from_dlpack(used)
    assert tensor.shape == (2, 3) and len(world.lent()) == 1
    del tensor, used
    assert len(world.lent()) == 1
    del unused
    assert world.lent() == []


def test_a_buffer_is_not_copied_for_others(world):
    buffer = world._native.empty("x", [4], "float32")
    with pytest.raises(BufferError):
        buffer.__dlpack__(max_version=(1, 0), copy=True)
    with pytest.raises(BufferError):
        buffer.__dlpack__(max_version=(1, 0), dl_device=(2, 0))


def test_buffers_go_back_from_any_thread(world):
    held = [world.symmetric("x", (7,)) for _ in range(20)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert world.lent() == []
    assert world.memory_stats()["in_use"] == 0


def test_a_full_heap_says_so(world):
    with pytest.raises(HeapError, match="no room for `large`: 4194304 bytes asked for.*raise heap_bytes"):
        world.symmetric("large", (1 << 20,))
    with pytest.raises(InputError, match="asked for with torch.int64; choose one of torch.float32"):
        world.symmetric("numbers", (4,), torch.int64)
    assert world.symmetric("small", (4,)).sum() == 0


def test_shutdown_names_what_is_alive(world):
    x = world.symmetric("x", (4,))
    more = [world.symmetric("halo", (4,)) for _ in range(2)]
    o, _ = deltalink.kda(**random_inputs())
    with pytest.raises(StillLentError) as error:
        deltalink.shutdown()
    text = str(error.value)
    assert "4 pieces of the world's memory" in text
    for name in ("symmetric buffer 'x'", "symmetric buffer 'halo' (x2)", "saved state of 'kda'"):
        assert name in text
    # It refused, so everything goes on.
    o.sum().backward()
    x.add_(1)
    del x, more
    deltalink.shutdown()
    with pytest.raises(WorldError, match="was shut down; call deltalink.init"):
        world.memory_stats()
    assert o.isfinite().all()


def test_shutdown_waits_for_others(world):
    held = [world.symmetric("x", (4,))]
    timer = threading.Timer(0.2, held.clear)
    timer.start()
    deltalink.shutdown(wait=30)
    assert held == []


def test_tensors_outlive_their_world(world):
    x = world.symmetric("x", (4,))
    leaves = random_inputs()
    o, _ = deltalink.kda(**leaves)
    deltalink.shutdown(force=True)
    x += 1
    assert x.tolist() == [1, 1, 1, 1] and o.isfinite().all()
    with pytest.raises(WorldError, match="was shut down"):
        o.sum().backward()
    del x, o
    # The next call makes a new world.
    deltalink.kda(**leaves)[0].sum().backward()


def test_a_saved_state_serves_one_backward_call():
    leaves = random_inputs()
    o, _ = deltalink.kda(**leaves)
    o.sum().backward(retain_graph=True)
    with pytest.raises(SavedStateError, match="serves one backward call"):
        o.sum().backward()


def test_numpy_looks_at_the_same_memory():
    gradient, _ = added_up()
    array = gradient.numpy()
    gradient[0, 0] = 7
    before = counts()
    del gradient
    assert array[0, 0] == 7 and counts() == before
    del array
    assert counts()["result"] == before["result"] - 1


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_tensors_may_be_alive_when_the_process_ends():
    text = run("""
        import torch, deltalink, deltalink.worlds
        world = deltalink.init()
        x = world.symmetric("x", (4,))
        q = torch.randn(1, 4, 1, 16, requires_grad=True)
        o, _ = deltalink.gdn(q, q, q, torch.zeros(1, 4, 1), torch.ones(1, 4, 1))
        # Keeps them for longer than the module's own objects.
        torch.keep = (x, o)
        print("last line")
    """)
    assert text == "last line"


def test_a_forked_process_is_told_what_to_do():
    text = run("""
        import os, torch, deltalink
        q = torch.randn(1, 4, 1, 16)
        step = lambda: deltalink.gdn(q, q, q, torch.zeros(1, 4, 1), torch.ones(1, 4, 1))
        step()
        child = os.fork()
        if child == 0:
            try:
                step()
            except deltalink.errors.WorldError as error:
                print(error, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
    """)
    assert "which was forked from it" in text and 'method "spawn"' in text
