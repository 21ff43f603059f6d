"""The callbacks of every fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.callbacks import Callback

from zoo.train.attention_statistics import AttentionStatistics
from zoo.train.checkpoints import Checkpoints, RandomState
from zoo.train.expert_loads import ExpertLoads
from zoo.train.gate_statistics import GateStatistics
from zoo.train.progress import StepProgress
from zoo.train.run_folder import RunFolder
from zoo.train.sample import Sample
from zoo.train.validation import LastValidation


def default_callbacks(
    given: Sequence[Callback] = (), config: dict[str, Any] | None = None, force: bool = False
) -> list[Callback]:
    """The user's callbacks, and of ours those that the user did not give; `config` is the resolved recipe."""
    ours = (
        *(RandomState(), RunFolder(config, force), StepProgress(), LastValidation(), Sample()),
        *(ExpertLoads(), GateStatistics(), AttentionStatistics()),
        Checkpoints(),
    )
    missing = [one for one in ours if not any(isinstance(other, type(one)) for other in given)]
    # the random state first: what the user's callbacks draw must be drawn behind its restoration
    return sorted([*given, *missing], key=lambda callback: not isinstance(callback, RandomState))
