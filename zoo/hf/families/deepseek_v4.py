"""DeepSeek-V4 (2026): one key and value for all heads, near and in compressed entries; routing by table; mHC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zoo.hf.configuration import FILE, REQUIRED, Config
from zoo.hf.families._mixture import BALANCE, expert_tensors, mixture, shared_tensors
from zoo.hf.family import Family, Kind
from zoo.hf.layers import COUNT, Layers
from zoo.hf.rope import KEY, RopeKeys
from zoo.hf.template import Entry, Inexpressible, Key, Written
from zoo.hf.tensors import Rule, rule
from zoo.registry import RecipeError

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
MIXERS = {SLIDING: "sliding", CSA: "csa", HCA: "hca"}
HASH = "_hash"
_RATIOS = {0: SLIDING, 4: CSA, 128: HCA}
_PARTIAL = "partial_rotary_factor"


class Rope(Entry):
    """The rotation under one label: `main` near, `compress` where entries are compressed. What is rotated is the key
    `qk_rope_head_dim`, which the fraction of all channels in transformers' configurations only says again."""

    def __init__(self, label: str):
        self.label, self.own = label, RopeKeys(interleaved=True)

    def read(self, config: Config) -> Any:
        rope = dict(config[KEY][self.label])
        width, rotated = config["head_dim"], config["qk_rope_head_dim"]
        if int(width * rope.pop(_PARTIAL, 1.0)) != rotated:
            config.refuse(
                f"{KEY}.{self.label}.{_PARTIAL}", f"not the {rotated} of {width} channels of qk_rope_head_dim"
            )
        inner = Config({KEY: rope}, {KEY: None})
        value = self.own.read(inner)
        for fault in inner.faults:
            name, _, why = fault.partition(" is ")
            config.refuse(name.replace(KEY, f"{KEY}.{self.label}"), why)
        return value

    def write(self, value: Any, out: Written) -> None:
        inner = Written()
        self.own.write(value, inner)
        rope = {**inner[KEY], _PARTIAL: out["qk_rope_head_dim"] / out["head_dim"]}
        _set_within(out, KEY, self.label, rope)


class Rate(Entry):
    """Tokens an entry, of one kind of layer."""

    def __init__(self, kind: str):
        self.kind = kind

    def read(self, config: Config) -> Any:
        rates = config["compress_rates"]
        for unknown in set(rates) - set(MIXERS):
            config.refuse(f"compress_rates.{unknown}", f"{rates[unknown]!r}, which zoo does not understand")
        return rates[self.kind]

    def write(self, value: Any, out: Written) -> None:
        _set_within(out, "compress_rates", self.kind, value)


def _set_within(out: Written, key: str, name: str, value: Any) -> None:
    said = out.get(key, {})
    if said.get(name, value) != value:
        raise Inexpressible(f"{value!r}, and elsewhere {said[name]!r}: one '{key}.{name}' says both")
    out[key] = {**said, name: value}


class V4Layers(Layers):
    """`layer_types` says the mixers, `mlp_layer_types` the routers."""

    def read(self, config: Config) -> list[str]:
        mixers, ffns = config["layer_types"], config["mlp_layer_types"]
        for key, types, known in (("layer_types", mixers, MIXERS), ("mlp_layer_types", ffns, ("hash_moe", "moe"))):
            if len(types) != config[COUNT] or not set(types) <= set(known):
                config.refuse(
                    key, f"{types!r}, and zoo knows {', '.join(known)}, one for each of {config[COUNT]} layers"
                )
                return []
        pairs = zip(mixers, ffns, strict=True)
        return [MIXERS[mixer] + (HASH if ffn == "hash_moe" else "") for mixer, ffn in pairs]

    def write(self, kinds: Sequence[str], out: Written) -> None:
        types = {kind: name for name, kind in MIXERS.items()}
        out.set(COUNT, len(kinds))
        out.set("layer_types", [types[kind.removesuffix(HASH)] for kind in kinds])
        out.set("mlp_layer_types", ["hash_moe" if kind.endswith(HASH) else "moe" for kind in kinds])


def _mixer(name: str, rope: str, **options: Any) -> dict[str, Any]:
    keys = ("head_dim", "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank")
    sizes = {"n_heads": Key("num_attention_heads"), "window": Key("sliding_window"), **{key: Key(key) for key in keys}}
    return {"name": name, "options": {**sizes, "rope": Rope(rope), **options}, "gates": {}}


