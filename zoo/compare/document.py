"""A report as blocks, and the two forms that it is written in: Markdown with figures beside it, and one HTML file."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """`lead`: what is to be read first."""

    text: str
    lead: bool = False


@dataclass(frozen=True)
class Table:
    titles: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    """An SVG, its file's name, and what is seen in it."""

    name: str
    svg: str
    caption: str


@dataclass(frozen=True)
class Fold:
    """What few readers want to see at once: long tables, the differences between recipes."""

    title: str
    blocks: Sequence[Block]


Block = Heading | Paragraph | Table | Figure | Fold

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #111827; max-width: 1080px; margin: 1.5em auto; padding: 0 1em; }
h1 { font-size: 1.5em; margin: 0 0 .5em; }
h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid #e5e7eb; }
p.lead { font-size: 1.1em; margin: .3em 0; padding-left: .7em; border-left: 4px solid #2563eb; }
p, summary, h1 { overflow-wrap: anywhere; }
table { border-collapse: collapse; margin: 1em 0; display: block; overflow-x: auto; }
th, td { padding: .25em .7em; text-align: right; border-bottom: 1px solid #e5e7eb; vertical-align: top; }
th { vertical-align: bottom; } td { white-space: nowrap; }
th.text, td.text { text-align: left; }
td.long { white-space: normal; overflow-wrap: anywhere; min-width: 11em; }
figure { margin: 1em 0; } figcaption { color: #6b7280; font-size: .9em; }
details { margin: .6em 0; } summary { cursor: pointer; }
svg { width: 100%; max-width: 760px; height: auto; }
"""
_NUMBER = re.compile(r"[-+]?\.?\d|[-–]?$")
_LONG = 28  # letters that a line of a table has room for


def to_markdown(blocks: Sequence[Block], figures: str = "figures") -> str:
    """Figures are linked as `figures`/name.svg."""
    return "\n\n".join(part for block in blocks for part in _markdown(block, figures)) + "\n"


def _markdown(block: Block, figures: str) -> list[str]:
    if isinstance(block, Heading):
        return [f"{'#' * block.level} {block.text}"]
    if isinstance(block, Paragraph):
        return [block.text]
    if isinstance(block, Figure):
        return [f"![{block.caption}]({figures}/{block.name}.svg)", block.caption]
    if isinstance(block, Fold):
        return [f"### {block.title}", *(part for inner in block.blocks for part in _markdown(inner, figures))]
    lines = [block.titles, ["---"] * len(block.titles), *block.rows]
    return ["\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)]


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """One file that needs no other."""
    body = "\n".join(_html(block) for block in blocks)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f"<body>\n{body}\n</body></html>\n"
    )


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{html.escape(block.text)}</h{block.level}>"
    if isinstance(block, Paragraph):
        return _element("p", block.text, "lead" if block.lead else "")
    if isinstance(block, Figure):
        return f"<figure>{block.svg}<figcaption>{html.escape(block.caption)}</figcaption></figure>"
    if isinstance(block, Fold):
        inner = "\n".join(_html(each) for each in block.blocks)
        return f"<details><summary>{html.escape(block.title)}</summary>\n{inner}\n</details>"
    columns = [[row[at] for row in block.rows] for at in range(len(block.titles))]
    kinds = ["" if at and all(map(_NUMBER.match, cells)) else "text" for at, cells in enumerate(columns)]
    head = "".join(_cell("th", cell, kind) for cell, kind in zip(block.titles, kinds, strict=True))
    rows = ("".join(_cell("td", cell, kind) for cell, kind in zip(row, kinds, strict=True)) for row in block.rows)
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def _cell(tag: str, text: str, kind: str) -> str:
    """Numbers are set to the right; words to the left, and broken where they are long."""
    return _element(tag, text, f"{kind} long" if kind and len(text) > _LONG else kind)


def _element(tag: str, text: str, names: str) -> str:
    names = f' class="{names}"' if names else ""
    return f"<{tag}{names}>{html.escape(text)}</{tag}>"


def figures_of(blocks: Sequence[Block]) -> list[Figure]:
    found: list[Figure] = []
    for block in blocks:
        if isinstance(block, Figure):
            found.append(block)
        elif isinstance(block, Fold):
            found += figures_of(block.blocks)
    return found
