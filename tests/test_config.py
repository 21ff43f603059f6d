"""zoo.config: every way to write a stack wrongly is one line with its place, before anything is built."""

from __future__ import annotations

from typing import Any

import pytest

from tests.recipes_by_hand import error_of, stack
from zoo.config import MixerPart, StackConfig, check_parts, decode_stack, granularity_of
from zoo.decode import Part
from zoo.overrides import apply_assignments
from zoo.registry import DECAY, OUTPUT
from zoo.shapes import NormConfig


def changed(*assignments: str) -> dict[str, Any]:
    return apply_assignments(stack(), assignments)


def without(*keys: str) -> dict[str, Any]:
    data = stack()
    node = data
    for key in keys[:-1]:
        node = node[key]
    del node[keys[-1]]
    return data


def test_a_stack_is_decoded() -> None:
    config = decode_stack(changed("norm.zero_centered=true", "tie_embeddings=true", "init_std=1"))
    assert isinstance(config, StackConfig)
    assert (config.vocab_size, config.d_model, config.n_layers) == (29, 24, 4)
    assert config.layers == ("gdn", "attn", "gdn", "attn")
    assert config.norm == NormConfig(zero_centered=True)
    assert config.tie_embeddings is True
    assert config.init_std == 1.0
    gdn, attn = config.blocks["gdn"], config.blocks["attn"]
    assert gdn.mixer == MixerPart(
        name="gated_deltanet",
        options={"n_heads": 2, "head_dim": 8},
        gates={
            "decay": Part(name="mamba2"),
            "write": Part(name="sigmoid"),
            "output": Part(name="silu", options={"rank": 4}),
        },
    )
    assert attn.mixer.gates == {}
    assert attn.ffn == Part(name="swiglu")
    assert attn.residual == Part(name="pre_norm")
    check_parts(config)


@pytest.mark.parametrize(
    ("assignments", "layers"),
    [
        ((), "gdn attn gdn attn"),
        (("n_layers=2",), "gdn attn"),
        (("n_layers=5", "last=[attn]"), "gdn attn gdn attn attn"),
        (("n_layers=6", "first=[attn]", "last=[attn]"), "attn gdn attn gdn attn attn"),
        (("n_layers=3", "first=[gdn, attn]", "last=[gdn]", "pattern=[]"), "gdn attn gdn"),
    ],
)
def test_the_pattern_is_repeated_between_irregular_ends(assignments: tuple[str, ...], layers: str) -> None:
    assert decode_stack(changed(*assignments)).layers == tuple(layers.split())


def test_null_empties_slots_ffns_and_blocks() -> None:
    config = decode_stack(
        changed("blocks.gdn.mixer.gates.output=null", "blocks.gdn.ffn=null", "blocks.attn=null", "pattern=[gdn]")
    )
    assert set(config.blocks) == {"gdn"}
    assert set(config.blocks["gdn"].mixer.gates) == {"decay", "write"}
    assert config.blocks["gdn"].ffn is None


GDN = "model.stack.blocks.gdn"

