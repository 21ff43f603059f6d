"""Silences what Lightning says to everybody, so that what a run says to its user can be seen."""

from __future__ import annotations

import logging
import warnings


def quiet() -> None:
    """Call after Lightning is imported: its loggers set their levels while it is."""
    import lightning.pytorch  # noqa: F401

    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] in ("lightning", "lightning_fabric", "pytorch_lightning"):
            logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning(_fabric|_utilities)?\.")
    warnings.filterwarnings("ignore", message=r".*LeafSpec.*")
