from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from tests.build import SIZES, Case, draw, recipe, redraw, sizes
from tests.mixers.by_hand import attend, mix, mixer, turn
from tests.tolerances import FORWARD, assert_close
from zoo.mixers.mla import MLA
from zoo.stack import Stack

T = 7
WIDTHS = {"key": SIZES["qk_nope_head_dim"] + SIZES["qk_rope_head_dim"], "value": SIZES["v_head_dim"]}
HEADWISE = {"granularity": "headwise"}
# gates on keys and values, and the numbers that the cache holds for them a token: their scores
GATES: list[tuple[dict[str, dict[str, Any]], int]] = [
    ({"key": {}}, 2 * WIDTHS["key"]),
    ({"key": HEADWISE}, 2),
    ({"key": {"granularity": "head_shared"}}, WIDTHS["key"]),
    ({"key": {"additive": True} | HEADWISE}, 2),
    ({"value": {}}, 2 * WIDTHS["value"]),
    ({"value": HEADWISE}, 2),
    ({"value": {"additive": True}}, 2 * WIDTHS["value"]),
    ({"key": HEADWISE, "value": HEADWISE}, 4),
    ({"key": HEADWISE, "value": {"additive": True} | HEADWISE}, 4),
    ({"key": {"additive": True}, "value": HEADWISE}, 2 * WIDTHS["key"] + 2),
    ({"key": {}, "value": {}}, 2 * WIDTHS["key"] + 2 * WIDTHS["value"]),
]
every_gate = pytest.mark.parametrize(("gates", "held"), GATES, ids=lambda value: str(value).replace(" ", ""))


def gated(gates: dict[str, dict[str, Any]], dtype: torch.dtype = torch.float64) -> Stack:
    """Two layers with sigmoid gates of these options, rotated and redrawn."""
    parts = {slot: {"name": "sigmoid", "options": options} for slot, options in gates.items()}
    torch.manual_seed(1)
    lm = zoo.load(recipe(Case("", "mla", sizes(MLA) | {"rope": {}}, parts)))
    redraw(lm)
    return lm.to(dtype)


def neutral(options: dict[str, Any]) -> float:
    return 0.0 if options.get("additive") else 1.0


def in_chunks(lm: Stack, tokens: Tensor, *chunks: int) -> Tensor:
    cache = lm.init_cache(len(tokens))
    return torch.cat([lm(chunk, cache=cache) for chunk in tokens.split(list(chunks), dim=1)], dim=1)


@pytest.mark.parametrize("options", [{}, {"q_lora_rank": 10}, {"rope": {}}, {"qk_rope_head_dim": 0}], ids=str)
@torch.no_grad()
def test_formula(options: dict[str, Any]) -> None:
    part, x = mixer("mla-required", **options), torch.randn(1, T, 24, dtype=torch.float64)
    heads, rank, nope, width = SIZES["n_heads"], SIZES["kv_lora_rank"], SIZES["qk_nope_head_dim"], SIZES["v_head_dim"]
    rope = options.get("qk_rope_head_dim", SIZES["qk_rope_head_dim"])
    queries = part.q_proj(x[0]) if "q_lora_rank" not in options else part.q_b_proj(part.q_a_norm(part.q_a_proj(x[0])))
    latent, k_rope = part.kv_a_proj(x[0]).split([rank, rope], dim=-1)
    up = part.kv_b_proj.weight.view(heads, nope + width, rank)
    latent = latent / (latent.square().mean(-1, keepdim=True) + 1e-6).sqrt() * part.kv_a_norm.weight
    outputs = []
    for h in range(heads):
        q_nope, q_rope = queries.view(T, heads, nope + rope)[:, h].split([nope, rope], dim=-1)
        key = k_rope
        if "rope" in options:
            q_rope, key = (torch.stack([turn(row, t) for t, row in enumerate(rows)]) for rows in (q_rope, k_rope))
        q, k = torch.cat([q_nope, q_rope], dim=-1), torch.cat([latent @ up[h, :nope].T, key], dim=-1)
        outputs.append(attend(q, k, latent @ up[h, nope:].T, (nope + rope) ** -0.5))
    want = torch.cat(outputs, dim=-1) @ part.o_proj.weight.T
    assert_close(mix(part, x)[0], want, 1e-6 if "rope" in options else FORWARD[torch.float64])


@torch.no_grad()
def test_only_the_latents_are_cached() -> None:
    lm = gated({"query": {}, "output": {}, "post": {}})
    cache = lm.init_cache(1, max_length=20)
    lm(draw(1, 20), cache=cache)
    widths = {name: history.shape[2:].numel() for name, history in cache.layers[0].histories.items()}
    assert sum(widths.values()) == SIZES["kv_lora_rank"] + SIZES["qk_rope_head_dim"]


@every_gate
@torch.no_grad()
def test_scores_of_keys_and_values_are_cached(gates: dict[str, Any], held: int) -> None:
    """Decoding equals the full forward, whether scores are absorbed or not; and state_size says it."""
    lm, tokens = gated(gates), draw(2, 23)
    full = lm(tokens)
    assert_close(in_chunks(lm, tokens, 9, 1, 1, 5, 1, 6), full, FORWARD[torch.float64])
    assert_close(in_chunks(lm, tokens, *[1] * 23), full, FORWARD[torch.float64])
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, :4] = 0
    cache = lm.init_cache(2, max_length=15)
    lm(tokens[:, :9], attention_mask=mask, cache=cache)
    got = torch.cat([lm(tokens[:, 9:10], cache=cache), lm(tokens[:, 10:15], cache=cache)], dim=1)
    want = torch.stack([lm(tokens[:1, :15])[0, 9:], lm(tokens[1:, 4:15])[0, 5:]])
    assert_close(got, want, FORWARD[torch.float64], "ragged")
    mixer = lm.layers[0].mixer
    assert mixer.state_size(15) == 15 * (SIZES["kv_lora_rank"] + SIZES["qk_rope_head_dim"] + held)
    assert cache.numel() == 2 * sum(layer.mixer.state_size(15) for layer in lm.layers)


