"""nsa: the reference against the definition written out query by query and against fla's, the fast path against the
reference in outputs and gradients, and that its work and memory grow as the method promises."""

from __future__ import annotations

import importlib.util
import math
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.tolerances import BACKWARD, FORWARD, assert_close
from zoo.ops import Blocks, _nsa_blockwise, nsa

NAMES = ("q", "k_cmp", "v_cmp", "k", "v")
BACKENDS = ("torch", "reference")
SMALL = Blocks(compress_block=8, compress_stride=4, select_block=8, n_selected=4)
GEOMETRIES = {
    "small": SMALL,
    "no overlap": Blocks(compress_block=4, compress_stride=4, select_block=4, n_selected=3),
    "threefold overlap": Blocks(compress_block=12, compress_stride=4, select_block=8, n_selected=5),
    "wider entries than blocks": Blocks(compress_block=8, compress_stride=2, select_block=4, n_selected=4),
    "one token": Blocks(compress_block=1, compress_stride=1, select_block=1, n_selected=3),
    "the paper's": Blocks(),
}
every_geometry = pytest.mark.parametrize("geometry", GEOMETRIES)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def inputs(
    queries: int,
    keys: int | None = None,
    blocks: Blocks = SMALL,
    *,
    documents: list[int] | None = None,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 8,
    values: int = 6,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> list[Tensor]:
    """q, k_cmp, v_cmp, k, v; `documents` are the lengths of packed ones in k."""
    keys = queries if keys is None else keys
    entries = sum(blocks.complete(length) for length in documents or [keys])
    shapes = [(queries, heads, width), (entries, kv_heads, width), (entries, kv_heads, values)]
    shapes += [(keys, kv_heads, width), (keys, kv_heads, values)]
    return [torch.randn(batch, *s, dtype=dtype, device=device, requires_grad=True) for s in shapes]


def by_hand(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k: Tensor, v: Tensor, blocks: Blocks
) -> tuple[Tensor, Tensor, list[list[int]]]:
    """One document, one query head and key head at a time, with eq. 9 as it is printed, counted from 1; and the blocks
    that each query selects."""
    heads, width, length = q.shape[2], q.shape[3], k.shape[1]
    block, stride, size = blocks.compress_block, blocks.compress_stride, blocks.select_block
    o_cmp, o_slc = (torch.zeros(*q.shape[:3], v.shape[3], dtype=v.dtype) for _ in range(2))
    selections = []
    for i in range(q.shape[1]):
        t = length - q.shape[1] + i
        seen = [c for c in range(k_cmp.shape[1]) if c * stride + block <= t + 1]
        p_slc = dict.fromkeys(range(1, t // size + 2), 0.0)
        for h in range(heads):
            if seen:
                p = torch.softmax(k_cmp[0, seen, 0] @ q[0, i, h] / math.sqrt(width), dim=0)
                o_cmp[0, i, h] = p @ v_cmp[0, seen, 0]
                p_cmp = {c + 1: p[n].item() for n, c in enumerate(seen)}
                for j in p_slc:
                    for m in range(size // stride):
                        for n in range(block // stride):
                            p_slc[j] += p_cmp.get(size // stride * j - m - n, 0.0)
        own = t // size + 1
        fixed = [j for j in p_slc if j in (1, own - 1, own)]
        rest = sorted((j for j in p_slc if j not in fixed), key=lambda j: (-p_slc[j], j))
        chosen = sorted(fixed + rest[: blocks.n_selected - len(fixed)])
        tokens = [s for j in chosen for s in range((j - 1) * size, j * size) if s <= t]
        for h in range(heads):
            p = torch.softmax(k[0, tokens, 0] @ q[0, i, h] / math.sqrt(width), dim=0)
            o_slc[0, i, h] = p @ v[0, tokens, 0]
        selections.append([j - 1 for j in chosen])
    return o_cmp, o_slc, selections


def run(ins: list[Tensor], blocks: Blocks, weights: list[Tensor] | None = None, **how: Any) -> dict[str, Tensor]:
    """Outputs, and the gradients of a fixed random linear function of both."""
    outputs = nsa(*ins, blocks, **how)
    noise = torch.Generator().manual_seed(1)
    weights = [torch.randn(o.shape, generator=noise, dtype=torch.float64).to(o.dtype) for o in outputs]
    grads = torch.autograd.grad(sum((w * o).sum() for w, o in zip(weights, outputs, strict=True)), ins)
    named = {f"grad of {name}": grad for name, grad in zip(NAMES, grads, strict=True)}
    return {"o_cmp": outputs[0].detach(), "o_slc": outputs[1].detach(), **named}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> None:
    for name, value in want.items():
        assert_close(got[name].to(value.dtype), value, (BACKWARD if "grad" in name else FORWARD)[dtype], name)


# ---- what it computes


@every_backend
@every_geometry
@torch.no_grad()
def test_is_the_definition(geometry: str, backend: str) -> None:
    blocks = GEOMETRIES[geometry]
    for queries, keys in ((1, 1), (40, 40), (3, 77)):
        ins = inputs(queries, keys, blocks, batch=1, heads=2, kv_heads=1)
        o_cmp, o_slc, _ = by_hand(*ins, blocks)
        got = nsa(*ins, blocks, backend=backend)
        assert_close(got[0], o_cmp, 1e-12, "o_cmp")
        assert_close(got[1], o_slc, 1e-12, "o_slc")


def shares(blocks: Blocks, backend: str, q: Tensor, k_cmp: Tensor, keys: int) -> Tensor:
    """What share of its attention each query gives to each block, [Tq,blocks], all keys being alike."""
    n_blocks = -(-keys // blocks.select_block)
    v = torch.eye(n_blocks, dtype=q.dtype)[torch.arange(keys) // blocks.select_block][None, :, None]
    k = torch.zeros(1, keys, 1, q.shape[3], dtype=q.dtype)
    return nsa(q, k_cmp, torch.zeros(*k_cmp.shape[:3], n_blocks, dtype=q.dtype), k, v, blocks, backend=backend)[1][
        0
    ].mean(1)


@every_backend
def test_ties_go_to_the_earliest_for_chunk_and_decode(backend: str) -> None:
    """A query of zeros looks at all entries alike: of blocks of one importance the first are taken."""
    blocks, keys = Blocks(compress_block=4, compress_stride=4, select_block=8, n_selected=5), 96
    k_cmp = torch.randn(1, blocks.complete(keys), 1, 8, dtype=torch.float64)
    q = torch.zeros(1, keys, 2, 8, dtype=torch.float64)
    whole = shares(blocks, backend, q, k_cmp, keys)
    assert whole[-1].nonzero().flatten().tolist() == [0, 1, 2, 10, 11]
    assert whole[60].nonzero().flatten().tolist() == [0, 1, 2, 6, 7]
    for t in (60, 95):
        alone = shares(blocks, backend, q[:, t : t + 1], k_cmp[:, : blocks.complete(t + 1)], t + 1)
        assert torch.equal(alone[0] > 0, whole[t, : alone.shape[1]] > 0)


@every_backend
def test_a_group_of_heads_selects_together(backend: str) -> None:
    """One head looks at block 3 with all it has, the other hardly prefers block 5: summed, 3 wins for both; alone, the
    other goes its way."""
    blocks, keys = Blocks(compress_block=8, compress_stride=8, select_block=8, n_selected=4), 80
    k_cmp = torch.zeros(1, 10, 1, 2, dtype=torch.float64)
    k_cmp[0, 3, 0, 0], k_cmp[0, 5, 0, 1] = 1, 1
    q = torch.tensor([[20.0, 0.0], [0.0, 1.0]], dtype=torch.float64)[None, None]
    assert shares(blocks, backend, q, k_cmp, keys)[0].nonzero().flatten().tolist() == [0, 3, 8, 9]
    assert shares(blocks, backend, q[:, :, 1:], k_cmp, keys)[0].nonzero().flatten().tolist() == [0, 5, 8, 9]


@every_backend
def test_selection_has_no_gradient(backend: str) -> None:
    ins = inputs(70)
    grads = torch.autograd.grad(nsa(*ins, SMALL, backend=backend)[1].sum(), ins, allow_unused=True)
    for name, grad in zip(NAMES, grads, strict=True):
        assert (grad is None or not grad.any()) == name.endswith("_cmp"), name


@every_backend
def test_causal(backend: str) -> None:
    ins = [x.detach() for x in inputs(70)]
    before = nsa(*ins, SMALL, backend=backend)
    at = 41
    for name, x in zip(NAMES, ins, strict=True):
        x[:, SMALL.complete(at) if name.endswith("_cmp") else at :] += 1
    after = nsa(*ins, SMALL, backend=backend)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:, :at], b[:, :at])
        assert (a[:, at:] - b[:, at:]).abs().amax((0, 2, 3)).min() > 1e-3


# ---- the fast path


@every_geometry
@pytest.mark.parametrize("length", [1, 7, 8, 63, 64, 65, 130])
def test_fast_is_reference(geometry: str, length: int) -> None:
    blocks = GEOMETRIES[geometry]
    ins = inputs(length, blocks=blocks)
    assert_same(run(ins, blocks), run(ins, blocks, backend="reference"))


@every_geometry
@pytest.mark.parametrize(("queries", "keys"), [(1, 5), (1, 77), (3, 70), (65, 66), (64, 200)])
def test_a_chunk_sees_the_cache_before_it(geometry: str, queries: int, keys: int) -> None:
    blocks = GEOMETRIES[geometry]
    ins = inputs(queries, keys, blocks)
    assert_same(run(ins, blocks), run(ins, blocks, backend="reference"))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1), (130, 1)])
def test_groups(heads: int, kv_heads: int) -> None:
    ins = inputs(50, heads=heads, kv_heads=kv_heads)
    assert_same(run(ins, SMALL), run(ins, SMALL, backend="reference"))


@pytest.mark.parametrize("length", [100, 333])
def test_many_stretches_of_queries(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_nsa_blockwise, "SCORES", 1)
    ins = inputs(length)
    assert_same(run(ins, SMALL), run(ins, SMALL, backend="reference"))


def test_float32() -> None:
    ins = inputs(200, dtype=torch.float32)
    assert_same(run(ins, SMALL), run(ins, SMALL, backend="reference"), torch.float32)


@every_backend
def test_bfloat16_is_computed_in_float32(backend: str) -> None:
    ins = inputs(70, dtype=torch.bfloat16)
    wide = [x.detach().float().requires_grad_() for x in ins]
    want = run(wide, SMALL, backend=backend)
    got = run(ins, SMALL, backend=backend)
    assert got["o_slc"].dtype == torch.bfloat16
    assert_same(got, want, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        o_cmp, o_slc = nsa(*wide, SMALL, backend=backend)
    assert torch.equal(o_cmp, want["o_cmp"])
    assert torch.equal(o_slc, want["o_slc"])


def test_gradients_are_slopes() -> None:
    ins = inputs(18, batch=1, heads=2, kv_heads=1, width=2, values=1)
    assert torch.autograd.gradcheck(lambda *x: nsa(*x, SMALL), ins)


@every_backend
def test_scores_of_any_size_stay_finite(backend: str) -> None:
    q, *rest = inputs(70, dtype=torch.float32)
    assert all(torch.isfinite(x).all() for x in run([1e3 * q, *rest], SMALL, backend=backend).values())


# ---- packing


@every_backend
def test_packed_is_separate(backend: str) -> None:
    lengths, carried = [5, 1, 40, 3, 30], [0, 12, 7, 50, 0]
    keys = [a + b for a, b in zip(lengths, carried, strict=True)]
    ins = inputs(sum(lengths), sum(keys), documents=keys, batch=1)
    cu, cu_k = (torch.tensor([0, *x]).cumsum(0) for x in (lengths, keys))
    got = nsa(*ins, SMALL, cu_seqlens=cu, cu_seqlens_k=cu_k.int(), backend=backend)
    entries = [SMALL.complete(length) for length in keys]
    pieces = [x.split(s, 1) for x, s in zip(ins, [lengths, entries, entries, keys, keys], strict=True)]
    for n, document in enumerate(zip(*pieces, strict=True)):
        want = nsa(*document, SMALL, backend=backend)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a[:, cu[n] : cu[n + 1]], b)
    grads = torch.autograd.grad(sum(o[:, cu[2] : cu[3]].square().sum() for o in got), ins)
    for grad, sizes in zip(grads, [lengths, entries, entries, keys, keys], strict=True):
        assert [part.any().item() for part in grad.split(sizes, 1)] == [n == 2 for n in range(5)]


# ---- what it costs


class Largest(TorchDispatchMode):
    """The largest tensor that any operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            self.numbers = max(self.numbers, x.numel() if isinstance(x, Tensor) else 0)
        return out


def test_work_and_memory_grow_as_the_method_promises() -> None:
    """Counted, forward and backward, on tensors that hold nothing. Dense attention takes 16 times the work."""
    work, memory = {}, {}
    for length in (2048, 8192, 16384):
        ins = inputs(
            length,
            blocks=Blocks(),
            batch=1,
            heads=4,
            kv_heads=1,
            width=64,
            values=64,
            dtype=torch.float32,
            device="meta",
        )
        with FlopCounterMode(display=False) as flops, Largest() as largest:
            sum(o.sum() for o in nsa(*ins, Blocks())).backward()
        work[length], memory[length] = flops.get_total_flops(), largest.numbers
    assert work[8192] <= 6 * work[2048]
    assert memory[16384] <= 2 * memory[8192]
    assert memory[16384] < 16384**2 / 16
    dense = 16384**2 / 2 * 4 * 64 * 2 * 7  # a kernel that computes the half below the diagonal: 2 products, then 5
    assert work[16384] < dense / 2


@every_backend
def test_meta_tensors(backend: str) -> None:
    for queries, keys in ((1, 1), (1, 200), (70, 200)):
        ins = [x.detach().to("meta").requires_grad_() for x in inputs(queries, keys)]
        outputs = nsa(*ins, SMALL, backend=backend)
        assert [tuple(o.shape) for o in outputs] == [(2, queries, 4, 6)] * 2
        grads = torch.autograd.grad(sum(o.sum() for o in outputs), ins)
        assert [g.shape for g in grads] == [x.shape for x in ins]


# ---- fla


def fla_naive() -> ModuleType:
    """fla's plain torch file, loaded alone; what it imports beside torch wants Triton, so that stands in here."""
    pytest.importorskip("einops")
    fla = importlib.util.find_spec("fla")
    if fla is None or not fla.submodule_search_locations:
        pytest.skip("fla is not installed")
    path = Path(fla.submodule_search_locations[0], "ops", "nsa", "naive.py")
    source = path.read_text(encoding="utf-8")
    wanted = "from fla.ops.utils import prepare_chunk_offsets\nfrom fla.ops.utils.pooling import mean_pooling\n"
    assert wanted in source
    module = ModuleType("naive_nsa")
    module.__dict__["mean_pooling"] = pool
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that flash-attn is not installed
        exec(compile(source.replace(wanted, ""), str(path), "exec"), module.__dict__)
    return module


def pool(x: Tensor, size: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """[B,T,H,E] -> the means of blocks of `size`, that of the last over what there is of it."""
    assert cu_seqlens is None
    return torch.stack([piece.mean(1) for piece in x.split(size, 1)], dim=1)


@every_backend
@pytest.mark.parametrize(("length", "size", "count"), [(150, 8, 6), (64, 8, 16), (7, 8, 3), (300, 64, 3)])
def test_is_fla_for_means_and_shared_keys(length: int, size: int, count: int, backend: str) -> None:
    """fla pools the last block before it is complete but never shows it; its top-k does not say who wins a tie."""
    naive = fla_naive()
    blocks = Blocks(compress_block=size, compress_stride=size, select_block=size, n_selected=count)
    q = torch.randn(1, length, 32, 8, requires_grad=True)
    k, v = (torch.randn(1, length, 2, 8, requires_grad=True) for _ in range(2))
    gates = [torch.rand(1, length, 32) for _ in range(2)]
    want = naive.naive_nsa(q, k, v, *gates, block_counts=count, block_size=size)
    k_cmp, v_cmp = (pool(x[:, : length // size * size], size) if length >= size else x[:, :0] for x in (k, v))
    o_cmp, o_slc = nsa(q, k_cmp, v_cmp, k, v, blocks, backend=backend)
    got = o_cmp * gates[0][..., None] + o_slc * gates[1][..., None]
    assert_close(got, want, FORWARD[torch.float32])
    weights = torch.randn_like(want)
    for a, b in zip(*(torch.autograd.grad(o, [q, k, v], weights) for o in (got, want)), strict=True):
        assert_close(a, b, BACKWARD[torch.float32])


# ---- errors


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"compress_block": 0}, "compress_block: expected at least 1, found 0"),
        ({"compress_stride": 5}, "compress_stride: 5 does not divide compress_block 32"),
        ({"compress_stride": 64}, "compress_stride: 64 does not divide compress_block 32"),
        ({"select_block": 40}, "select_block: 40 is not a multiple of compress_stride 16"),
        ({"select_block": 8}, "select_block: 8 is not a multiple of compress_stride 16"),
        ({"n_selected": 2}, "n_selected: 2 blocks are fewer than those that are always selected"),
    ],
)
def test_sizes_that_cannot_be(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Blocks(**sizes)
    assert "\n" not in str(caught.value)


def test_arguments_that_do_not_fit() -> None:
    q, k_cmp, v_cmp, k, v = inputs(20, batch=1)
    with pytest.raises(ValueError, match=r"^nsa: k_cmp: expected shape \[1, 4, 2, 8\], got \[1, 3, 2, 8\]"):
        nsa(q, k_cmp[:, 1:], v_cmp, k, v, SMALL)
    with pytest.raises(ValueError, match="nsa: q: its 3 heads are not a multiple of the 2 heads of k"):
        nsa(q[:, :, :3], k_cmp, v_cmp, k, v, SMALL)
    with pytest.raises(ValueError, match="document 0 has 20 queries and 19 keys"):
        nsa(q, k_cmp, v_cmp, k[:, 1:], v[:, 1:], SMALL)
    with pytest.raises(ValueError, match="cu_seqlens_k needs cu_seqlens"):
        nsa(q, k_cmp, v_cmp, k, v, SMALL, cu_seqlens_k=torch.tensor([0, 20]))
    with pytest.raises(ValueError, match="do not fit 20 keys"):
        nsa(q, k_cmp, v_cmp, k, v, SMALL, cu_seqlens=torch.tensor([0, 9, 20]), cu_seqlens_k=torch.tensor([0, 20]))
    with pytest.raises(ValueError, match=r"v: expected shape \[1, 20, 2, 6\]"):
        nsa(q, k_cmp, v_cmp, k, v[:, 1:], SMALL)
