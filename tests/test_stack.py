"""Construction and persistence of a stack: memory, initialisation, ties, what a file keeps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import zoo
from tests.build import D_MODEL, EXTREMES, STACKS, VOCAB, draw
from tests.tolerances import FORWARD, assert_close
from zoo.recipe import load_stack_config, read_recipe
from zoo.sequence import dense
from zoo.stack import Stack

extreme_stacks = pytest.mark.parametrize("name", EXTREMES)


def plain(**changes: object) -> dict:
    """The smallest stack of one attention layer."""
    return {**STACKS["attention-required"], "n_layers": 1, **changes}


@extreme_stacks
def test_a_stack_is_what_its_recipe_says(name: str) -> None:
    lm = zoo.load(STACKS[name])
    assert isinstance(lm, nn.Module)
    assert [type(layer.mixer).__module__.rsplit(".", 1)[1] for layer in lm.layers] == [
        lm.config.blocks[block].mixer.name for block in lm.config.layers
    ]
    assert lm(draw(2, 5)).shape == (2, 5, VOCAB)


@pytest.mark.parametrize("name", ["qwen3_next/tiny", "kimi_linear/tiny", "transformer/tiny"])
def test_shipped_recipes_load_by_name(name: str) -> None:
    lm = zoo.load(name)
    assert torch.isfinite(lm(torch.randint(lm.config.vocab_size, (1, 9)))).all()


@extreme_stacks
def test_on_meta_then_given_memory_equals_built_there(name: str) -> None:
    config = load_stack_config(read_recipe(STACKS[name]))
    with torch.device("meta"):
        later = Stack(config)
    assert all(parameter.is_meta for parameter in later.parameters())
    torch.manual_seed(3)
    later.materialize("cpu")
    direct = Stack(config)
    torch.manual_seed(3)
    direct.reset_parameters()
    loaded_on_meta = zoo.load(STACKS[name], device="meta")
    assert all(parameter.is_meta for parameter in loaded_on_meta.parameters())
    torch.manual_seed(3)
    loaded = zoo.load(STACKS[name])
    for key, value in direct.state_dict().items():
        assert torch.equal(later.state_dict()[key], value), key
        assert torch.equal(loaded.state_dict()[key], value), key
        assert loaded_on_meta.state_dict()[key].shape == value.shape


@extreme_stacks
def test_initialisation_depends_on_no_memory(name: str) -> None:
    lm = zoo.load(STACKS[name])
    with torch.no_grad():
        for _ in range(20):
            for parameter in lm.parameters():
                parameter.fill_(torch.nan)
            lm.reset_parameters()
            assert all(torch.isfinite(parameter).all() for parameter in lm.parameters())


def test_init_std_is_that_of_every_projection_however_it_was_built() -> None:
    recipe = {**STACKS["mla-output=sigmoid"], "init_std": 0.5}
    for lm in (zoo.load(recipe), Stack(load_stack_config(read_recipe(recipe)))):
        for module in lm.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                assert module.weight.std().item() == pytest.approx(0.5, rel=0.25)
    assert not zoo.load(STACKS["attention-bias=True"]).layers[0].mixer.q_proj.bias.any()


@pytest.mark.parametrize("zero_centered", [True, False])
def test_norms_start_as_the_identity(zero_centered: bool) -> None:
    lm = zoo.load(plain(norm={"zero_centered": zero_centered}))
    assert lm.norm.weight.unique().tolist() == [0.0 if zero_centered else 1.0]
    x = torch.randn(3, D_MODEL)
    torch.testing.assert_close(lm.norm(x), x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt())


def test_the_norm_of_a_linear_read_out_is_never_zero_centred() -> None:
    lm = zoo.load({**STACKS["gated_deltanet-required"], "norm": {"zero_centered": True}})
    assert lm.layers[0].mixer.o_norm.weight.unique().tolist() == [1.0]
    assert lm.norm.zero_centered


def test_tied_embeddings_stay_tied() -> None:
    recipe = plain(tie_embeddings=True)
    tied, untied = zoo.load(recipe), zoo.load(plain())
    on_meta = zoo.load(recipe, device="meta")
    saved = copy.deepcopy(tied.state_dict())
    again = zoo.load(recipe)
    again.load_state_dict(saved)
    variants = [tied, copy.deepcopy(tied), on_meta.materialize("cpu"), again, copy.deepcopy(tied).double()]
    for lm in variants:
        assert lm.head.weight is lm.embed.weight
        assert len(list(lm.parameters())) == len(list(untied.parameters())) - 1
        lm.loss(draw(1, 5))[0].backward()
        assert lm.embed.weight.grad.abs().sum(-1).all(), "the head's gradient reaches every row of the embedding"
    assert torch.equal(again.head.weight, tied.embed.weight)
    assert untied.head.weight is not untied.embed.weight


def test_blocks_do_not_depend_on_their_order() -> None:
    """Each layer is built from its own block: nothing is inherited from the layer before."""
    blocks = {key: STACKS[f"{key}-full"]["blocks"]["a"] for key in ("attention", "gated_deltanet", "kda", "mla")}
    names = list(blocks)
    one = zoo.load(plain(n_layers=4, pattern=names, blocks=blocks))
    other = zoo.load(plain(n_layers=4, pattern=names[::-1], blocks=dict(reversed(blocks.items()))))
    for here, there in zip(one.layers, reversed(other.layers), strict=True):
        assert {key: value.shape for key, value in here.state_dict().items()} == {
            key: value.shape for key, value in there.state_dict().items()
        }


def test_irregular_ends() -> None:
    blocks = {key: STACKS[f"{key}-required"]["blocks"]["a"] for key in ("kda", "mla")}
    lm = zoo.load(plain(n_layers=6, pattern=["kda", "mla"], first=["kda"], last=["mla"], blocks=blocks))
    assert [type(layer.mixer).__name__ for layer in lm.layers] == ["KDA", "KDA", "MLA", "KDA", "MLA", "MLA"]


def test_a_block_without_ffn() -> None:
    block = {"mixer": STACKS["attention-required"]["blocks"]["a"]["mixer"]}
    lm = zoo.load(plain(blocks={"a": block})).double()
    x, tokens = [], draw(1, 5)
    lm.norm.register_forward_hook(lambda module, args, out: x.append(args[0]))
    lm(tokens)
    layer = lm.layers[0]
    embedded = lm.embed(tokens)
    want = embedded + layer.mixer(layer.mixer_residual.norm(embedded), dense(1, 5, embedded.device))
    assert_close(x[0], want, FORWARD[torch.float64])
