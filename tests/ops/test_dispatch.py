"""The choice of a backend: the first that takes the call, visible, and never by falling back in silence."""

import threading

import pytest
import torch

import zoo.ops
from zoo.ops import (
    BackendRefused,
    Blocks,
    attention,
    compressed_attention,
    delta_rule,
    dplr,
    experts,
    gated_norm,
    lightning_indexer,
    linear_attention,
    nsa,
    selected_attention,
    short_conv,
    trace,
)
from zoo.ops import _dispatch as dispatch
from zoo.ops._dispatch import Backend, Choice, Op, device_kind, on_device
from zoo.registry import RecipeError


def test_the_choice_is_compiled_along(op: Op) -> None:
    """No graph breaks at it, and a block that forces a backend is seen none the less."""
    run = torch.compile(lambda x: op(x.numel())[1] + x, backend="eager", fullgraph=True)
    assert run(torch.ones(3)).tolist() == [7, 7, 7]
    chosen = torch.compile(lambda x: op(x.numel())[0] == "plain", backend="eager")
    assert [chosen(torch.ones(3)), chosen(torch.ones(3))] == [False, False]
    with zoo.ops.backend("plain"):
        assert chosen(torch.ones(3))
    assert not chosen(torch.ones(3))


@pytest.fixture
def op(monkeypatch):
    """An op whose fast backend takes small numbers only, and whose `picky` one takes none."""
    monkeypatch.setattr(dispatch, "_ops", list(dispatch._ops))
    return Op(
        "double",
        Backend("picky", lambda x: x + x, lambda x: "it is always busy"),
        Backend("fast", lambda x: ("fast", 2 * x), lambda x: "the number is large" if x > 9 else None),
        Backend("plain", lambda x: ("plain", 2 * x)),
    )


def test_the_first_that_takes_the_call_runs(op):
    assert op(3) == ("fast", 6)
    assert op(30) == ("plain", 60)


def test_trace_records_choices_and_refusals(op):
    with trace() as choices:
        op(3)
        op(30)
        op(4, backend="plain")
    assert choices == [
        Choice("double", "fast", {"picky": "it is always busy"}),
        Choice("double", "plain", {"picky": "it is always busy", "fast": "the number is large"}),
        Choice("double", "plain"),
    ]
    assert str(choices[1]) == "double: plain (picky: it is always busy) (fast: the number is large)"
    op(3)
    assert len(choices) == 3


def test_traces_nest(op):
    with trace() as outer:
        op(1)
        with trace() as inner:
            op(2)
        op(3)
    assert (len(outer), len(inner)) == (3, 1)


def test_forced_and_refused_is_an_error_that_says_why(op):
    reason = r"^double: backend 'fast' was forced but refuses: the number is large$"
    with pytest.raises(BackendRefused, match=reason):
        op(30, backend="fast")
    with zoo.ops.backend("fast"), pytest.raises(BackendRefused, match=reason):
        op(30)


def test_unknown_names(op):
    with pytest.raises(
        BackendRefused, match=r"^double: no backend 'fats'\. Did you mean 'fast'\? Known: picky, fast, plain$"
    ):
        op(3, backend="fats")
    with pytest.raises(RecipeError, match=r"^unknown backend 'fats'. Did you mean 'fast'"), zoo.ops.backend("fats"):
        pass


def test_no_backend_takes_the_call(monkeypatch):
    monkeypatch.setattr(dispatch, "_ops", [])
    op = Op("none", Backend("a", abs, lambda x: "too small"), Backend("b", abs, lambda x: "too red"))
    with pytest.raises(BackendRefused, match=r"none: no backend takes this call: .*too small.*too red"):
        op(1)


def test_a_refused_call_is_not_recorded(op):
    with trace() as choices, pytest.raises(BackendRefused):
        op(30, backend="fast")
    assert choices == []


def test_blocks_nest_and_end(op):
    with zoo.ops.backend("plain"):
        assert op(3)[0] == "plain"
        with zoo.ops.backend("fast"):
            assert op(3)[0] == "fast"
            assert op(3, backend="plain")[0] == "plain"
        assert op(3)[0] == "plain"
    assert op(3)[0] == "fast"


