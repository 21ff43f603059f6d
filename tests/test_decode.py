"""zoo.decode: nothing is converted, and every fault is one line with its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest

from tests.recipes_by_hand import error_of
from zoo.decode import AtLeast, Part, Size, decode, decode_options, describe, option_parameters, type_name

if TYPE_CHECKING:
    from nowhere import Context


@dataclass(frozen=True, kw_only=True)
class Inner:
    eps: float = 1.0
    words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.eps > 9:
            raise ValueError("eps: too much")


@dataclass(frozen=True, kw_only=True)
class Outer:
    size: Size
    inner: Inner = Inner()
    part: Part | None = None
    parts: dict[str, Part] | None = None


class Gate:
    """Its annotations are postponed, and that of `context` does not resolve outside a type checker."""

    def __init__(
        self,
        context: Context,
        *,
        scale: float = 1.0,
        rank: int | Literal["full", "head_dim"] = "full",
        range: tuple[float, float] = (0.0, 1.0),
        heads: Size | None = None,
        free=3,
    ):
        self.arguments = (context, scale, rank, range, heads, free)


class Required:
    def __init__(self, context: Any, *, width: int, depth: int = 1):
        self.width = width


class Unreadable:
    def __init__(self, context: Any, *, mode: Mood = "a"):  # noqa: F821
        self.mode = mode


@pytest.mark.parametrize(
    ("kind", "value", "wanted"),
    [
        (int, 3, 3),
        (float, 3, 3.0),
        (float, 1e-3, 1e-3),
        (bool, True, True),
        (str, "32", "32"),
        (Any, {"a": [1]}, {"a": [1]}),
        (int | None, None, None),
        (int | None, 3, 3),
        (Literal["a", 1], 1, 1),
        (int | Literal["full"], "full", "full"),
        (list[int], [1, 2], [1, 2]),
        (list, [1, "a"], [1, "a"]),
        (tuple[int, ...], [1, 2, 3], (1, 2, 3)),
        (tuple[float, str], [1, "a"], (1.0, "a")),
        (tuple, [1, "a"], (1, "a")),
        (Sequence[int], [1], (1,)),
        (dict[str, float], {"a": 1}, {"a": 1.0}),
        (dict, {1: None}, {1: None}),
        (Mapping[str, Any], {"a": None}, {"a": None}),
        (Size, 1, 1),
        (Annotated[float, AtLeast(0)], 0, 0.0),
        (Part, "kda", Part(name="kda")),
        (Part, {"name": "kda", "options": {"a": None}}, Part(name="kda", options={"a": None})),
        (dict[str, Part], {"a": "x", "b": None}, {"a": Part(name="x")}),
        (Outer, {"size": 2, "part": None}, Outer(size=2)),
        (Inner | None, {"eps": 2, "words": ["a"]}, Inner(eps=2.0, words=("a",))),
        (Inner, Inner(eps=3.0), Inner(eps=3.0)),
    ],
)
def test_values_that_fit(kind: Any, value: Any, wanted: Any) -> None:
    decoded = decode(kind, value, "here")
    assert decoded == wanted
    assert type(decoded) is type(wanted)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (int, "32", "here: expected an integer, found '32'"),
        (int, True, "here: expected an integer, found True"),
        (int, 3.0, "here: expected an integer, found 3.0"),
        (int, None, "here: expected an integer, found null"),
        (float, "1e-3", "here: expected a number, found '1e-3'"),
        (float, False, "here: expected a number, found False"),
        (bool, 1, "here: expected true or false, found 1"),
        (str, 3, "here: expected a string, found 3"),
        (Literal["none", "head"], "hed", "here: unknown value 'hed'. Did you mean 'head'? Known: none, head"),
        (Literal[1, 2], True, "here: unknown value True. Known: 1, 2"),
        (Literal[True, 2], 1, "here: unknown value 1. Known: True, 2"),
        (int | None, "a", "here: expected an integer, found 'a'"),
        (int | str | None, [1], "here: expected an integer or a string or null, found a list"),
        (
            int | Literal["full", "head"],
            "ful",
            "here: expected an integer or 'full' or 'head', found 'ful'. Did you mean 'full'? Known: full, head",
        ),
        (int | Inner, {"esp": 1.0}, "here.esp: unknown key. Did you mean 'eps'? Known: eps, words"),
        (list[int], "abc", "here: expected a list, found 'abc'"),
        (list[int], [1, "2"], "here[1]: expected an integer, found '2'"),
        (tuple[float, float], [1, 2, 3], "here: expected a list of 2, found 3: [1, 2, 3]"),
        (tuple[float, float], [1], "here: expected a list of 2, found 1: [1]"),
        (dict[str, int], [1], "here: expected a mapping, found a list"),
        (dict[str, int], {"a": "1"}, "here.a: expected an integer, found '1'"),
        (dict[str, int], {1: 1}, "here: the key 1: expected a string, found 1"),
        (Size, 0, "here: expected at least 1, found 0"),
        (Size | None, -4, "here: expected at least 1, found -4"),
        (Size, "2", "here: expected an integer, found '2'"),
        (Annotated[float, AtLeast(0)], -0.1, "here: expected at least 0, found -0.1"),
        (float, float("nan"), "here: expected a finite number, found nan"),
        (float | None, float("-inf"), "here: expected a finite number, found -inf"),
        (Outer, {}, "here.size: missing"),
        (Outer, [], "here: expected a mapping, found a list"),
        (
            Outer,
            {"size": 1, "iner": {}},
            "here.iner: unknown key. Did you mean 'inner'? Known: size, inner, part, parts",
        ),
        (Outer, {"size": 1, "inner": {"words": ["a", 2]}}, "here.inner.words[1]: expected a string, found 2"),
        (Outer, {"size": 1, "inner": None}, "here.inner: expected a mapping, found null"),
        (Outer, {"size": 1, "part": 3}, "here.part: expected a name or a mapping, found 3"),
        (Outer, {"size": 1, "part": {"options": {}}}, "here.part.name: missing"),
        (
            Outer,
            {"size": 1, "part": {"name": "a", "options": None}},
            "here.part.options: expected a mapping, found null",
        ),
        (Inner, {"eps": 10}, "here: eps: too much"),
    ],
)
def test_values_that_do_not_fit(kind: Any, value: Any, message: str) -> None:
    assert error_of(decode, kind, value, "here") == message


def test_options_are_the_keyword_only_parameters() -> None:
    assert list(option_parameters(Gate)) == ["scale", "rank", "range", "heads", "free"]
    given = {"scale": 2, "rank": 8, "range": [0, 1], "heads": 3, "free": "x"}
    assert decode_options(Gate, given, "here") == {
        "scale": 2.0,
        "rank": 8,
        "range": (0.0, 1.0),
        "heads": 3,
        "free": "x",
    }


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (
            Gate,
            {"scael": 1},
            "here.scael: Gate has no such option. Did you mean 'scale'? Known: scale, rank, range, heads, ",
        ),
        (Gate, {"context": 1}, "here.context: Gate has no such option. Known: scale"),
        (Gate, {"scale": "1"}, "here.scale: expected a number, found '1'"),
        (Gate, {"range": [1]}, "here.range: expected a list of 2, found 1: [1]"),
        (Gate, {"heads": 0}, "here.heads: expected at least 1, found 0"),
        (Required, {"depth": 2}, "here.width: missing: Required has no default for it"),
        (Required, {"widht": 2}, "here.widht: Required has no such option. Did you mean 'width'?"),
        (Unreadable, {"mode": "a"}, "here: cannot read the option types of Unreadable: name 'Mood' is not defined"),
    ],
)
def test_options_that_do_not_fit(cls: type, options: dict[str, Any], message: str) -> None:
    assert error_of(decode_options, cls, options, "here").startswith(message)


def test_a_class_without_a_constructor_has_no_options() -> None:
    class Plain:
        pass

    assert decode_options(Plain, {}, "here") == {}
    assert error_of(decode_options, Plain, {"a": 1}, "here") == "here.a: Plain has no such option. Known: none"


def test_words_for_types_and_values() -> None:
    assert type_name(int | Literal["a"] | None) == "an integer or 'a' or null"
    assert type_name(tuple[int, ...] | dict[str, int]) == "a list or a mapping"
    assert type_name(Part) == "a name or a mapping"
    assert describe({}) == "a mapping with nothing"
    assert describe({"a": 1, "b": 2}) == "a mapping with a, b"
