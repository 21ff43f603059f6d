"""moe: transformers' blocks, LatentMoE by its formula, stacks of mixtures, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zoo
from tests.recipes_by_hand import error_of
from tests.tolerances import BACKWARD, FORWARD, assert_close
from zoo.check import ffns
from zoo.check.cases import redraw
from zoo.config import FFNPart, Part, RouterPart, build
from zoo.registry import FFNS
from zoo.sequence import Ledger, dense
from zoo.shapes import LayerContext, NormConfig

N_EXPERTS, TOP_K, WIDTH, D = 12, 3, 20, 32
GROUPED = {"n_groups": 4, "top_groups": 2, "scaling": 2.446}


def part(name: str, **options: Any) -> dict[str, Any]:
    return {"name": name, "options": options}


def mixture(router: dict[str, Any], shared: int | None = None, expert: str = "swiglu", **options: Any) -> Any:
    """`shared`: the width of a shared expert. Options of the experts: alike in `limit`."""
    own = {name: options.pop(name) for name in ("limit", "beta_up") if name in options}
    given = {
        "n_experts": N_EXPERTS,
        "top_k": TOP_K,
        "expert": FFNPart(name=expert, options={"width": WIDTH, **own}),
        "router": RouterPart(**router),
        "shared": None if shared is None else FFNPart(name=expert, options={"width": shared, **own}),
    }
    context = LayerContext(D, norm=NormConfig(eps=1e-2))
    ffn = build(FFNS, Part(name="moe", options={**given, **options}), "ffn", context)
    redraw(ffn)
    return ffn


CASES = {
    "qwen3_next": (part("softmax"), {"shared": 28, "shared_gate": True}),
    "qwen3_next_plain": (part("softmax", renormalize=False), {"shared": 28, "shared_gate": True}),
    "qwen3_5_moe": (part("softmax"), {"shared": 28, "shared_gate": True}),
    "kimi_linear": (part("sigmoid", scaling=2.446), {"shared": 40}),
    "bailing_hybrid": (part("sigmoid", **GROUPED), {"shared": 40}),
    "deepseek_v3": (part("sigmoid", **GROUPED), {"shared": 40}),
    "deepseek_v3_plain": (part("sigmoid", renormalize=False, **GROUPED), {"shared": 40}),
    "glm5_next": (part("sigmoid", **GROUPED), {"shared": 40, "limit": 0.7}),
    "minimax": (part("softmax"), {}),
    "gpt_oss": (part("softmax", bias=True), {"expert": "gpt_oss_glu", "limit": 0.7}),
    "deepseek_v4": (part("sigmoid", score="sqrtsoftplus", scaling=1.5), {"shared": 20, "limit": 0.7}),
    "deepseek_v4_hash": (part("hash", vocab_size=61, scaling=1.5), {"shared": 20, "limit": 0.7}),
}
NAMES = {
    "gate.weight": "router.proj.weight",
    "router.weight": "router.proj.weight",
    "router.bias": "router.proj.bias",
    "gate.e_score_correction_bias": "router.selection_bias",
    "gate.tid2eid": "router.table",
    "shared_expert_gate.weight": "shared_gate.weight",
    "experts.gate_up_proj_bias": "experts.gate_up_bias",
    "experts.down_proj_bias": "experts.down_bias",
}


def ours(theirs: dict[str, Tensor], case: str) -> dict[str, Tensor]:
    """Their tensors under our names; GPT-OSS keeps matrices the other way round, gates and ups in turn."""
    found = {}
    for name, tensor in theirs.items():
        name = NAMES.get(name, name.replace("shared_expert.", "shared.").replace("shared_experts.", "shared."))
        if case == "gpt_oss" and name in ("experts.gate_up_proj", "experts.down_proj"):
            tensor = tensor.mT
        if case == "gpt_oss" and name.startswith("experts.gate_up"):
            tensor = torch.cat((tensor[:, ::2], tensor[:, 1::2]), dim=1)
        found[name] = tensor
    return found


@pytest.mark.parametrize("case", CASES)
def test_it_is_transformers_block(oracle: dict[str, Any], case: str) -> None:
    theirs = oracle[case]
    router, options = CASES[case]
    ffn = mixture(router, **options)
    ffn.load_state_dict(ours(theirs["state"], case))
    x = theirs["x"].requires_grad_()
    layout = dense(*x.shape[:2], x.device)
    layout.tokens = theirs["tokens"]
    y = ffn(x, layout)
    assert_close(y, theirs["y"], FORWARD[torch.float32], "y")
    parameters = {"x": x, **dict(ffn.named_parameters())}
    grads = torch.autograd.grad((y * theirs["w"]).sum(), list(parameters.values()))
    wanted = ours(theirs["gradients"], case)
    assert parameters.keys() == wanted.keys(), "what they count as parameters"
    for name, grad in zip(parameters, grads, strict=True):
        assert_close(grad, wanted[name], BACKWARD[torch.float32], name)


def test_the_load_balance_loss_is_transformers(oracle: dict[str, Any]) -> None:
    logits, wanted = oracle["load_balance"]["logits"], oracle["load_balance"]["loss"]
    router = mixture(part("softmax", load_balance=0.5, z_loss=0.25), latent_width=8).router
    with torch.no_grad():
        router.proj.weight.copy_(torch.eye(N_EXPERTS, D))
    layout = dense(1, len(logits), logits.device)
    layout.ledger = Ledger()
    router(F.pad(logits, (0, D - N_EXPERTS)), layout)
    assert_close(layout.ledger.losses["load_balance"], 0.5 * wanted, FORWARD[torch.float32])
    z_loss = 0.25 * logits.exp().sum(-1).log().square().mean()
    assert_close(layout.ledger.losses["z_loss"], z_loss, FORWARD[torch.float32])


def test_latent_experts_and_situ_by_their_formulas() -> None:
    """Kimi K3, eq. 11-12, token by token."""
    ffn = mixture(part("sigmoid"), 9, "situ_glu", beta_up=3.0, latent_width=10, latent_norm=True).double()
    x = torch.randn(1, 7, D, dtype=torch.float64)
    y = ffns.run(ffn, x)
    p = dict(ffn.named_parameters())

    def situ(g: Tensor, u: Tensor) -> Tensor:
        return 4 * torch.tanh(g / 4) / (1 + torch.exp(-g)) * 3 * torch.tanh(u / 3)

    for t in range(7):
        scores = 1 / (1 + torch.exp(-p["router.proj.weight"] @ x[0, t]))
        chosen = scores.argsort(descending=True)[:TOP_K]
        latent = p["latent_down_proj.weight"] @ x[0, t]
        total = torch.zeros(10, dtype=torch.float64)
        for e in chosen:
            gate, up = (p["experts.gate_up_proj"][e] @ latent).split(WIDTH)
            total += scores[e] / scores[chosen].sum() * (p["experts.down_proj"][e] @ situ(gate, up))
        normed = total / (total.square().mean() + 1e-2).sqrt() * p["latent_norm.weight"]
        gate, up = p["shared.gate_proj.weight"] @ x[0, t], p["shared.up_proj.weight"] @ x[0, t]
        want = p["latent_up_proj.weight"] @ normed + p["shared.down_proj.weight"] @ situ(gate, up)
        assert_close(y[0, t], want, FORWARD[torch.float64])


def recipe(**options: Any) -> dict[str, Any]:
    ffn = part("moe", n_experts=N_EXPERTS, top_k=TOP_K, expert=part("swiglu", width=8), **options)
    attention = part("attention", n_heads=2, head_dim=8)
    gdn = part("gated_deltanet", n_heads=1, head_dim=8) | {"gates": {"decay": "mamba2", "write": "sigmoid"}}
    blocks = {"a": {"mixer": attention, "ffn": ffn}, "b": {"mixer": gdn, "ffn": ffn}}
    return {"vocab_size": 29, "d_model": 24, "n_layers": 2, "pattern": ["a", "b"], "blocks": blocks}


@pytest.mark.parametrize(
    "router", [part("softmax"), part("sigmoid", n_groups=4, top_groups=2)], ids=lambda r: r["name"]
)
@pytest.mark.parametrize("more", [{}, {"shared": "swiglu", "shared_gate": True, "latent_width": 10}], ids=["", "all"])
def test_a_stack_of_mixtures(router: dict[str, Any], more: dict[str, Any]) -> None:
    """Cached is full, packed is separate, padded is unpadded."""
    lm = zoo.load(recipe(router=router, **more))
    redraw(lm)
    lm = lm.double()
    tokens = torch.randint(29, (2, 21))
    full = lm(tokens)
    cache = lm.init_cache(2)
    cached = torch.cat([lm(chunk, cache=cache) for chunk in tokens.split([11, 1, 9], dim=1)], dim=1)
    assert_close(cached, full, FORWARD[torch.float64], "cached")
    packed = lm(tokens.view(1, -1), cu_seqlens=torch.tensor([0, 21, 42]))
    assert_close(packed.view_as(full), full, FORWARD[torch.float64], "packed")
    mask = torch.ones(2, 21, dtype=torch.int64)
    mask[1, :5] = 0
    padded = lm(torch.cat((tokens[:1], tokens[1:].roll(5, 1))), attention_mask=mask)
    assert_close(padded[0], full[0], FORWARD[torch.float64], "padded")
    assert_close(padded[1, 5:], full[1, :16], FORWARD[torch.float64], "padded")


def test_initialisation_and_idle_parameters() -> None:
    lm = zoo.load(recipe() | {"d_model": 64, "init_std": 0.03})
    experts = lm.layers[0].ffn.experts
    for name in ("gate_up_proj", "down_proj"):
        assert getattr(experts, name).std().item() == pytest.approx(0.03, rel=0.05)
    assert lm.layers[0].ffn.idle_params == (N_EXPERTS - TOP_K) * 3 * 64 * 8
    assert zoo.load(recipe(), device="meta").layers[0].ffn.experts.gate_up_proj.is_meta


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 13}, "top_k: 13 of 12 experts"),
        ({"expert": "moe"}, "expert: 'moe' has no combine(gate, up): experts are GLUs, as swiglu"),
        ({"expert": "swiglo"}, "expert: unknown ffn 'swiglo'. Did you mean 'swiglu'?"),
        ({"expert": part("swiglu", width=0)}, "expert.options.width: expected at least 1, found 0"),
        ({"shared_gate": True}, "shared_gate: there is no shared expert to gate: give shared"),
        ({"latent_norm": True}, "latent_norm: there is no latent to normalise: give latent_width"),
        ({"router": part("sigmoid", n_groups=5)}, "router.options.n_groups: 12 experts cannot be shared out over 5"),
        ({"router": part("sigmoid", top_groups=2)}, "router.options.top_groups: 2 of 1 groups"),
        ({"router": part("sigmoid", n_groups=6)}, "router.options.top_groups: 1 of 2 experts each, and top_k is 3"),
        (
            {"router": part("sigmoid", balance="none", update_rate=0.1)},
            "router.options.update_rate: 0.1 says nothing with balance: none",
        ),
        ({"router": part("sigmoid", score="sqrtsoftplus", balance="quantile")}, "router.options.balance: "),
        ({"router": "hash"}, "router.options.vocab_size: missing"),
        ({"router": part("softmax", z_loss=-1.0)}, "router.options.z_loss: expected at least 0, found -1"),
    ],
)
def test_refused_in_a_line(options: dict[str, Any], message: str) -> None:
    source = recipe()
    source["blocks"]["a"]["ffn"]["options"].update(options)
    assert error_of(zoo.load, source, device="meta").startswith(f"model.stack.blocks.a.ffn.options.{message}")
