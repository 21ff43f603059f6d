"""What every residual form owes: the contracts of zoo.check over the plans of all forms; and what is one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.build import D_MODEL, VOCAB, by_case, hold, recipe, required
from tests.recipes_by_hand import undone, write
from tests.tolerances import FORWARD, assert_close
from zoo.check import find, learning, parts, plan, residuals, stacks
from zoo.check.contract import Broken, Contract
from zoo.nn.residual.mhc import sinkhorn
from zoo.registry import RESIDUALS, RecipeError
from zoo.train import parameter_groups

STEPS = [step for key in RESIDUALS.names() for step in plan.residual_plan(key)]


@pytest.mark.parametrize(("case", "contracts"), by_case(STEPS, residuals, parts, stacks, learning))
def test_contracts(case: Any, contracts: list[Contract[Any]]) -> None:
    hold(case, contracts)


def stack_with(residual: Any, **more: Any) -> dict[str, Any]:
    """Three layers of attention with a gate in `post`, all in the form."""
    block = {**required("attention").block, "residual": residual}
    return recipe(required("attention"), 3, blocks={"a": block}, **more)


LEARNT = {"name": "mhc", "options": {"collapse": "learned"}}


def test_what_decays_is_the_matrix_of_hyper_connections() -> None:
    """Pseudo-queries, norms, biases and scales are vectors."""
    for residual, decaying in ((LEARNT, {"coefficients.fn", "head.fn"}), ("attn_res", set()), ("sandwich", set())):
        lm = zoo.load(stack_with(residual), device="meta")
        names = {parameter: name for name, parameter in lm.named_parameters()}
        groups = {group["name"]: {names[one] for one in group["params"]} for group in parameter_groups(lm)}
        own = {name for name in groups["matrices"] if "residual" in name or "streams" in name}
        assert {".".join(name.split(".")[-2:]) for name in own} == decaying
        assert len(own) == (7 if decaying else 0)


def test_hyper_connections_stay_float32() -> None:
    lm = zoo.load(stack_with(LEARNT)).to(torch.bfloat16)
    again = zoo.load(stack_with(LEARNT))
    again.load_state_dict({key: value.bfloat16() for key, value in lm.state_dict().items()}, assign=True)
    for model in (lm, again):
        kept = {name for name, one in model.named_parameters() if one.dtype == torch.float32}
        assert kept == {name for name, _ in model.named_parameters() if "coefficients" in name or "streams" in name}
    assert lm.layers[0].mixer_residual.norm.weight.dtype == torch.bfloat16


def test_starts() -> None:
    """AttnRes: every read the mean of its sources. mHC: fn N(0, 0.02²) whatever `init_std` says, base 0, scale 1."""
    lm = zoo.load(stack_with("attn_res", init_std=0.5))
    sources = [torch.randn(2, 3, D_MODEL) for _ in range(3)]
    assert_close(lm.layers[1].ffn_residual.read(sources), sum(sources) / 3, FORWARD[torch.float32])
    lm = zoo.load(stack_with(LEARNT, init_std=0.5))
    for one in (lm.layers[2].mixer_residual.coefficients, lm.streams.head):
        assert one.fn.std().item() == pytest.approx(0.02, rel=0.1)
        assert not one.base.any()
        assert torch.equal(one.scale, torch.ones_like(one.scale))


def test_mixing_is_doubly_stochastic() -> None:
    """So the mean of the streams only changes by what sublayers give."""
    residual = residuals.ResidualCase("", RESIDUALS.get("mhc")).redrawn().residuals[0]
    x = torch.randn(2, 3, 4, residuals.D, dtype=torch.float64)
    y = residual(x, torch.zeros_like)
    assert_close(y.mean(dim=2), x.mean(dim=2), 1e-3)
    assert (y - x).abs().max() > 0.1
    positive = torch.rand(5, 4, 4, dtype=torch.float64)
    assert_close(sinkhorn(positive, 200, 0.0).sum(dim=-1), torch.ones(5, 4, dtype=torch.float64), 1e-9)


def test_only_the_first_read_has_no_parameters() -> None:
    """2D a read and D a norm: Kimi K3's 93 layers of width 7168 have (6 · 93 + 2 - 2) · 7168 in all of this."""
    lm = zoo.load(stack_with("attn_res"), device="meta")
    own = {name: one for name, one in lm.named_parameters() if "residual" in name or "streams" in name}
    assert sum(one.numel() for one in own.values()) == (6 * 3 + 2 - 2) * D_MODEL
    assert {name for name in own if ".query" in name} == {
        "streams.read.query",
        "layers.0.ffn_residual.read.query",
        *(f"layers.{layer}.{part}_residual.read.query" for layer in (1, 2) for part in ("mixer", "ffn")),
    }


