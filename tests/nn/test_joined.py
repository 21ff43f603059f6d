"""Linear maps of one input as one product: the same numbers, the same modules and hooks, and never an old weight."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zoo
from zoo.cache import _steps
from zoo.nn import Linear
from zoo.nn.joined import FEW, Joined


class Part(nn.Module):
    """Two maps of x, one of something else, one called with both."""

    def __init__(self, bias=False):
        super().__init__()
        self.a, self.b = nn.Linear(6, 5, bias=bias), nn.Linear(6, 3, bias=False)
        self.down = nn.Linear(8, 6, bias=False)

    def forward(self, x):
        y = self.down(torch.cat((self.a(x), self.b(x)), dim=-1))
        return y + F.pad(self.b(y), (0, 3))


def usual(part, x):
    """Part's formula, from its parameters."""
    a, b, down = part.a, part.b.weight, part.down.weight
    y = torch.cat((x @ a.weight.T + (0 if a.bias is None else a.bias), x @ b.T), dim=-1) @ down.T
    return y + F.pad(y @ b.T, (0, 3))


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_equals_the_usual_products(bias):
    part = Part(bias).double()
    joined = Joined(part)
    for rows in (1, 1, 2, FEW, FEW + 1, 1):
        x = torch.randn(rows, 1, 6, dtype=torch.float64)
        torch.testing.assert_close(joined(x), usual(part, x))
    assert joined.ahead is not None
    assert len(joined.shares) == 3
    assert "forward" not in part.a.__dict__


CHANGES = {
    "in place": lambda part: part.a.weight.mul_(2),
    "data": lambda part: setattr(part.down.weight, "data", part.down.weight.data * 2),
    "replaced": lambda part: setattr(part.b, "weight", nn.Parameter(part.b.weight * 2)),
    "bias": lambda part: part.a.bias.add_(1),
    "loaded": lambda part: part.load_state_dict({name: 3 * x for name, x in part.state_dict().items()}),
}


@pytest.mark.parametrize("change", list(CHANGES))
@torch.no_grad()
def test_a_changed_weight_counts_at_once(change):
    part, x = Part(bias=True).double(), torch.randn(1, 1, 6, dtype=torch.float64)
    joined = Joined(part)
    before = [joined(x) for _ in range(2)][-1]
    CHANGES[change](part)
    assert not torch.allclose(joined(x), before)
    torch.testing.assert_close(joined(x), usual(part, x))


@torch.no_grad()
def test_what_is_apart_leaves_the_others_as_they_are():
    part, x = Part(), torch.randn(1, 1, 6)
    part.b.apart = True
    joined = Joined(part)
    torch.testing.assert_close([joined(x), joined(x)], 2 * [usual(part, x)])
    assert joined.ahead is not None
    assert joined.ahead.linears == [part.a]


@torch.no_grad()
def test_hooks_run_and_nothing_stays_behind():
    part, x = Part(), torch.randn(1, 1, 6)
    joined = Joined(part)
    joined(x)
    seen = []
    part.a.register_forward_hook(lambda module, args, y: seen.append(y))
    joined(x)
    torch.testing.assert_close(seen[0], part.a(x))

    def fail(*args):
        raise KeyError("planted")

    part.down.register_forward_hook(fail)
    with pytest.raises(KeyError, match="planted"):
        joined(x)
    assert not any("forward" in module.__dict__ for module in part.modules())


def test_a_call_with_a_graph_is_left_alone():
    part, x = Part(), torch.randn(1, 1, 6)
    joined = Joined(part)
    joined(x).sum().backward()
    assert part.a.weight.grad is not None
    assert joined.ahead is None


def test_decoding_follows_the_optimizer_and_a_copied_cache_has_no_weights():
    torch.manual_seed(0)
    lm, tokens = zoo.load("qwen3_next/tiny").eval(), torch.randint(200, (1, 9))
    cache = lm.init_cache(1)
    for t in range(4):
        lm(tokens[:, t : t + 1], cache=cache)
    again = copy.deepcopy(cache)
    assert _steps.get(again.head) is None
    with torch.no_grad():
        for parameter in lm.head.parameters():
            parameter.mul_(-1)
        expected = lm(tokens[:, :5])[:, -1]
        for kept in (cache, again):
            torch.testing.assert_close(lm(tokens[:, 4:5], cache=kept)[:, -1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recipe", ["qwen3_next/tiny", "kimi_linear/tiny"])
@torch.no_grad()
def test_every_projection_of_a_model_is_among_them(recipe):
    lm = zoo.load(recipe).eval()
    cache = lm.init_cache(1)
    for _ in range(2):
        lm(torch.zeros(1, 1, dtype=torch.int64), cache=cache)
    memories = [memory for memory in cache.names("cache").values() if memory in _steps and memory is not cache]
    shared = {share.linear for memory in memories for share in _steps[memory].run.args[0].shares}
    kinds = {type(linear) for linear in shared}
    assert kinds == {Linear}
    for layer in lm.layers:
        missing = [name for name, part in layer.mixer.named_modules() if name.endswith("_proj") and part not in shared]
        assert [name for name in missing if not name.startswith("gates.")] == []
