"""RWKV-7 token by token with the tensors of our export, by the recurrence that its authors publish (RWKV-LM, 2024) and
not by fla's model, which warns that it may be wrong; in float64. What fla's configuration may say, and what not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zoo
from tests.tolerances import BACKWARD, FORWARD, assert_close
from zoo.check.cases import gradients, redraw
from zoo.hf.bound import bind_model
from zoo.hf.files import list_tensors, read_tensors
from zoo.hf.recipes import to_config, to_stack
from zoo.registry import RecipeError

CONFIG = {
    "model_type": "rwkv7",
    "vocab_size": 31,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "decay_low_rank_dim": 5,
    "a_low_rank_dim": 6,
    "v_low_rank_dim": 7,
    "gate_low_rank_dim": 9,
    "fuse_norm": False,
}
EPS = 1e-5


def authors(p: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits [T,V] of one document."""
    d, h, n = 32, 4, 8

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (d,), p[f"{name}.weight"], p[f"{name}.bias"], EPS)

    def lora(name: str, x: Tensor, between: str = "") -> Tensor:
        y = p[f"{name}.lora.0.weight"] @ x
        y = {"tanh": torch.tanh, "sigmoid": torch.sigmoid, "": torch.nn.Identity()}[between](y)
        return p[f"{name}.lora.2.weight"] @ y + p.get(f"{name}.lora.2.bias", torch.zeros(()))

    layers = range(3)
    before = {(i, part): torch.zeros(d, dtype=torch.float64) for i in layers for part in ("attn", "ffn")}
    states = {i: torch.zeros(h, n, n, dtype=torch.float64) for i in layers}  # [value, key]
    out = []
    for token in tokens:
        x = norm("model.layers.0.pre_norm", p["model.embeddings.weight"][token])
        for i in layers:
            at = f"model.layers.{i}"
            z, last = norm(f"{at}.attn_norm", x), before[i, "attn"]
            before[i, "attn"] = z
            r, w, k, v, a, g = (z + (last - z) * p[f"{at}.attn.x_{one}"].flatten() for one in "rwkvag")
            xv = v
            r, k, v = (p[f"{at}.attn.{one}_proj.weight"] @ y for one, y in (("r", r), ("k", k), ("v", v)))
            decay = torch.exp(-(torch.e**-0.5) * torch.sigmoid(lora(f"{at}.attn.w_lora", w, "tanh")))
            if i == 0:
                first = v
            else:
                v = v + (first - v) * torch.sigmoid(lora(f"{at}.attn.v_lora", xv))
            a, g = torch.sigmoid(lora(f"{at}.attn.a_lora", a)), lora(f"{at}.attn.g_lora", g, "sigmoid")
            erased = F.normalize((k * p[f"{at}.attn.k_k"]).view(h, n), dim=-1)
            k = (k * (1 + (a - 1) * p[f"{at}.attn.k_a"])).view(h, n)
            r, v, a, decay = (y.view(h, n) for y in (r, v, a, decay))
            erase = -erased[:, :, None] @ (erased * a)[:, None]
            states[i] = states[i] * decay[:, None] + states[i] @ erase + v[:, :, None] @ k[:, None]
            o = (states[i] @ r[:, :, None]).flatten()
            o = F.group_norm(o[None], h, p[f"{at}.attn.g_norm.weight"], p[f"{at}.attn.g_norm.bias"], n * EPS)[0]
            o = o + ((r * k * p[f"{at}.attn.r_k"]).sum(-1, keepdim=True) * v).flatten()
            x = x + p[f"{at}.attn.o_proj.weight"] @ (o * g)
            z, last = norm(f"{at}.ffn_norm", x), before[i, "ffn"]
            before[i, "ffn"] = z
            k = torch.relu(p[f"{at}.ffn.key.weight"] @ (z + (last - z) * p[f"{at}.ffn.x_k"])) ** 2
            x = x + p[f"{at}.ffn.value.weight"] @ k
        out.append(p["lm_head.weight"] @ norm("model.norm", x))
    return torch.stack(out)


