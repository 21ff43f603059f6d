"""First-token measures against the whole matrix of attention, written out query by query."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from tests.build import draw, redraw
from tests.build import stack as contract_stack
from zoo.metrics.attention import COLUMNS, AttentionReader, FirstTokenAttention, MaxHidden
from zoo.ops import _attention_blocked, watch_attention
from zoo.ops._dispatch import on_device
from zoo.stack import Stack

ATTENTION = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 8}
MLA = {"n_heads": 3, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "rope": {}}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("attention", {}),
    "window": ("attention", {"window": 4}),
    "softmax_off_by_one": ("attention", {"normalizer": "softmax_off_by_one"}),
    "learned_sink": ("attention", {"normalizer": "learned_sink", "window": 7}),
    "sigmoid": ("attention", {"normalizer": "sigmoid"}),
    "softcap": ("attention", {"softcap": 0.7, "normalizer": "learned_sink"}),
    "mla": ("mla", MLA),
}
LAYOUTS: dict[str, dict[str, Tensor]] = {
    "plain": {},
    "packed": {"cu_seqlens": torch.tensor([0, 9, 10, 12, 24])},
    "padded": {"attention_mask": torch.tensor([[0] * 4 + [1] * 8, [1] * 11 + [0]])},
}


def build(name: str) -> Stack:
    mixer, options = MODELS[name]
    options = options | (ATTENTION if mixer == "attention" else {})
    block = {"mixer": {"name": mixer, "options": options}, "ffn": None}
    torch.manual_seed(3)
    lm = zoo.load(
        {"vocab_size": 29, "d_model": 24, "n_layers": 2, "pattern": ["a"], "blocks": {"a": block}, "init_std": 0.3}
    )
    redraw(lm)
    return lm


def matrices(lm: Stack, tokens: Tensor, **layout: Tensor) -> dict[tuple[int, int], list[Tensor]]:
    """(layer, head) -> the whole p of each document, from the q and k that the model has for it alone."""
    documents = [tokens[row] for row in range(len(tokens))]
    if "cu_seqlens" in layout:
        documents = list(tokens[0].split(layout["cu_seqlens"].diff().tolist()))
    if "attention_mask" in layout:
        documents = [row[mask == 1] for row, mask in zip(tokens, layout["attention_mask"], strict=True)]
    found: dict[tuple[int, int], list[Tensor]] = {}
    for document in documents:
        calls: list[Any] = []
        with watch_attention(lambda *call, calls=calls: calls.append(call)):
            lm(document[None])
        for layer, (q, k, options) in enumerate(calls):
            for head in range(q.shape[2]):
                found.setdefault((layer, head), []).append(matrix(q[0, :, head], k, options, head, q.shape[2]))
    return found


def matrix(q: Tensor, k: Tensor, options: Any, head: int, heads: int) -> Tensor:
    """p [T,T] of one head, in float64."""
    k = k[0, :, head // (heads // k.shape[2])]
    p = torch.zeros(len(q), len(k), dtype=torch.float64)
    for i in range(len(q)):
        start = 0 if options.window is None else max(0, i + 1 - options.window)
        s = k[start : i + 1].double() @ q[i].double() * options.scale
        s = s if options.softcap is None else options.softcap * torch.tanh(s / options.softcap)
        if options.normalizer == "sigmoid":
            p[i, start : i + 1] = torch.sigmoid(s - math.log(i + 1 - start))
        else:
            rest = 1.0 if options.normalizer == "softmax_off_by_one" else 0.0
            rest = rest if options.sink is None else options.sink[head].double().exp()
            p[i, start : i + 1] = s.exp() / (s.exp().sum() + rest)
    return p


def to_first(p: Tensor, sigmoid: bool) -> Tensor:
    return p[:, 0] / p.sum(1) if sigmoid else p[:, 0]


def measures(documents: list[Tensor], eps: float, sigmoid: bool = False) -> dict[str, float]:
    firsts, totals, sinks = [], [], []
    for p in documents:
        first = to_first(p, sigmoid)
        firsts += first[1:].tolist()
        totals += p.sum(1)[1:].tolist()
        if len(p) > 1:
            sinks.append(float(first.mean() > eps))
    return {
        "queries": len(firsts),
        "first_share": sum(firsts) / len(firsts),
        "total": sum(totals) / len(totals),
        "documents": len(sinks),
        "sink": sum(sinks) / len(sinks),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_all_is_as_the_whole_matrix_says(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_attention_blocked, "ROWS", (1, 5))  # several blocks
    lm, tokens, sigmoid = build(name), draw(2, 12), name == "sigmoid"
    if layout == "packed":
        tokens = tokens.reshape(1, -1)
    found = matrices(lm, tokens, **LAYOUTS[layout])
    # an eps that tells heads apart
    alphas = sorted(to_first(p, sigmoid).mean().item() for heads in found.values() for p in heads if len(p) > 1)
    middle = len(alphas) // 2
    eps = (alphas[middle - 1] + alphas[middle]) / 2
    want = {place: measures(documents, eps, sigmoid) for place, documents in found.items()}
    for backend in ("reference", "blocked"):
        reader = AttentionReader(lm, eps)
        with zoo.ops.backend(backend), reader.reading():
            lm(tokens, **LAYOUTS[layout])
        rows = reader.rows()
        assert {(row["layer"], row["head"]) for row in rows} == set(want)
        for row in rows:
            assert (tuple(row), row["mixer"], row["call"]) == (COLUMNS, f"layers.{row['layer']}.mixer", 0)
            for key, value in want[row["layer"], row["head"]].items():
                assert row[key] == pytest.approx(value, abs=1e-5), key
        assert reader.sink_rate() == pytest.approx(sum(row["sink"] for row in rows) / len(rows))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_cached_run_is_read_like_a_whole_one(name: str) -> None:
    """MLA decodes from its latents: to them keys are the same as to the heads. Sinks are told of whole documents only,
    so of the one whose prompt is the call."""
    lm, tokens = build(name), draw(2, 12)
    whole, cached = AttentionReader(lm), AttentionReader(lm)
    with whole.reading():
        lm(tokens)
    with cached.reading():
        cache = lm.init_cache(2)
        for chunk in tokens.split([1, 6, 1, 1, 3], dim=1):
            lm(chunk, cache=cache)
    for got, want in zip(cached.rows(), whole.rows(), strict=True):
        for key in ("queries", "first_share", "total"):
            assert got[key] == pytest.approx(want[key], rel=1e-4), key
        assert (got["documents"], got["sink"], want["documents"]) == (0, None, 2)
    assert cached.sink_rate() is None


def test_row_one_and_documents_of_one_token_do_not_count() -> None:
    """Documents of 1, 2 and 3 tokens, and the last token of one of 4, by Gu et al.'s α_1 = 1/T sum_i p_i1."""
    metric = FirstTokenAttention(1, eps=0.5)
    first = torch.tensor([1.0, 1.0, 0.1, 1.0, 0.2, 0.2, 0.9])[:, None]
    total = torch.tensor([9.0, 9.0, 0.5, 9.0, 0.6, 0.7, 0.8])[:, None]
    metric.update(first, total, torch.tensor([1, 2, 3, 1]), torch.tensor([1, 2, 3, 4]))
    found = {key: value.item() for key, value in metric.compute().items()}
    assert found["queries"] == 4
    assert found["first_share"] == pytest.approx((0.1 + 0.2 + 0.2 + 0.9) / 4)
    assert found["total"] == pytest.approx((0.5 + 0.6 + 0.7 + 0.8) / 4)
    assert (found["documents"], found["sink"]) == (2, 0.5)  # α_1: 0.55 and 0.47


