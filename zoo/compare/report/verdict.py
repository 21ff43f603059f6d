"""The first screen: which recipe is better, and whether that is more than the seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zoo.compare.document import Block, Paragraph, Table
from zoo.compare.report.rows import Row, number, span, spread
from zoo.compare.tasks import ALL


def verdict(results: Row) -> Iterator[Block]:
    first, *others = results["summary"]
    said = [_sentence(row, first) for row in others]
    answers = [row for row in results["tasks"] if row["cell"] == ALL and row["recipe"] != first["recipe"]]
    told = [_task_sentence(row, first) for row in answers]
    learns_a_task = any("task" in run for run in results["runs"])
    for sentence in told + said if learns_a_task else said + told:
        yield Paragraph(sentence, lead=True)
    titles = (
        "recipe",
        "runs",
        "loss (nats)",
        "bits a byte",
        "difference to the first",
        "speedup (FLOPs)",
        "speedup (time)",
        "parameters",
    )
    yield Table(titles, [_summary_row(row, row is first) for row in results["summary"]])
    yield Paragraph(
        "Means with 95% intervals over seeds (Student's t) of the loss on what is held out for the test; differences "
        "are paired by seed, and those of one table are held to 95% together (Holm), which asks more of each than that "
        "its own interval excludes zero. Speedup: what the first recipe would need for the recipe's loss, over what "
        "the recipe has used, by a curve fitted to the validation losses at one learning rate, before it falls."
    )
    if without := _without_speedup(others):
        yield Paragraph(f"No speedup is given: {without}.")
    runs = [*results["runs"], *results["task_runs"]]
    failed = [run for run in runs if run["status"] != "done"]
    if failed:
        yield Paragraph(f"{len(failed)} of {len(runs)} runs have no result and count nowhere: see Runs.")


def _without_speedup(rows: Sequence[Row]) -> str:
    """The reasons, each with those that it holds of."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.get("no_speedup"):
            reasons.setdefault(row["no_speedup"], []).append(row["recipe"])
    return "; ".join(f"{', '.join(names)} ({reason})" for reason, names in reasons.items())


def _sentence(row: Row, first: Row) -> str:
    name, base = row["recipe"], first["recipe"]
    if not row["runs"] or row.get("diff_to_first") is None:
        return f"{name}: no run to set beside one of {base}."
    gap, half = row["diff_to_first"], row["diff_ci95"]
    word = "lower" if gap < 0 else "higher"
    if half is None:
        return f"{name}: {abs(gap):.4f} nats {word} than {base}, of one seed, which says nothing about chance."
    return f"{name}: {abs(gap):.4f} ± {half:.4f} nats {word} than {base}, {_beyond_chance(row)}."


def _task_sentence(row: Row, first: Row) -> str:
    name, base, gap, half = row["recipe"], first["recipe"], row["diff_to_first"], row["diff_ci95"]
    if gap is None:
        return f"{name} on {row['task']}: no run to set beside one of {base}."
    start = f"{name} on {row['task']}: {abs(100 * gap):.1f}"
    word = f"points {'more' if gap > 0 else 'fewer'} of the answers right than {base}"
    if half is None:
        return f"{start} {word}, of one seed, which says nothing about chance."
    return f"{start} ± {100 * half:.1f} {word}, {_beyond_chance(row)}."


def _beyond_chance(row: Row) -> str:
    return "more than seeds explain" if row["shown"] else "no more than seeds explain: a difference was not shown"


def _summary_row(row: Row, first: bool) -> list[str]:
    return [
        row["recipe"],
        str(row["runs"]),
        spread(row.get("mean"), row.get("ci95")),
        spread(row.get("bpb"), row.get("bpb_ci95")),
        "-" if first else spread(row.get("diff_to_first"), row.get("diff_ci95"), sign=True),
        span(row.get("effective_speedup"), row.get("effective_speedup_ci95")),
        span(row.get("effective_speedup_time"), row.get("effective_speedup_time_ci95")),
        number(row.get("params"), ",d"),
    ]
