"""The loss: which tokens have a target, that it is cross-entropy, and that the logits are never whole."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from tests.build import EXTREMES, STACKS, VOCAB, draw, gradients, stack
from tests.tolerances import BACKWARD, FORWARD, assert_close
from zoo.nn.cross_entropy import cross_entropy
from zoo.ops._dispatch import on_device

LM = "gated_deltanet-hybrid"


def expected(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


@pytest.mark.parametrize("name", EXTREMES)
def test_labels_default_to_the_next_token(name: str) -> None:
    lm, tokens = stack(name), draw(3, 11)
    loss, parts = lm.loss(tokens)
    want = expected(lm(tokens)[:, :-1], tokens[:, 1:])
    assert_close(loss, want, FORWARD[torch.float64])
    assert parts["n_targets"] == 30
    assert torch.equal(parts["cross_entropy"], loss.detach())
    grads = gradients(lm, loss)
    for parameter, grad in gradients(lm, want).items():
        assert_close(grads[parameter], grad, BACKWARD[torch.float64], parameter)


def test_given_labels_stand_under_their_own_position() -> None:
    lm, tokens, labels = stack(LM), draw(2, 7), draw(2, 7)
    labels[0, 3:] = -100
    loss, parts = lm.loss(tokens, labels)
    assert_close(loss, expected(lm(tokens), labels), FORWARD[torch.float64])
    assert parts["n_targets"] == 10


def test_the_last_token_of_a_document_has_no_target() -> None:
    lm, tokens, bounds = stack(LM), draw(1, 12), [0, 5, 6, 12]
    targets = F.pad(tokens[:, 1:], (0, 1), value=-100)
    targets[0, [4, 5, 11]] = -100
    cu = torch.tensor(bounds)
    loss, parts = lm.loss(tokens, cu_seqlens=cu)
    assert_close(loss, expected(lm(tokens, cu_seqlens=cu), targets), FORWARD[torch.float64])
    assert parts["n_targets"] == 9


@pytest.mark.parametrize("own", [False, True], ids=["default labels", "own labels"])
def test_pads_have_no_target(own: bool) -> None:
    lm, rows = stack(LM), [draw(7), draw(4), draw(1)]
    tokens, labels = draw(3, 7), draw(3, 7)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [0] * 3 + [1] + [0] * 3])
    tokens[mask == 1] = torch.cat(rows)
    loss, parts = lm.loss(tokens, labels if own else None, attention_mask=mask)
    alone = [lm(row[None])[0] for row in rows]
    if own:
        want = F.cross_entropy(torch.cat(alone), labels[mask == 1])
    else:
        want = F.cross_entropy(torch.cat([logits[:-1] for logits in alone]), torch.cat([row[1:] for row in rows]))
    assert_close(loss, want, FORWARD[torch.float64])
    assert parts["n_targets"] == (12 if own else 9)


@pytest.mark.parametrize("how", ["one token", "all -100", "all pads"])
def test_no_target_at_all_is_a_loss_of_zero(how: str) -> None:
    lm = copy.deepcopy(stack(LM))
    if how == "one token":
        loss, parts = lm.loss(draw(2, 1))
    elif how == "all -100":
        loss, parts = lm.loss(draw(2, 5), torch.full((2, 5), -100))
    else:
        loss, parts = lm.loss(draw(2, 5), attention_mask=torch.zeros(2, 5))
    loss.backward()
    assert loss == 0
    assert parts["n_targets"] == 0
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in lm.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_loss_is_float32_or_better(dtype: torch.dtype) -> None:
    lm = copy.deepcopy(stack(LM)).to(dtype)
    tokens = draw(2, 9)
    loss, _ = lm.loss(tokens)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    with torch.no_grad():
        want = expected(lm(tokens)[:, :-1].double(), tokens[:, 1:])
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)


def test_int32_tokens_and_labels() -> None:
    lm, tokens = stack(LM), draw(2, 9)
    assert torch.equal(lm.loss(tokens.int())[0], lm.loss(tokens)[0])
    assert torch.equal(lm.loss(tokens, tokens.int())[0], lm.loss(tokens, tokens)[0])


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.ones(2, 8, dtype=torch.int64), "labels: expected (2, 9) like tokens, found (2, 8)"),
        (torch.full((2, 9), VOCAB), f"labels: found {VOCAB}, and the vocabulary is 0 to {VOCAB - 1}"),
        (torch.full((2, 9), -1), f"labels: found -1, and the vocabulary is 0 to {VOCAB - 1}"),
    ],
)
def test_wrong_labels_are_refused_in_one_line(labels: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        stack(LM).loss(draw(2, 9), labels)


@pytest.mark.parametrize("chunk", [1, 40, 7 * VOCAB, 10**6])
def test_chunks_change_neither_value_nor_gradient(chunk: int) -> None:
    hidden = torch.randn(23, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCAB, 8, dtype=torch.float64, requires_grad=True)
    targets = draw(23)
    targets[::4] = -100
    total, n_targets = cross_entropy(hidden, weight, targets, chunk=chunk)
    want = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    assert n_targets == 17
    assert_close(total, want, FORWARD[torch.float64])
    grads = torch.autograd.grad(total, (hidden, weight))
    for got, grad in zip(grads, torch.autograd.grad(want, (hidden, weight)), strict=True):
        assert_close(got, grad, BACKWARD[torch.float64])


class _Largest(TorchDispatchMode):
    """The most numbers that any tensor made within has."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(item, Tensor):
                self.numel = max(self.numel, item.numel())
        return out


