"""What is taken out of the arguments, and where a run goes."""

from pathlib import Path

import pytest

from zoo.cli._request import parse_request, read_request, run_folder
from zoo.registry import RecipeError


def test_sorts_the_arguments() -> None:
    files = ["-c", "a.yaml", "--config=b.yaml", "--imports", "x.py", "--imports=y.py"]
    others = ["--trainer.max_steps=5", "--data.seq_len", "8"]
    request = parse_request("fit", [*files, "--force", "--ckpt_path=last", *others])
    assert request.configs == ["a.yaml", "b.yaml"]
    assert request.imports == ["x.py", "y.py"]
    assert request.force
    assert request.ckpt_path == "last"
    assert request.overrides == others


@pytest.mark.parametrize(
    "args",
    [
        ["--model.set+", "n_layers=4"],
        ["--model.set+=n_layers=4"],
        ["--model.set", "n_layers=4"],
        ["--model.set=n_layers=4"],
        ["--model.set=[n_layers=4]"],
        ["--model.stack.n_layers=4"],
        ["--model.stack.n_layers", "4"],
    ],
)
def test_every_way_to_change_the_stack_is_one_assignment(args: list[str]) -> None:
    assert parse_request("fit", args).assignments == ["n_layers=4"]


def test_assignments_keep_their_order() -> None:
    args = ["--model.stack.d_model=8", "--model.set+", "d_model=16", "--model.stack.d_model=24"]
    assert parse_request("fit", args).assignments == ["d_model=8", "d_model=16", "d_model=24"]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--config"], "--config: a value is missing"),
        (["--config", "--force"], "--config: a value is missing"),
        (["--model.set+"], "--model.set+: a value is missing"),
        (["--force=yes"], "--force takes no value"),
        (["--model.stack={}"], "the stack is not replaced whole"),
        (["--model={}"], "the stack is not replaced whole"),
        (["--model.stack.pattern+=attn"], "a list of the stack is set whole"),
        (["--model.set=[1]"], "expected a list of 'path=value' strings"),
        (["--model.set=[a"], "not valid YAML"),
    ],
)
def test_refuses(args: list[str], told: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_request("fit", args)
    assert told in str(caught.value)


def test_an_assignment_is_typed(recipe: Path) -> None:
    request = parse_request(
        "fit", ["--config", str(recipe), "--model.stack.n_layers=4", "--model.stack.blocks.attn.ffn=null"]
    )
    stack = read_request(request).stack
    assert stack["n_layers"] == 4
    assert stack["blocks"]["attn"]["ffn"] is None
    assert stack["blocks"]["gdn"]["mixer"]["gates"] == {"decay": "mamba2", "write": "sigmoid", "output": "silu"}


def test_a_second_config_is_laid_over_the_first(recipe: Path, tmp_path: Path) -> None:
    over = tmp_path / "over.yaml"
    over.write_text(
        "model: {stack: {d_model: 32}, set: [blocks.attn.ffn=null]}\n"
        "data: {init_args: {seq_len: 16}}\n"
        "optimizer: {class_path: SGD, init_args: {lr: 0.1}}\n"
    )
    data = read_request(parse_request("fit", ["--config", str(recipe), "--config", str(over)])).data
    assert data["model"]["stack"]["d_model"] == 32
    assert data["model"]["stack"]["n_layers"] == 2
    assert data["model"]["stack"]["blocks"]["attn"]["ffn"] is None
    assert data["data"]["init_args"]["seq_len"] == 16
    assert data["data"]["init_args"]["batch_size"] == 2
    assert data["optimizer"] == {"class_path": "SGD", "init_args": {"lr": 0.1}}, "AdamW's options are not SGD's"


@pytest.mark.parametrize(
    ("args", "folder"),
    [
        (["qwen3_next/tiny"], "runs/qwen3_next-tiny"),
        (["kimi_linear/ablation/baseline"], "runs/kimi_linear-ablation-baseline"),
        (["mini.yaml"], "runs/mini"),
        (["mini.yaml", "--config", "over.yaml"], "runs/mini-over"),
        (["placed.yaml"], "elsewhere"),
        (["mini.yaml", "--trainer.default_root_dir=there"], "there"),
        (["placed.yaml", "--trainer.default_root_dir", "there"], "there"),
        (["moved"], "moved"),
        (["moved/config.yaml"], "moved"),
        (["moved", "--trainer.default_root_dir=there"], "there"),
    ],
)
def test_where_a_run_goes(recipe: Path, tmp_path: Path, args: list[str], folder: str) -> None:
    (tmp_path / "over.yaml").write_text("data: {init_args: {seq_len: 16}}\n")
    placed = recipe.read_text() + "  default_root_dir: elsewhere\n"
    (tmp_path / "placed.yaml").write_text(placed)
    (tmp_path / "moved" / "checkpoints").mkdir(parents=True)
    (tmp_path / "moved" / "config.yaml").write_text(placed)
    request = parse_request("fit", ["--config", *args])
    assert run_folder(request, read_request(request)) == Path(folder)


def test_a_shipped_recipe_by_path_is_named_like_by_name() -> None:
    from zoo.recipe import find_recipe

    request = parse_request("fit", ["--config", str(find_recipe("qwen3_next/tiny"))])
    assert run_folder(request, read_request(request)) == Path("runs/qwen3_next-tiny")
