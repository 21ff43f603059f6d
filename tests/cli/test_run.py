"""fit, validate, test and predict through the real command line, on a run of two steps."""

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from zoo.cli._paths import absolute_data
from zoo.registry import OUTPUT


def step_of(checkpoint: Path) -> int:
    return torch.load(checkpoint, weights_only=True)["global_step"]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def bits(out: str, stage: str) -> float:
    return float(re.search(rf"{stage}/bpb\D+([\d.]+)", out)[1])


def test_fit_leaves_a_run_folder(run: Path) -> None:
    assert step_of(run / "checkpoints/last.ckpt") == step_of(run / "checkpoints/step=2.ckpt") == 2
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert all(row["train/loss"] for row in rows)
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["stack"]["pattern"] == ["gdn", "attn"]
    assert config["trainer"]["max_steps"] == 2
    assert config["optimizer"]["init_args"]["weight_decay"] == 0.1
    assert config["data"]["init_args"]["seed"] == 0, "defaults are written down too"


def test_a_folder_that_holds_a_run_is_refused_and_left_alone(zoo, run: Path) -> None:
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    refused = zoo("fit", "--config", "mini.yaml", "--trainer.max_steps=1")
    assert "runs/mini holds a run" in refused.fault
    assert refused.out == "", "nothing was built to find that out"
    assert "holds a run" in zoo("fit", "--config", run).fault
    assert before == {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}


def test_force_starts_anew(zoo, run: Path) -> None:
    before = weights_of(run)
    assert zoo("fit", "--config", "mini.yaml", "--force", "--trainer.max_steps=1").code == 0
    assert step_of(run / "checkpoints/last.ckpt") == 1
    assert not (run / "checkpoints/step=2.ckpt").exists()
    assert not same(before, weights_of(run))


def test_resumed_from_its_own_config_the_run_is_the_uninterrupted_one(zoo, run: Path) -> None:
    assert zoo("fit", "--config", run, "--ckpt_path", "last", "--trainer.max_steps=4").code == 0
    whole = zoo("fit", "--config", "mini.yaml", "--trainer.default_root_dir=whole", "--trainer.max_steps=4")
    assert whole.code == 0
    assert step_of(run / "checkpoints/last.ckpt") == 4
    assert same(weights_of(run), weights_of(Path("whole")))


def test_resuming_a_run_that_is_done_says_so(zoo, run: Path) -> None:
    result = zoo("fit", "--config", run, "--ckpt_path", "last")
    assert result.code == 0
    assert "nothing to train: runs/mini/checkpoints/last.ckpt is at step 2 of 2" in result.out


def test_a_run_that_was_moved_resumes_where_it_is(zoo, run: Path) -> None:
    run.rename("moved")
    assert zoo("fit", "--config", "moved", "--ckpt_path", "last", "--trainer.max_steps=3").code == 0
    assert step_of(Path("moved/checkpoints/last.ckpt")) == 3
    assert not run.exists()


