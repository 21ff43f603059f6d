"""What recipes must share, what the first one lends to all, and what is refused in a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zoo.compare.protocol import SHARED, VALIDATIONS, make_protocol, slug
from zoo.recipe import find_recipe
from zoo.registry import RecipeError

ROWS = "gated_attention/tiny_baseline"


def test_all_get_the_first_ones_training_and_budget() -> None:
    protocol = make_protocol(["qwen3_next/tiny", "gla/tiny"], tokens=100_000)
    assert protocol.length == 256
    assert protocol.tokens == protocol.steps * 256 * 4 >= 100_000
    first, second = protocol.entries
    for section in SHARED:
        assert first.recipe.data[section] == second.recipe.data[section]
    assert first.recipe.data["trainer"]["max_steps"] == protocol.steps
    assert (first.off, first.changes, first.differs) == (0.0, (), ())
    assert abs(second.off) <= 0.01
    assert second.changes
    assert any("blocks.gla" in line for line in second.differs)


def test_a_sweep_makes_variants_of_the_first() -> None:
    protocol = make_protocol([ROWS], sweep="blocks.attn.mixer.gates.output=[sigmoid, silu]", tokens=50_000)
    assert [entry.name for entry in protocol.entries] == [ROWS, f"{ROWS} output=sigmoid", f"{ROWS} output=silu"]
    gates = [entry.recipe.stack["blocks"]["attn"]["mixer"].get("gates") for entry in protocol.entries]
    assert gates == [None, {"output": "sigmoid"}, {"output": "silu"}]


def test_a_sweep_of_assignments_changes_several_places_at_once() -> None:
    output = "blocks.attn.mixer.gates.output=silu"
    protocol = make_protocol([ROWS], sweep=f"model.set=[{output}, [{output}, n_layers=3]]", tokens=50_000)
    assert [entry.name for entry in protocol.entries][1:] == [f"{ROWS} output=silu", f"{ROWS} output=silu n_layers=3"]
    assert [entry.recipe.stack["n_layers"] for entry in protocol.entries] == [4, 4, 3]


def test_matching_is_a_choice() -> None:
    plain = make_protocol(["transformer/tiny", "gla/tiny"], tokens=50_000, by="none")
    assert all(not entry.changes for entry in plain.entries)
    flops = make_protocol(["transformer/tiny", "gla/tiny"], tokens=50_000, by="flops")
    assert abs(flops.entries[1].off) <= 0.01


def test_one_recipe_twice_has_two_names() -> None:
    protocol = make_protocol(["gla/tiny", "gla/tiny"], tokens=50_000)
    assert [entry.name for entry in protocol.entries] == ["gla/tiny", "gla/tiny (2)"]
    assert slug("gla/tiny (2)") == "gla-tiny-2"


def test_a_shipped_recipe_has_its_whole_name_however_it_is_given(tmp_path: Path) -> None:
    name, mine = "kimi_linear/ablation/baseline", tmp_path / "mine.yaml"
    mine.write_text(f"base: {name}\n", encoding="utf-8")
    protocol = make_protocol([name, "kimi_linear/ablation/ratio_0_1", str(find_recipe(name)), str(mine)])
    names = [name, "kimi_linear/ablation/ratio_0_1", f"{name} (2)", "mine"]
    assert [entry.name for entry in protocol.entries] == names


@pytest.mark.parametrize(
    ("sources", "options", "reason"),
    [
        (["gla/tiny"], {}, "two recipes or more, or a --sweep"),
        (["transformer/tiny", "qwen3_next/tiny"], {}, "trainer.max_steps: 1550 -> 1200); --tokens N gives all"),
        (
            ["transformer/tiny", "tasks/parity"],
            {"tokens": 99999},
            "data.class_path: zoo.data.TextData -> zoo.tasks.Task",
        ),
        (["tasks/parity", "tasks/parity_sigmoid"], {"tokens": 99999}, "only text is counted in tokens"),
        (["transformer/tiny", "gla/tiny"], {"tokens": 10}, "expected at least 1,024, those of one step, found 10"),
        (["transformer/tiny"], {"sweep": "n_layers=3"}, "--sweep: expected PATH=[value, value], found 'n_layers=3'"),
        (["transformer/tinny", "gla/tiny"], {}, "no recipe 'transformer/tinny'"),
    ],
)
def test_refusals(sources: list[str], options: dict[str, Any], reason: str) -> None:
    with pytest.raises(RecipeError) as error:
        make_protocol(sources, **options)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_data_that_no_tokens_can_be_counted_of(tmp_path: Path) -> None:
    """A data module of the user's, which says no sizes."""
    recipe = tmp_path / "own.yaml"
    recipe.write_text("base: gla/tiny\ndata: {class_path: lightning.LightningDataModule, init_args: null}\n")
    with pytest.raises(RecipeError, match="data: LightningDataModule says no seq_len and batch_size"):
        make_protocol([str(recipe), str(recipe)], by="none")