@pytest.mark.parametrize("layout", ["plain", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_reading_on_a_gpu_waits_for_no_numbers(name: str, layout: str) -> None:
    """Meta tensors have none."""
    lm = build(name).to("meta")
    reader = AttentionReader(lm)
    tokens = torch.empty((1, 24) if layout == "packed" else (2, 12), dtype=torch.int64, device="meta")
    with on_device("cuda"), torch.no_grad(), reader.reading():
        lm(tokens, **LAYOUTS[layout])
    assert all(metric.first.is_meta for metric in reader.metrics.values())


def test_nothing_to_count() -> None:
    lm = build("softmax")
    reader = AttentionReader(lm)
    with reader.reading():
        lm(draw(3, 1))
    assert {(row["queries"], row["first_share"], row["documents"], row["sink"]) for row in reader.rows()} == {
        (0, None, 0, None)
    }


@torch.no_grad()
def test_batches_add_up_and_two_processes_are_one() -> None:
    """What torchmetrics does with the gathered states of two processes."""
    lm, tokens = build("softmax"), draw(5, 12)
    whole, one, two = (AttentionReader(lm) for _ in range(3))
    for reader, parts in ((whole, [tokens[:2], tokens[2:]]), (one, [tokens[:2]]), (two, [tokens[2:]])):
        with reader.reading():
            for part in parts:
                lm(part)
    pairs = [(one.metrics[place], two.metrics[place], whole.metrics[place]) for place in whole.metrics]
    pairs += [(one.hidden[layer], two.hidden[layer], whole.hidden[layer]) for layer in whole.hidden]
    for mine, other, want in pairs:
        for name, reduce in mine._reductions.items():
            setattr(mine, name, reduce(torch.stack([getattr(mine, name), getattr(other, name)])))
        torch.testing.assert_close(mine.compute(), want.compute())
    assert one.rows()[0]["documents"] == 5


@pytest.mark.parametrize("name", ["attention-hybrid", "mla-full", "kda-full"])
def test_reading_leaves_no_trace(name: str) -> None:
    """Nor does it read layers without attention, or when the block is left."""
    lm, tokens = contract_stack(name, torch.float32), draw(2, 12)
    reader = AttentionReader(lm)
    before = lm(tokens)
    with reader.reading():
        during = lm(tokens)
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in reader.mixers.values()]
    assert hooks == [0] * len(lm.layers)
    rows, most = reader.rows(), reader.max_hidden()
    assert torch.equal(before, lm(tokens))
    assert torch.equal(before, during)
    assert (rows, most) == (reader.rows(), reader.max_hidden())
    softmax = [index for index, block in enumerate(lm.config.layers) if lm.config.blocks[block].mixer.name != "kda"]
    softmax = [index for index in softmax if "decay" not in lm.layers[index].mixer.SLOTS]
    assert sorted({row["layer"] for row in rows}) == softmax


def test_reading_ends_with_its_block_even_on_an_error() -> None:
    lm = build("softmax")
    reader = AttentionReader(lm)
    with reader.reading():
        hook = lm.layers[1].mixer.o_proj.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            lm(draw(1, 4))
        hook.remove()
        lm(draw(1, 4))
    assert {(row["layer"], row["queries"]) for row in reader.rows()} == {(0, 6), (1, 6)}
    assert reader._inside == []


@torch.no_grad()
def test_the_largest_hidden_number_of_each_layer() -> None:
    lm, seen = build("softmax"), []
    hooks = [layer.register_forward_hook(lambda module, args, out: seen.append(out)) for layer in lm.layers]
    reader = AttentionReader(lm)
    with reader.reading():
        lm(draw(2, 12))
        lm(10 * draw(1, 1) // 29)
    for hook in hooks:
        hook.remove()
    assert reader.max_hidden() == [max(seen[at].abs().max().item(), seen[at + 2].abs().max().item()) for at in (0, 1)]
    metric = MaxHidden()
    metric.update(torch.tensor([-3.0, 2.0], dtype=torch.bfloat16))
    assert metric.compute() == 3
    metric.update(torch.tensor([math.nan]))
    metric.update(torch.ones(1))
    assert metric.compute().isnan()


def test_autocast_rounds_nothing() -> None:
    lm, tokens = build("softmax"), draw(2, 12)
    with torch.autocast("cpu", torch.bfloat16):
        calls: list[Any] = []
        reader = AttentionReader(lm)
        with reader.reading(), watch_attention(lambda *call: calls.append(call)):
            lm(tokens)
    for row in reader.rows():
        q, k, options = calls[row["layer"]]
        documents = [matrix(q[b, :, row["head"]], k[b : b + 1], options, row["head"], 4) for b in range(2)]
        assert row["first_share"] == pytest.approx(measures(documents, 0.3)["first_share"], rel=1e-5)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that anything makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            self.numel = max(self.numel, x.numel() if isinstance(x, Tensor) else 0)
        return out


@torch.no_grad()
def test_all_pairs_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_attention_blocked, "SCORES", 1 << 14)
    lm = build("softmax")
    with Largest() as largest, AttentionReader(lm).reading():
        lm(draw(1, 2048))
    assert largest.numel <= 4 * 16 * 2048


def test_a_stream_of_several_tensors_is_measured_whole() -> None:
    """Attention residuals hand on the blocks that came before as well, the embedding first."""
    lm, tokens = zoo.load("kimi_k3/tiny"), torch.randint(256, (1, 12))
    reader = AttentionReader(lm)
    with torch.no_grad(), reader.reading():
        lm(tokens)
    embedded = lm.embedded(tokens).abs().max().item()
    assert len(reader.max_hidden()) == len(lm.layers)
    assert all(most >= embedded for most in reader.max_hidden())
