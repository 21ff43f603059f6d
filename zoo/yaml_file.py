"""YAML texts -> plain data, and the lines on which things stand. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from zoo.registry import RecipeError


class _Loader(yaml.SafeLoader):
    """YAML as people write it: `1e-3` is a number, and a key that stands twice is an error rather than a loss."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain word", key.start_mark)
            if key.value != "<<" and key.value in seen:
                problem = f"the key '{key.value}' stands twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def parse_yaml(text: str, place: str) -> Any:
    """The value of a YAML text, in which no two places share one list or mapping. RecipeError when it is none."""
    try:
        return unshared(yaml.load(text, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark and "\n" in text else ""
        raise RecipeError(f"{place}{line}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{place}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise RecipeError(f"{place}: not valid YAML: an alias stands inside what it names") from None


def unshared(value: Any) -> Any:
    """A copy without aliases: an override of one block must not reach another that was written as `*alias`."""
    if isinstance(value, dict):
        return {key: unshared(item) for key, item in value.items()}
    return [unshared(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Spot:
    """The nearest that a file has to a place: how many steps of it, on which line (0: none), and the node there.

    It is `final` when a base recipe adds nothing below: it is no mapping, or it belongs to a part that is named here.
    """

    depth: int
    line: int
    node: Any
    final: bool


@dataclass(frozen=True)
class YamlFile:
    """One file, for finding the line of a place such as `model.stack.pattern[2]`."""

    path: Path
    root: Any

    @classmethod
    def read(cls, path: Path) -> YamlFile:
        return cls(path, yaml.compose(path.read_text(encoding="utf-8"), Loader=_Loader))

    def at(self, place: str) -> str:
        """`file:line` of the place, or of the nearest node above it that the file has."""
        line = self.find(place).line
        return f"{self.path}:{line}" if line else str(self.path)

    def items(self, place: str) -> list[tuple[Any, str]]:
        """The scalars of a list and the `file:line` of each."""
        node = self.find(place).node
        scalars = node.value if isinstance(node, yaml.SequenceNode) else []
        return [(item.value, f"{self.path}:{item.start_mark.line + 1}") for item in scalars]

    def find(self, place: str) -> Spot:
        depth, line, node, names_part = 0, 0, self.root, False
        for step in _steps(place):
            if isinstance(node, yaml.MappingNode) and isinstance(step, str):
                pair = next((pair for pair in node.value if pair[0].value == step), None)
                if pair is None:
                    break
                line, node = pair[0].start_mark.line + 1, pair[1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
                node = node.value[step]
                line = node.start_mark.line + 1
            else:
                break
            depth += 1
            names_part = names_part or (isinstance(node, yaml.MappingNode) and _has_name(node))
        return Spot(depth, line, node, names_part or not isinstance(node, yaml.MappingNode))


def _has_name(node: yaml.MappingNode) -> bool:
    return any(key.value == "name" for key, _ in node.value)


def _steps(place: str) -> Iterator[str | int]:
    """`model.stack.pattern[2]` -> model, stack, pattern, 2."""
    for step in place.split("."):
        name, *indices = step.split("[")
        yield name
        yield from (int(index.rstrip("]")) for index in indices if index.rstrip("]").isdigit())
