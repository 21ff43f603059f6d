"""zoo check PATH[:CLASS]: the contract suite for somebody's gate, mixer, FFN or router."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from zoo.cli._parser import Parser

if TYPE_CHECKING:
    from zoo.check import Verdict

DESCRIPTION = (
    "Tries every contract that the zoo's own gates, mixers, FFNs and routers are held to, and explains the first that "
    "does not hold. Exit code 0: all hold; 1: one does not; 2: there is nothing to check."
)
COUNTED = {"holds": "hold", "FAILS": "fail", "exempt": "exempt", "-": "not tried"}


def main(command: str, args: list[str]) -> int:
    parser = Parser(command, DESCRIPTION)
    parser.add_argument(
        "path",
        metavar="PATH[:CLASS]",
        help="a Python file or a module, and the class in it; without CLASS all that are registered there",
    )
    options = parser.read(args)

    from zoo.check import check, find

    broken: Verdict | None = None
    for kind, key in find(options.path):
        counts: Counter[str] = Counter()
        section = ""
        for verdict in check(kind, key):
            if verdict.section != section:
                section = verdict.section
                print(f"{kind}/{key}, {section}")
            _print_row(verdict)
            counts[verdict.status] += 1
            broken = broken or (verdict if verdict.fault else None)
        told = ", ".join(f"{counts[status]} {words}" for status, words in COUNTED.items() if counts[status])
        print(f"{kind}/{key}: {told}\n", flush=True)
    if broken is None:
        return 0
    _explain(broken)
    return 1


def _print_row(verdict: Verdict) -> None:
    contract = verdict.contract
    tried = f" ({verdict.cases} cases)" if verdict.cases > 1 else ""
    why = f" [{verdict.why}]" if verdict.why else ""
    print(f"  {verdict.status:<7} {contract.name:<45} {contract.says}{tried}{why}", flush=True)


def _explain(verdict: Verdict) -> None:
    fault = verdict.fault
    assert fault is not None
    print(f"{fault}\n  contract  {verdict.contract.says}")
