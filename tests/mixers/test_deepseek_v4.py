"""shared_kv, csa and hca worked by hand, a token and a head at a time; what they see, keep and refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from tests.build import SIZES, draw, recipe, redraw, required, stack
from tests.mixers.by_hand import mix, mixer, turn
from tests.tolerances import FORWARD, assert_close
from zoo.cache import LayerCache
from zoo.mixers import Mixer
from zoo.mixers._compressor import Compressor
from zoo.mixers._shared_kv import mean_entries
from zoo.registry import RecipeError
from zoo.sequence import Layout, dense, packed
from zoo.shapes import NormConfig

MIXERS = ["shared_kv", "csa", "hca"]
T, WINDOW, RATIO, ROPE = 23, 3, SIZES["compress_ratio"], SIZES["qk_rope_head_dim"]

every_mixer = pytest.mark.parametrize("name", MIXERS)
overlapping = pytest.mark.parametrize("overlap", [False, True], ids=["hca", "csa"])


def rms(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x: Tensor, position: int, theta: float) -> Tensor:
    """x [E] with its last channels rotated."""
    return torch.cat([x[:-ROPE], turn(x[-ROPE:], position, theta, interleaved=True)])


def entries(part: Compressor, x: Tensor, overlap: bool) -> Tensor:
    """[M,E] from x [T,D], unrotated: one block, token and series at a time."""
    m, width = part.ratio, part.width
    out = []
    for i in range(len(x) // m):
        values, logits = [], []
        for block, series in ((i - 1, 0), (i, 1)) if overlap else ((i, 0),):
            if block < 0:
                continue
            for j in range(m):
                own = slice(series * width, (series + 1) * width)
                values.append((part.kv_proj.weight @ x[block * m + j])[own])
                logits.append((part.gate_proj.weight @ x[block * m + j] + part.position_bias[j])[own])
        out.append((torch.stack(logits).softmax(0) * torch.stack(values)).sum(0))
    return rms(torch.stack(out), part.kv_norm.weight)


def by_hand(part: Any, x: Tensor, name: str) -> Tensor:
    """x [T,D] -> [T,D]."""
    theta = 10000.0 if name == "shared_kv" else 160000.0
    heads, width = part.n_heads, part.head_dim
    latent = rms(x @ part.q_a_proj.weight.T, part.q_a_norm.weight)
    q = rms((latent @ part.q_b_proj.weight.T).view(-1, heads, width)) * part.gates["query"](x[None])[0]
    c = rms(x @ part.kv_proj.weight.T, part.kv_norm.weight)
    c = torch.stack([turned(row, t, theta) for t, row in enumerate(c)])
    far, chosen = c[:0], None
    if name != "shared_kv":
        far = entries(part.compressor, x, name == "csa")
        far = torch.stack([turned(row, i * RATIO, theta) for i, row in enumerate(far)])
    if name == "csa":
        keys = entries(part.indexer.compressor, x, overlap=True)
        keys = torch.stack([turned(row, i * RATIO, theta) for i, row in enumerate(keys)])
        index = (latent @ part.indexer.q_b_proj.weight.T).view(T, SIZES["index_n_heads"], -1)
        weights = x @ part.indexer.weights_proj.weight.T
        chosen = []
        for t in range(T):
            scores = sum(w * (keys @ turned(row, t, theta)).relu() for w, row in zip(weights[t], index[t], strict=True))
            chosen.append(scores[: (t + 1) // RATIO].argsort(descending=True, stable=True)[: part.indexer.top_k])
    out = []
    for t in range(T):
        seen = far[: (t + 1) // RATIO] if chosen is None else far[chosen[t]]
        seen = torch.cat([c[max(0, t + 1 - WINDOW) : t + 1], seen])
        rows = []
        for h in range(heads):
            p = (seen @ turned(q[t, h], t, theta) * width**-0.5).exp()
            rows.append(turned(p @ seen / (p.sum() + part.sinks.logit[h].exp()), -t, theta))
        o = torch.stack(rows) * part.gates["output"](x[None])[0, t]
        groups = o.view(part.o_a_proj.n_groups, -1)
        maps = part.o_a_proj.weight.view(len(groups), -1, groups.shape[1])
        out.append(part.o_b_proj.weight @ torch.cat([w @ group for w, group in zip(maps, groups, strict=True)]))
    return torch.stack(out) * part.gates["post"](x[None])[0, :, 0]


@every_mixer
@torch.no_grad()
def test_formula(name: str) -> None:
    part = mixer(f"{name}-full", window=WINDOW, o_groups=2, **({"index_topk": 2} if name == "csa" else {}))
    x = torch.randn(1, T, 24, dtype=torch.float64)
    assert_close(mix(part, x)[0], by_hand(part, x[0], name), 1e-6)  # positions turn in float32


# ---- the compressor


def compressor(overlap: bool) -> Compressor:
    part = Compressor(6, 4, RATIO, NormConfig(), overlap=overlap).double()
    redraw(part)
    return part


@overlapping
@pytest.mark.parametrize("chunks", [[23], [1] * 23, [4, 1, 1, 11, 6], [10, 5, 8]], ids=str)
@torch.no_grad()
def test_entries_do_not_depend_on_how_tokens_arrive(overlap: bool, chunks: list[int]) -> None:
    part, x, cache, past, got = (
        compressor(overlap),
        torch.randn(2, T, 6, dtype=torch.float64),
        LayerCache(2, None),
        0,
        [],
    )
    for chunk in x.split(chunks, dim=1):
        new, positions = part(chunk, dense(2, chunk.shape[1], x.device, past), cache, "tokens")
        assert positions.tolist() == [[i for i in range(0, T, RATIO) if past < i + RATIO <= past + chunk.shape[1]]]
        past += chunk.shape[1]
        got.append(new)
    for row, own in zip(torch.cat(got, dim=1), x, strict=True):
        assert_close(row, entries(part, own, overlap), 1e-12)


@overlapping
@torch.no_grad()
def test_entries_of_packed_documents(overlap: bool) -> None:
    """Each with its own number of tokens behind it, some making no block full; a row of the cache is left out."""
    part, cache = compressor(overlap), LayerCache(4, None)
    rows, totals = [0, 1, 3], [17, 4, 11]
    documents = [torch.randn(n, 6, dtype=torch.float64) for n in totals]
    got: list[list[Tensor]] = [[], [], []]
    taken = [0, 0, 0]
    for counts in ([9, 1, 5], [1, 2, 1], [7, 1, 5]):
        new = [own[at : at + n] for own, at, n in zip(documents, taken, counts, strict=True)]
        bounds = [0, counts[0], counts[0] + counts[1], sum(counts)]
        made, positions = part(torch.cat(new)[None], packed(bounds, new[0].device, taken, rows), cache, "tokens")
        closed = [(at + n) // RATIO - at // RATIO for at, n in zip(taken, counts, strict=True)]
        firsts = [RATIO * (at // RATIO + i) for at, n in zip(taken, closed, strict=True) for i in range(n)]
        assert positions.tolist() == [firsts]
        taken = [at + n for at, n in zip(taken, counts, strict=True)]
        for kept, piece in zip(got, made[0].split(closed), strict=True):
            kept.append(piece)
    for kept, own in zip(got, documents, strict=True):
        want = entries(part, own, overlap) if len(own) >= RATIO else own.new_zeros(0, 4)
        assert_close(torch.cat(kept), want, 1e-12)


# ---- what a token sees


@every_mixer
def test_beyond_the_window_only_full_blocks_are_seen(name: str) -> None:
    """With a window of 1, all entries chosen: the token itself, and the blocks before it that are full."""
    part = mixer(f"{name}-required", window=1, **({"index_topk": T} if name == "csa" else {}))
    x = torch.randn(1, T, 24, dtype=torch.float64, requires_grad=True)
    y = mix(part, x)
    for t in range(T):
        (grad,) = torch.autograd.grad(y[0, t].sum(), x, retain_graph=True)
        reach = 0 if name == "shared_kv" else (t + 1) // RATIO * RATIO
        assert grad[0].abs().sum(-1).nonzero().flatten().tolist() == sorted({*range(reach), t})


@torch.no_grad()
def test_only_chosen_entries_are_seen() -> None:
    """Each token at most index_topk of them, and not the same ones."""
    part = mixer("csa-required", window=1, index_topk=2)
    with zoo.ops.trace() as choices:
        mix(part, torch.randn(1, 70, 24, dtype=torch.float64))
    assert [choice.op for choice in choices] == ["lightning_indexer", "compressed_attention"]
    x = torch.randn(1, 70, 24, dtype=torch.float64)
    selected = part.far(x, part.q_a_norm(part.q_a_proj(x)), dense(1, 70, x.device), None).selected
    assert selected.shape == (1, 70, 2)
    assert len({tuple(row) for row in selected[0, 40:].tolist()}) > 3


@torch.no_grad()
def test_only_distances_count() -> None:
    """c turns as a value too: the rotation back leaves how far away it is."""
    part, x = mixer("shared_kv-required", window=WINDOW), torch.randn(1, T, 24, dtype=torch.float64)
    assert_close(part(x, Layout(torch.arange(1000, 1000 + T)[None])), mix(part, x), 1e-4)
    angles = part.rope.angles(torch.arange(T)[None], part.rope_width)
    c = torch.randn(1, T, 1, 8, dtype=torch.float64)
    assert torch.equal(part.turn(c, angles)[..., :-ROPE], c[..., :-ROPE]), "the first channels carry no position"
    assert (part.turn(c, angles) != c)[:, 1:, :, -ROPE:].all()


# ---- what is kept


@every_mixer
@torch.no_grad()
def test_rows_of_unequal_length_may_be_reordered(name: str) -> None:
    lm, lengths = stack(f"{name}-full"), [2, 19, 11]
    rows, cache = [draw(n) for n in lengths], lm.init_cache(3)
    tokens, mask = draw(3, 19), torch.zeros(3, 19, dtype=torch.int64)
    for row, own in enumerate(rows):
        tokens[row, 19 - len(own) :], mask[row, 19 - len(own) :] = own, 1
    lm(tokens, attention_mask=mask, cache=cache)
    order, new = [2, 0, 0, 1], draw(4, 9)
    cache = cache[order]
    got = torch.cat([lm(chunk, cache=cache) for chunk in new.split([1, 1, 6, 1], dim=1)], dim=1)
    for row, (own, more) in enumerate(zip(order, new, strict=True)):
        want = lm(torch.cat([rows[own], more])[None])[0, -9:]
        assert_close(got[row], want, FORWARD[torch.float64], f"row {row}")


@every_mixer
@torch.no_grad()
def test_the_cache_holds_window_entries_and_waiting_tokens(name: str) -> None:
    lm, width = stack(f"{name}-required"), SIZES["head_dim"]
    cache = lm.init_cache(1, max_length=33)
    lm(draw(1, 33), cache=cache)
    layer = cache.layers[0]
    held = {key: kept.numel() for key, kept in (layer.states | layer.histories).items()}
    want = {"kv": 33 * width}  # of the 127 that a window of 128 carries
    if name == "hca":
        want |= {"entries": 33 // RATIO * width, "entries_tokens": (RATIO - 1) * 2 * width}
    if name == "csa":
        for key, size in (("entries", width), ("index_keys", SIZES["index_head_dim"])):
            want |= {key: 33 // RATIO * size, f"{key}_tokens": (2 * RATIO - 1) * 4 * size}
    assert held == want
    assert sum(held.values()) == lm.layers[0].mixer.state_size(33)


def test_only_the_indexer_is_frozen() -> None:
    part: Mixer = stack("csa-full").layers[0].mixer
    frozen = {key for key, own in part.named_parameters() if not own.requires_grad}
    assert frozen == {key for key, _ in part.named_parameters() if key.startswith("indexer.")}
    assert "nothing_is_frozen" in part.exempt
    assert all(own.requires_grad for name in ("hca", "shared_kv") for own in stack(f"{name}-full").parameters())


@pytest.mark.parametrize(
    ("length", "ratio", "at_most"), [(1, 4, None), (77, 4, 8), (77, 4, None), (9, 16, 3), (8, 1, 2)]
)
def test_mean_entries(length: int, ratio: int, at_most: int | None) -> None:
    want = [min((t + 1) // ratio, length if at_most is None else at_most) for t in range(length)]
    assert mean_entries(length, ratio, at_most) == pytest.approx(sum(want) / length)


# ---- what is refused


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("shared_kv", {"o_groups": 3}, "n_heads: 2 heads cannot be shared out over o_groups 3"),
        ("shared_kv", {"qk_rope_head_dim": 5}, "rope: fraction 1.0 of a head of 5 rotates 5 channels"),
        ("hca", {"qk_rope_head_dim": 10}, "head_dim: 8 channels are fewer than the 10 that qk_rope_head_dim rotates"),
        ("csa", {"index_head_dim": 2}, "index_head_dim: 2 channels are fewer than the 4 that qk_rope_head_dim rotates"),
        ("csa", {"index_topk": 0}, "index_topk: expected at least 1, found 0"),
        ("csa", {"window": 0}, "window: expected at least 1, found 0"),
        ("hca", {"compress_ratio": 0}, "compress_ratio: expected at least 1, found 0"),
        ("hca", {"index_topk": 4}, "index_topk: HCA has no such option"),
        ("shared_kv", {"compress_ratio": 4}, "compress_ratio: SharedKV has no such option"),
        ("csa", {"rope": {"yarn": {"beta_slow": 40}}}, "rope.yarn: expected 0 < beta_slow < beta_fast, found 40.0 and"),
        ("csa", {"rope": {"theta": 1, "yarn": {}}}, "rope: theta: at 1 all pairs turn alike"),
    ],
    ids=lambda x: str(x)[:30] if isinstance(x, str) else "",
)
def test_sizes_that_cannot_be_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    plain = recipe(required(name))
    block = plain["blocks"]["a"]
    block = {**block, "mixer": {**block["mixer"], "options": block["mixer"]["options"] | options}}
    with pytest.raises(RecipeError) as caught:
        zoo.load({**plain, "blocks": {"a": block}}, device="meta")
    assert f"options.{message}" in str(caught.value)
    assert "\n" not in str(caught.value)


@every_mixer
def test_a_gate_on_the_tensor_that_is_key_and_value_is_refused(name: str) -> None:
    plain = recipe(required(name))
    block = plain["blocks"]["a"]
    for slot in ("key", "value"):
        gated = {**block, "mixer": {**block["mixer"], "gates": {slot: "sigmoid"}}}
        with pytest.raises(RecipeError, match=f"gates.{slot}: .*no .*slot"):
            zoo.load({**plain, "blocks": {"a": gated}}, device="meta")
