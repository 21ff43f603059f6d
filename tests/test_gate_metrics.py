"""What is said of a gate is what its values are."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

import zoo
from tests.build import STACKS, draw, stack
from zoo.data.tokenizers import ByteTokenizer, JsonTokenizer, train_bpe
from zoo.gates.branch import BranchGate
from zoo.gates.decay import DecayGate
from zoo.gates.output import OutputGate
from zoo.gates.write import UNBOUNDED, WriteGate
from zoo.metrics import GateReader, GateStatistic, gate_statistics, token_classes, whitespace_ids
from zoo.metrics.gates import CLASSES, COLUMNS, SAMPLE, Row
from zoo.registry import DECAY

FIRST, SPACE, REST = range(3)


class _Unasked:
    def forward(self, x: Any) -> Any:
        raise AssertionError("only its values are read")


class _Decay(_Unasked, DecayGate):
    pass


class _Write(_Unasked, WriteGate):
    pass


class _Output(_Unasked, OutputGate):
    pass


class _Branch(_Unasked, BranchGate):
    pass


def around(gate: nn.Module, **mixer: Any) -> nn.Module:
    """A model of one layer whose mixer has this gate, as layers.0.mixer.gates.it, and these attributes."""
    lm, layer, inner = nn.Module(), nn.Module(), nn.Module()
    inner.gates = nn.ModuleDict({"it": gate})
    for name, value in mixer.items():
        setattr(inner, name, value)
    layer.mixer = inner
    lm.layers = nn.ModuleList([layer])
    return lm


def read(gate: nn.Module, heads: Sequence[Sequence[float]], **mixer: Any) -> list[Row]:
    """The rows of a gate that gave these values to the heads, token by token."""
    values = torch.tensor(heads).T[None]
    if gate.kind == "output":
        values = values.unsqueeze(-1)
    return gate_statistics({"layers.0.mixer.gates.it": values}, around(gate, **mixer))


def test_numbers_worked_by_hand() -> None:
    one, two = read(_Output(), [[0.6, 0.01, 0.99, 0.2], [0.5, 0.5, 0.5, 0.04]])
    assert tuple(one) == COLUMNS
    assert (one["layer"], one["slot"], one["kind"], one["gate"]) == (0, "it", "output", "_Output")
    assert [(row["head"], row["branch"], row["token_class"]) for row in (one, two)] == [
        (0, None, "all"),
        (1, None, "all"),
    ]
    assert one["count"] == 4
    assert one["mean"] == pytest.approx(0.45)
    assert [one[name] for name in ("min", "q0.05", "q0.5", "q0.95", "max")] == pytest.approx(
        [0.01, 0.01, 0.2, 0.99, 0.99]
    )
    assert (one["below_0.05"], one["above_0.95"]) == (0.25, 0.25)
    assert two["mean"] == pytest.approx(0.385)
    assert (two["below_0.05"], two["above_0.95"], two["q0.5"]) == (0.25, 0.0, 0.5)
    assert one["half_life"] is one["dead"] is two["dead"] is None


def test_quantiles_are_values_that_a_share_does_not_exceed() -> None:
    (row,) = read(_Output(), [[index / 20 for index in range(20, 0, -1)]])
    assert [row[name] for name in ("q0.05", "q0.5", "q0.95")] == pytest.approx([0.05, 0.5, 0.95])


def test_a_score_that_may_be_negative_counts_by_its_size() -> None:
    (row,) = read(_Output(), [[-0.28, -0.02, 0.0, 3.0]])
    assert (row["below_0.05"], row["above_0.95"]) == (0.5, 0.25)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_a_write_gate_is_measured_by_its_own_maximum(scale: float) -> None:
    gate = zoo.load(
        {**STACKS["gated_deltanet-required"]}, set=[f"blocks.a.mixer.gates.write.options={{scale: {scale}}}"]
    )
    gate = gate.layers[0].mixer.gates["write"]
    (row,) = read(gate, [[0.03, 0.09, 0.96, 0.98]])
    assert (row["below_0.05"], row["above_0.95"]) == {1.0: (0.25, 0.5), 2.0: (0.5, 0.0)}[scale]


def test_a_write_gate_without_a_bound_is_near_none() -> None:
    gate = _Write()
    gate.at_most = UNBOUNDED
    (row,) = read(gate, [[0.03, 40.0]])
    assert (row["below_0.05"], row["above_0.95"]) == (0.5, None)
    assert read(_Write(), [[0.09, 1.91]])[0]["above_0.95"] == 0.5, "2 where a class says nothing"


@pytest.mark.parametrize(
    ("decay", "tokens"), [(31 / 32, 21.83), (0.5, 1.0), (0.25, 0.5), (0.0, 0.0), (1.0, math.inf), (1 - 2**-20, 726817)]
)
def test_half_life_of_a_known_decay(decay: float, tokens: float) -> None:
    (row,) = read(_Decay(), [[decay, decay, decay]])
    assert row["half_life"] == pytest.approx(tokens, rel=1e-3)


def test_half_life_is_that_of_the_median() -> None:
    (row,) = read(_Decay(), [[1.0, 0.5, 0.0]])
    assert row["half_life"] == pytest.approx(1.0)


@torch.no_grad()
def test_half_lives_of_retnet() -> None:
    lm = zoo.load(STACKS["gated_deltanet-decay=retnet"])
    with zoo.record(lm) as gates:
        lm(draw(2, 9))
    rows = [row for row in gate_statistics(gates, lm) if row["slot"] == "decay"]
    assert [row["gate"] for row in rows] == ["retnet"] * 4
    assert [row["half_life"] for row in rows] == pytest.approx([21.83, 44.01] * 2, rel=1e-3)
    assert [row["dead"] for row in rows] == [None] * 4


def test_dead_heads() -> None:
    def dead(gate: nn.Module, *heads: Sequence[float]) -> list[str | None]:
        return [row["dead"] for row in read(gate, heads)]

    decays = [[0.0, 0.009], [0.0, 0.011], [1.0, 1 - 1e-7], [1.0, 0.99999], [0.0, 1.0]]
    assert dead(_Decay(), *decays) == ["forgets", None, "keeps", None, None]
    assert dead(_Output(), [0.009, -0.009], [0.009, -0.011], [0.0, 0.0], [1.0, 1.0]) == ["closed", None, "closed", None]
    assert dead(_Write(), [0.0, 0.019], [0.0, 0.021]) == ["closed", None]
    additive = _Output()
    additive.additive = True
    assert dead(additive, [0.0, 0.0]) == [None], "nothing added closes nothing"


def test_branches_have_rows_of_their_own() -> None:
    weights = torch.tensor([[[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]]).expand(1, 7, 2, 3)
    rows = gate_statistics({"layers.0.mixer.gates.it": weights}, around(_Branch()))
    found = [(row["head"], row["branch"], round(row["mean"], 6), row["count"]) for row in rows]
    assert found == [(0, 0, 0.1, 7), (0, 1, 0.2, 7), (0, 2, 0.3, 7), (1, 0, 0.4, 7), (1, 1, 0.5, 7), (1, 2, 0.6, 7)]


def test_channels_of_a_head_are_read_together_and_heads_of_width_one_as_one() -> None:
    values = torch.rand(2, 5, 6, 4)
    rows = gate_statistics({"layers.0.mixer.gates.it": values}, around(_Decay(), head_v_dim=4))
    assert [row["count"] for row in rows] == [40] * 6
    torch.testing.assert_close(torch.tensor([row["mean"] for row in rows]), values.mean((0, 1, 3)))
    (row,) = gate_statistics({"layers.0.mixer.gates.it": values}, around(_Decay(), head_v_dim=1))
    assert (row["head"], row["count"]) == (0, 240)
    assert row["mean"] == pytest.approx(values.mean().item())


@pytest.mark.parametrize("width", [1, 96, 128])
def test_quantiles_of_many_values(width: int) -> None:
    """Channels and tokens at levels of their own, against which a regular pick of values, or the first ones, show."""
    tokens = 500_000 // width
    levels = torch.linspace(0, 1, tokens)[:, None, None] + torch.linspace(0, 1, width)
    values = levels ** torch.tensor([[1.0], [3.0]])
    metric = GateStatistic(2)
    metric.update(values)
    assert sum(map(len, metric.sample)) == SAMPLE
    found = metric.compute()
    for head in range(2):
        ordered = values[:, head].flatten()
        for name, share in (("q0.05", 0.05), ("q0.5", 0.5), ("q0.95", 0.95)):
            assert (ordered <= found[name][0, head]).float().mean().item() == pytest.approx(share, abs=0.01)
    assert found["max"][0, 0] == values[:, 0].max()


def test_a_batch_counts_for_as_many_values_as_it_has() -> None:
    metric = GateStatistic(1)
    metric.update(torch.ones(3 * SAMPLE, 1, 1))
    metric.update(torch.zeros(SAMPLE, 1, 1))
    found = {name: of_all.item() for name, (of_all, _) in metric.compute().items()}
    assert (found["mean"], found["count"], found["q0.5"]) == (0.75, 4 * SAMPLE, 1.0)


def test_two_processes_are_one() -> None:
    """What torchmetrics does with the gathered states of two processes."""
    torch.manual_seed(0)
    values, classes = torch.rand(20, 2, 3), torch.randint(3, (20,))
    whole, one, two = (GateStatistic(2, n_classes=3) for _ in range(3))
    whole.update(values, classes)
    one.update(values[:13], classes[:13])
    two.update(values[13:], classes[13:])
    for name, reduce in one._reductions.items():
        mine, other = getattr(one, name), getattr(two, name)
        setattr(one, name, reduce([*mine, *other] if isinstance(mine, list) else torch.stack([mine, other])))
    for name, found in one.compute().items():
        torch.testing.assert_close(found, whole.compute()[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_any_dtype_and_expanded_views(dtype: torch.dtype) -> None:
    values = torch.tensor([[0.25], [0.5]], dtype=dtype).expand(2, 3000, 2, 1)
    rows = gate_statistics({"layers.0.mixer.gates.it": values}, around(_Output()))
    assert [(row["mean"], row["q0.05"], row["count"]) for row in rows] == [(0.25, 0.25, 6000), (0.5, 0.5, 6000)]


def test_a_default_dtype_of_bfloat16_rounds_nothing() -> None:
    """Lightning sets it in the forward pass of a bf16-true run."""
    values = torch.linspace(0, 1, 6000).expand(1, 2, -1).mT
    rows = gate_statistics({"layers.0.mixer.gates.it": values}, around(_Write()))
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert gate_statistics({"layers.0.mixer.gates.it": values}, around(_Write())) == rows
    finally:
        torch.set_default_dtype(torch.float32)
    assert rows[0]["mean"] == pytest.approx(0.5, abs=1e-6)


def test_classes_of_packed_tokens() -> None:
    tokens = torch.tensor([[5, 7, 8, 7, 7, 9, 7]])
    classes = token_classes(tokens, cu_seqlens=torch.tensor([0, 3, 7]), whitespace=torch.tensor([7]))
    assert classes.tolist() == [[FIRST, SPACE, REST, FIRST, SPACE, REST, SPACE]]


def test_classes_of_padded_tokens_are_those_of_the_real_ones() -> None:
    tokens = torch.tensor([[7, 7, 5, 7], [5, 7, 8, 7], [7, 5, 6, 7]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]])
    classes = token_classes(tokens, attention_mask=mask, whitespace=torch.tensor([7]))
    assert classes.tolist() == [[FIRST, SPACE, FIRST, SPACE, REST, SPACE, FIRST, REST, REST]]


def test_classes_of_plain_rows() -> None:
    tokens = torch.tensor([[7, 7, 5], [5, 7, 8]])
    assert token_classes(tokens).tolist() == [[FIRST, REST, REST]] * 2
    assert token_classes(tokens, whitespace=torch.tensor([7])).tolist() == [[FIRST, SPACE, REST]] * 2


LAYOUTS: dict[str, dict[str, Tensor]] = {
    "plain": {},
    "packed": {"cu_seqlens": torch.tensor([0, 5, 6, 24])},
    "padded": {"attention_mask": torch.tensor([[0] * 4 + [1] * 8, [1] * 5 + [0] * 7])},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["gated_deltanet-full", "kda-full", "attention-full"])
@torch.no_grad()
def test_reading_is_reducing_what_is_recorded(name: str, layout: str) -> None:
    """Each gate as it gives its values, by class of token, against these; nobody reads afterwards."""
    lm, tokens = stack(name, torch.float32), draw(2, 12)
    if layout == "packed":
        tokens = tokens.reshape(1, -1)
    classes = token_classes(tokens, **LAYOUTS[layout], whitespace=torch.arange(0, 29, 2))
    reader = GateReader(lm, classes=True)
    before = [len(gate.readers) for gate in reader.gates.values()]
    with zoo.record(lm) as gates, reader.reading(classes):
        lm(tokens, **LAYOUTS[layout])
    assert [len(gate.readers) for gate in reader.gates.values()] == before
    rows = reader.rows()
    assert rows == gate_statistics(gates, lm, classes)
    assert {row["slot"] for row in rows} == {path.rpartition(".")[2] for path in gates}
    assert {row["token_class"] for row in rows} == {"all", *CLASSES}
    for row in rows:
        values = gates[f"layers.{row['layer']}.mixer.gates.{row['slot']}"][:, :, row["head"]]
        if row["token_class"] != "all":
            values = values[classes == CLASSES.index(row["token_class"])]
        assert row["count"] == values.numel()
        assert row["mean"] == pytest.approx(values.mean().item(), rel=1e-4, abs=1e-6)
        assert row["max"] == values.max().item()
        assert (values <= row["q0.5"]).float().mean().item() >= 0.5 - 1e-6


def test_a_gate_that_the_model_lacks_and_classes_that_do_not_fit() -> None:
    lm = around(_Output())
    with pytest.raises(ValueError, match=r"the model has no gate 'layers.0.mixer.gates.at'. Did you mean .*gates.it"):
        gate_statistics({"layers.0.mixer.gates.at": torch.rand(1, 2, 3, 1)}, lm)
    with pytest.raises(ValueError, match=r"layers.0.mixer.gates.it has 2 tokens, and classes are 3"):
        gate_statistics({"layers.0.mixer.gates.it": torch.rand(1, 2, 3, 1)}, lm, torch.zeros(1, 3))


def test_the_key_of_a_gate_that_is_sharded() -> None:
    """FSDP2 gives every module a class of its own, below the one that it had."""
    lm = zoo.load(STACKS["kda-full"])
    decay = lm.layers[0].mixer.gates["decay"]
    key = next(key for key, cls in DECAY._classes.items() if cls is type(decay))
    decay.__class__ = type(f"FSDP{type(decay).__name__}", (type(decay),), {})
    rows = gate_statistics({"layers.0.mixer.gates.decay": torch.rand(1, 5, 2)}, lm)
    assert [row["gate"] for row in rows] == [key] * 2


def test_the_example_of_the_docs_runs() -> None:
    text = (Path(__file__).parents[1] / "docs" / "training.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    found: dict[str, Any] = {}
    exec(compile(block, "docs/training.md", "exec"), found)
    assert {row["token_class"] for row in found["rows"]} == {"all", "first", "rest"}
    assert all(f"`{name}`" in text for name in COLUMNS)


def test_no_tokens_no_rows_and_classes_only_where_they_are_told_apart() -> None:
    lm, name = around(_Output()), "layers.0.mixer.gates.it"
    assert gate_statistics({name: torch.rand(1, 0, 3, 1)}, lm) == []
    reader = GateReader(lm)
    reader.add(name, torch.ones(1, 2, 1, 1), torch.tensor([[FIRST, REST]]))
    assert [(row["token_class"], row["count"]) for row in reader.rows()] == [("all", 2)]


def test_whitespace_of_bytes() -> None:
    assert bytes(whitespace_ids(ByteTokenizer()).tolist()) == b"\t\n\v\f\r\x1c\x1d\x1e\x1f "


def test_whitespace_of_byte_pairs() -> None:
    tokenizer = JsonTokenizer(train_bpe([b"if a:\n    b = 1\n\n        c\n" * 9], 280), "learnt")
    texts = [tokenizer.decode([index]) for index in whitespace_ids(tokenizer).tolist()]
    assert {" ", "\n"} < set(texts)
    assert all(text.isspace() for text in texts)
    spaces = {index for index in range(tokenizer.vocab_size) if tokenizer.decode([index]).isspace()}
    assert spaces == set(whitespace_ids(tokenizer).tolist())


def test_whitespace_of_a_vocabulary_that_marks_spaces() -> None:
    """Whose decoder drops the space before a text."""
    tokenizer = Tokenizer(models.WordLevel({"\u2581a": 0, "\u2581": 1, "\u2581b": 2, "\u2581\u2581": 3, "?": 4}, "?"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    assert whitespace_ids(JsonTokenizer(tokenizer.to_str(), "marks")).tolist() == [1, 3]
