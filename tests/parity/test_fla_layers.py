"""fla's own layers with redrawn weights: the output and the gradients of the input and of every parameter are the same.

Its kernels need Triton: plain torch stands in their place (see `fla_layers.py`), so what this holds is the wiring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import zoo
from tests.oracles import ask
from tests.parity.fla_layers import CASES, EPS, WIDTH
from tests.parity.mapping import Tensors
from tests.parity.test_transformers import difference, fill
from zoo.mixers import Mixer
from zoo.sequence import dense

Answers = dict[str, Any]
TOLERANCE = 1e-5  # of the largest entry; seen: 3e-6


class Twin(NamedTuple):
    """Our mixer, and its tensors' names in fla's layer: those that are not the same in both."""

    mixer: dict[str, Any]
    names: Mapping[str, str] = {}
    shape: Callable[[Tensors], Tensors] = dict


def gates(**parts: Any) -> dict[str, Any]:
    """`decay=("gla", {...})` as a recipe has it."""
    return {
        slot: part if isinstance(part, str) else {"name": part[0], "options": part[1]} for slot, part in parts.items()
    }


def rwkv6(tensors: Tensors) -> Tensors:
    """fla has the mixtures of all streams in one tensor, in the order r, w, k, v, g."""
    places = [SHIFTS[stream] for stream in "rwkvg"]
    parts = {
        "still.mu": tensors.pop("x_bias").unbind(0),
        "a.weight": tensors.pop("x_proj.0.linear.weight").chunk(len(places), dim=0),
        "b.weight": tensors.pop("x_proj.2.weight").chunk(len(places), dim=1),
    }
    for part, of_streams in parts.items():
        tensors |= {f"{place}.{part}": tensor for place, tensor in zip(places, of_streams, strict=True)}
    return tensors


SHIFTS = {stream: f"shifts.{stream}" for stream in "rkv"} | {
    letter: f"gates.{slot}.shift" for letter, slot in {"w": "decay", "a": "write", "g": "output"}.items()
}
GATED_NORM = {"g_proj.weight": "gates.output.g_proj.weight", "g_norm_swish_gate.weight": "o_norm.weight"}
DELTA = {"b_proj.weight": "gates.write.b_proj.weight", "g_proj.weight": "gates.output.g_proj.weight"}
GDN = {name: f"gates.decay.{name}" for name in ("a_proj.weight", "A_log", "dt_bias")}
KDA = {
    "A_log": "gates.decay.A_log",
    "dt_bias": "gates.decay.dt_bias",
    "f_proj.0.weight": "gates.decay.f_proj.a.weight",
    "f_proj.1.weight": "gates.decay.f_proj.b.weight",
    "g_proj.0.weight": "gates.output.g_proj.a.weight",
    "g_proj.1.weight": "gates.output.g_proj.b.weight",
}
RWKV6 = {
    "x_proj.0.mu": "mixture.mu",
    **{f"{name}_proj.linear.weight": f"{name}_proj.weight" for name in "rkv"},
    "g_proj.linear.weight": "gates.output.g_proj.weight",
    "w_proj.linear.lora.0.weight": "gates.decay.a_proj.weight",
    "w_proj.linear.lora.2.weight": "gates.decay.b_proj.weight",
    "w_proj.linear.lora.2.bias": "gates.decay.w0",
    "g_norm.weight": "o_norm.weight",
    "g_norm.bias": "o_norm.bias",
}
RWKV7 = {
    **{f"x_{stream}": f"{place}.mu" for stream, place in SHIFTS.items()},
    "w_lora.lora.0.weight": "gates.decay.a_proj.weight",
    "w_lora.lora.2.weight": "gates.decay.b_proj.weight",
    "w_lora.lora.2.bias": "gates.decay.w0",
    "a_lora.lora.0.weight": "gates.write.b_proj.a.weight",
    "a_lora.lora.2.weight": "gates.write.b_proj.b.weight",
    "a_lora.lora.2.bias": "gates.write.a_bias",
    "v_lora.lora.0.weight": "value_mix.a.weight",
    "v_lora.lora.2.weight": "value_mix.b.weight",
    "v_lora.lora.2.bias": "value_bias",
    "g_lora.lora.0.weight": "gates.output.a_proj.weight",
    "g_lora.lora.2.weight": "gates.output.b_proj.weight",
    "g_norm.weight": "o_norm.weight",
    "g_norm.bias": "o_norm.bias",
}
RWKV7_GATES = gates(
    decay=("rwkv7", {"rank": 5}),
    write=("channel", {"rank": 6}),
    output=("mlp", {"width": 9, "inner": "sigmoid", "outer": "none"}),
)


def mixer(name: str, filled: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"name": name, "options": options, "gates": filled}


TWINS = {
    "gla": Twin(
        mixer("gla", gates(decay=("gla", {"rank": 6}), output="silu"), n_heads=2, head_dim=8),
        {
            "gk_proj.0.weight": "gates.decay.f_proj.a.weight",
            "gk_proj.1.weight": "gates.decay.f_proj.b.weight",
            "gk_proj.1.bias": "gates.decay.bias",
            **GATED_NORM,
        },
    ),
    "retnet": Twin(mixer("retnet", gates(decay="retnet", output="silu"), n_heads=4, head_dim=8), GATED_NORM),
    "deltanet": Twin(
        mixer("deltanet", gates(write="sigmoid"), n_heads=4, head_dim=8, head_v_dim=12, conv_size=3), DELTA
    ),
    "deltanet_gated": Twin(
        mixer("deltanet", gates(write=("sigmoid", {"scale": 2}), output="silu"), n_heads=2, head_dim=16), DELTA
    ),
    "gated_deltanet": Twin(
        mixer(
            "gated_deltanet",
            gates(decay="mamba2", write="sigmoid", output="silu"),
            n_heads=2,
            n_v_heads=6,
            head_dim=8,
            head_v_dim=16,
        ),
        DELTA | GDN,
    ),
    "kda": Twin(
        mixer(
            "kda",
            gates(decay=("kda", {"rank": 12}), write="sigmoid", output=("sigmoid", {"rank": "head_dim"})),
            n_heads=3,
            head_dim=8,
            head_v_dim=12,
        ),
        DELTA | KDA,
    ),
    "kda_bounded": Twin(
        mixer(
            "kda",
            gates(decay="bounded", write="sigmoid", output=("sigmoid", {"rank": "head_dim"})),
            n_heads=3,
            head_dim=8,
        ),
        DELTA | KDA,
    ),
    "rwkv6": Twin(
        mixer(
            "rwkv6",
            gates(decay=("rwkv6", {"rank": 6}), output="silu"),
            n_heads=2,
            head_dim=8,
            head_v_dim=16,
            shift_rank=5,
            norm={"eps": EPS},  # fla's own; RWKV's code has it 64 times larger
        ),
        RWKV6,
        rwkv6,
    ),
    "rwkv7_first": Twin(mixer("rwkv7", RWKV7_GATES, n_heads=4, head_dim=8), RWKV7),
    "rwkv7": Twin(
        mixer("rwkv7", RWKV7_GATES, n_heads=4, head_dim=8, head_v_dim=12, value_rank=7, norm={"eps": 8 * EPS}),
        RWKV7,
    ),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answers]:
    program = Path(__file__).with_name("fla_layers.py")
    file = ask(program, tmp_path_factory.mktemp("parity") / "fla_layers.pt", "fla", "einops")
    found: dict[str, Answers] = torch.load(file, weights_only=True)
    return found


def build(name: str) -> Mixer:
    arguments = CASES[name][2]
    stack = {
        "vocab_size": 3,
        "d_model": WIDTH,
        "n_layers": arguments.get("num_hidden_layers", 1),
        "pattern": ["a"],
        "blocks": {"a": {"mixer": TWINS[name].mixer}},
        "norm": {"eps": EPS},
    }
    return zoo.load(stack).layers[arguments.get("layer_idx", 0)].mixer


def to_zoo(tensors: Tensors, name: str, mixer: Mixer) -> Tensors:
    """fla's tensors under our names. Where they differ in shape alone (a channel of a head, a tap) ours counts."""
    twin = TWINS[name]
    out = {twin.names.get(theirs, theirs): tensor for theirs, tensor in twin.shape(dict(tensors)).items()}
    out.pop("g_proj.1.bias", None)  # only fla's KDA has this bias; it is zero
    shapes = {ours: parameter.shape for ours, parameter in mixer.named_parameters()}
    return {ours: tensor.reshape(shapes[ours]) for ours, tensor in out.items()}


