"""short_conv: the reference against torch's conv1d, the fast path against the reference."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from tests.tolerances import BACKWARD, FORWARD, assert_close
from zoo.ops import short_conv

LENGTHS = [1, 2, 3, 4, 7, 63, 64, 65]
BACKENDS = ["torch", "reference"]
CHANNELS = 5


def inputs(length, *, batch=2, width=4, states=None, bias=True, dtype=torch.float32):
    states = batch if states is None else states
    shapes = (batch, length, CHANNELS), (CHANNELS, width), (CHANNELS,), (states, CHANNELS, width - 1)
    x, weight, b, state = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    return [x, weight, b if bias else None, state]


def call(ins, **options):
    x, weight, bias, state = ins
    return short_conv(x, weight, bias, initial_state=state, **options)


def compare(got, want, got_ins, want_ins, dtype, backward=None):
    """Output, last state, and the gradients of both to everything that went in."""
    for name, a, b in zip(("y", "state"), got, want, strict=True):
        assert_close(a.to(b.dtype), b, FORWARD[dtype], name)
    weights = [torch.randn_like(x) for x in want]
    pairs = [(a, b) for a, b in zip(got_ins, want_ins, strict=True) if b is not None]
    got_grads = torch.autograd.grad(
        got, [a for a, _ in pairs], [w.to(x.dtype) for w, x in zip(weights, got, strict=True)]
    )
    want_grads = torch.autograd.grad(want, [b for _, b in pairs], weights)
    for a, b in zip(got_grads, want_grads, strict=True):
        assert_close(a.to(b.dtype), b, BACKWARD[dtype], f"gradient of shape {list(b.shape)}")


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("width", [1, 2, 4, 5])
@pytest.mark.parametrize("length", [1, 2, 7, 33])
def test_reference_is_conv1d(length, width, activation):
    ins = x, weight, bias, state = inputs(length, width=width, dtype=torch.float64)
    padded = torch.cat([state, x.transpose(1, 2)], dim=2)
    y = F.conv1d(padded, weight[:, None], bias, groups=CHANNELS).transpose(1, 2)
    want = y if activation is None else F.silu(y), padded[..., length:]
    compare(call(ins, activation=activation, backend="reference"), want, ins, ins, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(("width", "bias"), [(1, True), (2, False), (4, True), (4, False)])
@pytest.mark.parametrize("length", LENGTHS)
def test_fast_is_reference(length, width, bias, activation, dtype):
    ins = inputs(length, width=width, bias=bias, dtype=dtype)
    got, want = (call(ins, activation=activation, backend=name) for name in BACKENDS)
    assert got[0].dtype == got[1].dtype == dtype
    compare(got, want, ins, ins, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1, 7, 65])
def test_bfloat16_is_rounded_once(length, backend):
    ins = inputs(length, dtype=torch.bfloat16)
    wide = [x.detach().float().requires_grad_() for x in ins]
    got = call(ins, activation="silu", backend=backend)
    want = call(wide, activation="silu", backend="reference")
    assert got[0].dtype == got[1].dtype == torch.bfloat16
    torch.testing.assert_close(got[0], want[0].bfloat16(), rtol=8e-3, atol=1e-6)
    compare(got, want, ins, wide, torch.bfloat16)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("cu", [None, [0, 1, 6]], ids=str)
def test_gradients_are_derivatives(cu, activation):
    ins = inputs(6, batch=1, states=2 if cu else 1, dtype=torch.float64)
    cu_seqlens = torch.tensor(cu) if cu else None
    assert torch.autograd.gradcheck(lambda *ins: call(ins, activation=activation, cu_seqlens=cu_seqlens), ins)


@pytest.mark.parametrize("wanted", range(4))
def test_gradient_of_one_input_alone(wanted):
    ins = inputs(7)
    want = torch.autograd.grad(call(ins, activation="silu")[0].sum(), ins)[wanted]
    alone = [x if i == wanted else x.detach() for i, x in enumerate(ins)]
    assert torch.equal(torch.autograd.grad(call(alone, activation="silu")[0].sum(), ins[wanted])[0], want)


# ---- state


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("cut", range(1, 9))
def test_every_split_is_the_whole(cut, width, backend):
    ins = x, weight, bias, state = inputs(9, width=width)
    want = call(ins, activation="silu", backend=backend)
    first, between = call([x[:, :cut], weight, bias, state], activation="silu", backend=backend)
    second, last = call([x[:, cut:], weight, bias, between], activation="silu", backend=backend)
    compare((torch.cat([first, second], dim=1), last), want, ins, ins, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_token_by_token_is_the_whole(backend):
    x, weight, bias, _ = inputs(9)
    want, last = short_conv(x, weight, bias, backend=backend)
    state, steps = None, []
    for t in range(9):
        y, state = short_conv(x[:, t : t + 1], weight, bias, initial_state=state, backend=backend)
        steps.append(y)
    assert_close(torch.cat(steps, dim=1), want, FORWARD[torch.float32])
    assert torch.equal(state, last)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_state_is_zeros(backend):
    x, weight, bias, state = inputs(5)
    for a, b in zip(
        short_conv(x, weight, bias, backend=backend),
        short_conv(x, weight, bias, initial_state=torch.zeros_like(state), backend=backend),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_the_state_does_not_keep_the_sequence_alive():
    x, weight, _, _ = inputs(100)
    _, state = short_conv(x.detach(), weight.detach())
    assert state.untyped_storage().nbytes() == state.numel() * state.element_size()


@pytest.mark.parametrize("backend", BACKENDS)
def test_causal(backend):
    ins = inputs(20)
    with torch.no_grad():
        before = call(ins, backend=backend)[0]
        ins[0][:, 12:] += 1
        after = call(ins, backend=backend)[0]
    assert torch.equal(before[:, :12], after[:, :12])
    assert (before[:, 12:] - after[:, 12:]).abs().max() > 0.1


# ---- packing

PACKINGS = [[0, 1, 2, 3], [0, 1, 3, 40, 65], [0, 8, 16], [0, 9], [0, 63, 64, 65]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("cu", PACKINGS, ids=str)
def test_packed_is_separate(cu, width, backend):
    ins = x, weight, bias, state = inputs(cu[-1], batch=1, width=width, states=len(cu) - 1)
    options = {"activation": "silu", "backend": backend}
    got = call(ins, cu_seqlens=torch.tensor(cu), **options)
    separate = [call([x[:, a:b], weight, bias, state[n : n + 1]], **options) for n, (a, b) in enumerate(pairwise(cu))]
    want = torch.cat([y for y, _ in separate], dim=1), torch.cat([last for _, last in separate])
    compare(got, want, ins, ins, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cu", [[0, 1, 2, 3], [0, 7, 9, 20]], ids=str)
def test_no_gradient_between_documents(cu, backend):
    ins = x, _, _, state = inputs(cu[-1], batch=1, states=3)
    y, last = call(ins, activation="silu", cu_seqlens=torch.tensor(cu, dtype=torch.int32), backend=backend)
    loss = y[:, cu[1] : cu[2]].square().sum() + last[1].square().sum()
    dx, dstate = torch.autograd.grad(loss, [x, state])
    assert (dx[:, : cu[1]] == 0).all()
    assert (dx[:, cu[2] :] == 0).all()
    assert (dstate[[0, 2]] == 0).all()
    assert (dx[:, cu[1] : cu[2]] != 0).all()
    assert (dstate[1] != 0).all()


# ---- shapes and errors


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1, 9])
def test_meta_tensors(length, backend):
    ins = [x.detach().to("meta").requires_grad_() for x in inputs(length)]
    y, last = call(ins, activation="silu", backend=backend)
    assert (y.device.type, y.shape, last.shape) == ("meta", (2, length, CHANNELS), (2, CHANNELS, 3))
    assert [g.shape for g in torch.autograd.grad(y.sum() + last.sum(), ins)] == [x.shape for x in ins]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.zeros(2, 5)}, r"expected x \[B,T,D\] and weight \[D,W\], got x \[2, 5\], weight \[5, 4\]"),
        ({"weight": torch.zeros(6, 4)}, r"got x \[2, 7, 5\], weight \[6, 4\]"),
        ({"weight": torch.zeros(5, 0)}, r"weight \[5, 0\]"),
        ({"bias": torch.zeros(4)}, r"expected bias \[D\] = \[5\], got \[4\]"),
        ({"initial_state": torch.zeros(2, 5, 4)}, r"expected initial_state \[2, 5, 3\], got \[2, 5, 4\]"),
        ({"activation": "sillu"}, "unknown activation 'sillu'. Did you mean 'silu'"),
        ({"cu_seqlens": torch.tensor([0, 7])}, "the batch size must be 1, got 2"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit(changed, message):
    x, weight, bias, state = inputs(7)
    arguments = {"x": x, "weight": weight, "bias": bias, "initial_state": state, **changed}
    with pytest.raises(ValueError, match=message) as caught:
        short_conv(**arguments)
    assert "\n" not in str(caught.value)


def test_packed_wants_a_state_for_each_document():
    x, weight, bias, state = inputs(7, batch=1)
    with pytest.raises(ValueError, match=r"expected initial_state \[2, 5, 3\], got \[1, 5, 3\]"):
        short_conv(x, weight, bias, initial_state=state, cu_seqlens=torch.tensor([0, 3, 7]))
