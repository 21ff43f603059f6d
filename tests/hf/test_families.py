"""Every family both ways, on tiny random models: our logits, decoding and gradients are transformers'; what we write is
what we read, and transformers loads it.

Tolerance is a yardstick, since rounding noise varies a hundredfold between models; as a control token 0 moves the last
logits by 100 times that.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hf.cases import CASES, DERIVED, FIRST, FLA_CASES, PREFILL, another
from tests.hf.conftest import Answered
from zoo.hf.bound import bind_model
from zoo.hf.configuration import HARMLESS, REQUIRED
from zoo.hf.family import families, family_of
from zoo.hf.files import list_tensors, read_tensors
from zoo.hf.recipes import to_stack
from zoo.registry import RecipeError

every_case = pytest.mark.parametrize("name", CASES)


def tensors(folder: Path) -> dict[str, Tensor]:
    return dict(read_tensors(list_tensors(folder)))


def test_every_family_has_a_case() -> None:
    cases = (CASES | FLA_CASES).items()
    assert set(families()) == {family_of(case["model_type"], name).model_type for name, case in cases}


def test_every_family_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text(encoding="utf-8")
    for family in families().values():
        assert any(f"`{name}`" in page for name in (family.model_type, *family.also)), family.model_type


@every_case
@torch.no_grad()
def test_logits(answered: dict[str, Answered], name: str, record_property: Any) -> None:
    case = answered[name]
    difference = (case.model(case.answer["tokens"]) - case.answer["logits"]).abs().max().item()
    record_property("difference", difference)
    assert difference <= case.tolerance
    assert case.answer["moved"] > 100 * case.tolerance


@every_case
def test_decoding(answered: dict[str, Answered], name: str, record_property: Any) -> None:
    case = answered[name]
    tokens = case.answer["tokens"]
    cache = case.model.init_cache(len(tokens))
    chunks = tokens.split([PREFILL, *[1] * (tokens.shape[1] - PREFILL)], dim=1)
    logits = torch.cat([case.model(chunk, cache=cache) for chunk in chunks], dim=1)
    difference = (logits - case.answer["decoded"]).abs().max().item()
    record_property("difference", difference)
    assert difference <= case.tolerance


@every_case
def test_gradients(answered: dict[str, Answered], name: str) -> None:
    """Ours go through the same map as our weights, theirs through their own `save_pretrained`."""
    case = answered[name]
    lm = case.model
    gradients = {name: torch.zeros_like(parameter) for name, parameter in lm.named_parameters()}
    learnt_here = {name: parameter for name, parameter in lm.named_parameters() if parameter.requires_grad}
    loss = _cross_entropy(lm, case.answer["tokens"])
    gradients |= zip(learnt_here, torch.autograd.grad(loss, list(learnt_here.values())), strict=True)
    read = to_stack(json.loads((case.folder / "released" / "config.json").read_text()))
    wanted, noise = tensors(case.folder / "gradients"), tensors(case.folder / "noise")
    rules = bind_model(read.family, read.config, read.kinds, lm)
    learnt = [rule for rule in rules if set(rule.names) <= set(gradients)]
    assert {rule.hf for rule in learnt} == set(wanted)
    for rule in learnt:
        want = wanted[rule.hf]
        allowed = 20 * noise[rule.hf].max().item() + 1e-5 * max(1e-2, want.abs().max().item())
        assert (rule.to_hf(gradients) - want).abs().max() <= allowed, rule.hf


def _cross_entropy(lm: Any, tokens: Tensor) -> Tensor:
    logits = lm(tokens)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@every_case
def test_export_is_what_was_imported(answered: dict[str, Answered], name: str) -> None:
    case = answered[name]
    assert case.model is not None
    released, exported = tensors(case.folder / "released"), tensors(case.folder / "exported")
    assert exported.keys() == {key for key in released if not re.fullmatch(DERIVED, key)}
    for key in exported:
        tensor = released[key]
        assert exported[key].dtype == tensor.dtype, key
        assert torch.equal(exported[key], tensor), key


@every_case
def test_transformers_loads_the_export(answered: dict[str, Answered], name: str) -> None:
    case = answered[name]
    assert case.model is not None
    assert isinstance(case.reloaded, Tensor), case.reloaded
    assert torch.equal(case.reloaded, case.answer["logits"])


@every_case
@torch.no_grad()
def test_a_model_of_transformers_is_read_like_its_files(answered: dict[str, Answered], name: str) -> None:
    case = answered[name]
    assert isinstance(case.answer["instance"], Tensor), case.answer["instance"]
    assert torch.equal(case.answer["instance"], case.model(case.answer["tokens"]))


@every_case
def test_what_a_configuration_leaves_out_is_transformers_default(answered: dict[str, Answered], name: str) -> None:
    data = json.loads(answered[name].answer["default"])
    defaults = family_of(data["model_type"], name).defaults
    told = {key: data[key] for key, value in defaults.items() if value is REQUIRED}
    assert to_stack({"model_type": data["model_type"], **told}).stack == to_stack(data).stack


@pytest.mark.parametrize("model_type", dict.fromkeys(case["model_type"] for case in CASES.values()))
def test_no_value_of_the_configuration_is_ignored(answered: dict[str, Answered], model_type: str) -> None:
    """Another value of any key changes the stack of some model of the family or is refused; or the key is known to be
    without effect."""
    ignored = [ignored_keys(answered[name]) for name, case in CASES.items() if case["model_type"] == model_type]
    assert set.intersection(*ignored) == set()


def ignored_keys(case: Answered) -> set[str]:
    data = json.loads((case.folder / "released" / "config.json").read_text())
    read = to_stack(data)
    ignored = set()
    for key in {*data, *case.answer["keys"]} - HARMLESS - read.family.harmless:
        try:
            if to_stack({**data, key: another(data.get(key))}).stack == read.stack:
                ignored.add(key)
        except RecipeError:
            continue
    return ignored


@pytest.mark.parametrize("name", FIRST)
def test_what_is_called_harmless_moves_no_logit(answered: dict[str, Answered], name: str) -> None:
    assert answered[name].answer["harmful"] == []
