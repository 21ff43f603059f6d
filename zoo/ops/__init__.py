"""Kernels behind one door each: the equations, a reference loop over time, and the fast paths that are held to it."""

from zoo.ops._attention_call import watch_attention
from zoo.ops._attention_to_first import attention_to_first
from zoo.ops._check import check_cu_seqlens
from zoo.ops._dispatch import BackendRefused, Choice, backend, device_kind, trace
from zoo.ops._nsa_blocks import Blocks
from zoo.ops._precision import full_precision
from zoo.ops.attention import attention
from zoo.ops.compressed_attention import compressed_attention
from zoo.ops.delta_rule import delta_rule
from zoo.ops.dplr import dplr
from zoo.ops.experts import experts
from zoo.ops.gated_norm import gated_norm
from zoo.ops.lightning_indexer import lightning_indexer
from zoo.ops.linear_attention import linear_attention
from zoo.ops.nsa import nsa
from zoo.ops.selected_attention import selected_attention
from zoo.ops.short_conv import short_conv

__all__ = [
    "BackendRefused",
    "Blocks",
    "Choice",
    "attention",
    "attention_to_first",
    "backend",
    "check_cu_seqlens",
    "compressed_attention",
    "delta_rule",
    "device_kind",
    "dplr",
    "experts",
    "full_precision",
    "gated_norm",
    "lightning_indexer",
    "linear_attention",
    "nsa",
    "selected_attention",
    "short_conv",
    "trace",
    "watch_attention",
]