def test_a_run_resumes_from_any_folder(
    zoo, run: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(trained.parent / "corpus", tmp_path / "corpus")
    shutil.copyfile(run / "tokenizer.json", "letters.json")
    given = ("--trainer.default_root_dir=mine", "--data.tokenizer=letters.json", "--model.weights=runs/mini")
    assert zoo("fit", "--config", "mini.yaml", "--data.path=[corpus/1*.txt,corpus]", *given).code == 0
    config = yaml.safe_load(Path("mine/config.yaml").read_text())
    assert config["data"]["init_args"]["path"] == [str(tmp_path / "corpus/1*.txt"), str(tmp_path / "corpus")]
    assert config["data"]["init_args"]["tokenizer"] == str(tmp_path / "letters.json")
    assert config["model"]["weights"] == str(tmp_path / "runs/mini")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    mine = tmp_path / "mine"
    assert zoo("fit", "--config", mine, "--ckpt_path", "last", "--trainer.max_steps=3").code == 0
    assert step_of(mine / "checkpoints/last.ckpt") == 3


def test_words_for_data_are_no_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "[odd]"
    odd.mkdir()
    monkeypatch.chdir(odd)
    kept = {"path": "hf://a/b", "tokenizer": "bytes", "seed": 1}
    assert absolute_data(kept) == kept
    assert absolute_data({"path": None, "tokenizer": "bpe:300"}) == {"path": None, "tokenizer": "bpe:300"}
    assert absolute_data({"path": "*.txt"}) == {"path": f"{tmp_path}/[[]odd]/*.txt"}
    assert absolute_data({"task": "needle", "options": {"path": "a"}})["options"] == {"path": f"{odd}/a"}


def test_held_out_measures_agree_however_the_run_is_named(zoo, run: Path) -> None:
    before = (run / "metrics.csv").read_bytes()
    ways = [
        ("--config", "mini.yaml", "--ckpt_path", "last"),
        ("--config", run, "--ckpt_path", "last"),
        ("--config", run / "config.yaml", "--ckpt_path", run),
        ("--ckpt_path", run / "checkpoints/last.ckpt"),
        ("--config", "mini.yaml", "--model.weights", run),
    ]
    for stage, command in (("val", "validate"), ("test", "test")):
        found = [bits(zoo(command, *way).out, stage) for way in ways[: 5 if stage == "val" else 1]]
        assert found == [found[0]] * len(found)
    assert (run / "metrics.csv").read_bytes() == before, "measuring is no part of the run's record"


def test_fresh_weights_are_measured_but_not_in_silence(zoo, recipe: Path) -> None:
    result = zoo("validate", "--config", recipe)
    assert result.code == 0
    assert "the weights are fresh" in result.out


def test_predict_keeps_the_loss_of_every_token(zoo, run: Path) -> None:
    assert zoo("predict", "--ckpt_path", run).code == 0
    batches = torch.load(run / "predictions.pt", weights_only=True)
    total = sum(batch["nats"].sum() for batch in batches)
    n_bytes = sum((batch["labels"] != -100).sum() for batch in batches)
    measured = bits(zoo("test", "--ckpt_path", run, "--trainer.limit_test_batches=1000").out, "test")
    assert float(total / n_bytes / torch.tensor(2.0).log()) == pytest.approx(measured, rel=1e-5)


def test_weights_start_a_run_of_its_own(zoo, run: Path) -> None:
    result = zoo("fit", "--config", "mini.yaml", "--model.weights", run, "--trainer.default_root_dir=new")
    assert result.code == 0
    assert step_of(Path("new/checkpoints/last.ckpt")) == 2


def test_another_optimizer_takes_none_of_the_old_ones_options(zoo, run: Path) -> None:
    arguments = ("--config", "mini.yaml", "--force", "--trainer.max_steps=1")
    assert zoo("fit", *arguments, "--optimizer=SGD", "--optimizer.lr=0.5").code == 0
    optimizer = yaml.safe_load((run / "config.yaml").read_text())["optimizer"]
    assert optimizer["class_path"] == "torch.optim.SGD"
    assert optimizer["init_args"]["lr"] == 0.5
    assert optimizer["init_args"]["weight_decay"] == 0, "0.1 was AdamW's"
    muon = zoo("fit", *arguments, "--optimizer", "zoo.train.MuonAdamW", "--lr_scheduler=WarmupCosine")
    assert muon.code == 0
    assert "Muon" in muon.out
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["lr_scheduler"]["class_path"] == "zoo.train.WarmupCosine"
    adamw = zoo("fit", *arguments, "--optimizer=torch.optim.AdamW", "--optimizer.lr=0.5")
    assert adamw.code == 0
    assert yaml.safe_load((run / "config.yaml").read_text())["optimizer"]["init_args"]["weight_decay"] == 0.1


def test_the_users_logger_and_callback_stand_beside_ours(zoo, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "greeting.py").write_text(
        "from lightning.pytorch.callbacks import Callback\n"
        "class Greeting(Callback):\n"
        "    def __init__(self, word: str = 'hello'): self.word = word\n"
        "    def on_train_start(self, trainer, pl_module): print(self.word)\n"
    )
    result = zoo(
        "fit",
        *("--config", recipe, "--imports", "greeting.py", "--trainer.logger=CSVLogger"),
        *("--trainer.callbacks+=greeting.Greeting", "--trainer.callbacks.word=welcome"),
    )
    assert result.code == 0
    assert "welcome\n" in result.out
    assert Path("runs/mini/metrics.csv").is_file()
    assert Path("runs/mini/checkpoints/last.ckpt").is_file()
    assert list(Path("runs/mini").glob("lightning_logs/*/metrics.csv")), "the user's logger writes into the run folder"


@pytest.mark.parametrize("interval", [8, 100])
def test_a_run_is_measured_once_at_its_end_where_the_interval_is_no_shorter(zoo, recipe: Path, interval: int) -> None:
    """The interval is in batches, the run in steps of four."""
    sizes = ("--trainer.accumulate_grad_batches=4", f"--trainer.val_check_interval={interval}")
    whole = "--trainer.check_val_every_n_epoch=null"
    assert zoo("fit", "--config", recipe, *sizes, whole, "--trainer.default_root_dir=cut").code == 0
    with Path("cut/metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file) if row.get("val/loss")] == ["1"]


def test_a_users_gate_trains_resumes_and_is_kept_by_path(zoo, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "third_gate.py").write_text(
        "import torch\n"
        "from zoo.gates.output import OutputGate, register\n"
        "@register('third')\n"
        "class Third(OutputGate):\n"
        "    '''score = 1/3.'''\n"
        "    def __init__(self, slot):\n"
        "        super().__init__()\n"
        "        self.n_heads = slot.n_heads\n"
        "    def forward(self, x):\n"
        "        return x.new_full((*x.shape[:2], self.n_heads, 1), 1 / 3)\n"
    )
    recipe.write_text("imports: [third_gate.py]\n" + recipe.read_text())
    try:
        gate = ("--model.set+", "blocks.attn.mixer.gates.output=third")
        assert zoo("fit", "--config", recipe, *gate).code == 0
        config = yaml.safe_load(Path("runs/mini/config.yaml").read_text())
        assert config["imports"] == [str(tmp_path / "third_gate.py")]
        assert zoo("fit", "--config", "runs/mini", "--ckpt_path", "last", "--trainer.max_steps=3").code == 0
        assert zoo("generate", "runs/mini", "--prompt", "a", "--max-new-tokens", "3").code == 0
    finally:
        OUTPUT._classes.pop("third", None)


def test_print_config_prints_and_does_not_run(zoo, recipe: Path) -> None:
    result = zoo("fit", "--config", recipe, "--model.stack.d_model=32", "--print_config")
    assert result.code == 0
    assert yaml.safe_load(result.out)["model"]["stack"]["d_model"] == 32
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "args", [("--data.help",), ("--data.help=TextData",), ("--optimizer.help=AdamW",), ("--help-all",)]
)
def test_help_on_classes_needs_no_recipe(zoo, args: tuple[str]) -> None:
    result = zoo("fit", *args)
    assert result.code == 0
    assert re.search(r"--(data.seq_len|optimizer.weight_decay|trainer.max_steps)\b", result.out)


def test_a_recipe_without_data_trains_on_the_standard_library(zoo, recipe: Path) -> None:
    text = recipe.read_text()
    recipe.write_text(re.sub(r"data:\n.*\n.*\n", "", text))
    result = zoo("fit", "--config", recipe, "--print_config")
    assert yaml.safe_load(result.out)["data"]["class_path"] == "zoo.data.TextData"


def test_interrupted_the_run_says_how_to_go_on(zoo, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "ctrl_c.py").write_text(
        "import os, signal\n"
        "from lightning.pytorch.callbacks import Callback\n"
        "class CtrlC(Callback):\n"
        "    def on_train_batch_end(self, trainer, *args):\n"
        "        if trainer.global_step == 2: os.kill(os.getpid(), signal.SIGINT)\n"
    )
    callback = ("--imports", "ctrl_c.py", "--trainer.callbacks+=ctrl_c.CtrlC")
    result = zoo("fit", "--config", recipe, "--trainer.max_steps=50", *callback)
    assert result.code == 1
    command = re.search(r"zoo: interrupted; to go on: zoo (.*)\n", result.err)[1]
    assert "Traceback" not in result.err
    stopped = step_of(Path("runs/mini/checkpoints/last.ckpt"))
    assert 2 <= stopped <= 3
    assert zoo(*command.split(), "--trainer.max_steps=5", "--trainer.callbacks=[]").code == 0
    assert step_of(Path("runs/mini/checkpoints/last.ckpt")) == 5


def test_a_loss_that_is_not_finite_is_a_failed_run_in_one_line(zoo, recipe: Path) -> None:
    result = zoo("fit", "--config", recipe, "--optimizer=SGD", "--optimizer.lr=1e30", "--trainer.max_steps=9")
    assert result.code == 1
    assert re.fullmatch(r"zoo: error: step \d+: the loss is .*\n", result.err)


def test_what_nobody_foresaw_keeps_its_traceback(zoo, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "breaks.py").write_text(
        "from lightning.pytorch.callbacks import Callback\n"
        "class Breaks(Callback):\n"
        "    def on_train_start(self, *args): raise ZeroDivisionError('of the user')\n"
    )
    with pytest.raises(ZeroDivisionError):  # which Python prints, with exit code 1
        zoo("fit", "--config", recipe, "--imports", "breaks.py", "--trainer.callbacks+=Breaks")


def test_the_record_has_the_command(run: Path) -> None:
    assert json.loads((run / "run.json").read_text())["starts"][0]["command"]


@pytest.mark.slow
def test_two_processes_share_one_run(recipe: Path) -> None:
    command = [sys.executable, "-m", "zoo", "fit", "--config", recipe, "--trainer.strategy=ddp", "--trainer.devices=2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert step_of(Path("runs/mini/checkpoints/last.ckpt")) == 2
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stderr.count("zoo: error: ") == 1
