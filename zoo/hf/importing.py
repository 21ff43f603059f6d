"""A transformers checkpoint -> a model of ours, tensor by tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.hf.bound import EXTRA, bind_model, head_rules, tensors_of
from zoo.hf.configuration import read_config
from zoo.hf.family import Family
from zoo.hf.files import Stored, list_tensors, read_tensors
from zoo.hf.origin import Origin, remember
from zoo.hf.recipes import to_stack
from zoo.hf.surgery import notes_on_gates
from zoo.hf.tensors import Bound, matches
from zoo.recipe import read_recipe
from zoo.registry import RecipeError
from zoo.stack import Stack, load

Rules = Mapping[str, Bound]


@dataclass(frozen=True)
class Imported:
    """A model and how it came about.

    stack    the plain data under `model.stack`
    skipped  tensors of the files that the text model does not need
    new      tensors of the model that the files have nothing for: they have their own start
    dropped  tensors of the files that the changed stack has no place for
    notes    what the changes do to the logits, and which tensors of the files hold no finite numbers; one line each
    imports  the user's files that the changed stack needs
    """

    lm: Stack
    stack: dict[str, Any]
    origin: Origin
    skipped: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()


def import_folder(
    folder: str | Path,
    *,
    set: Sequence[str] = (),
    imports: Sequence[str] = (),
    drop: bool = False,
    device: str | torch.device = "cpu",
) -> Imported:
    """The model of a folder that transformers wrote, with `set` (`path=value`) applied to its stack,
    for which `imports` are the user's files to import first.

    Weights keep the dtype of the files, but for what zoo keeps in float32. What the changed stack has no place for is
    refused, unless `drop`. RecipeError, which lists everything at once, for values of the configuration that zoo does
    not understand, and for unknown, missing and misshapen tensors. No more is held than the model and one tensor.
    """
    folder = Path(folder).expanduser()
    data = read_config(folder)
    try:
        read = to_stack(data)
        plain = load(read.stack, device="meta")
    except RecipeError as error:
        raise RecipeError(f"{folder}: {error}") from None
    before = tensors_of(plain)
    rules = {each.hf: each for each in bind_model(read.family, read.config, read.kinds, plain)}
    stored, skipped = _released(read.family, list_tensors(folder), len(read.kinds))
    heads = [each.hf for each in head_rules(read.family)]
    tied = {name: stored.pop(name) for name in heads if name not in rules and name in stored}
    _check(rules, stored, before, folder)

    changed = read_recipe(read.stack, set, imports)
    lm = load(changed, device="meta") if set else plain
    kept = {name for name, each in tensors_of(lm).items() if name in before and before[name].shape == each.shape}
    dropped = tuple(name for name, rule in rules.items() if not kept.issuperset(rule.names))
    if dropped and not drop:
        raise RecipeError(
            f"{folder}: the changed stack has no place for {', '.join(dropped)}; to drop them: --drop (drop=True)"
        )
    _allocate(lm, _dtypes(rules, stored, kept), kept, device)
    own = tensors_of(lm)
    targets = {name: own[name] for name in kept}
    broken = []
    for name, tensor in read_tensors({name: stored[name] for name in rules}):
        if tensor.is_floating_point() and not tensor.sum(dtype=torch.float32).isfinite():  # holds nothing of its size
            broken.append(name)
        rules[name].fill(targets, tensor, before)
    _check_tied(tied, lm, folder)
    widened = {name: stored[name].dtype for name, rule in rules.items() if _is_widened(rule, own, stored[name])}
    origin = Origin(data, {name: dtype for name, dtype in widened.items() if dtype is not None})
    remember(lm, origin)
    new = tuple(name for name in lm.state_dict() if name not in kept and (name in own or name.startswith(EXTRA)))
    notes = [*(notes_on_gates(plain, lm) if set else ()), *_notes_on_numbers(broken)]
    return Imported(lm, changed.stack, origin, skipped, new, dropped, tuple(notes), changed.imports)


def _notes_on_numbers(broken: Sequence[str]) -> list[str]:
    return [f"NaN or infinite numbers in {len(broken)} tensors of the files: {', '.join(broken)}"] if broken else []


def _is_widened(rule: Bound, own: Mapping[str, Tensor], stored: Stored) -> bool:
    return any(name in own and own[name].dtype != stored.dtype for name in rule.names)


def _released(family: Family, listed: Mapping[str, Stored], n_layers: int) -> tuple[dict[str, Stored], tuple[str, ...]]:
    """The tensors under the names of the family's rules, and those that are left out."""
    kept, skipped = {}, []
    unneeded = [pattern.replace("{n}", str(n_layers)) for pattern in family.skipped]
    for name, each in listed.items():
        for pattern, replacement in family.renames:
            name = re.sub(pattern, replacement, name)
        if matches(unneeded, name):
            skipped.append(each.name)
        else:
            kept[name] = each
    return kept, tuple(skipped)


