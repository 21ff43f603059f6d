"""Mixers: what lets tokens see each other. One a file; siblings never import each other."""

from zoo.mixers._mixer import Mixer

__all__ = ["Mixer"]