def _compressor(theirs: str, ours: str) -> list[Rule]:
    return [
        rule(f"{theirs}.ape", f"{ours}.position_bias"),
        rule(f"{theirs}.norm.weight", f"{ours}.kv_norm.weight"),
        rule(f"{theirs}.wgate.weight", f"{ours}.gate_proj.weight"),
        rule(f"{theirs}.wkv.weight", f"{ours}.kv_proj.weight"),
    ]


_ATTENTION = [
    rule("attn.wq_a.weight", "mixer.q_a_proj.weight"),
    rule("attn.q_norm.weight", "mixer.q_a_norm.weight"),
    rule("attn.wq_b.weight", "mixer.q_b_proj.weight"),
    rule("attn.wkv.weight", "mixer.kv_proj.weight"),
    rule("attn.norm.weight", "mixer.kv_norm.weight"),
    rule("attn.wo_a.weight", "mixer.o_a_proj.weight"),
    rule("attn.wo_b.weight", "mixer.o_b_proj.weight"),
    rule("attn.attn_sink", "mixer.sinks.logit"),
    *_compressor("attn.compressor", "mixer.compressor"),
    *_compressor("attn.indexer.compressor", "mixer.indexer.compressor"),
    rule("attn.indexer.wq_b.weight", "mixer.indexer.q_b_proj.weight"),
    rule("attn.indexer.weights_proj.weight", "mixer.indexer.weights_proj.weight"),
    rule("attn_norm.weight", "mixer_residual.norm.weight"),
    rule("ffn_norm.weight", "ffn_residual.norm.weight"),
    *(rule(f"hc_attn_{each}", f"mixer_residual.coefficients.{each}") for each in ("fn", "base", "scale")),
    *(rule(f"hc_ffn_{each}", f"ffn_residual.coefficients.{each}") for each in ("fn", "base", "scale")),
]
_INDEX = {key: Key(key) for key in ("index_n_heads", "index_head_dim", "index_topk")}
_MIXERS = {
    "sliding": _mixer("shared_kv", "main"),
    "csa": _mixer("csa", "compress", compress_ratio=Rate(CSA), **_INDEX),
    "hca": _mixer("hca", "compress", compress_ratio=Rate(HCA)),
}
_SCORE = {"score": Key("scoring_func", values={"sqrtsoftplus": "sqrtsoftplus", "sigmoid": "sigmoid"})}
_SCALING = {"scaling": Key("routed_scaling_factor")}
_ROUTERS: dict[str, Mapping[str, Any]] = {
    "": {
        "name": "sigmoid",
        "options": {**_SCORE, **_SCALING, "renormalize": True, "n_groups": 1, "top_groups": 1, "balance": BALANCE},
    },
    HASH: {"name": "hash", "options": {"vocab_size": Key("vocab_size"), **_SCORE, **_SCALING}},
}
_W = ("w1", "w3", "w2")
_MOE = [
    rule("ffn.gate.weight", "ffn.router.proj.weight"),
    rule("ffn.gate.bias", "ffn.router.selection_bias"),
    rule("ffn.gate.tid2eid", "ffn.router.table"),
    *expert_tensors("ffn.experts", _W),
    *shared_tensors("ffn.shared_experts", _W),
]
_GLU = {"width": Key("moe_intermediate_size"), "limit": Key("swiglu_limit")}
_MHC = {
    "name": "mhc",
    "options": {
        "n_streams": Key("hc_mult"),
        "sinkhorn_iters": Key("hc_sinkhorn_iters"),
        "eps": Key("hc_eps"),
        "collapse": "learned",
    },
}


def _kind(mixer: Mapping[str, Any], router: Mapping[str, Any]) -> Kind:
    ffn = mixture(
        n_experts="n_routed_experts",
        top_k="num_experts_per_tok",
        router=router,
        shared={"name": "swiglu", "options": _GLU},
        limit=Key("swiglu_limit"),
    )
    return Kind({"mixer": mixer, "ffn": ffn, "residual": _MHC, "ffn_residual": _MHC}, [*_ATTENTION, *_MOE])


