"""What forcing a gate does to its mixer, and what recording says."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from zoo import ops
from zoo.check.cases import Case, build, draw, mixers_of, recipe, sample, slots
from zoo.check.contract import Contract, NotApplicable, Trial, about, contract
from zoo.check.tolerances import FORWARD
from zoo.gates import force, named_gates, record
from zoo.registry import GATES
from zoo.stack import Stack, load


def gates_in(case: Case) -> str:
    """The pattern of the gates that the case is about."""
    return f"layers.*.mixer.gates.{case.slot}"


@torch.no_grad()
def without_biases(lm: Stack) -> Stack:
    """A copy whose read-out norms add nothing: "0" is said of a mixer without biases."""
    lm = copy.deepcopy(lm)
    for mixer in mixers_of(lm):
        bias = getattr(mixer.o_norm, "bias", None)
        if bias is not None:
            bias.zero_()
    return lm


@contextmanager
def mixed(lm: Stack) -> Iterator[list[Tensor]]:
    """Collects what the mixers give."""
    seen: list[Tensor] = []
    hooks = [mixer.register_forward_hook(lambda module, args, out: seen.append(out)) for mixer in mixers_of(lm)]
    yield seen
    for hook in hooks:
        hook.remove()


def additive(lm: Stack, case: Case) -> bool:
    return bool(getattr(mixers_of(lm)[0].gates[case.slot or ""], "additive", False))


@about("decay", "write", "query", "key", "value", "output", "post")
@torch.no_grad()
def neutral_is_the_empty_slot(case: Case, t: Trial) -> None:
    """forced to its neutral value a gate leaves, bit for bit, the model with that slot empty"""
    assert case.slot is not None
    if slots(case.mixer)[case.slot].required:
        raise NotApplicable(f"the slot {case.slot} cannot be empty")
    lm, tokens = build(case, torch.float32), sample(case)[0]
    bare = load(recipe(replace(case, gates={slot: gate for slot, gate in case.gates.items() if slot != case.slot})))
    bare.load_state_dict({key: value for key, value in lm.state_dict().items() if f".gates.{case.slot}." not in key})
    value = 0.0 if additive(lm, case) else 1.0
    for backend, length in ((None, 67), ("reference", 9)):
        t.given(f"tokens [2, {length}], {gates_in(case)} forced to {value:g}, backend {backend or 'by choice'}")
        with ops.backend(backend) if backend else nullcontext():
            with force(lm, gates_in(case), value):
                forced = lm(tokens[:, :length])
            t.equal(forced, bare(tokens[:, :length]), "logits", "those of the empty slot, bit for bit")
            free = lm(tokens[:, :length])
        t.hold(not torch.equal(free, forced), "the same logits without forcing", "other logits")


@about("output", "value", "post", "branch")
@torch.no_grad()
def nothing_passes_a_gate_at_zero(case: Case, t: Trial) -> None:
    """a multiplicative gate on values or outputs, forced to 0, leaves of the mixer exactly 0"""
    lm = without_biases(build(case, torch.float32))
    if additive(lm, case):
        raise NotApplicable("the gate adds: 0 is its neutral value")
    t.given(f"tokens [2, 19], {gates_in(case)} forced to 0")
    with force(lm, gates_in(case), 0.0), mixed(lm) as outputs:
        lm(draw(2, 19))
    t.hold(len(outputs) == len(lm.layers), f"{len(outputs)} outputs of {len(lm.layers)} mixers", "one of each")
    for out in outputs:
        t.hold(not out.any(), f"a mixer gives up to {out.abs().max().item():.3g}", "exactly 0")


@about("write")
@torch.no_grad()
def writing_nothing_leaves_the_state_zero(case: Case, t: Trial) -> None:
    """a write gate at 0 writes nothing"""
    lm = build(case, torch.float32)
    cache, forced = lm.init_cache(2), lm.init_cache(2)
    t.given(f"tokens [2, 19] with a cache, {gates_in(case)} forced to 0")
    lm(draw(2, 19), cache=cache)
    with force(lm, gates_in(case), 0.0):
        lm(draw(2, 19), cache=forced)
    for free, layer in zip(cache.layers, forced.layers, strict=True):
        t.hold(bool(free.states["state"].any()), "a state of zeros without forcing", "a state")
        largest = layer.states["state"].abs().max().item()
        t.hold(largest == 0, f"a state of up to {largest:.3g}", "exactly 0")


@about("decay")
@torch.no_grad()
def a_decay_of_zero_forgets_all(case: Case, t: Trial) -> None:
    """a decay gate at 0 leaves of the past what convolutions and token shifts carry, no more"""
    lm, tokens, at = build(case), draw(1, 40), 10
    other = tokens.clone()
    other[0, at] = (tokens[0, at] + 1) % 7
    first = at + 3 * case.n_layers + 1  # convolutions with 3 tokens of history
    t.given(f"tokens [1, 40], and the same with token {at} changed, seen from token {first} on")
    moved = (lm(tokens) - lm(other))[:, first:].abs().max().item()
    least = 100 * FORWARD[torch.float64]
    t.hold(moved > least, f"logits move by {moved:.3g} without forcing", f"more than {least:g}")
    with force(lm, gates_in(case), 0.0):
        t.given(f"{t.input}, {gates_in(case)} forced to 0")
        t.close(lm(other)[:, first:], lm(tokens)[:, first:], FORWARD[torch.float64], "logits")


@about("query")
@torch.no_grad()
def query_or_key_at_zero_look_at_all_alike(case: Case, t: Trial) -> None:
    """a query gate at 0 does what a key gate at 0 does: no token is nearer than another"""
    if "key" not in slots(case.mixer):
        raise NotApplicable(f"{case.mixer} has no slot key")
    query = build(case, torch.float32)
    if additive(query, case):
        raise NotApplicable("the gate adds: 0 is its neutral value")
    gates = {slot: gate for slot, gate in case.gates.items() if slot != "query"}
    key = load(recipe(replace(case, gates=gates | {"key": case.gates["query"]})))
    key.load_state_dict(query.state_dict(), strict=False)
    tokens = draw(2, 19)
    t.given("tokens [2, 19], a gate in query forced to 0, and one in key")
    with force(query, "layers.*.mixer.gates.query", 0.0), force(key, "layers.*.mixer.gates.key", 0.0):
        t.equal(query(tokens), key(tokens), "logits")


@contract
@torch.no_grad()
def record_reads_every_gate_in_its_unit(case: Case, t: Trial) -> None:
    """zoo.record names every gate and has the values of its latest call, a decay as exp(log_decay)"""
    lm, tokens = build(case), draw(2, 9)
    t.given("tokens [2, 9], then [2, 7]")
    with record(lm) as gates:
        lm(tokens)
        lm(tokens[:, :7])
    layers = range(case.n_layers)
    expected = {f"layers.{layer}.mixer.gates.{slot}" for layer in layers for slot in case.gates}
    t.hold(expected <= set(gates) == set(named_gates(lm)), sorted(gates), f"{sorted(expected)}, and what is below them")
    for name, values in gates.items():
        kind = named_gates(lm)[name].kind
        t.hold(kind in GATES, f"{name} of kind {kind}", f"one of {', '.join(GATES)}")
        t.hold(values.shape[:2] == (2, 7), f"{name} of shape {list(values.shape)}", "the latest call's [2,7,...]")
        t.hold(not values.requires_grad, f"{name} with a graph", "detached values")
        if kind == "decay":
            low, high = (end.item() for end in values.aminmax())
            t.hold(0 < low <= high <= 1, f"{name} from {low:.3g} to {high:.3g}", "in (0, 1]")
    t.given("tokens [2, 9], the second row with 5 pads on the left")
    with record(lm) as gates:
        lm(tokens, attention_mask=torch.tensor([[1] * 9, [0] * 5 + [1] * 4]))
    for name, values in gates.items():
        t.hold(values.shape[:2] == (1, 13), f"{name} of shape {list(values.shape)}", "as layers see it, packed: [1,13]")


CONTRACTS: list[Contract[Case]] = [
    neutral_is_the_empty_slot,
    nothing_passes_a_gate_at_zero,
    writing_nothing_leaves_the_state_zero,
    a_decay_of_zero_forgets_all,
    query_or_key_at_zero_look_at_all_alike,
]
"""For a case with one gate."""

OF_A_MIXER: list[Contract[Case]] = [record_reads_every_gate_in_its_unit]
"""For a full mixer."""

ALL = [*CONTRACTS, *OF_A_MIXER]
