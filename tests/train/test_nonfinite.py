import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from tests.train import toy
from zoo.train import Checkpoints, LanguageModule, NonFiniteError, RunFolder


class Break(Callback):
    """At step `step` one module's output, one weight or one gradient becomes `value`."""

    def __init__(self, step: int, what: str, name: str, value: float = float("nan")):
        self.step, self.what, self.name, self.value = step, what, name, value

    def on_train_batch_start(self, trainer: Any, pl_module: LanguageModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self.step:
            return
        if self.what == "output":

            def spoil(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
                output = output.clone()
                output[0, -1, 0] = self.value
                return output

            pl_module.stack.get_submodule(self.name).register_forward_hook(spoil)
        elif self.what == "weight":
            with torch.no_grad():
                pl_module.stack.get_parameter(self.name).view(-1)[0] = self.value
        else:
            pl_module.stack.get_parameter(self.name).register_hook(lambda grad: grad + self.value)


def fail(folder: Path, *breaks: Break, **arguments: Any) -> str:
    with pytest.raises(NonFiniteError) as caught:
        toy.fit(folder, callbacks=[*breaks, RunFolder(), Checkpoints(every_n_steps=1)], **arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_first_layer_is_named(tmp_path: Path, value: float) -> None:
    message = fail(tmp_path, Break(3, "output", "layers.0.ffn.up_proj", value))
    assert message.startswith("step 4: the loss is nan")
    assert "the first output that is not finite is that of 'layers.0.ffn.up_proj' (Linear)" in message


def test_a_weight_is_named(tmp_path: Path) -> None:
    message = fail(tmp_path, Break(3, "weight", "layers.1.mixer.o_proj.weight"))
    assert "the weights 'layers.1.mixer.o_proj.weight' are not finite" in message


def test_a_gradient_is_named_in_backward_order(tmp_path: Path) -> None:
    message = fail(tmp_path, Break(3, "gradient", "embed.weight"), Break(3, "gradient", "layers.0.mixer.o_proj.weight"))
    assert re.match(r"step 4: the loss is [23]\.\d+ and its gradient norm nan", message)
    assert "the first gradient that is not is that of 'layers.0.mixer.o_proj.weight'" in message


def test_the_last_good_checkpoint_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    fail(tmp_path, Break(3, "output", "layers.0.ffn.up_proj"))
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert f"the last good checkpoint is {last.with_name('step=3.ckpt')}" in capsys.readouterr().out
    content = torch.load(last, weights_only=True)
    assert content["global_step"] == 3
    assert all(tensor.isfinite().all() for tensor in content["state_dict"].values())
    toy.assert_same(
        toy.fit(tmp_path / "on", ckpt_path=last, max_steps=6),
        toy.fit(tmp_path / "whole", max_steps=6),
    )


def test_among_accumulated_batches(tmp_path: Path) -> None:
    message = fail(tmp_path, Break(2, "output", "norm"), accumulate_grad_batches=2)
    assert message.startswith("step 3:")
    assert "'norm' (RMSNorm)" in message