def test_a_block_ends_with_an_error(op):
    with pytest.raises(ZeroDivisionError), trace() as choices, zoo.ops.backend("plain"):
        raise ZeroDivisionError
    assert op(3)[0] == "fast"
    assert choices == []


def test_a_block_is_of_its_thread(op):
    seen = []
    with zoo.ops.backend("plain"), trace() as choices:
        thread = threading.Thread(target=lambda: seen.append(op(3)[0]))
        thread.start()
        thread.join()
    assert seen == ["fast"]
    assert choices == []


def test_an_op_without_that_backend_chooses_for_itself(op):
    with zoo.ops.backend("reference"):
        assert op(3)[0] == "fast"


def calls(batch=1):
    """A call of each op."""
    x = torch.randn(batch, 5, 2, 8)
    yield "attention", lambda **how: attention(x, x, x, **how)
    yield "short_conv", lambda **how: short_conv(x.flatten(2), torch.randn(16, 4), **how)
    beta = torch.rand(batch, 5, 2)
    yield "delta_rule", lambda **how: delta_rule(x, x, x, -beta, beta, **how)
    yield "linear_attention", lambda **how: linear_attention(x, x, x, -beta, **how)
    kv, far = x[:, :, 0], x[:, :2, 0]
    yield "compressed_attention", lambda **how: compressed_attention(x, kv, far, window=2, stride=2, **how)
    yield "lightning_indexer", lambda **how: lightning_indexer(x, beta, far, top_k=1, stride=2, **how)
    yield "dplr", lambda **how: dplr(x, x, x, -beta, -x, x, **how)
    stacked, routes = torch.randn(3, 16, 8), torch.tensor([0, 2]).expand(5 * batch, -1)
    tokens, shares = x[:, :, 0].flatten(0, 1), beta.flatten(0, 1)
    yield (
        "experts",
        lambda **how: experts(tokens, routes, shares, stacked, stacked[:, :8], lambda gate, up: gate * up, **how),
    )
    weight = torch.randn(8)
    yield "gated_norm", lambda **how: gated_norm(x, x, weight, activation="silu", eps=1e-6, **how)
    yield "nsa", lambda **how: nsa(x, x[:, :0], x[:, :0], x, x, Blocks(), **how)
    some = torch.tensor([[-1], [0], [0], [1], [1]]).expand(batch, -1, -1)
    yield "selected_attention", lambda **how: selected_attention(x, x, x, some, stride=2, **how)


@pytest.mark.parametrize(("name", "call"), list(calls()), ids=lambda x: x if isinstance(x, str) else "")
def test_every_op_has_a_reference_and_something_faster(name, call):
    with trace() as choices:
        call()
        with zoo.ops.backend("reference"):
            call()
        call(backend="reference")
    assert [choice.op for choice in choices] == [name] * 3
    assert choices[0].backend != "reference"
    assert [choice.backend for choice in choices[1:]] == ["reference", "reference"]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", [op.name for op in dispatch._ops])
def test_no_sequence_gives_no_output(name, grad):
    """What a filter leaves may be nothing."""
    op = next(op for op in dispatch._ops if op.name == name)
    for backend in op.backends:
        call = dict(calls(batch=0))[name]
        try:
            with torch.set_grad_enabled(grad):
                o = call(backend=backend)
        except BackendRefused:
            continue
        assert all(not x.numel() for x in (o if isinstance(o, tuple) else (o,)))


def test_every_op_is_called_here():
    assert {name for name, _ in calls()} == {op.name for op in dispatch._ops}


def test_meta_tensors_stand_for_a_device():
    cpu, meta = torch.empty(1), torch.empty(1, device="meta")
    assert (device_kind(cpu), device_kind(meta)) == ("cpu", "cpu")
    with on_device("cuda"):
        assert (device_kind(cpu), device_kind(meta)) == ("cpu", "cuda")
    assert device_kind(meta) == "cpu"