def test_every_layer_has_a_twin() -> None:
    assert set(TWINS) == set(CASES)


def relative(got: Tensor, want: Tensor) -> float:
    return difference(got, want) / want.abs().max().item()


@pytest.mark.parametrize("name", CASES)
def test_layer(answers: dict[str, Answers], name: str) -> None:
    answer, ours = answers[name], build(name)
    fill(ours, to_zoo(answer["state"], name, ours))
    inputs = {key: tensor.clone().requires_grad_() for key, tensor in answer["inputs"].items()}
    layout = dense(*inputs["x"].shape[:2], inputs["x"].device)
    if "v_first" in inputs:
        layout.shared["rwkv7.values"] = inputs["v_first"].unflatten(-1, (ours.n_v_heads, ours.head_v_dim))
    y = ours(inputs["x"], layout)
    assert relative(y, answer["y"]) <= TOLERANCE
    if answer["v_first"] is not None:
        assert relative(layout.shared["rwkv7.values"].flatten(-2), answer["v_first"]) <= TOLERANCE
    names, parameters = zip(*ours.named_parameters(), strict=True)
    given = torch.autograd.grad((y * answer["w"]).sum(), (*inputs.values(), *parameters))
    gradients = dict(zip((*inputs, *names), given, strict=True))
    theirs = dict(answer["gradients"])
    wanted = {key: theirs.pop(key) for key in inputs} | to_zoo(theirs, name, ours)
    for key, gradient in gradients.items():
        assert relative(gradient, wanted[key]) <= TOLERANCE, key
