"""What a stack owes to training: gradients that are right and reach everything, in every precision."""

from __future__ import annotations

import copy
import io

import torch
from torch import Tensor, nn

from zoo import ops
from zoo.check.cases import VOCAB, Case, build, draw, gradients, recipe, sample, trained
from zoo.check.contract import Contract, Trial, contract
from zoo.check.parts import dead_rows, default_dtype, slope
from zoo.check.tolerances import BACKWARD, FORWARD
from zoo.gates import named_gates
from zoo.stack import Stack, load


@contract
def every_parameter_learns(case: Case, t: Trial) -> None:
    """every row of every matrix and every entry of every vector has a gradient: a head that is never read has none"""
    lm, tokens = build(case), sample(case)[0].clone()
    tokens[0, :VOCAB] = torch.arange(VOCAB)
    t.given(f"the loss of tokens [2, 67] with all {VOCAB} tokens of the vocabulary")
    parameters = trained(lm)
    grads = torch.autograd.grad(lm.loss(tokens)[0], list(parameters.values()), allow_unused=True)
    dead_rows(t, dict(zip(parameters, grads, strict=True)))


@contract
def nothing_is_frozen(case: Case, t: Trial) -> None:
    """training moves every parameter: none has requires_grad off"""
    frozen = [name for name, parameter in build(case).named_parameters() if not parameter.requires_grad]
    t.given("the parameters as they are built")
    t.hold(not frozen, f"{', '.join(frozen)} with requires_grad off", "parameters that learn")


@contract
def the_gradient_is_the_slope(case: Case, t: Trial) -> None:
    """the backward agrees with differences of the forward, in float64, over packed documents"""
    lm, tokens, bounds = copy.deepcopy(build(case)), draw(1, 11), torch.tensor([0, 4, 11])
    weight = torch.randn(1, 11, VOCAB, dtype=torch.float64)
    t.given("documents of 4 and 7 tokens, packed, in one random direction of all parameters")
    slope(t, lambda: (lm(tokens, cu_seqlens=bounds) * weight).sum(), trained(lm))


@contract
def the_fast_paths_agree_with_the_recurrence(case: Case, t: Trial) -> None:
    """the default backends give what `reference` gives, logits and gradients, in float32"""
    lm = build(case, torch.float32)
    for length in (1, 63, 64, 65):
        tokens, weight = draw(2, length), torch.randn(2, length, VOCAB) / length
        t.given(f"tokens [2, {length}], float32")
        fast = lm(tokens)
        grads = gradients(lm, (fast * weight).sum())
        with ops.backend("reference"):
            slow = lm(tokens)
            wanted = gradients(lm, (slow * weight).sum())
        t.close(fast, slow, FORWARD[torch.float32], "logits")
        for parameter, want in wanted.items():
            t.close(grads[parameter], want, BACKWARD[torch.float32], f"the gradient of {parameter}")


@contract
def a_training_step_is_the_same_in_eval(case: Case, t: Trial) -> None:
    """finite gradients at any length, the same in train() and eval()"""
    lm = copy.deepcopy(build(case, torch.float32))
    for length in (1, 8, 65):
        tokens, labels = draw(2, length), draw(2, length)
        t.given(f"the loss of tokens [2, {length}], float32")
        grads = {}
        for mode in (True, False):
            lm.train(mode)
            grads[mode] = gradients(lm, lm.loss(tokens, labels)[0])
        for parameter, grad in grads[True].items():
            t.finite(grad, f"the gradient of {parameter}:")
            t.equal(grad, grads[False][parameter], f"the gradient of {parameter}", "the same in eval()")


@contract
def a_forward_changes_nothing_it_keeps(case: Case, t: Trial) -> None:
    """no parameter or buffer is moved by a loss, its backward, a cached call or generation"""
    lm, tokens = build(case), draw(2, 19)
    before = copy.deepcopy(lm.state_dict())
    t.given("loss and backward, a cached call, generate, on tokens [2, 19]")
    lm.loss(tokens)[0].backward()
    lm.zero_grad()
    lm(tokens, cache=lm.init_cache(2))
    lm.generate(tokens, 2)
    after = lm.state_dict()
    t.hold(list(after) == list(before), f"other entries of state_dict: {sorted(set(after) ^ set(before))}", "the same")
    for key, value in before.items():
        t.equal(after[key], value, key)


