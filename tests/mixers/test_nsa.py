"""NSA where selection is real: blocks so small that a token leaves most of them out. The contract tests run with the
paper's sizes, of which their sequences fill two."""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from tests.build import Case, draw, gradients, recipe, redraw
from tests.mixers.by_hand import attend, mix, turn
from tests.ops.test_nsa import by_hand, fla_naive
from tests.tolerances import BACKWARD, FORWARD, assert_close
from zoo.mixers.nsa import NSA
from zoo.registry import RecipeError
from zoo.sequence import dense
from zoo.stack import Stack

SIZES = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "head_v_dim": 6, "window": 7}
BLOCKS = {"compress_block": 8, "compress_stride": 4, "select_block": 8, "n_selected": 4}
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "shared": {"shared_kv": True},
    "mean": {"compression": "mean"},
    "fla": {"compression": "mean", "shared_kv": True, "compress_stride": 8},
    "one token wide": {"compress_block": 1, "compress_stride": 1, "select_block": 1, "window": 1, "n_selected": 8},
    "long entries": {"compress_block": 24, "n_selected": 3},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def build(variant: str = "paper", gates: dict[str, Any] | None = None, **options: Any) -> Stack:
    """Two layers, redrawn, in float64."""
    gates = {"branch": "sigmoid", "output": "sigmoid"} if gates is None else gates
    torch.manual_seed(1)
    lm = zoo.load(recipe(Case("", "nsa", SIZES | BLOCKS | VARIANTS[variant] | options, gates)))
    redraw(lm)
    return lm.double()


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


@pytest.mark.parametrize("variant", ["paper", "fla", "long entries"])
@pytest.mark.parametrize("rope", [True, False])
@torch.no_grad()
def test_formula(variant: str, rope: bool) -> None:
    part = build(variant, {"branch": "sigmoid"}, **({} if rope else {"rope": None})).layers[0].mixer
    T, (heads, kv_heads, width, values, window) = 60, SIZES.values()
    x, blocks = torch.randn(1, T, 24, dtype=torch.float64), part.blocks
    queries = rms((x[0] @ part.q_proj.weight.T).view(T, heads, width), part.q_norm.weight)

    def turned(y: Tensor) -> Tensor:
        return torch.stack([turn(row, t) for t, row in enumerate(y)]) if rope else y

    def compressed(y: Tensor, phi: nn.Module, head: int) -> Tensor:
        out = []
        for start in range(0, T - blocks.compress_block + 1, blocks.compress_stride):
            block = y[start : start + blocks.compress_block]
            if variant == "fla":
                out.append(block.mean(0))
                continue
            # channel by channel, each with all positions of the block
            block = (block + phi.position[:, head]).T.flatten()
            out.append(phi.b.weight @ F.silu(phi.a.weight @ block))
        return torch.stack(out)

    weights = (x[0] @ part.gates["branch"].g_proj.weight.T).view(T, heads, 3).sigmoid()
    outputs = []
    for h in range(heads):
        group = h // (heads // kv_heads)
        views = {}
        for name in part.k_proj:
            k = (x[0] @ part.k_proj[name].weight.T).view(T, kv_heads, width)[:, group]
            v = (x[0] @ part.v_proj[name].weight.T).view(T, kv_heads, values)[:, group]
            views[name] = turned(rms(k, part.k_norm[name].weight)), v
        (k_cmp, v_cmp), (k, v), (k_win, v_win) = (
            views.get("shared", views.get(name)) for name in ("compressed", "selected", "window")
        )
        k_cmp, v_cmp = compressed(k_cmp, part.k_compress, group), compressed(v_cmp, part.v_compress, group)
        # the heads of the group, for what they select together
        both = torch.stack([turned(queries[:, i]) for i in range(2 * group, 2 * group + 2)], dim=1)
        o_cmp, o_slc, chosen = by_hand(both[None], *(y[None, :, None] for y in (k_cmp, v_cmp, k, v)), blocks)
        assert len(chosen[-1]) < T // blocks.select_block, "selection is real"
        o_win = attend(turned(queries[:, h]), k_win, v_win, 1 / math.sqrt(width), window)
        parts = torch.stack((o_cmp[0, :, h % 2], o_slc[0, :, h % 2], o_win), dim=-1)
        outputs.append((parts * weights[:, h, None]).sum(-1))
    want = torch.cat(outputs, dim=-1) @ part.o_proj.weight.T
    assert_close(mix(part, x)[0], want, 1e-6 if rope else FORWARD[torch.float64])  # positions turn in float32


