"""Training: the LightningModule, optimizers and schedules, and what a run keeps.

LanguageModule                                        the module
MuonAdamW, WarmupCosine, WarmupStableDecay            by class path, in `optimizer` and `lr_scheduler`
Checkpoints, ExpertLoads, RandomState, RunFolder, Sample, StepProgress   callbacks of every fit, by `default_callbacks`
LastValidation                                        so is this
GateStatistics, AttentionStatistics                   and these: gates.csv and attention.csv
MetricsCSV                                            the default logger
check_run_folder, check_writable, data_module, find_checkpoint, quiet   for the command line
devices_of, rate_factors                              for comparisons
"""

from zoo.train._plain import data_module
from zoo.train.attention_statistics import AttentionStatistics
from zoo.train.callbacks import default_callbacks
from zoo.train.checkpoints import Checkpoints, RandomState
from zoo.train.devices import devices_of
from zoo.train.expert_loads import ExpertLoads
from zoo.train.gate_statistics import GateStatistics
from zoo.train.metrics_csv import MetricsCSV
from zoo.train.module import LanguageModule
from zoo.train.muon import MuonAdamW
from zoo.train.nonfinite import NonFiniteError
from zoo.train.optim import build_optimizer, describe_groups, parameter_groups
from zoo.train.progress import StepProgress
from zoo.train.quiet import quiet
from zoo.train.run_folder import RunFolder, check_run_folder, check_writable
from zoo.train.sample import Sample
from zoo.train.schedule import WarmupCosine, WarmupStableDecay, rate_factors
from zoo.train.trained import read_stack
from zoo.train.validation import LastValidation
from zoo.train.weights import check_fits, find_checkpoint, read_checkpoint, read_weights

__all__ = [
    "AttentionStatistics",
    "Checkpoints",
    "ExpertLoads",
    "GateStatistics",
    "LanguageModule",
    "LastValidation",
    "MetricsCSV",
    "MuonAdamW",
    "NonFiniteError",
    "RandomState",
    "RunFolder",
    "Sample",
    "StepProgress",
    "WarmupCosine",
    "WarmupStableDecay",
    "build_optimizer",
    "check_fits",
    "check_run_folder",
    "check_writable",
    "data_module",
    "default_callbacks",
    "describe_groups",
    "devices_of",
    "find_checkpoint",
    "parameter_groups",
    "quiet",
    "rate_factors",
    "read_checkpoint",
    "read_stack",
    "read_weights",
]
