"""Routers: what moves a selection bias, and the table of `hash`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zoo.check.routers import layout_of
from zoo.decode import decode_options
from zoo.registry import ROUTERS
from zoo.routers import best
from zoo.shapes import LayerContext

D, E, K = 16, 8, 2


def build(name: str, layer: int = 0, **options: Any) -> Any:
    cls = ROUTERS.get(name)
    router = cls(LayerContext(D, layer=layer), E, K, **decode_options(cls, options, name))
    torch.manual_seed(0)
    torch.nn.init.normal_(router.proj.weight, std=0.3)
    return router


def skewed(n: int) -> torch.Tensor:
    """Hidden states with a direction that they share, so that some experts are busy and others idle."""
    return torch.randn(n, D) + 2 * torch.linspace(-1, 1, D)


def step(router: Any, x: torch.Tensor, parts: int = 1) -> torch.Tensor:
    """The loads of a step over x in so many calls, and the update after it."""
    seen = 0
    for part in x.chunk(parts):
        layout = layout_of(torch.zeros(len(part), dtype=torch.int64))
        router(part, layout)
        seen = seen + layout.ledger.statistics[0]
    router.update(seen)
    return seen[:, 0]


def test_the_sign_rule() -> None:
    router = build("sigmoid", update_rate=0.125)
    loads = step(router, skewed(100))
    assert loads.sum() == 100 * K
    assert torch.equal(router.selection_bias, 0.125 * (loads.double().mean() - loads).sign().float())


@pytest.mark.parametrize(("options", "steps"), [({"update_rate": 0.01}, 100), ({"balance": "quantile"}, 9)])
def test_loads_become_even(options: dict[str, Any], steps: int) -> None:
    router = build("sigmoid", **options)
    first = step(router, skewed(4000))
    for _ in range(steps):
        last = step(router, skewed(4000))
    assert first.max() > 2.5 * first.float().mean()
    assert last.max() < 1.25 * last.float().mean()
    assert last.min() > 0.75 * last.float().mean()


def test_a_quantile_update_hits_the_share_by_the_bar_of_these_tokens() -> None:
    """Kimi K3, eq. 13-14: with the new bias, K / E of the tokens would pass the bar where it stood."""
    router, x = build("sigmoid", balance="quantile"), skewed(4000)
    with torch.no_grad():
        router.selection_bias.copy_(0.1 * torch.randn(E))
        router.selection_bias -= router.selection_bias.mean()
    scores = (x @ router.proj.weight.T).sigmoid().detach()
    bar = (scores + router.selection_bias).sort(-1, descending=True).values[:, K, None]
    want = -torch.quantile(scores - bar, 1 - K / E, dim=0)
    step(router, x)
    assert (router.selection_bias - (want - want.mean())).abs().max() < 2e-3, "within a bin"
    assert router.selection_bias.mean().abs() < 1e-6


@pytest.mark.parametrize("balance", ["bias", "quantile"])
def test_micro_batches_make_the_update_of_one_batch(balance: str) -> None:
    x = skewed(90)
    one, three = (build("sigmoid", balance=balance) for _ in range(2))
    step(one, x)
    step(three, x, 3)
    assert one.selection_bias.any()
    assert torch.equal(one.selection_bias, three.selection_bias)


def test_a_bias_chooses_and_does_not_weigh() -> None:
    router = build("sigmoid")
    with torch.no_grad():
        router.selection_bias[3] = 10.0
    routes = router(skewed(9), layout_of(torch.zeros(9, dtype=torch.int64)))
    assert (routes.experts == 3).any(-1).all()
    assert routes.weights.sum(-1).allclose(torch.ones(9))


def test_best_is_a_stable_sort() -> None:
    scores = torch.randint(-3, 3, (200, 9)).float()
    scores[scores == 0] *= -1  # -0.0
    scores[::2] = 0.0 * scores[::2]
    for k in (1, 4, 9):
        for dtype in (torch.float32, torch.float64):
            want = scores.to(dtype).sort(dim=-1, descending=True, stable=True).indices[:, :k]
            assert torch.equal(best(scores.to(dtype), k), want)
    extremes = torch.tensor([[-torch.inf, 1e-45, torch.inf, -1e-45, 3e38, -3e38]])
    assert best(extremes, 6).tolist() == [[2, 4, 1, 3, 5, 0]]


def test_a_fresh_table_is_even_and_another_in_each_layer() -> None:
    tables = [build("hash", layer, vocab_size=4000).table for layer in (0, 1)]
    for table in tables:
        loads = table.flatten().bincount(minlength=E)
        assert loads.max() < 1.15 * loads.float().mean()
        assert (table[:, 0] != table[:, 1]).all()
    assert (tables[0] == tables[1]).float().mean() < 0.25
    assert torch.equal(tables[0], build("hash", 0, vocab_size=4000).table), "the same in every process"


def test_hash_needs_tokens_of_its_table() -> None:
    router, x = build("hash", vocab_size=5), torch.randn(2, D)
    with pytest.raises(ValueError, match="token 5, and the table has vocab_size 5 rows"):
        router(x, layout_of(torch.tensor([1, 5])))
    layout = layout_of(torch.tensor([1, 4]))
    layout.tokens = None
    with pytest.raises(ValueError, match="routes by token ids"):
        router(x, layout)


def test_the_numbers_stay_float32() -> None:
    for router in (build("sigmoid").bfloat16(), build("hash", vocab_size=5).bfloat16()):
        for name, buffer in router.named_buffers():
            assert buffer.dtype in (torch.float32, torch.int64), name
        assert router.proj.weight.dtype == torch.bfloat16