def _check(rules: Rules, stored: Mapping[str, Stored], own: Mapping[str, Tensor], folder: Path) -> None:
    """RecipeError with every tensor that is unknown, missing, misshapen or of a dtype that zoo does not compute in."""
    faults = [f"unknown tensor {name} {list(each.shape)}" for name, each in stored.items() if name not in rules]
    for name, rule in rules.items():
        like = rule.to_hf(own)
        shape = list(like.shape)
        if name not in stored:
            faults.append(f"missing tensor {name} {shape}")
            continue
        found = stored[name]
        if list(found.shape) != shape:
            faults.append(f"{name} is {list(found.shape)}, expected {shape}")
        if found.dtype is None or found.dtype.is_floating_point != like.dtype.is_floating_point:
            faults.append(f"{name} is stored as {found.stored_as}, which zoo does not take for it")
    if faults:
        raise RecipeError(f"{folder}: {'; '.join(faults)}")


def _check_tied(tied: Mapping[str, Stored], lm: Stack, folder: Path) -> None:
    """Some files hold the head of a model whose head is its embedding: then the two must be equal."""
    for name, tensor in read_tensors(tied):
        if not torch.equal(tensor.to(lm.embed.weight.device), lm.embed.weight):
            raise RecipeError(f"{folder}: tie_word_embeddings is true, and {name} is not the embedding")


def _dtypes(rules: Rules, stored: Mapping[str, Stored], kept: set[str]) -> dict[str, torch.dtype]:
    """Of each of our tensors the dtype of the file's, the widest of several; of new ones that of most numbers."""
    found: dict[str, torch.dtype] = {}
    for hf, rule in rules.items():
        dtype = stored[hf].dtype
        assert dtype is not None
        for name in kept.intersection(rule.names):
            found[name] = torch.promote_types(found[name], dtype) if name in found else dtype
    return found


def _allocate(lm: Stack, dtypes: Mapping[str, torch.dtype], kept: set[str], device: str | torch.device) -> None:
    """Memory for a model on the meta device, in these dtypes, and the start of what the files do not have."""
    usual = dtypes.get("embed.weight", torch.get_default_dtype())
    for prefix, module in lm.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            dtype = dtypes.get(f"{prefix}.{name}".removeprefix("."), usual)
            if getattr(module, "keep_float32", False):
                dtype = torch.promote_types(dtype, torch.float32)
            parameter.data = parameter.data.to(dtype)
    lm.to_empty(device=device)
    if lm.config.tie_embeddings:
        lm.head.weight = lm.embed.weight
    lm.reset_parameters(only=_unfilled(lm, kept))


def _unfilled(lm: Stack, kept: set[str]) -> list[nn.Module]:
    """The modules that hold, themselves or within, a tensor which no file fills."""
    found = []
    names = {name for name, _ in (*lm.named_parameters(), *lm.named_buffers())} - kept
    for prefix, module in lm.named_modules():
        if any(name.startswith(f"{prefix}.") for name in names):
            found.append(module)
    return found