@pytest.mark.parametrize(("window", "bias"), [(5, False), (64, True)])
def test_the_simplified_form_is_fla(window: int, bias: bool) -> None:
    """fla's operator on this mixer's queries, keys, values and gates; its window wants flash-attn, so it is ours."""
    torch.manual_seed(1)
    options = {"n_heads": 16, "n_kv_heads": 1, "head_dim": 8, "window": window, "compression": "mean"}
    options |= {"compress_block": 8, "compress_stride": 8, "select_block": 8, "n_selected": 5}
    options |= {"shared_kv": True, "qk_norm": "none", "bias": bias}
    part = zoo.load(recipe(Case("", "nsa", options, {"branch": "sigmoid"}))).layers[0].mixer
    redraw(part)
    x = torch.randn(2, 90, 24, requires_grad=True)
    layout = dense(2, 90, x.device)
    q = part._turn(part.q_proj(x).unflatten(-1, (16, 8)), layout)
    k = part._turn(part.k_proj["shared"](x).unflatten(-1, (1, 8)), layout)
    v = part.v_proj["shared"](x).unflatten(-1, (1, 8))
    gates = part.gates["branch"](x).unbind(-1)
    o = fla_naive().naive_nsa(q, k, v, *gates[:2], block_counts=5, block_size=8)
    o = o + zoo.ops.attention(q, k, v, window=window, backend="reference") * gates[2][..., None]
    want, got = part.o_proj(o.flatten(-2)), part(x, layout)
    assert_close(got, want, FORWARD[torch.float32])
    weights, parameters = torch.randn_like(want), [x, *part.parameters()]
    grads = (torch.autograd.grad(y, parameters, weights, allow_unused=True) for y in (got, want))
    for a, b in zip(*grads, strict=True):
        assert_close(a, b, BACKWARD[torch.float32])


# ---- the three views and their memory


@every_variant
@pytest.mark.parametrize(
    "sizes",
    [[1] * 77, [40, 1, 1, 35], [76, 1], [7, 1, 23, 46], [31, 2, 32, 12]],
    ids=lambda sizes: f"{sizes[0]}-{sizes[-1]}",
)
@torch.no_grad()
def test_cached_equals_full(variant: str, sizes: list[int]) -> None:
    lm, tokens = build(variant), draw(2, 77)
    cache = lm.init_cache(2, max_length=77)
    got = torch.cat([lm(chunk, cache=cache) for chunk in tokens.split(sizes, 1)], dim=1)
    assert_close(got, lm(tokens), FORWARD[torch.float64])
    assert cache.numel() == 2 * sum(layer.mixer.state_size(77) for layer in lm.layers)


@every_variant
@torch.no_grad()
def test_rows_of_different_lengths_keep_views_of_their_own(variant: str) -> None:
    """Padding, rows without a token, a row that waits while others complete blocks, and rows taken out and repeated."""
    lm, lengths = build(variant), [60, 3, 31, 45]
    rows, taken, got = [draw(80) for _ in lengths], [0] * 4, [[], [], [], []]
    cache = lm.init_cache(4)
    for counts in (lengths, [0, 9, 1, 0], [5, 1, 0, 13], [1, 1, 1, 1], [1, 1, 1, 1], [2, 14, 5, 1]):
        width = max(counts)
        tokens, mask = draw(4, width), torch.zeros(4, width, dtype=torch.int64)
        for row, count in enumerate(counts):
            left = (width - count) // 2
            tokens[row, left : left + count] = rows[row][taken[row] : taken[row] + count]
            mask[row, left : left + count] = 1
            taken[row] += count
        logits = lm(tokens, attention_mask=mask, cache=cache)
        for row in range(4):
            got[row].append(logits[row][mask[row] == 1])
    for row in range(4):
        assert_close(torch.cat(got[row]), lm(rows[row][None, : taken[row]])[0], FORWARD[torch.float64], f"row {row}")
    order = [2, 1, 1]
    new = draw(3, 6)
    logits = lm(new, cache=cache[order])
    for i, row in enumerate(order):
        want = lm(torch.cat([rows[row][: taken[row]], new[i]])[None])[0, -6:]
        assert_close(logits[i], want, FORWARD[torch.float64], f"row {row}")