STRUCTURE = [
    (["vocab_size='32'"], "vocab_size: expected an integer, found '32'"),
    (["d_model=true"], "d_model: expected an integer, found True"),
    (["d_model=0"], "d_model: expected at least 1, found 0"),
    (["vocab_size=-1"], "vocab_size: expected at least 1, found -1"),
    (["n_layers=0"], "n_layers: expected at least 1, found 0"),
    (["n_layers=2.0"], "n_layers: expected an integer, found 2.0"),
    (["n_layers=null"], "n_layers: expected an integer, found null"),
    (["tie_embeddings=1"], "tie_embeddings: expected true or false, found 1"),
    (["init_std=-0.1"], "init_std: expected at least 0, found -0.1"),
    (["norm.eps=-1"], "norm.eps: expected at least 0, found -1.0"),
    (["norm.eps=1e-6x"], "norm.eps: expected a number, found '1e-6x'"),
    (["norm={epsilon: 1}"], "norm.epsilon: unknown key. Did you mean 'eps'? Known: kind, eps, zero_centered"),
    (["pattern=gdn"], "pattern: expected a list, found 'gdn'"),
    (["pattern=[gdn, atn]"], "pattern[1]: unknown block 'atn'. Did you mean 'attn'? Known: gdn, attn"),
    (["pattern=[gdn, 3]"], "pattern[1]: expected a string, found 3"),
    (["first=[x]"], "first[0]: unknown block 'x'. Known: gdn, attn"),
    (["last=[gdm]"], "last[0]: unknown block 'gdm'. Did you mean 'gdn'? Known: gdn, attn"),
    (["pattern=[]"], "n_layers: 4 leaves 4 for an empty pattern"),
    (
        ["n_layers=5"],
        "n_layers: 5 is no multiple of the pattern's 2: use 4 or 6, or say an irregular end with first or last",
    ),
    (["n_layers=1"], "n_layers: 1 is no multiple of the pattern's 2: use 2, or say an irregular end"),
    (
        ["first=[gdn]"],
        "n_layers: 4, less 1 in first and last, is no multiple of the pattern's 2: use 3 or 5, or",
    ),
    (
        ["first=[gdn, gdn]", "last=[attn, attn]"],
        "n_layers: 4, less 4 in first and last, leaves 0 for the pattern of 2",
    ),
    (
        ["n_layers=1", "first=[gdn, gdn]"],
        "n_layers: 1, less 2 in first and last, leaves 0 for the pattern of 2",
    ),
    (
        ["n_layers=3", "first=[gdn]", "last=[attn]", "pattern=[]"],
        "n_layers: 3, less 2 in first and last, leaves 1 for an empty pattern",
    ),
    (["pattern=[gdn]"], "blocks.attn: no layer uses this block: name it in pattern, or set it to null"),
    (["blocks={}"], "pattern[0]: unknown block 'gdn'. Known: none"),
    (["blocks=[gdn]"], "blocks: expected a mapping, found a list"),
    (["blocks.gdn=gated_deltanet"], "blocks.gdn: expected a mapping, found 'gated_deltanet'"),
    (["blocks.gdn={mixr: kda}"], "blocks.gdn.mixr: unknown key. Did you mean 'mixer'? Known: mixer, ffn, residual"),
    (["blocks.gdn={ffn: swiglu}"], "blocks.gdn.mixer: missing"),
    (["blocks.gdn.mixer=null"], "blocks.gdn.mixer: expected a name or a mapping, found null"),
    (["blocks.gdn.mixer={options: {}}"], "blocks.gdn.mixer.name: missing"),
    (
        ["blocks.gdn.mixer={name: kda, option: {}}"],
        "blocks.gdn.mixer.option: unknown key. Did you mean 'options'? Known: name, options, gates",
    ),
    (["blocks.gdn.mixer.gates=[silu]"], "blocks.gdn.mixer.gates: expected a mapping, found a list"),
    (["blocks.gdn.ffn.name=swiglo"], "blocks.gdn.ffn: unknown ffn 'swiglo'. Did you mean 'swiglu'? Known: "),
    (["blocks.gdn.residual=prenorm"], "blocks.gdn.residual: unknown residual form 'prenorm'. Did you mean 'pre_norm'?"),
    (
        ["blocks.gdn.mixer=gated_delta_net"],
        "blocks.gdn.mixer: unknown mixer 'gated_delta_net'. Did you mean 'gated_deltanet'? Known: attention, ",
    ),
    (
        ["blocks.gdn.mixer.gates.decay=mamba"],
        "blocks.gdn.mixer.gates.decay: unknown decay gate 'mamba'. Did you mean 'mamba2'? Known: bounded, ",
    ),
    (
        ["blocks.attn.mixer.gates.value=sigmoyd"],
        "blocks.attn.mixer.gates.value: unknown gate 'sigmoyd'. Did you mean 'sigmoid'? Known: bounded, ",
    ),
]


@pytest.mark.parametrize(("assignments", "message"), STRUCTURE, ids=lambda value: str(value)[:40])
def test_structure_pattern_and_names(assignments: list[str], message: str) -> None:
    assert error_of(decode_stack, changed(*assignments)).startswith(f"model.stack.{message}")


def test_unknown_and_missing_keys() -> None:
    known = "Known: vocab_size, d_model, n_layers, pattern, blocks, first, last, norm, embed_norm, tie_embeddings"
    known += ", init_std, multi_token"
    misspelt = {**without("d_model"), "d_modle": 24}
    assert error_of(decode_stack, misspelt) == f"model.stack.d_modle: unknown key. Did you mean 'd_model'? {known}"
    for key in ("vocab_size", "d_model", "n_layers", "pattern", "blocks"):
        assert error_of(decode_stack, without(key)) == f"model.stack.{key}: missing"
    assert error_of(decode_stack, []) == "model.stack: expected a mapping, found a list"
    assert error_of(decode_stack, {**stack(), 3: 4}).startswith("model.stack.3: unknown key. Known: vocab_size")


