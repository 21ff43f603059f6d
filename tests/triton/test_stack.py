"""A layer of each family, with fla's kernels under it, is the layer without them: trained on packed documents, and
prefilled and decoded with a cache."""

from __future__ import annotations

import pytest
import torch

import zoo
from tests.tolerances import BACKWARD, FORWARD, assert_close
from tests.triton import interpreter
from zoo.ops import _fla, trace

FAMILIES = {
    "gdn": {"delta_rule", "gated_norm", "short_conv"},
    "kda": {"delta_rule", "gated_norm", "short_conv"},
    "retnet": {"gated_norm", "linear_attention"},
    "gla": {"gated_norm", "linear_attention"},
    "rwkv6": {"linear_attention"},
    "rwkv7": {"dplr"},
}
families = pytest.mark.parametrize("family", list(FAMILIES))
LENGTH = 11


@pytest.fixture(autouse=True)
def large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "choose", interpreter.largest)


def one_layer(family: str) -> torch.nn.Module:
    return zoo.load(f"{family}/tiny", set=["n_layers=1"])


def ops_on_fla(choices: list[zoo.ops.Choice]) -> set[str]:
    return {choice.op for choice in choices if choice.backend == "fla"}


@families
def test_training_on_packed_documents(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = one_layer(family)
    tokens, cu_seqlens = torch.randint(256, (1, LENGTH)), torch.tensor([0, 4, LENGTH])
    runs = []
    for device in ("cuda", "cpu"):
        monkeypatch.setattr(_fla, "device_kind", lambda x, device=device: device)
        lm.zero_grad()
        with trace() as choices:
            lm.loss(tokens, cu_seqlens=cu_seqlens)[0].backward()
        # rwkv7's chunked kernel is for 16 bits, which a test on numbers is not
        assert ops_on_fla(choices) == (FAMILIES[family] - {"dplr"} if device == "cuda" else set())
        runs.append({name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None})
    assert runs[0].keys() == runs[1].keys()
    for name, grad in runs[1].items():
        assert_close(runs[0][name], grad, BACKWARD[torch.float32], name)


@families
@torch.no_grad()
def test_prefill_and_decoding(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = one_layer(family)
    tokens = torch.randint(256, (2, LENGTH))
    cache = lm.init_cache(2)
    with trace() as choices:
        chunks = [lm(chunk, cache=cache) for chunk in tokens.split([8, 1, 1, 1], dim=1)]
    assert ops_on_fla(choices) == FAMILIES[family]
    monkeypatch.setattr(_fla, "device_kind", lambda x: "cpu")
    assert_close(torch.cat(chunks, 1), lm(tokens), FORWARD[torch.float32])
