"""What the families with Kimi Delta Attention share: its sizes, and a decay that is bounded or not."""

from __future__ import annotations

from typing import Any

from zoo.hf.configuration import Config
from zoo.hf.template import Entry, Inexpressible, Key, Written
from zoo.hf.tensors import Rule, rule, same
from zoo.hf.transforms import Reshaped, Unsqueezed


class Decay(Entry):
    """Bounded by the key `bound`; KDA's own where that is null, or where the key `safe` is false. Of one rank both."""

    def __init__(self, bound: str, rank: str, safe: str | None = None):
        self.bound, self.rank, self.safe = bound, rank, safe

    def read(self, config: Config) -> Any:
        bound = config[self.bound]
        if bound is None or (self.safe is not None and not config[self.safe]):
            return {"name": "kda", "options": {"rank": self.rank}}
        return {"name": "bounded", "options": {"granularity": "channel", "g_min": bound, "rank": self.rank}}

    def write(self, value: Any, out: Written) -> None:
        name = value["name"] if isinstance(value, dict) else "nothing"
        if name not in ("bounded", "kda"):
            raise Inexpressible(f"'{name}', where the family has 'bounded' or 'kda'")
        if self.safe is not None:
            out.set(self.safe, name == "bounded")
        if name == "bounded":
            out.set(self.bound, value["options"]["g_min"])
        elif self.safe is None:
            out.set(self.bound, None)


def kda(decay: Decay) -> dict[str, Any]:
    """The mixer; the output gate has the decay's rank."""
    return {
        "name": "kda",
        "options": {
            "n_heads": Key("linear_num_heads"),
            "head_dim": Key("linear_head_dim"),
            "conv_size": Key("linear_conv_kernel_dim"),
        },
        "gates": {
            "decay": decay,
            "write": {"name": "sigmoid", "options": {"scale": 1.0}},
            "output": {"name": "sigmoid", "options": {"granularity": "elementwise", "rank": decay.rank}},
        },
    }


def kda_tensors(prefix: str, out: str = "o_proj") -> list[Rule]:
    names = {"f": "mixer.gates.decay.f_proj", "g": "mixer.gates.output.g_proj"}
    return [
        *same(prefix, "mixer.", "q_proj.weight k_proj.weight v_proj.weight o_norm.weight"),
        *(rule(f"{prefix}{x}_conv1d.weight", f"mixer.{x}_conv1d.weight", Unsqueezed()) for x in "qkv"),
        rule(f"{prefix}A_log", "mixer.gates.decay.A_log"),
        rule(f"{prefix}dt_bias", "mixer.gates.decay.dt_bias", Reshaped(-1)),
        rule(f"{prefix}b_proj.weight", "mixer.gates.write.b_proj.weight"),
        # of full rank, or of two factors
        *(rule(f"{prefix}{x}_proj.weight", f"{name}.weight") for x, name in names.items()),
        *(rule(f"{prefix}{x}_{y}_proj.weight", f"{name}.{y}.weight") for x, name in names.items() for y in "ab"),
        rule(f"{prefix}{out}.weight", "mixer.o_proj.weight"),
    ]