def test_it_is_the_authors_recurrence(tmp_path: Path) -> None:
    """Logits, and the gradient of every tensor."""
    lm = zoo.load(to_stack(CONFIG).stack)
    redraw(lm)
    lm = lm.double()
    assert zoo.to_hf(lm, tmp_path / "out") == "rwkv7", "the family is found from the stack alone"
    tensors = {name: one.requires_grad_() for name, one in read_tensors(list_tensors(tmp_path / "out"))}
    tokens, weight = torch.randint(31, (1, 37)), torch.randn(37, 31, dtype=torch.float64)
    logits, wanted = lm(tokens), authors(tensors, tokens[0])
    assert_close(logits[0], wanted, FORWARD[torch.float64])
    ours = gradients(lm, (logits[0] * weight).sum())
    theirs = torch.autograd.grad((wanted * weight).sum(), list(tensors.values()))
    read = to_config(lm.config, "rwkv7")
    rules = {rule.hf: rule for rule in bind_model(read.family, read.config, read.kinds, lm)}
    for name, want in zip(tensors, theirs, strict=True):
        assert_close(rules[name].to_hf(ours), want, BACKWARD[torch.float64], name)
    fused = zoo.load(to_stack({**CONFIG, "fuse_norm": True}).stack).double()
    fused.load_state_dict(lm.state_dict())
    assert 1e-8 < (fused(tokens) - logits).abs().max() < 1e-3, "what the epsilon of fla's kernel does"


def test_sizes_that_the_configuration_leaves_out() -> None:
    """null is what RWKV's code makes of the hidden size."""
    ranks = dict.fromkeys(key for key in CONFIG if key.endswith("low_rank_dim"))
    stack = to_stack({**CONFIG, **ranks, "hidden_size": 1024, "head_dim": None, "num_heads": 8}).stack
    block = stack["blocks"]["rwkv7"]
    options, gates = block["mixer"]["options"], block["mixer"]["gates"]
    assert (options["n_heads"], options["head_dim"], options["head_v_dim"]) == (8, 128, 128)
    assert options["value_rank"] == 96  # 1.7 · 32 · 2 = 108.8, in steps of 32
    assert [gates[slot]["options"][key] for slot, key in (("decay", "rank"), ("output", "width"))] == [160, 160]
    assert block["ffn"]["options"]["width"] == 4096


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"head_dim": 7}, "head_dim is 7, which does not divide the hidden_size of 32"),
        ({"num_heads": 2}, "num_heads is 2, where hidden_size over head_dim is 4"),
        ({"head_dim": None}, "head_dim is null, and so is num_heads"),
        ({"value_dim": [32, 64, 32]}, r"value_dim is \[32, 64, 32\], and zoo knows the hidden_size, 32"),
        ({"value_dim": 64}, "value_dim is 64, and zoo knows the hidden_size, 32, for each of 3 layers"),
        ({"norm_bias": False}, "norm_bias is False, and zoo knows True only"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu', and zoo knows 'sqrelu' only"),
        ({"attn": {"layers": [1]}}, "attn is {'layers': "),
    ],
)
def test_what_it_does_not_take(more: dict[str, object], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        to_stack({**CONFIG, **more})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("norm.kind=rms", "stack.norm.kind is 'rms', where the family has 'layer'"),
        ("blocks.rwkv7.ffn=swiglu", "blocks.rwkv7.ffn is 'swiglu', where the family has 'rwkv7_channel_mix'"),
        ("blocks.rwkv7.mixer.options.head_v_dim=12", "head_v_dim is 12, where the family has hidden_size over"),
        ("blocks.rwkv7.mixer.options.key_eps=0.1", "key_eps is 0.1, where the family knows 1e-06, 1e-24"),
    ],
)
def test_what_it_cannot_say(change: str, told: str) -> None:
    lm = zoo.load(to_stack(CONFIG).stack, device="meta", set=[change])
    with pytest.raises(RecipeError, match=told):
        to_config(lm.config, "rwkv7")


def test_other_families_have_no_such_norms() -> None:
    llama = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": 31,
        "hidden_size": 16,
        "intermediate_size": 24,
    }
    stack = to_stack({**llama, "num_attention_heads": 2}).stack
    for change, told in (("norm.kind=layer", "stack.norm.kind is 'layer'"), ("embed_norm=true", "embed_norm is True")):
        with pytest.raises(RecipeError, match=told):
            to_config(zoo.load(stack, device="meta", set=[change]).config, "llama")