@every_gate
@pytest.mark.parametrize("backend", [None, "reference"])
@torch.no_grad()
def test_neutral_scores_decode_as_without_gates_bit_for_bit(
    gates: dict[str, Any], held: int, backend: str | None
) -> None:
    lm, bare, tokens = gated(gates, torch.float32), gated({}, torch.float32), draw(2, 40)
    bare.load_state_dict({key: value for key, value in lm.state_dict().items() if ".gates." not in key})
    with ExitStack() as within:
        if backend is not None:
            within.enter_context(zoo.ops.backend(backend))
        for slot, options in gates.items():
            within.enter_context(zoo.force(lm, f"layers.*.gates.{slot}", neutral(options)))
        assert torch.equal(lm(tokens), bare(tokens))
        assert torch.equal(in_chunks(lm, tokens, 30, 1, 1, 8), in_chunks(bare, tokens, 30, 1, 1, 8))


@every_gate
@torch.no_grad()
def test_a_past_of_neutral_scores_is_left_behind(gates: dict[str, Any], held: int) -> None:
    """Neutral in the first chunk, then half: the keys and values of both count."""
    lm, tokens = gated(gates), draw(2, 20)
    for slot, options in gates.items():
        at_rest = neutral(options)
        scores = torch.tensor([at_rest] * 12 + [0.5] * 8)[:, None, None]
        cache, chunks = lm.init_cache(2), []
        with zoo.force(lm, f"layers.*.gates.{slot}", scores):
            want = lm(tokens)
        for value, part in ((at_rest, tokens[:, :12]), (0.5, tokens[:, 12:13]), (0.5, tokens[:, 13:])):
            with zoo.force(lm, f"layers.*.gates.{slot}", value):
                chunks.append(lm(part, cache=cache))
        assert_close(torch.cat(chunks, dim=1), want, FORWARD[torch.float64], slot)


@pytest.mark.parametrize("options", [{}, HEADWISE], ids=["elementwise", "headwise"])
@torch.no_grad()
def test_query_and_key_at_zero_take_the_mean_and_value_at_zero_nothing(options: dict[str, Any]) -> None:
    lm, x = gated({"query": options, "key": options, "value": options}), torch.randn(1, T, 24, dtype=torch.float64)
    part = lm.layers[0].mixer
    latent = part.kv_a_norm(part.kv_a_proj(x[0])[:, : SIZES["kv_lora_rank"]])
    v = part.kv_b_proj(latent).view(T, SIZES["n_heads"], -1)[..., SIZES["qk_nope_head_dim"] :]
    mean = (v.cumsum(0) / torch.arange(1, T + 1)[:, None, None]).flatten(1) @ part.o_proj.weight.T
    for slot in ("query", "key"):
        with zoo.force(part, "gates.value", 1.0), zoo.force(part, f"gates.{slot}", 0.0):
            assert_close(mix(part, x)[0], mean, FORWARD[torch.float64], slot)
    tokens, outputs = draw(1, 9), []
    part.register_forward_hook(lambda module, args, out: outputs.append(out))
    with zoo.force(lm, "layers.0.mixer.gates.value", 0.0):
        in_chunks(lm, tokens, 5, 1, 3)
    assert len(outputs) == 3
    assert not any(out.any() for out in outputs)


@pytest.mark.parametrize("additive", [False, True], ids=["times", "plus"])
@torch.no_grad()
def test_each_gate_acts_in_its_place(additive: bool) -> None:
    """On all channels of its head, in front of rotation: with scores drawn at random, a head and a token at a time."""
    part = gated({slot: {"additive": additive} for slot in ("query", "key", "value")}).layers[0].mixer
    x = torch.randn(1, T, 24, dtype=torch.float64)
    heads, rank, nope = SIZES["n_heads"], SIZES["kv_lora_rank"], SIZES["qk_nope_head_dim"]
    latent, k_rope = part.kv_a_proj(x[0]).split([rank, WIDTHS["key"] - nope], dim=-1)
    k_nope, v = part.kv_b_proj(part.kv_a_norm(latent)).view(T, heads, -1).split([nope, WIDTHS["value"]], dim=-1)
    y = {
        "query": part.q_proj(x[0]).view(T, heads, -1),
        "key": torch.cat([k_nope, k_rope[:, None].expand(-1, heads, -1)], dim=-1),
        "value": v,
    }
    for slot, plain in y.items():
        score = part.gates[slot](x)[0]
        assert score.shape == plain.shape
        y[slot] = plain + score if additive else plain * score
    outputs = []
    for h in range(heads):
        q, k = y["query"][:, h], y["key"][:, h]
        q, k = (torch.stack([torch.cat([row[:nope], turn(row[nope:], t)]) for t, row in enumerate(z)]) for z in (q, k))
        outputs.append(attend(q, k, y["value"][:, h], WIDTHS["key"] ** -0.5))
    # positions turn in float32
    assert_close(mix(part, x)[0], torch.cat(outputs, dim=-1) @ part.o_proj.weight.T, 1e-6)
