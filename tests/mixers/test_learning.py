"""What every mixer owes to training: gradients that are right and reach everything, in every precision."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.build import EXTREMES, STACKS, VOCAB, draw, gradients, stack
from tests.tolerances import BACKWARD, FORWARD, assert_close
from zoo.gates import named_gates

every_stack = pytest.mark.parametrize("name", STACKS)
extreme_stacks = pytest.mark.parametrize("name", EXTREMES)


@every_stack
def test_every_parameter_learns(name: str) -> None:
    """Every row of every matrix, every entry of every vector: a head that is never read has no gradient."""
    lm, tokens = stack(name), draw(2, 67)
    tokens[0, :VOCAB] = torch.arange(VOCAB)
    loss, _ = lm.loss(tokens)
    for layer in lm.layers:
        frozen = [parameter for parameter, own in layer.named_parameters() if not own.requires_grad]
        assert not frozen or "every_parameter_learns" in layer.mixer.exempt, f"frozen without a reason: {frozen}"
    for parameter, grad in gradients(lm, loss).items():
        dead = (grad == 0).flatten(1).all(1) if grad.ndim > 1 else grad == 0
        assert not dead.any(), f"{parameter}: no gradient in {dead.nonzero().flatten().tolist()}"


@every_stack
def test_the_gradient_is_the_slope(name: str) -> None:
    """Central differences in float64 along one random direction through all parameters, over packed documents."""
    lm, tokens, bounds = copy.deepcopy(stack(name)), draw(1, 11), torch.tensor([0, 4, 11])
    weight = torch.randn(1, 11, VOCAB, dtype=torch.float64)

    def value() -> Tensor:
        return (lm(tokens, cu_seqlens=bounds) * weight).sum()

    grads = gradients(lm, value())
    direction = {parameter: torch.randn_like(grad) for parameter, grad in grads.items()}
    expected = sum((grads[parameter] * step).sum() for parameter, step in direction.items())
    ends = []
    with torch.no_grad():
        for size in (3e-7, -6e-7):
            for parameter, step in direction.items():
                lm.get_parameter(parameter).add_(step, alpha=size)
            ends.append(value())
    assert ((ends[0] - ends[1]) / 6e-7).item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-5)


@extreme_stacks
@pytest.mark.parametrize("length", [1, 63, 64, 65])
def test_the_fast_paths_agree_with_the_recurrence(name: str, length: int) -> None:
    """Outputs and gradients. The default backends are held to `reference` through the whole stack."""
    lm, tokens = stack(name, torch.float32), draw(2, length)
    weight = torch.randn(2, length, VOCAB) / length
    fast = lm(tokens)
    grads = gradients(lm, (fast * weight).sum())
    with zoo.ops.backend("reference"):
        slow = lm(tokens)
        wanted = gradients(lm, (slow * weight).sum())
    assert_close(fast, slow, FORWARD[torch.float32])
    for parameter, want in wanted.items():
        assert_close(grads[parameter], want, BACKWARD[torch.float32], parameter)


@extreme_stacks
@pytest.mark.parametrize("length", [1, 8, 64, 65])
def test_a_training_step_changes_all_and_is_the_same_in_eval(name: str, length: int) -> None:
    lm = copy.deepcopy(stack(name, torch.float32))
    tokens, labels = draw(2, length), draw(2, length)
    grads = {}
    for mode in (True, False):
        lm.train(mode)
        grads[mode] = gradients(lm, lm.loss(tokens, labels)[0])
    for parameter, grad in grads[True].items():
        assert torch.isfinite(grad).all(), parameter
        assert torch.equal(grad, grads[False][parameter]), parameter


@extreme_stacks
def test_a_forward_changes_nothing_it_keeps(name: str) -> None:
    lm, tokens = stack(name), draw(2, 19)
    before = copy.deepcopy(lm.state_dict())
    lm.loss(tokens)[0].backward()
    lm.zero_grad()
    lm(tokens, cache=lm.init_cache(2))
    lm.generate(tokens, 2)
    after = lm.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)


@extreme_stacks
@pytest.mark.parametrize("way", ["cast", "autocast", "default dtype"])
def test_bfloat16(name: str, way: str) -> None:
    """Finite, near the full-precision model, with decays, losses and states in float32."""
    lm, tokens = copy.deepcopy(stack(name, torch.float32)), draw(2, 33)
    exact = lm(tokens)
    if way == "default dtype":
        torch.set_default_dtype(torch.bfloat16)
        try:
            low = zoo.load(STACKS[name])
        finally:
            torch.set_default_dtype(torch.float32)
        low.load_state_dict(lm.state_dict())
        lm = low
    elif way == "cast":
        lm.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        decays = []
        for gate in named_gates(lm).values():
            if gate.kind == "decay":
                assert all(own.dtype == torch.float32 for own in gate.parameters(recurse=False))
                gate.register_forward_hook(lambda module, args, given: decays.append(given.log_decay))
        logits = lm(tokens)
        loss, _ = lm.loss(tokens)
        cache = lm.init_cache(2)
        pieces = torch.cat([lm(piece, cache=cache) for piece in tokens.split([30, 1, 2], dim=1)], dim=1)
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert all(decay.dtype == torch.float32 for decay in decays)
    assert all(layer.states["state"].dtype == torch.float32 for layer in cache.layers if "state" in layer.states)
    for got in (logits, pieces):
        assert torch.isfinite(got).all()
        assert (got.float() - exact).square().mean().sqrt() <= 0.05 * exact.std()
    assert all(torch.isfinite(grad).all() for grad in gradients(lm, loss).values())


@extreme_stacks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_survive_a_file(name: str, dtype: torch.dtype) -> None:
    lm, tokens = copy.deepcopy(stack(name, torch.float32)).to(dtype), draw(1, 9)
    file = io.BytesIO()
    torch.save(lm.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = zoo.load(STACKS[name]).to(dtype)
    again.load_state_dict(saved)
    assert torch.equal(again(tokens), lm(tokens))
    assert {key: value.dtype for key, value in again.state_dict().items()} == {k: v.dtype for k, v in saved.items()}


@extreme_stacks
def test_no_decay_names_parameters_that_exist(name: str) -> None:
    """A module's exceptions from weight decay: with them, only projections' matrices are left."""
    for path, module in stack(name).named_modules():
        own = dict(module.named_parameters(recurse=False))
        exempt = getattr(module, "no_decay", ())
        assert set(exempt) <= set(own), path
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            assert set(own) <= set(exempt), f"{path}: declare {set(own) - set(exempt)} in no_decay"
