"""Training: the LightningModule, optimizers and schedules, and what a run keeps.

    LanguageModule                                        the module
    MuonAdamW, WarmupCosine, WarmupStableDecay            by class path, in `optimizer` and `lr_scheduler`
    Checkpoints, RandomState, RunFolder, Sample, Progress callbacks of every fit; `default_callbacks` adds the missing
    MetricsCSV                                            the default logger
    check_run_folder, find_checkpoint, quiet              for the command line
"""

from zoo.train.module import LanguageModule
from zoo.train.nonfinite import NonFiniteError
from zoo.train.optim import MuonAdamW, build_optimizer, describe_groups, parameter_groups
from zoo.train.quiet import quiet
from zoo.train.schedule import WarmupCosine, WarmupStableDecay
from zoo.train.weights import check_fits, find_checkpoint, read_weights

__all__ = [
    "LanguageModule",
    "MuonAdamW",
    "NonFiniteError",
    "WarmupCosine",
    "WarmupStableDecay",
    "build_optimizer",
    "check_fits",
    "describe_groups",
    "find_checkpoint",
    "parameter_groups",
    "quiet",
    "read_weights",
]