@every_variant
def test_packed_equals_separate(variant: str) -> None:
    lm, lengths = build(variant), [50, 1, 7, 41, 8]
    tokens = draw(1, sum(lengths))
    packed = lm(tokens, cu_seqlens=torch.tensor([0, *accumulate(lengths)]))
    alone = torch.cat([lm(document) for document in tokens.split(lengths, 1)], dim=1)
    assert_close(packed, alone, FORWARD[torch.float64])
    weight = torch.randn_like(alone)
    got, want = (gradients(lm, (logits * weight).sum()) for logits in (packed, alone))
    for name, grad in want.items():
        assert_close(got[name], grad, BACKWARD[torch.float64], name)


@every_variant
def test_the_fast_path_is_the_reference(variant: str) -> None:
    lm, tokens = build(variant), draw(2, 90)
    logits, grads = [], []
    for how in (nullcontext(), zoo.ops.backend("reference")):
        with how:
            logits.append(lm(tokens))
            grads.append(gradients(lm, lm.loss(tokens)[0]))
    assert_close(*logits, FORWARD[torch.float64])
    for name in grads[0]:
        assert_close(grads[0][name], grads[1][name], BACKWARD[torch.float64], name)
        assert grads[0][name].any(), name


@torch.no_grad()
def test_what_the_cache_holds() -> None:
    """The paper's form at T = 100 with blocks of 8 at every 4th token, a window of 7: all tokens to select from, 24
    entries, 7 tokens for the next entry, 6 of the window; each a key of 8 and a value of 6 for 2 heads."""
    lm = build()
    assert lm.layers[0].mixer.state_size(100) == 2 * (8 + 6) * (100 + 24 + 7 + 6)
    assert build("fla").layers[0].mixer.state_size(100) == 2 * (8 + 6) * (100 + 12)
    for length in (1, 5, 8, 33, 100):
        cache = lm.init_cache(3, max_length=length)
        lm(draw(3, length), cache=cache)
        assert cache.numel() == 3 * 2 * lm.layers[0].mixer.state_size(length)
    shapes = {name: tuple(x.shape[1:]) for name, x in (cache.layers[0].states | cache.layers[0].histories).items()}
    assert shapes == {
        "k_selected": (100, 2, 8),
        "v_selected": (100, 2, 6),
        "k_entries": (24, 2, 8),
        "v_entries": (24, 2, 6),
        "k_compressed": (7, 2, 8),
        "v_compressed": (7, 2, 6),
        "k_window": (6, 2, 8),
        "v_window": (6, 2, 6),
    }


# ---- gates


@torch.no_grad()
def test_an_empty_branch_slot_is_the_plain_sum_bit_for_bit() -> None:
    lm, bare, tokens = build(), build(gates={"output": "sigmoid"}), draw(2, 50)
    bare.load_state_dict({key: value for key, value in lm.state_dict().items() if ".branch." not in key})
    for dtype in (torch.float32, torch.bfloat16):
        lm, bare = lm.to(dtype), bare.to(dtype)
        with zoo.force(lm, "layers.*.gates.branch", 1.0):
            assert torch.equal(lm(tokens), bare(tokens))
        assert not torch.equal(lm(tokens), bare(tokens))