def test_the_logits_are_never_whole() -> None:
    vocab, length = 2**16, 200
    lm = zoo.load({**STACKS["attention-required"], "vocab_size": vocab, "n_layers": 1})
    tokens = torch.randint(vocab, (1, length))
    with _Largest() as largest:
        lm.loss(tokens)[0].backward()
    assert largest.numel <= 2**22 < length * vocab
    assert lm.head.weight.grad is not None


def test_the_written_gradients_are_derivatives() -> None:
    """Of both together and of each alone, in chunks, and a second time."""
    targets = torch.tensor([3, -100, 0, 6, 6])
    hidden, weight = torch.randn(5, 4, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    for frozen in (None, 0, 1):
        given = [x.clone().requires_grad_(at != frozen) for at, x in enumerate((hidden, weight))]

        def loss(hidden: Tensor, weight: Tensor) -> Tensor:
            return cross_entropy(hidden, weight, targets, chunk=14)[0]

        assert torch.autograd.gradcheck(loss, given)
        assert torch.autograd.gradgradcheck(loss, given)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_loss_of_bfloat16_is_float32(autocast: bool) -> None:
    """Logits are rounded, what is made of them is not; gradients have their input's dtype."""
    hidden, weight, targets = torch.randn(40, 16), torch.randn(VOCAB, 16), draw(40)
    lower = hidden.bfloat16(), weight.bfloat16()
    want = F.cross_entropy((lower[0] @ lower[1].T).float(), targets, reduction="sum")
    leaves = [x.requires_grad_() for x in ((hidden, weight) if autocast else lower)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        total, _ = cross_entropy(*leaves, targets, chunk=7 * VOCAB)
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(want.item(), rel=1e-5)
    wide = [x.detach().float().requires_grad_() for x in lower]
    wanted = torch.autograd.grad(F.cross_entropy(wide[0] @ wide[1].T, targets, reduction="sum"), wide)
    for leaf, got, grad in zip(leaves, torch.autograd.grad(total, leaves), wanted, strict=True):
        assert got.dtype == leaf.dtype
        assert (got.float() - grad).norm() < 0.02 * grad.norm()


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors are judged as if they lay on a GPU."""
    monkeypatch.setattr("zoo.nn.cross_entropy.device_kind", lambda x: "cuda")


@pytest.mark.parametrize("chunk", [2 * VOCAB, None])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_rows_that_a_gpu_keeps_without_a_target_give_nothing(chunk: int | None) -> None:
    """Not even where they hold NaN."""
    hidden = torch.randn(23, 8, dtype=torch.float64)
    targets = draw(23)
    targets[::4] = -100
    hidden[::4] = torch.nan
    hidden.requires_grad_()
    weight = torch.randn(VOCAB, 8, dtype=torch.float64, requires_grad=True)
    total, n_targets = cross_entropy(hidden, weight, targets, chunk=chunk)
    want = F.cross_entropy(hidden[targets >= 0] @ weight.T, targets[targets >= 0], reduction="sum")
    assert n_targets == 17
    assert_close(total, want, FORWARD[torch.float64])
    grads = torch.autograd.grad(total, (hidden, weight))
    for got, grad in zip(grads, torch.autograd.grad(want, (hidden, weight)), strict=True):
        assert_close(got, grad, BACKWARD[torch.float64])


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_target_that_is_no_token_is_refused_on_a_gpu_too() -> None:
    with pytest.raises(RuntimeError, match="out of bounds"):
        cross_entropy(torch.randn(3, 8), torch.randn(VOCAB, 8), torch.tensor([0, -1, 2]))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_gradients_on_a_gpu_are_derivatives() -> None:
    test_the_written_gradients_are_derivatives()


class _Launches(_Largest):
    """And how many operations there were. None may wait for the numbers: meta tensors have none."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize(
    ("tokens", "vocab", "launches"), [(32768, 16384, 100), (32768, 151936, 600), (8192, 160000, 200)]
)
def test_a_gpu_gets_few_large_chunks(tokens: int, vocab: int, launches: int) -> None:
    """In chunks for a CPU they were 2,309, 9,221 and 2,300 operations."""
    with on_device("cuda"), torch.device("meta"), _Launches() as found:
        ins = [torch.empty(n, 1024, dtype=torch.bfloat16, requires_grad=True) for n in (tokens, vocab)]
        total, _ = cross_entropy(*ins, torch.zeros(tokens, dtype=torch.int64))
        total.backward()
    assert found.number <= launches
    assert found.numel <= 2**28


def test_on_a_gpu_nothing_waits_for_the_labels() -> None:
    lm = zoo.load({**STACKS["attention-required"], "n_layers": 1}).to("meta")
    tokens = torch.empty(2, 9, dtype=torch.int64, device="meta")
    with on_device("cuda"):
        loss, parts = lm.loss(tokens, tokens)
        loss.backward()
    assert parts["n_targets"].is_meta


LARGE = """
import resource, torch
from zoo.nn.cross_entropy import cross_entropy
torch.set_num_threads(1)
hidden, weight = torch.randn(8192, 64, requires_grad=True), torch.randn(160000, 64, requires_grad=True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
cross_entropy(hidden, weight, torch.randint(160000, (8192,)))[0].backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_a_vocabulary_of_160000_and_8192_tokens_fit() -> None:
    """Their float32 logits would take 5.2 GB; two chunks of them and the gradients take less than 0.4."""
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 400 * 1024