@contract
def bfloat16(case: Case, t: Trial) -> None:
    """cast, under autocast and built as bfloat16: finite, near float32; decays, losses and states in float32"""
    full, tokens = build(case, torch.float32), draw(2, 33)
    exact = full(tokens)
    for way in ("cast", "autocast", "default dtype"):
        lm = copy.deepcopy(full)
        t.given(f"tokens [2, 33], bfloat16 by {way}")
        if way == "default dtype":
            with default_dtype(torch.bfloat16):
                lm = load(recipe(case))
            lm.load_state_dict(full.state_dict())
        elif way == "cast":
            lm.to(torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            _check_low_precision(t, lm, tokens, exact)


def _check_low_precision(t: Trial, lm: Stack, tokens: Tensor, exact: Tensor) -> None:
    decays: list[Tensor] = []
    for name, gate in named_gates(lm).items():
        if gate.kind == "decay":
            for key, own in gate.named_parameters(recurse=False):
                t.hold(own.dtype == torch.float32, f"{name}.{key} in {own.dtype}", "float32")
            gate.register_forward_hook(lambda module, args, given: decays.append(given.log_decay))
    logits = lm(tokens)
    loss, _ = lm.loss(tokens)
    cache = lm.init_cache(2)
    pieces = torch.cat([lm(piece, cache=cache) for piece in tokens.split([30, 1, 2], dim=1)], dim=1)
    t.hold(logits.dtype == torch.bfloat16, f"logits in {logits.dtype}", "bfloat16")
    t.hold(loss.dtype == torch.float32, f"a loss in {loss.dtype}", "float32")
    for decay in decays:
        t.hold(decay.dtype == torch.float32, f"log_decay in {decay.dtype}", "float32")
    for layer in cache.layers:
        state = layer.states.get("state")
        t.hold(state is None or state.dtype == torch.float32, "a state in lower precision", "a float32 state")
    for got, what in ((logits, "logits"), (pieces, "logits of a cached run")):
        t.finite(got, what)
        apart, size = (got.float() - exact).square().mean().sqrt().item(), exact.std().item()
        t.hold(apart <= 0.1 * size, f"{what} off by {apart:.3g} (of {size:.3g})", "at most a tenth")
    for parameter, grad in gradients(lm, loss).items():
        t.finite(grad, f"the gradient of {parameter}:")


@contract
@torch.no_grad()
def weights_survive_a_file(case: Case, t: Trial) -> None:
    """saved and loaded, a model gives the same and keeps its dtypes, in float32 and bfloat16"""
    tokens = draw(1, 9)
    for dtype in (torch.float32, torch.bfloat16):
        t.given(f"torch.save, torch.load, tokens [1, 9], {dtype}")
        lm = copy.deepcopy(build(case, torch.float32)).to(dtype)
        file = io.BytesIO()
        torch.save(lm.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        again = load(recipe(case)).to(dtype)
        again.load_state_dict(saved)
        t.equal(again(tokens), lm(tokens), "logits")
        for key, value in again.state_dict().items():
            t.hold(value.dtype == saved[key].dtype, f"{key} in {value.dtype}", f"{saved[key].dtype}")


@contract
def only_projections_decay(case: Case, t: Trial) -> None:
    """`no_decay` names parameters that exist: with it, weight decay reaches matrices of projections only"""
    for path, module in build(case).named_modules():
        own = set(dict(module.named_parameters(recurse=False)))
        exempt = set(getattr(module, "no_decay", ()))
        t.given(f"{path or 'the stack'}, a {type(module).__name__}")
        t.hold(exempt <= own, f"no_decay names {sorted(exempt - own)}", f"parameters of its own: {sorted(own)}")
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            other = own - exempt - set(getattr(module, "projections", ()))
            t.hold(not other, f"{sorted(other)} would decay", f"no_decay = {tuple(sorted(other))}")


CONTRACTS: list[Contract[Case]] = [every_parameter_learns, the_gradient_is_the_slope]
"""For every case."""

OF_A_MIXER: list[Contract[Case]] = [
    nothing_is_frozen,
    only_projections_decay,
    the_fast_paths_agree_with_the_recurrence,
    a_training_step_is_the_same_in_eval,
    a_forward_changes_nothing_it_keeps,
    bfloat16,
    weights_survive_a_file,
]
"""For a mixer bare and full."""

ALL = [*CONTRACTS, *OF_A_MIXER]
