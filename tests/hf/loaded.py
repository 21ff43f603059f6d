"""What transformers says of exported folders, in a process of its own: `python loaded.py FILE` loads the folders beside
FILE and writes of each the logits of its tokens.pt, and what was amiss while it was loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.modules["fla"] = None  # type: ignore[assignment]


@torch.no_grad()
def main(file: Path) -> None:
    from transformers import AutoModelForCausalLM

    found: dict[str, Any] = {}
    for tokens in sorted(file.parent.glob("*/tokens.pt")):
        model, told = AutoModelForCausalLM.from_pretrained(tokens.parent, output_loading_info=True)
        amiss = {name: list(what) for name, what in told.items() if what}
        found[tokens.parent.name] = {
            "amiss": amiss,
            "ties": bool(model._tied_weights_keys),
            "logits": model(torch.load(tokens)).logits,
        }
    torch.save(found, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
