"""transformers' checkpoints, both ways: `from_hf` reads a folder (or a model), `to_hf` writes one.

One declarative map a family serves both ways: `zoo/hf/families/<model_type>.py`, whose `FAMILY` is a `Family`.
To add one:

1. Look at what `save_pretrained` of a tiny model writes (config.json, and the tensors' names and shapes). That layout,
   and not the state_dict's, is what the map speaks of.
2. A `Kind` for each kind of layer: `block`, the template of the block as it stands in a recipe, and `tensors`, its
   rules. Leaves of a template are constants or entries: `Key("num_attention_heads")`, `RopeKeys()`, `Derived(read,
   write)`, or your own `Entry`. Write out every option that the family fixes to another value than ours by default; in
   `gates`, every gate. A rule is `rule(their name, our name(s), transform)`, names relative to the layer; `same(...)`
   for runs of equal names; `{e}` in their name is the number of an expert, our tensor then has the experts first, and
   `Piece(name, part, parts)` is a run of its rows. A rule whose tensors a model lacks (a bias) is silent; one of ours
   without a rule is refused. Transforms: zoo/hf/transforms.py.
3. `layers` says which kind each layer is (`Uniform`, `LayerTypes`, `WithFFN`, or your own `Layers`).
4. `defaults` has every key that the templates read and transformers' value where config.json lacks it. All other keys
   are refused, unless `HARMLESS`/`FIXED` (zoo/hf/configuration.py) or the family's `harmless`/`fixed` know them.
   `aliases`, `prepare`, `renames`, `skipped` are for what other releases write.
5. A row in tests/hf/cases.py.

Both directions come from this: reading fills the template from the keys; writing matches the template against the stack
to find the keys, fills it again and compares: what differs is what the family cannot say, and is the refusal's text.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from zoo.hf.exporting import to_hf
from zoo.hf.importing import Imported, import_folder
from zoo.stack import Stack


def from_hf(
    source: Any,
    *,
    set: Sequence[str] = (),
    imports: Sequence[str] = (),
    drop: bool = False,
    device: str | torch.device = "cpu",
) -> Stack:
    """The model of a transformers folder, or of a transformers model.

    `set` are overrides (`blocks.attn.mixer.gates.output=identity_init`), `imports` the user's files that they need:
    what they add has its own start, what they take away is refused unless `drop`. Gates that change the logits are
    warned of. RecipeError lists all that does not fit. A model goes through `save_pretrained`, whose layout is the one
    that the maps know.
    """
    if not hasattr(source, "save_pretrained"):
        return _told(import_folder(source, set=set, imports=imports, drop=drop, device=device))
    with tempfile.TemporaryDirectory() as folder:
        source.save_pretrained(folder)
        return _told(import_folder(folder, set=set, imports=imports, drop=drop, device=device))


def _told(imported: Imported) -> Stack:
    for note in imported.notes:
        warnings.warn(note, stacklevel=3)
    return imported.lm


__all__ = ["Imported", "from_hf", "import_folder", "to_hf"]
