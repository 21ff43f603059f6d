"""What fla's own layers say on a CPU without Triton. A program, since it puts a hollow module in Triton's place and
plain torch in that of fla's kernels: their naive references where there are some, else the formula.

`python fla_layers.py FILE` writes {case: {x, w, v_first, state, y, v, gradients}} as a torch file: the layer's input,
its output, and the gradients of (y · w).sum().
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

BATCH, LENGTH, WIDTH = 2, 70, 32
EPS = 1e-2  # so large that every norm's epsilon counts

# case: the module of fla.layers, its class, the arguments. Sizes differ wherever they may.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gla": ("gla", "GatedLinearAttention", {"num_heads": 2, "expand_k": 0.5, "expand_v": 1.0, "gate_low_rank_dim": 6}),
    "retnet": ("multiscale_retention", "MultiScaleRetention", {"num_heads": 4}),
    "deltanet": ("delta_net", "DeltaNet", {"num_heads": 4, "expand_v": 1.5, "conv_size": 3}),
    "deltanet_gated": ("delta_net", "DeltaNet", {"num_heads": 2, "use_gate": True, "allow_neg_eigval": True}),
    "gated_deltanet": ("gated_deltanet", "GatedDeltaNet", {"num_heads": 2, "num_v_heads": 6, "head_dim": 8}),
    "kda": ("kda", "KimiDeltaAttention", {"num_heads": 3, "head_dim": 8, "expand_v": 1.5}),
    "kda_bounded": (
        "kda",
        "KimiDeltaAttention",
        {"num_heads": 3, "head_dim": 8, "lower_bound": -5.0, "safe_gate": True},
    ),
    "rwkv6": ("rwkv6", "RWKV6Attention", {"num_heads": 2, "proj_low_rank_dim": 5, "gate_low_rank_dim": 6}),
    "rwkv7_first": ("rwkv7", "RWKV7Attention", {"head_dim": 8, "layer_idx": 0, "fuse_norm": True}),
    "rwkv7": ("rwkv7", "RWKV7Attention", {"head_dim": 8, "value_dim": 48, "layer_idx": 1, "fuse_norm": True}),
}
# Unfused, fla's RWKV-7 divides keys by their length as RWKV's code does, without the epsilon 1e-6 that its fused form
# and ours have: that moves the output by 1e-5.
RANKS = {"decay_low_rank_dim": 5, "a_low_rank_dim": 6, "v_low_rank_dim": 7, "gate_low_rank_dim": 9}
for _layer in ("rwkv7_first", "rwkv7"):
    CASES[_layer][2].update(RANKS, num_hidden_layers=3)


class Hollow(ModuleType):
    """Stands for any module, decorator or value of Triton while fla is imported. There is no active driver."""

    __version__ = "3.6.0"
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "active":
            raise AttributeError(name)
        return Hollow(name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self

    def __mro_entries__(self, bases: Any) -> tuple[type]:
        return (HollowBase,)


class HollowBase:
    def __init__(self, *args: Any, **options: Any):
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(Hollow("base"), name)


class HollowTriton(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "triton" else None

    def create_module(self, spec: Any) -> ModuleType:
        return Hollow(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def main(file: str) -> None:
    import torch
    import torch.utils.flop_counter  # before Triton appears to be there

    torch.set_num_threads(1)
    torch.compile = lambda f=None, **options: (lambda g: g) if f is None else f  # type: ignore[assignment]
    if importlib.util.find_spec("triton") is None:
        sys.meta_path.insert(0, HollowTriton())
    # fla without its __init__, which imports every model that it has
    (where,) = importlib.machinery.PathFinder.find_spec("fla").submodule_search_locations  # type: ignore[union-attr]
    for name, path in {"fla": where, "fla.layers": f"{where}/layers"}.items():
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__dict__.update(__path__=[path], __version__="0")
    replace_modules()
    torch.save({name: answer(*case) for name, case in CASES.items()}, file)


def replace_modules() -> None:
    """Plain torch in the place of the kernels under fla.modules."""
    import torch
    import torch.nn.functional as F
    from fla.modules.causal_conv1d import ShortConvolution
    from fla.modules.norm import fused_norm_gate, layernorm
    from fla.modules.rotary import ops as rotary

    def rms_norm(x: Any, weight: Any, bias: Any, eps: float, **unused: Any) -> Any:
        return layernorm.rms_norm_ref(x, weight, bias, eps=eps)

    def rms_norm_gated(x: Any, g: Any, weight: Any, bias: Any, activation: str, eps: float, **unused: Any) -> Any:
        score = torch.sigmoid(g) if activation == "sigmoid" else F.silu(g)
        return layernorm.rms_norm_ref(x, weight, bias, eps=eps) * score

    def group_norm(x: Any, weight: Any, bias: Any, eps: float, num_groups: int, **unused: Any) -> Any:
        return layernorm.group_norm_ref(x, weight, bias, num_groups, eps=eps)

    def rotary_embedding(x: Any, cos: Any, sin: Any, interleaved: bool, **unused: Any) -> Any:
        return rotary.rotary_embedding_ref(x, cos[: x.shape[1]], sin[: x.shape[1]], interleaved)

    layernorm.rms_norm, fused_norm_gate.rms_norm_gated = rms_norm, rms_norm_gated
    layernorm.group_norm, rotary.rotary_embedding = group_norm, rotary_embedding
    ShortConvolution.forward = lambda self, x, **unused: convolution(x, self.weight.squeeze(1))


def convolution(x: Any, weight: Any, **unused: Any) -> Any:
    import torch.nn.functional as F

    y = F.conv1d(x.mT, weight.unsqueeze(1), padding=weight.shape[1] - 1, groups=len(weight))
    return F.silu(y[..., : x.shape[1]]).mT, None


def kernels() -> dict[str, Any]:
    """What stands in the place of the kernels in a layer's own namespace."""
    import torch
    from fla.modules.token_shift import token_shift_ref
    from fla.ops.delta_rule.naive import delta_rule_recurrence
    from fla.ops.gated_delta_rule.gate import naive_gdn_gate
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence
    from fla.ops.gla.naive import naive_recurrent_gla
    from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
    from fla.ops.kda.naive import naive_recurrent_kda
    from fla.ops.nsa import naive as naive_nsa
    from fla.ops.retention.naive import naive_retention
    from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6
    from fla.ops.rwkv7.fused_addcmul import torch_addcmul_rwkv7
    from fla.ops.rwkv7.fused_k_update import k_update_ref
    from fla.ops.rwkv7.gate_output_correction import gate_output_correction_ref
    from torch.nn.functional import scaled_dot_product_attention

    def heads_first(*tensors: Any) -> list[Any]:
        return [tensor.transpose(1, 2) for tensor in tensors]

    def l2norm(x: Any) -> Any:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)

    def gla(q: Any, k: Any, v: Any, g: Any, **unused: Any) -> Any:
        return naive_recurrent_gla(q, k, v, g)

    def retention(q: Any, k: Any, v: Any, **unused: Any) -> Any:
        return naive_retention(*heads_first(q, k, v)).transpose(1, 2), None

    def delta_rule(q: Any, k: Any, v: Any, beta: Any, use_qk_l2norm_in_kernel: bool, **unused: Any) -> Any:
        assert use_qk_l2norm_in_kernel
        return delta_rule_recurrence(*heads_first(l2norm(q), l2norm(k), v, beta))[0].transpose(1, 2), None

    def gated_delta_rule(q: Any, k: Any, v: Any, g: Any, beta: Any, A_log: Any, dt_bias: Any, **unused: Any) -> Any:
        q, k = (l2norm(y).repeat_interleave(v.shape[2] // y.shape[2], dim=2) for y in (q, k))
        return naive_recurrent_gated_delta_rule(q, k, v, beta.sigmoid(), naive_gdn_gate(g, A_log, dt_bias))

    def kda(
        q: Any, k: Any, v: Any, g: Any, beta: Any, A_log: Any, dt_bias: Any, lower_bound: Any, **unused: Any
    ) -> Any:
        if lower_bound is None:
            g = naive_kda_gate(g, A_log, dt_bias)
        else:
            g = naive_kda_lowerbound_gate(g, A_log, dt_bias, lower_bound)
        return naive_recurrent_kda(l2norm(q), l2norm(k), v, g, beta.sigmoid())

    def nsa(q: Any, k: Any, v: Any, **options: Any) -> Any:
        naive_nsa.mean_pooling = lambda x, size, cu_seqlens: torch.stack([y.mean(1) for y in x.split(size, 1)], 1)
        naive_nsa.flash_attn_func = windowed
        return naive_nsa.naive_nsa(q, k, v, **options)

    def windowed(q: Any, k: Any, v: Any, causal: bool, window_size: tuple[int, int]) -> Any:
        assert causal
        time = torch.arange(q.shape[1])
        back = time[:, None] - time
        seen = (back >= 0) & (back <= window_size[0])
        q, k, v = heads_first(q, k, v)
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)

    def rwkv6(r: Any, k: Any, v: Any, w: Any, u: Any, scale: float, **unused: Any) -> Any:
        return naive_recurrent_rwkv6(*heads_first(r, k, v, w), u, scale=scale)[0].transpose(1, 2), None

    def rwkv7(r: Any, w: Any, k: Any, v: Any, a: Any, b: Any, scale: float, **unused: Any) -> Any:
        r = scale * r.shape[-1] ** 0.5 * r  # the reference always divides by it
        return dplr_recurrence(*heads_first(r, k, v, a, b, w))[0].transpose(1, 2), None

    def token_shift(x: Any, cu_seqlens: Any, output_cache: bool = False, **unused: Any) -> Any:
        return (token_shift_ref(x), None) if output_cache else token_shift_ref(x)

    return {
        "causal_conv1d": convolution,
        "chunk_gla": gla,
        "chunk_retention": retention,
        "chunk_delta_rule": delta_rule,
        "chunk_gated_delta_rule": gated_delta_rule,
        "chunk_kda": kda,
        "chunk_rwkv6": rwkv6,
        "chunk_rwkv7": rwkv7,
        "parallel_nsa": nsa,
        "token_shift": token_shift,
        "l2_norm": l2norm,
        "fused_addcmul_rwkv7": torch_addcmul_rwkv7,
        "fused_k_rwkv7": k_update_ref,
        "gate_output_correction": gate_output_correction_ref,
    }


def answer(module: str, cls: str, arguments: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.nn.functional as F

    namespace = importlib.import_module(f"fla.layers.{module}")
    for name, plain in kernels().items():
        if hasattr(namespace, name):
            setattr(namespace, name, plain)
    layer_class = getattr(namespace, cls)
    layer_class._initialize_weights = lambda self, module: None  # RWKV-7's fails where values have a width of their own
    torch.manual_seed(0)
    layer = layer_class(hidden_size=WIDTH, norm_eps=EPS, **arguments)
    if module == "rwkv6":
        layer.gate_fn = F.silu
    redraw(layer)
    x, w = (torch.randn(BATCH, LENGTH, WIDTH) for _ in range(2))
    inputs = {"x": x.clone().requires_grad_()}
    options = {}
    if arguments.get("layer_idx"):
        inputs["v_first"] = torch.randn(BATCH, LENGTH, layer.value_dim).requires_grad_()
        options["v_first"] = inputs["v_first"]
    y, *_, last = layer(inputs["x"], **options)
    parameters = inputs | dict(layer.named_parameters())
    gradients = torch.autograd.grad((y * w).sum(), list(parameters.values()))
    return {
        "w": w,
        "y": y.detach(),
        "v_first": None if last is None else last.detach(),
        "inputs": {name: tensor.detach() for name, tensor in inputs.items()},
        "state": {name: parameter.detach() for name, parameter in layer.named_parameters()},
        "gradients": dict(zip(parameters, gradients, strict=True)),
    }


def redraw(layer: Any) -> None:
    """Every parameter anew, so that none is 0 or 1, and decays remember for a few to a few hundred tokens."""
    import torch

    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            if key.endswith("A_log"):
                parameter.uniform_(*((0.0, 0.7) if getattr(layer, "safe_gate", False) else (-2.5, 0.5)))
            elif key.endswith("dt_bias") or key in ("w_lora.lora.2.bias", "w_proj.linear.lora.2.bias"):
                parameter.normal_(mean=-1.5, std=0.7)
            elif (key.startswith("x_") and "proj" not in key) or key.endswith("mu"):
                parameter.uniform_()
            elif key == "g_proj.1.bias":
                parameter.zero_()  # only fla's KDA has this bias
            elif parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=parameter[0].numel() ** -0.5)


if __name__ == "__main__":
    main(sys.argv[1])
