"""What the gates of a stack do, a row for each head and class of tokens: level, spread, saturation, memory, dead heads.

    mean, min, max                 of the values, in the gate's own unit (decay: exp(log_decay))
    q0.05, q0.5, q0.95             q_p: the smallest value that at least a share p of them does not exceed
    below_0.05, above_0.95         share of |value| below 0.05 and above 0.95 of the gate's maximum: what a write gate
                                   can give at most, and 1 for the others
    half_life                      of a decay, in tokens: log 2 / -log(q0.5); 0 where that is 0, inf where it is 1
    dead                           of what was read, all values alike:
                                   `forgets`: a decay below 0.01, so that nothing outlives a token
                                   `keeps`: a decay with a half-life above a million tokens
                                   `closed`: a |score|, beta or weight below 0.01 of its maximum (not of an additive
                                   gate, which closes nothing)

Values are read as float32, which tells a decay from 1 up to half-lives of some ten million tokens. Gates that hold one
row for all heads have one head here; so has the state of value heads of width 1 (Mamba-1's channels).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from zoo.gates import Gate, named_gates, reading
from zoo.gates.write import WriteGate
from zoo.registry import GATES, did_you_mean
from zoo.sequence import lay_out

CLASSES = ("first", "whitespace", "rest")
QUANTILES = (0.05, 0.5, 0.95)
SATURATED = 0.05
DEAD = 0.01
FOR_EVER = 1e6
SAMPLE = 4096
LOW, HIGH = f"below_{SATURATED}", f"above_{1 - SATURATED}"
COLUMNS = (
    *("layer", "slot", "kind", "gate", "head", "branch", "token_class", "count", "mean", "min"),
    *(f"q{share}" for share in QUANTILES),
    *("max", LOW, HIGH, "half_life", "dead"),
)

Row = dict[str, Any]


class GateStatistic(Metric):
    """The numbers of one gate, of all its tokens and of each of `n_classes` classes: [1 + n_classes, heads] each.

    All are exact but the quantiles, which are those of at most `SAMPLE` values a head, class and update, spread evenly
    over tokens and channels. Nothing is drawn at random: reading a gate leaves no trace. Processes compare notes only
    where `sync_on_compute` asks for it.
    """

    full_state_update = False
    is_differentiable = False
    count: Tensor
    total: Tensor
    low: Tensor
    high: Tensor
    least: Tensor
    most: Tensor
    sample: list[Tensor]
    weight: list[Tensor]
    label: list[Tensor]

    def __init__(self, n_heads: int, maximum: float = 1.0, n_classes: int = 1, sync_on_compute: bool = False):
        super().__init__(sync_on_compute=sync_on_compute, compute_on_cpu=True)
        self.maximum, self.n_classes = maximum, n_classes
        # float32 said outright: while a bfloat16 run reads its gates, the default dtype is bfloat16
        zeros = torch.zeros(n_classes, n_heads, dtype=torch.float32)
        self.add_state("count", torch.zeros(n_classes, 1, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("total", zeros, dist_reduce_fx="sum")
        self.add_state("low", zeros.long(), dist_reduce_fx="sum")
        self.add_state("high", zeros.long(), dist_reduce_fx="sum")
        self.add_state("least", torch.full_like(zeros, math.inf), dist_reduce_fx="min")
        self.add_state("most", torch.full_like(zeros, -math.inf), dist_reduce_fx="max")
        for name in ("sample", "weight", "label"):
            self.add_state(name, [], dist_reduce_fx="cat")

    @property
    def unit(self) -> float:
        """What counts as 1."""
        return self.maximum if math.isfinite(self.maximum) else 1.0

    @torch.no_grad()
    def update(self, values: Tensor, classes: Tensor | None = None) -> None:
        """values [tokens, heads, width]; classes [tokens]: the class of each token, all the last where None."""
        for index in range(self.n_classes):
            if classes is not None:
                part = values[classes == index]
            else:
                part = values if index == self.n_classes - 1 else values[:0]
            if part.numel():
                self._add(index, part.detach().float())

    def _add(self, index: int, part: Tensor) -> None:
        n_values = part.shape[0] * part.shape[2]
        self.count[index] += n_values
        self.total[index] += part.sum((0, 2))
        self.least[index] = torch.minimum(self.least[index], part.amin((0, 2)))
        self.most[index] = torch.maximum(self.most[index], part.amax((0, 2)))
        size = part.abs()
        self.low[index] += (size < SATURATED * self.unit).sum((0, 2))
        self.high[index] += (size > (1 - SATURATED) * self.unit).sum((0, 2))
        drawn = _spread(part)
        self.sample.append(drawn)
        # so that a small batch does not count for as much as a large one
        self.weight.append(drawn.new_full((len(drawn),), n_values / len(drawn)))
        self.label.append(torch.full((len(drawn),), index, device=drawn.device))

    def compute(self) -> dict[str, Tensor]:
        """Statistic -> [1 + n_classes, heads]: of all tokens, then of each class; nan for a class without tokens."""
        count = _with_all(self.count, torch.sum)
        found = {
            "count": count.expand(-1, self.total.shape[1]),
            "mean": _with_all(self.total, torch.sum) / count,
            "min": _with_all(self.least, torch.amin),
            "max": _with_all(self.most, torch.amax),
            LOW: _with_all(self.low, torch.sum).float() / count,
            HIGH: _with_all(self.high, torch.sum).float() / count,
        }
        sample, weight, label = (dim_zero_cat(state) for state in (self.sample, self.weight, self.label))
        chosen = [torch.ones_like(label, dtype=torch.bool), *(label == index for index in range(self.n_classes))]
        levels = torch.stack([_quantiles(sample[part], weight[part]) for part in chosen], dim=1)
        return found | {f"q{share}": level for share, level in zip(QUANTILES, levels, strict=True)}


def _with_all(state: Tensor, reduce: Any) -> Tensor:
    return torch.cat([reduce(state, 0, keepdim=True), state])


def _spread(part: Tensor) -> Tensor:
    """[tokens, heads, width] -> at most SAMPLE values a head, [values, heads], spread over tokens and channels.

    Value i is number i·step of the n that a head has, round and round. A step prime to n meets none twice and every
    channel equally often; every k-th value would meet the same few channels where k and the width have a factor in
    common. Near n over the golden ratio, whatever prefix is taken lies evenly.
    """
    tokens, _, width = part.shape
    n = tokens * width
    if n <= SAMPLE:
        return part.transpose(1, 2).flatten(0, 1).clone()
    step = round(n * (math.sqrt(5) - 1) / 2)
    while math.gcd(step, n) > 1:
        step += 1
    index = torch.arange(SAMPLE, device=part.device) * step % n
    return part[index // width, :, index % width]


def _quantiles(sample: Tensor, weight: Tensor) -> Tensor:
    """Each of QUANTILES over the values of each head, [quantiles, heads]; nan without values. sample [values, heads],
    weight [values]."""
    if not len(sample):
        return sample.new_full((len(QUANTILES), sample.shape[1]), math.nan)
    ordered, order = sample.sort(0)
    passed = weight.double()[order].cumsum(0)
    # less a trifle, for the sum is rounded: 0.05 of 20 must be one value
    at = [(passed < share * (1 - 1e-9) * passed[-1]).sum(0) for share in QUANTILES]
    return ordered.gather(0, torch.stack(at).clamp_max(len(sample) - 1))


class GateReader:
    """The statistics of every gate of a model, each reduced as soon as it is there: no values are kept.

    `classes`: whether those of the CLASSES of tokens are to be told apart.
    """

    def __init__(self, lm: nn.Module, classes: bool = False):
        self.gates = named_gates(lm)
        self.n_classes = len(CLASSES) if classes else 1
        self.metrics: dict[str, GateStatistic] = {}
        self._as_one = {name for name, gate in self.gates.items() if _heads_are_channels(lm, name, gate)}
        self._branches: dict[str, int] = {}

    @contextmanager
    def reading(self, classes: Tensor | None = None) -> Iterator[None]:
        """Within the block reads what the gates give in every forward pass; `classes` are those of its tokens."""
        with reading(self.gates, lambda name, values: self.add(name, values, classes)):
            yield

    def add(self, name: str, values: Tensor, classes: Tensor | None = None) -> None:
        """values [B,T,...] of the gate at path `name`; classes [B,T], as `token_classes` gives them."""
        if name not in self.gates:
            raise ValueError(f"gate statistics: the model has no gate '{name}'{did_you_mean(name, self.gates)}")
        gate, values = self.gates[name], values.flatten(0, 1)
        if classes is not None and classes.numel() != len(values):
            raise ValueError(f"gate statistics: {name} has {len(values)} tokens, and classes are {classes.numel()}")
        if not values.numel():
            return
        if name in self._as_one:
            values = values.reshape(len(values), 1, -1)
        elif gate.kind == "branch":
            self._branches[name] = values.shape[-1]
            values = values.flatten(1).unsqueeze(-1)
        elif values.ndim == 2:
            values = values.unsqueeze(-1)
        if name not in self.metrics:
            metric = GateStatistic(values.shape[1], _maximum(gate), self.n_classes)
            self.metrics[name] = metric.to(values.device)
        self.metrics[name].update(values, classes.flatten() if classes is not None and self.n_classes > 1 else None)

    def rows(self, classes: Iterable[str] = CLASSES) -> list[Row]:
        """A row of COLUMNS for each gate that was read, each head, and all tokens and each of `classes` that had any;
        None where a statistic does not apply."""
        wanted = {"all", *classes} if self.n_classes > 1 else {"all"}
        return [
            row
            for name, gate in self.gates.items()
            if name in self.metrics
            for row in _rows(name, gate, self.metrics[name], self._branches.get(name))
            if row["token_class"] in wanted
        ]


def gate_statistics(gates: Mapping[str, Tensor], lm: nn.Module, classes: Tensor | None = None) -> list[Row]:
    """The rows of `gates`, path -> values [B,T,...] as `zoo.record` gives them for the model `lm`.

    classes [B,T], as `token_classes` gives them for the same call: also a row for each class of tokens.
    """
    reader = GateReader(lm, classes is not None)
    for name, values in gates.items():
        reader.add(name, values, classes)
    return reader.rows()


def token_classes(
    tokens: Tensor,
    cu_seqlens: Tensor | None = None,
    attention_mask: Tensor | None = None,
    whitespace: Tensor | None = None,
) -> Tensor:
    """The index in CLASSES of every token, in the layout in which gates see it: [B,T], or packed [1, real tokens].

    `first` has nothing before it: it begins a document, or a row that is not packed. `whitespace` are those of the ids
    `whitespace` that are not first; `rest` are all others.
    """
    entry = lay_out(tokens, cu_seqlens, attention_mask)
    seen = entry.enter(tokens)
    classes = torch.full_like(seen, CLASSES.index("rest"))
    if whitespace is not None:
        classes[torch.isin(seen, whitespace.to(seen))] = CLASSES.index("whitespace")
    classes[(entry.layout.positions == 0).expand_as(seen)] = CLASSES.index("first")
    return classes


class Decoder(Protocol):
    """What finding whitespace asks of a tokenizer."""

    vocab_size: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def whitespace_ids(tokenizer: Decoder) -> Tensor:
    """The ids that stand for whitespace and nothing else, int64."""
    # behind another token, since vocabularies that mark spaces lose the first one of a text
    before = list(tokenizer.encode("a"))
    start = tokenizer.decode(before)
    texts = (tokenizer.decode([*before, index]) for index in range(tokenizer.vocab_size))
    found = [index for index, text in enumerate(texts) if text.startswith(start) and text[len(start) :].isspace()]
    return torch.tensor(found, dtype=torch.int64)


def half_life(decay: float) -> float:
    """log 2 / -log(decay): after how many tokens half of the state is left."""
    if decay <= 0:
        return 0.0
    return math.inf if decay >= 1 else math.log(2) / -math.log(decay)


def _maximum(gate: Gate) -> float:
    """The value that counts as fully open: of a write gate, the most that it can give; inf where it has no bound."""
    if not isinstance(gate, WriteGate):
        return 1.0
    scale = getattr(gate, "scale", None)  # where there is one, it is narrower than what the class promises
    return float(scale) if isinstance(scale, (int, float)) else gate.at_most


def _heads_are_channels(lm: nn.Module, name: str, gate: Gate) -> bool:
    """Whether the gate acts on the state of value heads of width 1, as Mamba-1's thousands: they are read as one."""
    mixer, _, _ = name.rpartition(".gates.")
    return gate.kind in ("decay", "write") and getattr(lm.get_submodule(mixer), "head_v_dim", None) == 1


