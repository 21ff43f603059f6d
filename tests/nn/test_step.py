"""A decoded token from a recording: the same numbers as the modules give, and never those of other modules."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, prune

import zoo
from tests.build import EXTREMES, draw, stack
from tests.tolerances import FORWARD, assert_close
from zoo.cache import _steps
from zoo.gates.output import OutputGate
from zoo.nn import step
from zoo.nn.recorder import Recorder
from zoo.registry import MIXERS

PROMPT = 3


@pytest.fixture(autouse=True)
def _record_at_once(monkeypatch):
    monkeypatch.setattr(step, "BEFORE", 1)


def steps_of(cache):
    """The step of the whole model, and those of mixers and FFNs and of the head."""
    whole, *parts = [_steps[memory] for memory in cache.names("cache").values() if memory in _steps]
    return whole, parts


def decoded(lm, tokens, cache=None, start=PROMPT):
    """Logits of the tokens behind the prompt, one call each."""
    if cache is None:
        cache = lm.init_cache(len(tokens))
        lm(tokens[:, :start], cache=cache)
    return torch.cat([lm(tokens[:, t : t + 1], cache=cache) for t in range(start, tokens.shape[1])], dim=1), cache


LIVING = {"csa", "dsa", "hca", "nsa", "rwkv7", "shared_kv"}
"""Mixers that read a token's position, the number of keys, or what a lower layer has left."""


@pytest.mark.parametrize("name", EXTREMES)
@torch.no_grad()
def test_equals_the_whole_forward(name):
    lm, tokens = stack(name), draw(2, 9)
    got, cache = decoded(lm, tokens)
    assert_close(got, lm(tokens)[:, PROMPT:], FORWARD[torch.float64], "decoded")
    mixer = name.partition("-")[0]
    whole, parts = steps_of(cache)
    lives = mixer in LIVING or name in ("mla-full", "mla-hybrid")
    assert (whole.played is None) == lives
    assert any(part.fault for part in parts if type(part.roots[1]) is MIXERS.get(mixer)) == lives
    assert not any(part.played for part in parts) or lives


@pytest.mark.parametrize("name", ["qwen3_next/tiny", "kimi_linear/tiny", "olmo_hybrid/tiny"])
@torch.no_grad()
def test_models_are_recorded_whole(name):
    lm = zoo.load(name).eval()
    tokens = torch.randint(200, (2, 24))
    got, cache = decoded(lm, tokens)
    torch.testing.assert_close(got, lm(tokens)[:, PROMPT:], rtol=1e-4, atol=1e-5)
    whole, parts = steps_of(cache)
    assert whole.fault is None
    assert whole.played is not None
    assert not any(part.played for part in parts)


@pytest.fixture
def hybrid():
    torch.manual_seed(0)
    return zoo.load("qwen3_next/tiny", set=["blocks.gdn.ffn=null", "blocks.attn.ffn=null"]).eval()


def test_what_is_recorded_calls_no_module(hybrid, monkeypatch):
    tokens = torch.randint(200, (1, 12))
    _, cache = decoded(hybrid, tokens)
    with monkeypatch.context() as patched:
        patched.setattr(type(hybrid.layers[0].mixer), "forward", None)
        hybrid(tokens[:, :1], cache=cache)


def q_weight(lm):
    return lm.layers[0].mixer.q_proj.weight


def fused_step(lm):
    """Of which no tensor's version tells."""
    for parameter in lm.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(lm.parameters(), lr=0.1, fused=True).step()


def of_ones_own(module, forward):
    module.forward = forward


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


CHANGES = {
    "fused step": fused_step,
    "another dtype and back": lambda lm: lm.bfloat16().float(),
    "a map's forward": lambda lm: of_ones_own(lm.layers[0].mixer.q_proj, lambda x: -F.linear(x, q_weight(lm))),
    "a layer's forward": lambda lm: of_ones_own(lm.layers[1], lambda stream, layout, cache=None: stream),
    "parametrized": lambda lm: parametrize.register_parametrization(lm.layers[0].mixer.q_proj, "weight", Doubled()),
    "pruned": lambda lm: prune.l1_unstructured(lm.layers[0].mixer.o_proj, "weight", 0.5),
    "in place": lambda lm: lm.layers[0].mixer.q_conv1d.weight.mul_(2),
    "data": lambda lm: setattr(lm.layers[1].mixer.o_norm.weight, "data", lm.layers[1].mixer.o_norm.weight * 2),
    "parameter": lambda lm: setattr(
        lm.layers[0].mixer.o_proj, "weight", nn.Parameter(lm.layers[0].mixer.v_proj.weight.T)
    ),
    "module": lambda lm: setattr(lm.layers[3], "mixer_residual", lm.layers[2].mixer_residual),
    "gate": lambda lm: lm.layers[0].mixer.gates.update({"output": lm.layers[1].mixer.gates["output"]}),
    "no gate": lambda lm: lm.layers[0].mixer.gates.pop("output"),
    "loaded": lambda lm: lm.load_state_dict({name: 1.5 * x for name, x in lm.state_dict().items()}),
    "norm": lambda lm: lm.norm.weight.add_(1),
}


