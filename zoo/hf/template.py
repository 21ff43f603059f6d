"""A stack described once, with keys of a config.json at its leaves: filled from a configuration, or matched against a
stack to find the keys' values. No torch.

A template is plain data as it stands under `model.stack`. At its leaves are constants and entries; an entry reads its
keys of the configuration, and writes them from what stands in its place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zoo.hf.configuration import Config

ABSENT: Any = object()
"""What an entry reads where the stack has nothing in its place: no gate in a slot, an option left at its default."""


class Inexpressible(Exception):
    """Why a value of the stack has no place in a configuration of the family."""


class HeadWidth(int):
    """A rank that is the head's width: equal to the number, and to the word for it."""

    def __eq__(self, other: object) -> bool:
        return other == "head_dim" or int(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


class Written(dict[str, Any]):
    """The keys of a configuration as a stack gives them."""

    def set(self, key: str, value: Any) -> None:
        """Inexpressible when another place of the stack has said otherwise."""
        value = int(value) if isinstance(value, HeadWidth) else value
        if key in self and self[key] != value:
            raise Inexpressible(f"{value!r}, and elsewhere {self[key]!r}: one '{key}' says both")
        self[key] = value


class Entry(ABC):
    """A leaf of a template."""

    @abstractmethod
    def read(self, config: Config) -> Any:
        """What stands in this place of the stack; ABSENT for nothing. Says what it cannot take by `config.refuse`."""

    @abstractmethod
    def write(self, value: Any, out: Written) -> None:
        """Sets the keys from what stands in this place (ABSENT: nothing). Inexpressible where no keys say it."""


class Key(Entry):
    """The value of one key. `same` are keys that must have the same value; `values` turns the configuration's values
    into the stack's, where they are not the same, and knows no others; null is a value only if `optional`."""

    def __init__(self, name: str, *same: str, values: Mapping[Any, Any] | None = None, optional: bool = False):
        self.name, self.same, self.values, self.optional = name, same, values, optional

    def read(self, config: Config) -> Any:
        value = config[self.name]
        for other in self.same:
            if config[other] != value:
                config.refuse(other, f"{config[other]!r} where {self.name} is {value!r}: zoo knows them equal only")
        if value is None and not self.optional:
            config.refuse(self.name, "null, where zoo needs a value")
        if self.values is None:
            return value
        if value not in self.values:
            config.refuse(self.name, f"{value!r}, and zoo knows {', '.join(map(repr, self.values))}")
        return self.values.get(value)

    def write(self, value: Any, out: Written) -> None:
        if value is ABSENT or (value is None and not self.optional and self.values is None):
            raise Inexpressible(f"{'nothing' if value is ABSENT else 'null'}, where the family has '{self.name}'")
        if self.values is not None:
            theirs = [key for key, ours in self.values.items() if ours == value]
            if not theirs:
                raise Inexpressible(f"{value!r}, where the family knows {', '.join(map(repr, self.values.values()))}")
            value = theirs[0]
        for name in (self.name, *self.same):
            out.set(name, value)


class Derived(Entry):
    """A value that is no key's own: `read` computes it from the configuration, `write` sets keys from it."""

    def __init__(self, read: Callable[[Config], Any], write: Callable[[Any, Written], None]):
        self._read, self._write = read, write

    def read(self, config: Config) -> Any:
        return self._read(config)

    def write(self, value: Any, out: Written) -> None:
        self._write(value, out)


def fill(template: Any, config: Config) -> Any:
    """The template with the configuration's values at its leaves."""
    if isinstance(template, Entry):
        return template.read(config)
    if isinstance(template, Mapping):
        filled = {key: fill(each, config) for key, each in template.items()}
        return {key: value for key, value in filled.items() if value is not ABSENT}
    return template


def match(template: Any, found: Any, place: str, out: Written) -> Iterator[str]:
    """Sets in `out` the keys for which the template has the values `found` (a node of a stack in its normal form), and
    yields, each with its place, the reasons why it cannot. What the template does not mention is not looked at, but for
    gates."""
    if isinstance(template, Entry):
        try:
            template.write(found, out)
        except Inexpressible as reason:
            yield f"{place} is {reason}"
    elif isinstance(template, str) and isinstance(found, Mapping) and "name" in found:
        yield from match({"name": template}, found, place, out)
    elif isinstance(template, Mapping):
        if not isinstance(found, Mapping):
            wanted = f"'{template['name']}'" if "name" in template else "a mapping"
            yield f"{place} is {'nothing' if found in (None, ABSENT) else repr(found)}, where the family has {wanted}"
            return
        if "name" in template and found.get("name") != template["name"]:
            yield f"{place} is '{found.get('name')}', where the family has '{template['name']}'"
            return
        for key, each in template.items():
            yield from match(each, found.get(key, ABSENT), f"{place}.{key}", out)
        if place.endswith(".gates"):
            for slot in found:
                if slot not in template:
                    yield f"{place}.{slot} is '{found[slot]['name']}', where the family has no gate"
    elif found != template:
        shown = "nothing" if found is ABSENT else repr(found)
        yield f"{place} is {shown}, where the family has {template!r}"