def test_the_tokens_of_a_step_are_those_of_all_its_batches_and_processes(tmp_path: Path) -> None:
    recipe = tmp_path / "wide.yaml"
    recipe.write_text("base: gla/tiny\ntrainer: {accelerator: cpu, devices: 3, accumulate_grad_batches: 2}\n")
    protocol = make_protocol([str(recipe), str(recipe)], tokens=100_000, by="none")
    assert protocol.tokens == protocol.steps * 256 * 4 * 3 * 2
    assert protocol.tokens - 256 * 4 * 3 * 2 < 100_000 <= protocol.tokens


@pytest.mark.parametrize(
    ("batches", "steps", "limit", "epoch"),
    [
        (4, 2, None, None),
        (4, 3, None, 10),
        (5, 9, None, None),
        (1, 99, None, None),
        (4, 2, 6, 6),
        (4, 2, 8, None),
        (4, 3, 8, 10),
        (2, 99, 0.45, None),
    ],
)
def test_a_step_of_fewer_batches_at_the_end_of_an_epoch_is_refused(
    tmp_path: Path, batches: int, steps: int, limit: float | None, epoch: int | None
) -> None:
    """Ten batches an epoch: of four Lightning makes steps of 4, 4 and 2. Under a limit of eight, the second has two."""
    trainer = f"max_steps: {steps}, accumulate_grad_batches: {batches}, accelerator: cpu, devices: 1"
    trainer += "" if limit is None else f", limit_train_batches: {limit}"
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        f"base: tasks/parity\ndata: {{init_args: {{n_train: 60, batch_size: 6}}}}\ntrainer: {{{trainer}}}\n"
    )
    if epoch is None:
        assert make_protocol([str(recipe), str(recipe)], by="none").steps == steps
        return
    with pytest.raises(RecipeError, match=rf": {batches} does not divide the {epoch} batches of an epoch"):
        make_protocol([str(recipe), str(recipe)], by="none")


@pytest.mark.parametrize("batches", [1, 4])
def test_the_loss_is_measured_as_often_however_many_batches_a_step_takes(tmp_path: Path, batches: int) -> None:
    """Lightning's interval is one of batches."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"base: gla/tiny\ntrainer: {{max_steps: 100, accumulate_grad_batches: {batches}}}\n")
    trainer = make_protocol([str(recipe), str(recipe)], by="none").entries[0].recipe.data["trainer"]
    assert trainer["val_check_interval"] * VALIDATIONS == 100 * batches
    assert trainer["check_val_every_n_epoch"] is None


def test_differences_can_be_allowed() -> None:
    protocol = make_protocol(["transformer/tiny", "qwen3_next/tiny"], allow=True)
    assert {entry.recipe.data["trainer"]["max_steps"] for entry in protocol.entries} == {1550}


def test_what_of_a_recipes_own_training_does_not_hold_is_said() -> None:
    protocol = make_protocol(["tasks/parity", "tasks/word_problem"], allow=True, by="none")
    assert any("as the first recipe has it" in note for note in protocol.notes)