@pytest.mark.parametrize("change", list(CHANGES))
@torch.no_grad()
def test_a_changed_model_counts_at_once(hybrid, change):
    tokens = torch.randint(200, (2, 14))
    _, cache = decoded(hybrid, tokens[:, :10])
    CHANGES[change](hybrid)
    unrecorded = cache[:]
    for t in range(10, 14):
        token = tokens[:, t : t + 1]
        with zoo.ops.trace():  # which nothing is played in
            expected = hybrid(token, cache=unrecorded)
        torch.testing.assert_close(hybrid(token, cache=cache), expected, rtol=1e-4, atol=1e-5)
    assert not change.endswith("forward") or "forward" in vars(hybrid.layers[0].mixer.q_proj) | vars(hybrid.layers[1])


@pytest.mark.parametrize("tokens_before", [-PROMPT, 2, 8])
@torch.no_grad()
def test_a_call_that_fails_leaves_the_cache_as_it_was(hybrid, tokens_before):
    tokens = torch.randint(200, (1, 14))
    end = PROMPT + tokens_before
    cache = decoded(hybrid, tokens[:, :end])[1] if end else hybrid.init_cache(1)

    def stop(*_):
        raise KeyboardInterrupt

    hook = hybrid.layers[2].register_forward_hook(stop)
    for piece in (tokens[:, end : end + 1], tokens[:, end:]):
        with pytest.raises(KeyboardInterrupt):
            hybrid(piece, cache=cache)
    hook.remove()
    hybrid.double()
    if end:
        with pytest.raises(ValueError, match="cache: it holds float32, and the model computes in float64 now"):
            hybrid(tokens[:, end : end + 1], cache=cache)
        hybrid.float()
    got, _ = decoded(hybrid, tokens, cache, end)
    torch.testing.assert_close(got, hybrid(tokens)[:, end:], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_gates_are_read_and_forced_between_recorded_tokens(hybrid):
    tokens = torch.randint(200, (1, 16))
    _, cache = decoded(hybrid, tokens[:, :8])
    with zoo.record(hybrid) as gates:
        hybrid(tokens[:, 8:9], cache=cache)
    with zoo.record(hybrid) as expected:
        hybrid(tokens[:, :9])
    assert gates.keys() == expected.keys() != set()
    for name, values in gates.items():
        torch.testing.assert_close(values, expected[name][:, -1:], rtol=1e-4, atol=1e-5)
    decoded(hybrid, tokens[:, :12], cache, 9)
    other = cache[:]
    with zoo.force(hybrid, "layers.*.mixer.gates.output", 0.5):
        forced = hybrid(tokens[:, 12:13], cache=cache)
    assert not torch.allclose(forced, hybrid(tokens[:, 12:13], cache=other))


@torch.no_grad()
def test_hooks_of_anybody_run(hybrid):
    tokens = torch.randint(200, (1, 12))
    _, cache = decoded(hybrid, tokens[:, :8])
    seen = []
    hook = hybrid.layers[2].mixer.o_proj.register_forward_hook(lambda module, args, y: seen.append(y))
    hybrid(tokens[:, 8:9], cache=cache)
    hook.remove()
    assert len(seen) == 1
    everywhere = nn.modules.module.register_module_forward_hook(lambda module, args, y: seen.append(y))
    hybrid(tokens[:, 9:10], cache=cache)
    everywhere.remove()
    assert len(seen) > 20


@torch.no_grad()
def test_chunks_padding_and_rows_between_recorded_tokens(hybrid):
    tokens = torch.randint(200, (2, 30))
    _, cache = decoded(hybrid, tokens[:, :10])
    hybrid(tokens[:, 10:14], cache=cache)
    got, _ = decoded(hybrid, tokens[:, :18], cache, 14)
    torch.testing.assert_close(got, hybrid(tokens[:, :18])[:, 14:], rtol=1e-4, atol=1e-5)
    flipped = cache[[1, 0]]
    got, _ = decoded(hybrid, tokens.flip(0)[:, :22], flipped, 18)
    torch.testing.assert_close(got.flip(0), hybrid(tokens[:, :22])[:, 18:], rtol=1e-4, atol=1e-5)
    hybrid(tokens[:, 18:20], attention_mask=torch.tensor([[1, 1], [1, 0]]), cache=cache)
    ragged = hybrid(tokens[:, 20:21], cache=cache)
    torch.testing.assert_close(ragged[:1], hybrid(tokens[:1, :21])[:, -1:], rtol=1e-4, atol=1e-5)


class Keeping(OutputGate):
    """Keeps what it last gave, as nothing of zoo does."""

    def __init__(self, slot):
        super().__init__()
        self.proj = nn.Linear(slot.d_in, slot.n_heads)

    def forward(self, x):
        self.last = self.proj(x).sigmoid().unsqueeze(-1)
        return self.last


@torch.no_grad()
def test_a_module_that_is_not_of_zoo_always_runs(hybrid):
    mixer = hybrid.layers[0].mixer
    mixer.gates["output"] = Keeping(mixer.context.slot("output", mixer.n_v_heads, mixer.head_v_dim))
    tokens = torch.randint(200, (1, 12))
    _, cache = decoded(hybrid, tokens[:, :11])
    before = mixer.gates["output"].last
    hybrid(tokens[:, 11:], cache=cache)
    assert mixer.gates["output"].last is not before
    whole, parts = steps_of(cache)
    assert whole.fault == parts[0].fault == "Keeping is not of zoo"
    assert all(part.played for part in parts[1:])


@torch.no_grad()
def test_a_cache_is_given_back(hybrid):
    _, cache = decoded(hybrid, torch.randint(200, (1, 12)))
    assert steps_of(cache)[0].played is not None
    gone = [weakref.ref(cache), weakref.ref(cache.layers[0]), weakref.ref(cache.layers[0].states["conv"])]
    del cache
    gc.collect()
    assert [each() for each in gone] == [None] * 3


def recorded(function, *inputs, fixed=()):
    recorder = Recorder({f"x{n}": x for n, x in enumerate(inputs)}, fixed, {})
    given, played = recorder.run(function, *inputs)
    return given, played, recorder


WEIGHT = torch.tensor([2.0, 3.0])
FAULTS = {
    "reads a number": lambda x: x * float(x.sum()),
    "reads a number from a tensor": lambda x: x if x.sum() > 0 else -x,
    "nowhere": lambda x: x + torch.from_numpy(x.numpy() * 2),
    "random": lambda x: x + torch.rand(2),
    "writes into a weight": lambda x: x + WEIGHT.mul_(1),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_what_cannot_be_told_is_said_and_computed(fault):
    x = torch.tensor([1.0, 2.0])
    given, played, recorder = recorded(FAULTS[fault], x, fixed=[WEIGHT])
    assert played is None
    assert fault in recorder.fault or "reads a number" in recorder.fault
    assert given.shape == x.shape


def test_a_recording_is_the_function_of_its_inputs():
    def function(x, y):
        a, b = (x * WEIGHT.exp()).split((1, 1), dim=-1)
        total = torch.cat((b, a), dim=-1).mT if x.ndim == 3 else torch.cat((b, a), dim=-1)
        total[..., 0] += 1
        return total.add_(y), [float("inf"), WEIGHT.shape][1][0] * y

    _, played, recorder = recorded(function, torch.randn(3, 2), torch.randn(3, 2), fixed=[WEIGHT])
    assert recorder.fault is None
    x, y = torch.randn(3, 2), torch.randn(3, 2)
    torch.testing.assert_close(played(x, y), function(x, y))
    assert not any("exp" in line for line in recorder.lines)


def test_a_recording_gives_back_what_nothing_reads_any_more():
    def function(x):
        y = x
        for _ in range(20):
            a, b = y.split((1, 1))
            y = torch.cat((b.exp(), a + 1)) * x
        return y

    x = torch.rand(2, 3)
    given, played, _ = recorded(function, x)
    torch.testing.assert_close(played(x), given)
    assert played.__code__.co_nlocals < 12  # with x and the functions that are called