@pytest.mark.parametrize(
    ("set_", "told"),
    [
        (["blocks.b.residual=mhc"], "blocks.b.residual: 'mhc' works on another stream than 'pre_norm' in a.residual"),
        (["blocks.b.ffn_residual=attn_res"], "blocks.b.ffn_residual: 'attn_res' works on another stream than 'pre"),
        (
            ["blocks.a.residual=mhc", "blocks.b.residual={name: mhc, options: {n_streams: 3}}"],
            "blocks.b.residual: 'mhc' works on another stream than 'mhc' in a.residual: all blocks need one, with",
        ),
        (["blocks.a.residual=attn_res", "blocks.b.residual=mhc"], "blocks.b.residual: 'mhc' works on another"),
    ],
)
def test_streams_do_not_mix(set_: list[str], told: str) -> None:
    block = required("attention").block
    two = recipe(required("attention"), 2, pattern=["a", "b"], blocks={"a": block, "b": block})
    with pytest.raises(RecipeError) as caught:
        zoo.load(two, set=set_)
    assert f"model.stack.{told}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_forms_of_one_stream_mix() -> None:
    """Those that work on the hidden state alone; and one written with its default and without."""
    block = required("attention").block
    two = recipe(required("attention"), 2, pattern=["a", "b"], blocks={"a": block, "b": block})
    written = "{name: mhc, options: {n_streams: 4}}"
    for forms in (["a.residual=scaled", "a.ffn_residual=sandwich"], ["a.residual=mhc", f"b.residual={written}"]):
        lm = zoo.load(two, set=[f"blocks.{form}" for form in forms])
        assert lm(torch.arange(5)[None]).shape == (1, 5, VOCAB)
    lm = zoo.load(two, set=["blocks.a.residual=scaled", "blocks.a.ffn_residual=sandwich"])
    kinds = [type(one).__name__ for one in (lm.layers[0].mixer_residual, lm.layers[0].ffn_residual)]
    assert kinds == ["Scaled", "Sandwich"]


FAULTS = {
    "each_token_alone": "x + f(self.norm(x.cumsum(1)))",
    "every_sublayer_counts": "x + 0 * f(self.norm(x))",
    "every_parameter_learns": "x + f(x)",
    "the_gradient_is_the_slope": "x + f(self.norm(x).detach())",
    "precisions": "(x + f(self.norm(x))).double()",
    "it_starts_sound": "x + f(self.norm(x) / x.norm())",
    "nothing": "x + f(self.norm(x))",
}
FORM = '''
from zoo.nn import RMSNorm
from zoo.nn.residual import Residual, register

@register("planted")
class Planted(Residual):
    """x' = x + f(norm(x)). The author, 2026."""

    def __init__(self, context):
        super().__init__(context)
        self.norm = RMSNorm(context.d_model, context.norm)

    def forward(self, x, f):
        return RESULT
'''


@pytest.mark.parametrize("broken", FAULTS)
def test_a_fault_is_found(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "planted.py", FORM.replace("RESULT", FAULTS[broken]))
    with undone(tmp_path):
        assert find("planted.py") == [("residuals", "planted")]
        (case,) = residuals.variants("planted")
        failed = set()
        for contract in residuals.CONTRACTS:
            try:
                contract(case)
            except Broken:
                failed.add(contract.name)
        names = [step.contract.name for step in plan.plan("residuals", "planted")]
    assert (broken in failed) if broken != "nothing" else not failed
    assert {"docstring", "each_token_alone", "cached_equals_full", "a_post_gate_at_zero_silences_the_mixer"} <= {*names}