PARTS = [
    (
        ["blocks.gdn.mixer.options.n_head=2"],
        "mixer.options.n_head: GatedDeltaNet has no such option. Did you mean 'n_heads'? Known: n_heads, head_dim, ",
    ),
    (["blocks.gdn.mixer.options.n_heads='2'"], "mixer.options.n_heads: expected an integer, found '2'"),
    (["blocks.gdn.mixer.options.n_heads=true"], "mixer.options.n_heads: expected an integer, found True"),
    (["blocks.gdn.mixer.options.n_heads=0"], "mixer.options.n_heads: expected at least 1, found 0"),
    (["blocks.gdn.mixer.options.head_dim=-8"], "mixer.options.head_dim: expected at least 1, found -8"),
    (
        ["blocks.gdn.mixer.options.out_norm=heads"],
        "mixer.options.out_norm: unknown value 'heads'. Did you mean 'head'?",
    ),
    (["blocks.gdn.mixer.options={n_heads: 2}"], "mixer.options.head_dim: missing: GatedDeltaNet has no default for it"),
    (
        ["blocks.gdn.ffn.options.mul=2"],
        "ffn.options.mul: SwiGLU has no such option. Did you mean 'mult'? Known: mult, ",
    ),
    (["blocks.gdn.ffn.options.mult=2x"], "ffn.options.mult: expected a number, found '2x'"),
    (
        ["blocks.gdn.residual={name: pre_norm, options: {a: 1}}"],
        "residual.options.a: PreNorm has no such option. Known: none",
    ),
    (
        ["blocks.gdn.mixer.gates.outptu=sigmoid"],
        "mixer.gates.outptu: 'gated_deltanet' has no such slot. Did you mean 'output'? Known: decay, write, ",
    ),
    (
        ["blocks.gdn.mixer.gates.query=sigmoid"],
        "mixer.gates.query: 'gated_deltanet' has no such slot. Known: decay, write, ",
    ),
    (
        ["blocks.gdn.mixer.gates.decay=silu"],
        "mixer.gates.decay: 'silu' is of kind output, and the slot takes kind decay. Known: bounded, ",
    ),
    (
        ["blocks.gdn.mixer.gates.output=kda"],
        "mixer.gates.output: 'kda' is of kind decay, and the slot takes kind output.",
    ),
    (
        ["blocks.gdn.mixer.gates.write=null"],
        "mixer.gates.write: missing: 'gated_deltanet' needs a write gate. Known: channel, complement, sigmoid",
    ),
    (
        ["blocks.gdn.mixer.gates.decay=mamba1"],
        "mixer.gates.decay: 'mamba1' gives one an entry of the state, and the op of 'gated_deltanet' takes one "
        "number a head or one a key channel",
    ),
    (
        ["blocks.gdn.mixer.gates.write=tied_step"],
        "mixer.gates.write: 'tied_step' is unbounded, and 'gated_deltanet' diverges beyond 2",
    ),
    (
        ["blocks.gdn.mixer.gates.write=complement", "blocks.gdn.mixer.gates.decay=null"],
        "mixer.gates.write: 'complement' reads the decay, and the slot decay is empty",
    ),
    (
        [
            "blocks.gdn.mixer={name: gla, options: {n_heads: 2, head_dim: 8}, gates: {decay: gla, write: tied_step}}",
        ],
        "mixer.gates.write: 'tied_step' reads the step of the decay gate, and 'gla' has none: use mamba1 or mamba2",
    ),
    (
        ["blocks.gdn.mixer.gates.decay.options.a_init=[1, 2, 3]"],
        "mixer.gates.decay.options.a_init: expected a list of 2, found 3: [1, 2, 3]",
    ),
    (
        ["blocks.gdn.mixer.gates.decay.options.a_init=[1, '2']"],
        "mixer.gates.decay.options.a_init[1]: expected a number",
    ),
    (
        ["blocks.gdn.mixer.gates.output.options.granularity=elementwize"],
        "mixer.gates.output.options.granularity: unknown value 'elementwize'. Did you mean 'elementwise'?",
    ),
    (
        ["blocks.gdn.mixer.gates.output.options.rank=half"],
        "mixer.gates.output.options.rank: expected an integer or 'full' or 'head_dim', found 'half'",
    ),
]


@pytest.mark.parametrize(("assignments", "message"), PARTS, ids=lambda value: str(value)[:60])
def test_options_slots_and_kinds(assignments: list[str], message: str) -> None:
    config = decode_stack(changed(*assignments))
    assert error_of(check_parts, config).startswith(f"model.stack.blocks.gdn.{message}")


def test_options_are_checked_inside_nested_values() -> None:
    rope = "model.stack.blocks.attn.mixer.options.rope"
    config = decode_stack(changed("blocks.attn.mixer.options.rope={fracton: 0.5}"))
    assert error_of(check_parts, config).startswith(f"{rope}.fracton: unknown key. Did you mean 'fraction'?")
    config = decode_stack(changed("blocks.attn.mixer.options.rope.theta=10_000"))
    check_parts(config)
    config = decode_stack(changed("blocks.attn.mixer.options.rope.theta='1e4'"))
    assert error_of(check_parts, config) == f"{rope}.theta: expected a number, found '1e4'"


def test_granularity_comes_from_the_option_or_the_class() -> None:
    assert granularity_of(DECAY.get("mamba2"), {}) == "head"
    assert granularity_of(DECAY.get("kda"), {}) == "channel"
    assert granularity_of(OUTPUT.get("sigmoid"), {}) == "elementwise"
    assert granularity_of(OUTPUT.get("sigmoid"), {"granularity": "headwise"}) == "headwise"
