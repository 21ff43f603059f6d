"""Multi-token prediction: what it predicts, from what, and that nothing but the loss runs it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from tests.build import VOCAB, draw, gradients, recipe, redraw, required
from tests.tolerances import BACKWARD, FORWARD, assert_close
from zoo.accounting import account
from zoo.check.cases import with_gate
from zoo.cli import main
from zoo.ffns import FFN
from zoo.registry import RecipeError
from zoo.sequence import dense
from zoo.stack import Stack

BLOCKS = {"a": required("gated_deltanet").block, "b": required("attention").block}
STACK = recipe(required("attention"), 2, pattern=["a", "b"], blocks=BLOCKS, multi_token={"block": "b", "weight": 0.25})


def build(**changes: Any) -> Stack:
    lm = zoo.load({**STACK, **changes})
    redraw(lm)
    return lm.double()


def without(lm: Stack) -> Stack:
    """The stack without its further layer."""
    bare = zoo.load({**STACK, "tie_embeddings": lm.config.tie_embeddings, "multi_token": None}).double()
    bare.load_state_dict({key: value for key, value in lm.state_dict().items() if "multi_token" not in key})
    return bare


def rms(x: Tensor, norm: nn.Module) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], norm.weight, 1e-6)  # type: ignore[arg-type]


def predicted(lm: Stack, tokens: Tensor) -> Tensor:
    """[B,T-1,V], written out: from the hidden state of a token and the next token, logits of the one after that."""
    x, layout, extra = lm.embed(tokens), dense(*tokens.shape, tokens.device), lm.multi_token
    assert extra is not None
    for layer in lm.layers:
        x = layer(x, layout)
    joined = torch.cat((rms(x[:, :-1], extra.hidden_norm), rms(lm.embed(tokens[:, 1:]), extra.embed_norm)), dim=-1)
    x = joined @ extra.proj.weight.T
    x = x + extra.block.mixer(rms(x, extra.block.mixer_residual.norm), dense(*x.shape[:2], x.device))
    x = x + extra.block.ffn(rms(x, extra.block.ffn_residual.norm), dense(*x.shape[:2], x.device))  # type: ignore
    return rms(x, extra.norm) @ lm.head.weight.T


def by_hand(lm: Stack, documents: list[Tensor], labels: list[Tensor] | None = None) -> Tensor:
    """Both losses over documents [1,T] that are run one by one."""
    first, second, n = [], [], 0
    for index, tokens in enumerate(documents):
        own = labels[index] if labels is not None else F.pad(tokens[:, 1:], (0, 1), value=-100)
        first.append(F.cross_entropy(lm(tokens)[0], own[0], reduction="sum"))
        n += int((own != -100).sum())
        if tokens.shape[1] > 1:
            second.append(F.cross_entropy(predicted(lm, tokens)[0], own[0, 1:], reduction="sum"))
    return (sum(first) + 0.25 * sum(second)) / n  # type: ignore[return-value]


def check(lm: Stack, found: tuple[Tensor, dict[str, Tensor]], want: Tensor) -> None:
    loss, parts = found
    assert_close(loss, want, FORWARD[torch.float64])
    assert_close(parts["cross_entropy"] + parts["multi_token"], loss.detach(), FORWARD[torch.float64])
    wanted = gradients(lm, want)
    for name, gradient in gradients(lm, loss).items():
        assert wanted[name].any(), name
        assert_close(gradient, wanted[name], BACKWARD[torch.float64], name)


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_the_loss_by_hand(tied: bool) -> None:
    lm, tokens = build(tie_embeddings=tied), draw(2, 9)
    tokens[0, :] = tokens[0, 0]
    found = lm.loss(tokens)
    check(lm, found, by_hand(lm, [tokens[:1], tokens[1:]]))
    assert found[1]["n_targets"] == 16
    assert_close(found[1]["cross_entropy"], without(lm).loss(tokens)[0].detach(), FORWARD[torch.float64])


@pytest.mark.parametrize("own", [False, True], ids=["", "labels"])
def test_packed_documents_do_not_see_each_other(own: bool) -> None:
    """The last token of a document has no next token, and its last two have no second target."""
    lm, lengths = build(), [5, 1, 2, 7]
    documents = [draw(1, length) for length in lengths]
    labels = [draw(1, length) for length in lengths] if own else None
    if labels is not None:
        labels[3][0, 2:4] = -100
    bounds = torch.tensor([0, 5, 6, 8, 15])
    given = torch.cat(labels, dim=1) if labels is not None else None
    check(lm, lm.loss(torch.cat(documents, dim=1), given, cu_seqlens=bounds), by_hand(lm, documents, labels))


@pytest.mark.parametrize("own", [False, True], ids=["", "labels"])
def test_padding(own: bool) -> None:
    lm, rows = build(), [draw(1, 6), draw(1, 3), draw(1, 1)]
    tokens, labels = draw(3, 6), draw(3, 6)
    mask = torch.tensor([[1] * 6, [1] * 3 + [0] * 3, [0] * 5 + [1]])
    tokens[mask == 1] = torch.cat(rows, dim=1)[0]
    cut = [labels[row][mask[row] == 1][None] for row in range(3)]
    found = lm.loss(tokens, labels if own else None, attention_mask=mask)
    check(lm, found, by_hand(lm, rows, cut if own else None))


@pytest.mark.parametrize("case", ["one token", "two tokens", "no target", "pads"])
def test_nothing_to_predict(case: str) -> None:
    lm = build()
    tokens = draw(2, {"one token": 1, "two tokens": 2}.get(case, 4))
    labels = torch.full_like(tokens, -100) if case == "no target" else None
    mask = torch.zeros_like(tokens) if case == "pads" else None
    loss, parts = lm.loss(tokens, labels, attention_mask=mask)
    assert parts["multi_token"] == 0
    assert torch.isfinite(loss)
    assert all(torch.isfinite(gradient).all() for gradient in gradients(lm, loss).values())


def test_the_weight_scales_and_zero_is_none() -> None:
    lm, tokens = build(), draw(2, 9)
    one = lm.loss(tokens)[1]["multi_token"]
    for weight in (0.0, 0.75):
        other = zoo.load({**STACK, "multi_token": {"block": "b", "weight": weight}}).double()
        other.load_state_dict(lm.state_dict())
        assert_close(other.loss(tokens)[1]["multi_token"], one * weight / 0.25, FORWARD[torch.float64])


def test_batches_add_up_by_their_targets() -> None:
    """As training weighs micro-batches: by the number of next tokens."""
    lm, tokens = build(), draw(1, 12)
    whole, parts = lm.loss(tokens, cu_seqlens=torch.tensor([0, 9, 12]))
    pieces = [lm.loss(piece) for piece in tokens.split([9, 3], dim=1)]
    assert_close(
        sum(loss * own["n_targets"] for loss, own in pieces) / parts["n_targets"], whole, FORWARD[torch.float64]
    )


class Counting(FFN):
    """Writes down how many tokens it has seen, as a router does."""

    def __init__(self, layer: int):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, layout: Any, cache: Any = None) -> Tensor:
        if layout.ledger is not None:
            layout.ledger.statistics[self.layer] = torch.tensor(float(x[..., 0].numel()))
            layout.ledger.add("balance", x.square().mean())
        return x


def test_its_router_is_one_more_layer() -> None:
    lm, tokens = build(), draw(2, 5)
    plain = lm.loss(tokens)
    assert lm.multi_token is not None
    lm.layers[1].ffn, lm.multi_token.block.ffn = Counting(1), Counting(lm.multi_token.block.mixer.context.layer)
    loss, parts = lm.loss(tokens)
    assert {name: int(seen) for name, seen in parts.items() if name.startswith("router/")} == {
        "router/1": 10,
        "router/2": 10,
    }
    assert list(parts)[:4] == [*list(plain[1])[:2], "balance", "multi_token"]
    added = parts["cross_entropy"] + parts["balance"] + parts["multi_token"]
    assert_close(loss.detach(), added, FORWARD[torch.float64])


def test_only_the_loss_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, tokens = build(), draw(2, 6)
    bare = without(lm)
    monkeypatch.setattr(type(lm.multi_token), "forward", None)
    assert torch.equal(lm(tokens), bare(tokens))
    cache = lm.init_cache(2)
    assert len(cache.layers) == 2
    assert torch.equal(lm(tokens, cache=cache), bare(tokens, cache=bare.init_cache(2)))
    assert torch.equal(lm.generate(tokens, 3, temperature=0), bare.generate(tokens, 3, temperature=0))
    with zoo.record(lm) as gates:
        lm(tokens)
    assert not any("multi_token" in name for name in gates)
    with pytest.raises(TypeError):
        lm.loss(tokens)


def test_a_checkpoint_holds_it_and_every_way_of_building_starts_it() -> None:
    torch.manual_seed(3)
    lm = zoo.load(STACK)
    torch.manual_seed(3)
    other = zoo.load(STACK, device="meta").materialize("cpu")
    own = [key for key in lm.state_dict() if key.startswith("multi_token.")]
    assert {"multi_token.proj.weight", "multi_token.norm.weight", "multi_token.block.mixer.q_proj.weight"} <= set(own)
    assert all(torch.equal(other.state_dict()[key], value) for key, value in lm.state_dict().items())
    redrawn, tokens = copy.deepcopy(lm), draw(1, 5)
    redraw(redrawn)
    lm.load_state_dict(redrawn.state_dict(), strict=True)
    assert torch.equal(lm.loss(tokens)[0], redrawn.loss(tokens)[0])
    with pytest.raises(RuntimeError, match=r"multi_token\.proj\.weight"):
        zoo.load({**STACK, "multi_token": None}).load_state_dict(lm.state_dict())


def test_it_is_counted(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    lm = zoo.load(STACK, device="meta")
    bare = zoo.load({**STACK, "multi_token": None}, device="meta")
    params, least = account(lm)["params"], account(bare)["params"]
    own = sum(parameter.numel() for name, parameter in lm.named_parameters() if name.startswith("multi_token"))
    assert params["multi_token"] == own == params["total"] - least["total"] > 0
    assert params["active"] - least["active"] == own
    assert account(lm)["flops_per_token"] == account(bare)["flops_per_token"], "a forward"
    file = tmp_path / "recipe.json"
    file.write_text(str({"model": {"stack": STACK}}).replace("'", '"').replace("None", "null"), encoding="utf-8")
    assert main(["show", str(file)]) == 0
    assert f"multi-token  {own:,}, in training only" in capsys.readouterr().out


@pytest.mark.parametrize("residual", ["pre_norm", "attn_res", "mhc"])
@pytest.mark.parametrize(("mixer", "decay"), [("lightning", "lightning"), ("rwkv6", "rwkv6"), ("rwkv7", "rwkv7")])
def test_any_block_may_be_one_more(mixer: str, decay: str, residual: str) -> None:
    """What depends on the depth of a layer holds one layer further: decays stay at most 1, streams open anew."""
    block = {**with_gate(mixer, "decay", decay).block, "residual": residual}
    lm = zoo.load(recipe(required(mixer), 1, blocks={"a": block}, multi_token={"block": "a"}))
    loss, _ = lm.loss(draw(2, 33))
    assert torch.isfinite(loss)
    for key, gradient in gradients(lm, loss).items():
        assert torch.isfinite(gradient).all(), key
    with zoo.record(lm) as gates:
        lm.loss(draw(2, 5))
    decays = [values for key, values in gates.items() if key.endswith("decay")]
    assert len(decays) == 2
    assert all((values <= 1).all() for values in decays)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"multi_token": {"block": "c"}}, "multi_token.block: unknown block 'c'"),
        ({"multi_token": {"block": "b", "weight": -1.0}}, "multi_token.weight"),
        ({"multi_token": {"blok": "b"}}, "multi_token"),
    ],
)
def test_a_wrong_one_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        zoo.load({**STACK, **changes})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_block_of_its_own_may_have_another_stream() -> None:
    blocks = {**BLOCKS, "c": {**BLOCKS["b"], "residual": {"name": "mhc", "options": {"n_streams": 2}}}}
    lm = build(blocks=blocks, multi_token={"block": "c"})
    assert lm.streams is None
    assert torch.isfinite(lm.loss(draw(2, 5))[0])
    assert lm.config.vocab_size == VOCAB
