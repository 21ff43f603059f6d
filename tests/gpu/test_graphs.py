"""A decoding step in a CUDA graph gives the tokens that it gives outside.

A recurrent stack's step is the same at every position: its graph is captured once and replayed for every token, reading
and writing the same states. Attention's step is not: where its keys lie, how many there are and their rotation is said
by numbers of Python, which a graph freezes. So a hybrid is captured at each position, which proves that a step can be
captured and not that it is worth it. On the CPU, where there are no graphs, a replay is the same frozen step run again.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import zoo
from tests.gpu.conftest import ASKED
from zoo.cache import Cache

PROMPT, STEPS = 12, 8
# no layer of these looks at a position
RECURRENT = ["gdn/tiny", "kda/tiny", "gla/tiny", "mamba2/tiny", "rwkv7/tiny", "deltanet/tiny"]


def prefilled(lm: zoo.Stack, device: torch.device) -> tuple[Tensor, Cache]:
    """The token behind a prompt, and the cache."""
    tokens = torch.randint(lm.config.vocab_size, (2, PROMPT), generator=torch.Generator().manual_seed(5)).to(device)
    cache = lm.init_cache(2, PROMPT + STEPS + 1)
    return lm(tokens, cache=cache)[:, -1:].argmax(-1), cache


def decoded(lm: zoo.Stack, device: torch.device) -> list[Tensor]:
    """Without a graph."""
    token, cache = prefilled(lm, device)
    out = [token]
    for _ in range(STEPS):
        out.append(lm(out[-1], cache=cache)[:, -1:].argmax(-1))
    return out


def captured(step: Callable[[], None], warm: Callable[[], object]) -> Callable[[], None]:
    """A replay of the step; `warm` runs it on a copy of what it changes."""
    if ASKED == "cpu":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            warm()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@torch.no_grad()
@pytest.mark.parametrize("recipe", RECURRENT)
def test_one_graph_decodes_a_recurrent_stack(recipe: str, device: torch.device) -> None:
    torch.manual_seed(0)
    lm = zoo.load(recipe, device=device).eval()
    want = decoded(lm, device)
    token, cache = prefilled(lm, device)
    held = [(layer, name, state.clone()) for layer in cache.layers for name, state in layer.states.items()]
    assert all(not layer.histories for layer in cache.layers)

    def step() -> None:
        """Token and states in their places, and the next ones put into the same places."""
        cache.lengths = [PROMPT, PROMPT]  # what a graph would freeze
        for layer, name, place in held:
            layer.states[name] = place
        following = lm(token, cache=cache)[:, -1:].argmax(-1)
        for layer, name, place in held:
            place.copy_(layer.states[name])
        token.copy_(following)

    out = [token.clone()]
    replay = captured(step, lambda: lm(token, cache=cache[[0, 1]]))
    for _ in range(STEPS):
        replay()
        out.append(token.clone())
    assert torch.equal(torch.cat(out, dim=1), torch.cat(want, dim=1))
    assert len({tuple(each.flatten().tolist()) for each in out}) > 1, "a model that repeats one token shows nothing"


@torch.no_grad()
def test_a_graph_for_each_step_of_a_hybrid(device: torch.device) -> None:
    torch.manual_seed(0)
    lm = zoo.load("qwen3_next/bench", device=device).eval()
    want = decoded(lm, device)
    token, cache = prefilled(lm, device)
    out, replays = [token.clone()], []
    for at in range(STEPS):
        replays.append(captured(*_step(lm, out[-1].clone(), cache, out)))
        replays[-1]()
        assert cache.lengths == [PROMPT + at + 1] * 2
    assert torch.equal(torch.cat(out, dim=1), torch.cat(want, dim=1))


def _step(
    lm: zoo.Stack, token: Tensor, cache: Cache, out: list[Tensor]
) -> tuple[Callable[[], None], Callable[[], object]]:
    """A step that puts the token after `token` in `out`, and one on a copy of the cache."""
    warm = [cache[[0, 1]] for _ in range(2)]
    return (lambda: out.append(lm(token, cache=cache)[:, -1:].argmax(-1))), (lambda: lm(token, cache=warm.pop()))
