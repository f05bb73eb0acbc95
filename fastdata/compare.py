"""Whether one benchmark differs from another by more than both spread, and whether the two may be compared at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fastdata.errors import FastDataError
from fastdata.report import Document, row_name
from fastdata.spread import ratio_interval

if TYPE_CHECKING:
    from rich.console import Console

Verdict = Literal["faster", "slower", "same within the spread", "unknown: one repeat"]

SAME_ROW = (
    "backend",
    "mode",
    "source",
    "order",
    "crops",
    "output",
    "batch_size",
    "dtype",
    "device",
    "workers",
    "world_size",
)
"""Fields in which two rows agree that are held against each other; besides them the model."""


class ComparisonError(FastDataError):
    """Two benchmark files that do not measure the same thing."""


@dataclass(frozen=True)
class Change:
    """One row in both files."""

    name: str
    """Of the row."""
    mode: str
    """Of the row."""
    before: float
    """Median images per second in the first file."""
    after: float
    """Median images per second in the second file."""
    interval_percent: tuple[float, float] | None
    """95 % bootstrap interval of the change in percent; None where a file has one repeat."""
    verdict: Verdict
    """What the interval says."""

    @property
    def percent(self) -> float:
        """The change of the median in percent."""
        return 100.0 * (self.after / self.before - 1.0)


@dataclass(frozen=True)
class Comparison:
    """What two files say of each other."""

    changes: list[Change]
    """Rows in both files."""
    unmatched: list[str]
    """Rows that only one file has, and which."""


def compare(before: Document, after: Document) -> Comparison:
    """Hold the rows of two benchmark files against each other.

    A row is faster or slower only where the 95 % bootstrap interval of the ratio of the medians excludes 1.

    Args:
        before: From `fastdata.report.read_document`.
        after: Likewise.

    Raises:
        ComparisonError: The files are of different data or machines, of different cache states, or share no row.
    """
    _refuse_other("data", _data_of(before), _data_of(after), "Measure both on the same data.")
    _refuse_other("machine", _machine_of(before), _machine_of(after), "Measure both on the same machine.")
    old, new = _by_key(before), _by_key(after)
    for key in old.keys() & new.keys():
        if old[key]["cache"] != new[key]["cache"]:
            raise ComparisonError(
                row_name(old[key]), f"cache {old[key]['cache']} and {new[key]['cache']}", "both warm, or both cold"
            )
    changes = [_change(row, new[key]) for key, row in old.items() if key in new]
    unmatched = [f"only in the first: {_full_name(row)}" for key, row in old.items() if key not in new]
    unmatched += [f"only in the second: {_full_name(row)}" for key, row in new.items() if key not in old]
    if not changes:
        raise ComparisonError("rows", "; ".join(unmatched) or "none", "at least one row that both files have")
    return Comparison(changes, unmatched)


def show_comparison(comparison: Comparison, console: Console) -> None:
    """Print the changes as a table."""
    from rich import box
    from rich.table import Table

    table = Table("row", "mode", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("img/s before", "after", "change", "95 % interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict")
    colors = {"faster": "green", "slower": "red"}
    for change in comparison.changes:
        interval = change.interval_percent
        color = colors.get(change.verdict, "")
        table.add_row(
            change.name,
            change.mode,
            f"{change.before:,.0f}",
            f"{change.after:,.0f}",
            f"{change.percent:+.1f} %",
            f"{interval[0]:+.1f} to {interval[1]:+.1f} %" if interval else "n/a",
            f"[{color}]{change.verdict}[/]" if color else change.verdict,
        )
    console.print(table)
    for line in comparison.unmatched:
        console.print(f"- {line}", markup=False, highlight=False)


def _change(old: dict[str, Any], new: dict[str, Any]) -> Change:
    interval = ratio_interval(old["images_per_s_runs"], new["images_per_s_runs"])
    verdict: Verdict
    if interval is None:
        verdict = "unknown: one repeat"
    elif interval[0] > 1:
        verdict = "faster"
    elif interval[1] < 1:
        verdict = "slower"
    else:
        verdict = "same within the spread"
    percents = (100.0 * (interval[0] - 1), 100.0 * (interval[1] - 1)) if interval else None
    return Change(row_name(old), old["mode"], old["images_per_s"], new["images_per_s"], percents, verdict)


def _by_key(document: Document) -> dict[tuple[Any, ...], dict[str, Any]]:
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in document["rows"]:
        model = (row.get("training") or {}).get("model"), (row.get("training") or {}).get("compiled")
        key = (*(row.get(field) for field in SAME_ROW), *model)
        if key in rows and rows[key]["cache"] != row["cache"]:
            key = (*key, row["cache"])
        rows[key] = row
    return rows


def _data_of(document: Document) -> dict[str, Any]:
    dataset = document["dataset"]
    sources = {source["kind"]: source["bytes"] for source in dataset["sources"]}
    return {"samples": dataset["samples"], "fingerprint": dataset["fingerprint"], "bytes": sources}


def _machine_of(document: Document) -> dict[str, Any]:
    machine = document["machine"]
    return {
        "cpu": machine["cpu"],
        "cores": machine["cpu_cores_available"],
        "memory": round(machine["memory_gb"]),
        "gpus": [card["name"] for card in machine["gpus"]],
    }


def _refuse_other(what: str, before: dict[str, Any], after: dict[str, Any], remedy: str) -> None:
    for key, value in before.items():
        other = after[key]
        if isinstance(value, dict):  # of sources only those that both files have
            shared = value.keys() & other.keys()
            value, other = {k: value[k] for k in sorted(shared)}, {k: other[k] for k in sorted(shared)}
        if value != other:
            raise ComparisonError(f"{what} of the two files", f"{key} {value} and {other}", f"the same {what}", remedy)


def _full_name(row: dict[str, Any]) -> str:
    return (
        f"{row_name(row)}, {row['mode']}, batch {row.get('batch_size')}, workers {row.get('workers')}, {row['cache']}"
    )