def _prepare(data: dict[str, Any]) -> dict[str, Any]:
    """The rotations as transformers nests them, and the lists of types where a release says them in other keys."""
    out = dict(data)
    n = out.get(COUNT)
    if not isinstance(n, int):
        raise RecipeError(f"{FILE}: {COUNT}: expected a number, found {n!r}")
    rates = {CSA: out.pop("compress_rate_csa", None), HCA: out.pop("compress_rate_hca", None)}
    rates = {kind: rate for kind, rate in rates.items() if rate is not None}
    out["compress_rates"] = {CSA: 4, HCA: 128, **(out.get("compress_rates") or {}), **rates}
    ratios, hashed = out.pop("compress_ratios", None), out.pop("num_hash_layers", None)
    if out.get("layer_types") is None and ratios is not None:
        out["layer_types"] = [_RATIOS.get(ratio, f"a ratio of {ratio}") for ratio in ratios[:n]]
    if out.get("mlp_layer_types") is None and hashed is not None:
        out["mlp_layer_types"] = ["hash_moe"] * min(n, hashed) + ["moe"] * max(0, n - hashed)
    width, partial = out.get("head_dim", 512), out.pop(_PARTIAL, None)
    if partial is None:
        partial = out["qk_rope_head_dim"] / width if "qk_rope_head_dim" in out else 64 / 512
    out["qk_rope_head_dim"] = int(width * partial)
    theta, far = out.pop("rope_theta", 10000.0), out.pop("compress_rope_theta", 160000.0)
    rope = dict(out.get(KEY) or out.get("rope_scaling") or {})
    out.pop("rope_scaling", None)
    said = {name: rope.pop(name) for name in ("main", "compress") if isinstance(rope.get(name), dict)}
    if len(said) < 2:
        rope |= {"rope_type": rope.pop("type")} if "type" in rope else {}
        flat = {"rope_type": "default", **rope, "rope_theta": far, _PARTIAL: partial}
        flat |= {"attention_factor": flat.get("attention_factor", 1.0)} if flat["rope_type"] == "yarn" else {}
        main = {"rope_type": "default", "rope_theta": theta, _PARTIAL: partial}
        said = {"main": main, "compress": flat, **said}
    elif unknown := set(rope) - {"rope_type", "type", "rope_theta", _PARTIAL}:
        raise RecipeError(
            f"{FILE}: {KEY}: {', '.join(sorted(unknown))} beside main and compress, where transformers drops it"
        )
    out[KEY] = said
    return out


def _layer_types(config: Config) -> list[str]:
    return [HCA if n < 2 or n % 2 == 0 else CSA for n in range(config[COUNT])]


# what says the rotation again is read where `rope_parameters` does not say it
_HARMLESS = frozenset(
    (
        "compress_rope_theta",
        "num_nextn_predict_layers",
        "qk_rope_head_dim",
        "rope_theta",
        "router_aux_loss_coef",
        "router_jitter_noise",
    )
)

FAMILY = Family(
    model_type="deepseek_v4",
    architecture="DeepseekV4ForCausalLM",
    defaults={
        "vocab_size": 129280,
        "hidden_size": 4096,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": REQUIRED,
        "num_attention_heads": 64,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1024,
        "num_experts_per_tok": 6,
        "n_routed_experts": 256,
        "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": 1.5,
        "layer_types": _layer_types,
        "mlp_layer_types": lambda config: ["hash_moe" if n < 3 else "moe" for n in range(config[COUNT])],
        "compress_rates": {CSA: 4, HCA: 128},
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "swiglu_limit": 10.0,
        "sliding_window": 128,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {},
    },
    tensors=(
        rule("model.embed_tokens.weight", "embed.weight"),
        rule("model.norm.weight", "norm.weight"),
        rule("head.weight", "head.weight"),
        *(rule(f"model.hc_head.hc_{each}", f"streams.head.{each}") for each in ("fn", "base", "scale")),
    ),
    layers=V4Layers(),
    kinds={
        name + suffix: _kind(mixer, router) for name, mixer in _MIXERS.items() for suffix, router in _ROUTERS.items()
    },
    fixed={
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "num_key_value_heads": (1,),
        "n_shared_experts": (1,),
        # transformers' class looks at neither
        "norm_topk_prob": (True,),
        "topk_method": (None, "noaux_tc"),
    },
    harmless=_HARMLESS,
    aliases={"num_local_experts": "n_routed_experts", "intermediate_size": "moe_intermediate_size"},
    prepare=_prepare,
    # the release has no `model.`
    renames=(
        (r"^embed\.weight$", "model.embed_tokens.weight"),
        (r"^norm\.weight$", "model.norm.weight"),
        (r"^layers\.", "model.layers."),
        (r"^hc_head_(fn|base|scale)$", r"model.hc_head.hc_\1"),
    ),
    skipped=(r"mtp\..*",),
)