def _rows(name: str, gate: Gate, metric: GateStatistic, n_branches: int | None) -> Iterator[Row]:
    layer, slot = _place(name)
    found = {key: value.tolist() for key, value in metric.compute().items()}
    for index, token_class in enumerate(("all", *CLASSES) if metric.n_classes > 1 else ("all",)):
        for place in range(metric.total.shape[1]):
            numbers = {key: value[index][place] for key, value in found.items()}
            if not numbers["count"]:
                continue
            head, branch = (place, None) if n_branches is None else divmod(place, n_branches)
            row = {
                "layer": layer,
                "slot": slot,
                "kind": gate.kind,
                "gate": _key(gate),
                "head": head,
                "branch": branch,
                "token_class": token_class,
                **numbers,
                HIGH: numbers[HIGH] if math.isfinite(metric.maximum) else None,
                "half_life": half_life(numbers["q0.5"]) if gate.kind == "decay" else None,
                "dead": _dead(gate, numbers["min"], numbers["max"], metric.unit),
            }
            yield {column: row[column] for column in COLUMNS}


def _dead(gate: Gate, least: float, most: float, unit: float) -> str | None:
    if gate.kind == "decay":
        if most < DEAD:
            return "forgets"
        return "keeps" if half_life(least) > FOR_EVER else None
    if getattr(gate, "additive", False):  # a score of 0 closes nothing: all of it passes
        return None
    return "closed" if max(abs(least), abs(most)) < DEAD * unit else None


def _place(name: str) -> tuple[int | None, str]:
    """`layers.3.mixer.gates.output` -> (3, "output"); what else the path says stays in the slot."""
    found = re.fullmatch(r"layers\.(\d+)\.(?:mixer\.gates\.)?(.+)", name)
    return (int(found[1]), found[2]) if found else (None, name)


def _key(gate: Gate) -> str:
    """The name by which a recipe asks for the gate; its class's where it is not registered (any more)."""
    known = GATES[gate.kind].loaded().items()  # not `get`, which would import the gates that nobody uses
    # sharding (FSDP2) puts a class of its own in front of the gate's
    keys = (key for base in type(gate).__mro__ for key, cls in known if cls is base)
    return next(keys, type(gate).__name__)
