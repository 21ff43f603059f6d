"""Synthetic tasks: what a mixer can recall, copy, or keep track of, and up to which length. One task a file.

A task says how one batch of examples is drawn; `TaskData` makes splits, batches and presets of it. A user's own task is
one file with `@register("key")` that the recipe imports.
"""

from __future__ import annotations

from zoo.tasks._data import TaskData
from zoo.tasks._draws import Draws
from zoo.tasks._task import IGNORE, Examples, Preset, Task, next_token, register

__all__ = ["IGNORE", "Draws", "Examples", "Preset", "Task", "TaskData", "next_token", "register"]
