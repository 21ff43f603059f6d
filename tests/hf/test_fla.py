"""fla's own models both ways, as test_families has it for transformers': logits, decoding, files, configuration.

Decoding is held to their logits of the whole sequence, and gradients are held layer by layer in tests/parity.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hf.cases import FLA_CASES, PREFILL
from tests.hf.conftest import Answered
from tests.hf.test_families import ignored_keys, tensors
from zoo.hf.recipes import to_stack
from zoo.registry import RecipeError

every_case = pytest.mark.parametrize("name", FLA_CASES)
pytestmark = pytest.mark.slow


@every_case
@torch.no_grad()
def test_logits(answered_by_fla: dict[str, Answered], name: str, record_property: Any) -> None:
    case = answered_by_fla[name]
    difference = (case.model(case.answer["tokens"]) - case.answer["logits"]).abs().max().item()
    record_property("difference", difference)
    assert difference <= case.tolerance
    assert case.answer["moved"] > 10 * case.tolerance


@every_case
def test_decoding(answered_by_fla: dict[str, Answered], name: str, record_property: Any) -> None:
    case = answered_by_fla[name]
    tokens = case.answer["tokens"]
    cache = case.model.init_cache(len(tokens))
    chunks = tokens.split([PREFILL, *[1] * (tokens.shape[1] - PREFILL)], dim=1)
    logits = torch.cat([case.model(chunk, cache=cache) for chunk in chunks], dim=1)
    difference = (logits - case.answer["logits"]).abs().max().item()
    record_property("difference", difference)
    assert difference <= case.tolerance


@every_case
def test_export_is_what_was_imported(answered_by_fla: dict[str, Answered], name: str) -> None:
    case = answered_by_fla[name]
    assert case.model is not None
    released, exported = tensors(case.folder / "released"), tensors(case.folder / "exported")
    assert exported.keys() == released.keys()
    assert all(torch.equal(exported[key], tensor) for key, tensor in released.items())


@every_case
def test_fla_loads_the_export(answered_by_fla: dict[str, Answered], name: str) -> None:
    case = answered_by_fla[name]
    assert case.model is not None
    assert isinstance(case.reloaded, Tensor), case.reloaded
    assert torch.equal(case.reloaded, case.answer["logits"])


@pytest.mark.parametrize("model_type", dict.fromkeys(case["model_type"] for case in FLA_CASES.values()))
def test_no_value_of_the_configuration_is_ignored(answered_by_fla: dict[str, Answered], model_type: str) -> None:
    cases = [name for name, case in FLA_CASES.items() if case["model_type"] == model_type]
    assert set.intersection(*(ignored_keys(answered_by_fla[name]) for name in cases)) == set()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 8}, "num_kv_heads is 8 where num_heads is 64: fla's kernels want groups of 16, 32, 64"),
        ({"num_heads": 96, "num_kv_heads": 2}, "num_kv_heads is 2 where num_heads is 96"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0 where num_heads is 64"),
        ({"block_counts": 2}, "block_counts is 2 where block_size is 64: fla's kernels want 3 blocks or more"),
        ({"block_size": 31, "block_counts": 4}, "block_counts is 4 where block_size is 31"),
        ({"block_size": 16, "block_counts": 9}, "block_counts is 9 where block_size is 16"),
        ({"window_size": None}, "window_size is None, where a int stands"),
        ({"window_size": 0}, "window_size is 0"),
        ({"rope_theta": None}, "rope_theta is None, where a float stands"),
        ({"rope_parameters": {"rope_theta": 3.0}}, "rope_parameters is {'rope_theta': 3.0}, which zoo does not"),
    ],
)
def test_sizes_of_nsa_that_fla_does_not_take(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        to_stack({"model_type": "nsa", **changes})


def test_mamba2_of_transformers_is_told_from_that_of_fla() -> None:
    config = {"model_type": "mamba2", "num_hidden_layers": 2, "layer_norm_epsilon": 1e-5}
    with pytest.raises(RecipeError, match="layer_norm_epsilon is 1e-05, which zoo does not understand"):
        to_stack(json.loads(json.dumps(config)))
