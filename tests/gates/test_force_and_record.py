"""What forcing a gate does to its mixer, for every slot of every mixer, and what recording says."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor

import zoo
from tests.build import STACKS, by_gate, draw, fitting, slots, stack
from tests.tolerances import FORWARD, assert_close
from zoo.gates import named_gates
from zoo.registry import GATES, MIXERS, RecipeError
from zoo.stack import Stack

NEUTRAL = {"decay": 1.0, "write": 1.0, "output": 1.0}
SLOTS = [(mixer, slot) for mixer in MIXERS.names() for slot in slots(mixer)]
OPTIONAL = [
    (str(case), slot)
    for case in by_gate()
    for slot, spec in slots(case.mixer).items()
    if str(case).startswith(f"{case.mixer}-{slot}=") and not spec.required and spec.kind in NEUTRAL
]


def with_gate(mixer: str, slot: str, dtype: torch.dtype = torch.float32) -> Stack:
    """The mixer with a gate in that slot, and beside it only what it cannot do without."""
    return stack(f"{mixer}-{slot}={fitting(mixer, slot)[0]}", dtype)


def all_in(slot: str) -> str:
    return f"layers.*.mixer.gates.{slot}"


# What a mixer cannot owe, and why.
KEEPS_WRITING = {"rwkv7": "k̃ = k (1 + (a - 1) k_a) is written with a share 1 - k_a that a does not touch"}
KEEPS_MEMORY = {"rwkv7": "the correction reads the undecayed state, so b a^T S is left where the decay is 0"}


def without(reasons: dict[str, str], slot: str) -> list[str]:
    """The mixers that have the slot, but for those with a reason."""
    return [mixer for mixer, own in SLOTS if own == slot and mixer not in reasons]


@torch.no_grad()
def without_biases(lm: Stack) -> Stack:
    """A copy whose read-out norms add nothing: "0" is said of a mixer without biases."""
    lm = copy.deepcopy(lm)
    for layer in lm.layers:
        bias = getattr(layer.mixer.o_norm, "bias", None)
        if bias is not None:
            bias.zero_()
    return lm


@contextmanager
def mixed(lm: Stack) -> Iterator[list[Tensor]]:
    """Collects what the mixers give."""
    seen: list[Tensor] = []
    hooks = [layer.mixer.register_forward_hook(lambda module, args, out: seen.append(out)) for layer in lm.layers]
    yield seen
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(("name", "slot"), OPTIONAL)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_neutral_is_the_empty_slot_bit_for_bit(name: str, slot: str, backend: str | None) -> None:
    lm, tokens = stack(name, torch.float32), draw(2, 67)
    block = STACKS[name]["blocks"]["a"]
    gates = {key: gate for key, gate in block["mixer"]["gates"].items() if key != slot}
    bare = zoo.load({**STACKS[name], "blocks": {"a": {**block, "mixer": {**block["mixer"], "gates": gates}}}})
    bare.load_state_dict({key: value for key, value in lm.state_dict().items() if f".gates.{slot}." not in key})
    with torch.no_grad(), zoo.ops.backend(backend) if backend else nullcontext():
        with zoo.force(lm, all_in(slot), NEUTRAL[slots(block["mixer"]["name"])[slot].kind]):
            forced = lm(tokens)
        assert torch.equal(forced, bare(tokens))
        assert not torch.equal(lm(tokens), forced)


@pytest.mark.parametrize(("mixer", "slot"), [at for at in SLOTS if at[1] in ("output", "value", "post", "branch")])
@torch.no_grad()
def test_nothing_passes_a_gate_at_zero(mixer: str, slot: str) -> None:
    lm = without_biases(with_gate(mixer, slot))
    with zoo.force(lm, all_in(slot), 0.0), mixed(lm) as outputs:
        lm(draw(2, 19))
    assert len(outputs) == 2
    assert not any(out.any() for out in outputs)


@pytest.mark.parametrize("mixer", without(KEEPS_WRITING, "write"))
@torch.no_grad()
def test_writing_nothing_leaves_the_state_zero(mixer: str) -> None:
    lm = with_gate(mixer, "write")
    cache, forced = lm.init_cache(2), lm.init_cache(2)
    lm(draw(2, 19), cache=cache)
    with zoo.force(lm, all_in("write"), 0.0):
        lm(draw(2, 19), cache=forced)
    assert all(layer.states["state"].any() for layer in cache.layers)
    assert not any(layer.states["state"].any() for layer in forced.layers)


@pytest.mark.parametrize("mixer", without(KEEPS_MEMORY, "decay"))
@torch.no_grad()
def test_a_decay_of_zero_forgets_all(mixer: str) -> None:
    lm, tokens = with_gate(mixer, "decay", torch.float64), draw(1, 40)
    other = tokens.clone()
    other[0, 10] = (tokens[0, 10] + 1) % 7
    beyond = slice(10 + 2 * 3 + 1, None)  # two layers of convolutions with 3 tokens of history
    assert (lm(tokens) - lm(other))[:, beyond].abs().max() > 1e-3
    with zoo.force(lm, all_in("decay"), 0.0):
        assert_close(lm(other)[:, beyond], lm(tokens)[:, beyond], FORWARD[torch.float64])


@pytest.mark.parametrize("mixer", [mixer for mixer, slot in SLOTS if slot == "key"])
@torch.no_grad()
def test_query_or_key_at_zero_look_at_all_alike(mixer: str) -> None:
    tokens = draw(2, 19)
    outputs = []
    for slot in ("query", "key"):
        lm = copy.deepcopy(with_gate(mixer, slot))
        lm.load_state_dict(with_gate(mixer, "query").state_dict(), strict=False)
        with zoo.force(lm, all_in(slot), 0.0):
            outputs.append(lm(tokens))
    assert torch.equal(*outputs)


def test_a_pattern_without_a_gate_is_an_error() -> None:
    lm = stack("attention-full")
    with pytest.raises(RecipeError) as caught, zoo.force(lm, "layers.0.mixer.gates.outptu", 1.0):
        pass
    assert "force: no gate matches 'layers.0.mixer.gates.outptu'" in str(caught.value)
    assert "Did you mean 'layers.0.mixer.gates.output'" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [-0.5, 1.5, torch.tensor(2.0)])
def test_what_is_no_decay_is_refused(value: float | Tensor) -> None:
    lm = stack("kda-full")
    with zoo.force(lm, all_in("decay"), value), pytest.raises(ValueError, match="a decay is in \\[0, 1\\]"):
        lm(draw(1, 3))


def test_values_of_another_shape_are_refused() -> None:
    lm = stack("kda-full")
    for slot in slots("kda"):
        with zoo.force(lm, all_in(slot), torch.ones(3)), pytest.raises(ValueError, match="force: values of shape"):
            lm(draw(1, 5))


def test_forcing_ends_with_its_block_even_on_an_error() -> None:
    lm, tokens = stack("gated_deltanet-full"), draw(1, 5)
    before = lm(tokens)
    with pytest.raises(RuntimeError, match="inside"), zoo.force(lm, "*", 0.5):
        raise RuntimeError("inside")
    assert torch.equal(lm(tokens), before)


@torch.no_grad()
def test_one_layer_one_head_one_value_a_tensor() -> None:
    lm, tokens = stack("attention-full"), draw(1, 5)
    score = torch.tensor([[0.0], [1.0]])  # the first of two heads is silent
    with zoo.force(lm, "layers.1.mixer.gates.output", score), zoo.record(lm) as gates:
        lm(tokens)
    assert torch.equal(gates["layers.1.mixer.gates.output"], score.double().expand(1, 5, 2, 8))
    assert len(gates["layers.0.mixer.gates.output"].unique()) > 2


@torch.no_grad()
def test_the_inner_force_counts_and_a_record_outside_sees_it() -> None:
    lm, tokens = stack("attention-full"), draw(1, 5)
    with zoo.record(lm) as gates, zoo.force(lm, "*", 0.25), zoo.force(lm, "layers.0*", 0.75):
        lm(tokens)
    assert (gates["layers.0.mixer.gates.post"] == 0.75).all()
    assert (gates["layers.1.mixer.gates.post"] == 0.25).all()


@pytest.mark.parametrize("mixer", MIXERS.names())
def test_record_reads_every_gate_in_its_unit(mixer: str) -> None:
    lm, tokens = stack(f"{mixer}-full"), draw(2, 9)
    with zoo.record(lm) as gates:
        lm(tokens)
        lm(tokens[:, :7])
    expected = {f"layers.{layer}.mixer.gates.{slot}" for layer in range(2) for slot in slots(mixer)}
    assert set(gates) == expected == set(named_gates(lm))
    for name, values in gates.items():
        assert values.shape[:2] == (2, 7), "the latest call counts"
        assert not values.requires_grad
        kind = named_gates(lm)[name].kind
        assert kind in GATES
        if kind == "decay":
            assert ((values > 0) & (values <= 1)).all()
    with zoo.record(lm) as gates:
        lm(tokens, attention_mask=torch.tensor([[1] * 9, [0] * 5 + [1] * 4]))
    assert all(values.shape[:2] == (1, 13) for values in gates.values()), "as the layers see it: packed"