@torch.no_grad()
def test_the_weights_are_in_the_order_of_the_views() -> None:
    """One branch at a time: the window sees no further than it reaches, the compressed view nothing before its first
    entry, the selected one the token itself from the start."""
    part, x = build(gates={"branch": "sigmoid"}).layers[0].mixer, torch.randn(1, 60, 24, dtype=torch.float64)
    other = x.clone()
    other[0, 20] += 1
    moved = []
    for weights in torch.eye(3).unbind():
        with zoo.force(part, "gates.branch", weights):
            moved.append((mix(part, x) != mix(part, other))[0].any(-1).nonzero().flatten())
            outputs = mix(part, x)[0].abs().amax(-1)
        assert (outputs[:7] == 0).all() == bool(weights[0])
    assert moved[2].tolist() == list(range(20, 27))
    assert moved[0].max() == 59
    assert {20, 23, 24, 31} <= set(moved[1].tolist()), "the token's own block and the one before"
    assert not set(moved[1].tolist()) & set(range(20))


# ---- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compress_block": 0}, "compress_block: expected at least 1, found 0"),
        ({"window": 0}, "window: expected at least 1, found 0"),
        ({"compress_stride": 3}, "compress_stride: 3 does not divide compress_block 8"),
        ({"select_block": 10}, "select_block: 10 is not a multiple of compress_stride 4"),
        ({"n_selected": 2}, "n_selected: 2 blocks are fewer than those that are always selected"),
        ({"n_kv_heads": 3}, "n_heads: 4 heads cannot be shared out over n_kv_heads 3"),
        ({"compression": "mean", "compress_width": 9}, "compress_width: 9 says nothing beside compression mean"),
        ({"gate_order": "gate_first"}, "gate_order: gate_first says nothing"),
        ({"compression": "mpl"}, "unknown value 'mpl'. Did you mean 'mlp'"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        zoo.load(recipe(Case("", "nsa", SIZES | BLOCKS | options)), device="meta")
    assert str(caught.value).startswith("model.stack.blocks.a.mixer.options.")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("slot", ["query", "key", "value"])
def test_a_gate_without_its_slot_is_refused(slot: str) -> None:
    with pytest.raises(RecipeError, match=f"gates.{slot}"):
        zoo.load(recipe(Case("", "nsa", SIZES | BLOCKS, {slot: "sigmoid"})), device="meta")


def test_defaults_are_those_of_the_paper() -> None:
    part = zoo.load(recipe(Case("", "nsa", {"n_heads": 2, "head_dim": 8})), device="meta").layers[0].mixer
    assert isinstance(part, NSA)
    sizes = part.blocks.compress_block, part.blocks.compress_stride, part.blocks.select_block, part.blocks.n_selected
    assert (*sizes, part.window, part.shared_kv) == (32, 16, 64, 16, 512, False)
    assert len(part.k_proj) == len(part.v_proj) == 3


def test_the_tiny_recipe_selects_fewer_blocks_than_there_are_at_77_tokens() -> None:
    blocks = zoo.load("nsa/tiny", device="meta").layers[0].mixer.blocks
    assert -(-77 // blocks.select_block) >= 2 * blocks.n_selected


@pytest.mark.parametrize("length", [5, 64, 200])
def test_operations_are_those_of_the_keys_seen(length: int) -> None:
    part = build().layers[0].mixer
    entries = sum(part.blocks.complete(t + 1) for t in range(length))
    # 4 blocks of 8, of which the last goes as far as the token
    selected = sum(t + 1 if t < 4 * 8 else 3 * 8 + t % 8 + 1 for t in range(length))
    others = selected + sum(min(t + 1, 7) for t in range(length))
    compress = sum(8 * width * width + width * width for width in (8, 6))  # φ of keys and of values, d -> 8 d -> d
    compress = 2 * compress * (2 * part.blocks.complete(length) - length)
    assert part.op_flops(length) * length == pytest.approx(2 * 4 * (8 + 6) * (entries + others) + compress)
