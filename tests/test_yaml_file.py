"""zoo.yaml_file: YAML as people write it, and the line of every place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.recipes_by_hand import error_of, write
from zoo.yaml_file import YamlFile, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        ("-2.5e+3", -2500.0),
        (".5e1", 5.0),
        ("1.e-6", 1e-6),
        ("1_000", 1000),
        ("'1e-3'", "1e-3"),
        ("1e", "1e"),
        ("e-3", "e-3"),
        ("32", 32),
        ("'32'", "32"),
        ("true", True),
        ("null", None),
        ("", None),
        ("{a: {b: [1, x]}}", {"a": {"b": [1, "x"]}}),
        ("a: &x {b: 1}\nc: {<<: *x, b: 2, d: 3}", {"a": {"b": 1}, "c": {"b": 2, "d": 3}}),
        ("c: {y: &x {<<: {a: 1}, b: 2}}\nd: {<<: *x, b: 3}", {"c": {"y": {"a": 1, "b": 2}}, "d": {"a": 1, "b": 3}}),
    ],
)
def test_values(text: str, value: Any) -> None:
    parsed = parse_yaml(text, "here")
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "here:3: not valid YAML: the key 'a' stands twice"),
        ("a:\n  b: {c: 1, d: 2, c: 3}\n", "here:2: not valid YAML: the key 'c' stands twice"),
        ("{a: 1, a: 1}", "here: not valid YAML: the key 'a' stands twice"),
        ("a: [1\nb: 2\n", "here:2: not valid YAML: expected ',' or ']', but got ':'"),
        ("a: 1\n\tb: 2\n", "here:2: not valid YAML: found character '\\t' that cannot start any token"),
        ("? [a, b]\n: 1\n", "here:1: not valid YAML: a key must be a plain word"),
        ("a: 1\n---\nb: 2\n", "here:2: not valid YAML: but found another document"),
        ("a: !!python/name:os.system\n", "here:1: not valid YAML: could not determine a constructor for the tag"),
        ("a: *b\n", "here:1: not valid YAML: found undefined alias 'b'"),
        ("a: &b [*b]\n", "here: not valid YAML: an alias stands inside what it names"),
        ("a: \0\n", "here: not valid YAML: unacceptable character"),
    ],
)
def test_faults(text: str, message: str) -> None:
    assert error_of(parse_yaml, text, "here").startswith(message)


def test_no_two_places_share_a_value() -> None:
    data = parse_yaml("a: &x {b: [1]}\nc: *x\n", "here")
    data["a"]["b"].append(2)
    assert data["c"] == {"b": [1]}


def test_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path, "a.yaml", "model:\n  stack:\n    pattern:\n    - a\n    - b\n    blocks: {a: {ffn: x}}\nbase: y\n"
    )
    file = YamlFile.read(path)
    lines = {
        "model": 1,
        "model.stack.pattern": 3,
        "model.stack.pattern[1]": 5,
        "model.stack.pattern[7]": 3,
        "model.stack.blocks.a.ffn": 6,
        "model.stack.blocks.a.ffn.options.mult": 6,
        "model.stack.norm.eps": 2,
        "base": 7,
    }
    assert {place: file.at(place) for place in lines} == {place: f"{path}:{line}" for place, line in lines.items()}
    assert file.at("data") == str(path)
    assert file.items("model.stack.pattern") == [("a", f"{path}:4"), ("b", f"{path}:5")]
    assert file.items("model.stack.blocks") == file.items("nowhere") == []


def test_what_a_base_may_add_to(tmp_path: Path) -> None:
    """Below a part that is named here, and below values, a base has no say."""
    file = YamlFile.read(write(tmp_path, "a.yaml", "a: {name: x, options: {c: {}}}\nb: {options: {d: 1}}\n"))
    assert file.find("a.options.z").final
    assert file.find("a.options.c.z").final
    assert file.find("b.options.d").final
    assert not file.find("b.options.z").final
    assert not file.find("z").final
