"""Whether one benchmark differs from another by more than both spread, and whether the two may be compared at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fastdata.errors import FastDataError
from fastdata.report import Document, repeated_kinds, row_name, source_name
from fastdata.spread import MIN_REPEATS, TOO_FEW_REPEATS, ratio_interval

if TYPE_CHECKING:
    from rich.console import Console

Verdict = Literal["faster", "slower", "same within the spread", "unknown: fewer than 5 repeats"]

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
"""Fields in which two rows agree that are held against each other; besides them the model, and what `_Keys` adds."""


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
    """95 % interval of the change in percent; None where a file has fewer than `fastdata.spread.MIN_REPEATS`."""
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

    A row is faster or slower only where `fastdata.spread.ratio_interval` excludes 1.

    Args:
        before: From `fastdata.report.read_document`.
        after: Likewise.

    Raises:
        ComparisonError: The files are of different data or machines, of different cache states, or share no row; or
            two rows of one file do not differ in what rows are told apart by.
    """
    keys = _Keys.of(before, after)
    _refuse_other("data", keys.data_of(before), keys.data_of(after), "Measure both on the same data.")
    _refuse_other("machine", _machine_of(before), _machine_of(after), "Measure both on the same machine.")
    old, new = keys.rows_of(before, "first"), keys.rows_of(after, "second")
    for key in old.keys() & new.keys():
        if old[key]["cache"] != new[key]["cache"]:
            raise ComparisonError(
                keys.name(old[key]), f"cache {old[key]['cache']} and {new[key]['cache']}", "both warm, or both cold"
            )
    changes = [_change(keys.name(row), row, new[key]) for key, row in old.items() if key in new]
    unmatched = [f"only in the first: {keys.full_name(row)}" for key, row in old.items() if key not in new]
    unmatched += [f"only in the second: {keys.full_name(row)}" for key, row in new.items() if key not in old]
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


def slower_rows(comparison: Comparison) -> list[Change]:
    """Return the rows that are slower in the second file.

    Raises:
        ComparisonError: None is, but of some rows nobody can tell.
    """
    slower = [change for change in comparison.changes if change.verdict == "slower"]
    unknown = [change.name for change in comparison.changes if change.verdict.startswith("unknown")]
    if unknown and not slower:
        raise ComparisonError(
            ", ".join(unknown),
            TOO_FEW_REPEATS,
            f"at least {MIN_REPEATS} in both files, to tell whether a row is slower",
        )
    return slower


def _change(name: str, old: dict[str, Any], new: dict[str, Any]) -> Change:
    interval = ratio_interval(old["images_per_s_runs"], new["images_per_s_runs"])
    verdict: Verdict
    if interval is None:
        verdict = "unknown: fewer than 5 repeats"
    elif interval[0] > 1:
        verdict = "faster"
    elif interval[1] < 1:
        verdict = "slower"
    else:
        verdict = "same within the spread"
    percents = (100.0 * (interval[0] - 1), 100.0 * (interval[1] - 1)) if interval else None
    return Change(name, old["mode"], old["images_per_s"], new["images_per_s"], percents, verdict)


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


@dataclass(frozen=True)
class _Keys:
    """What rows of two files are told apart by, besides `SAME_ROW`."""

    repeated: frozenset[str]
    """Kinds of source of which a file has two data, such as plain and crop-ready shards: these go by their data."""
    by_cache: bool
    """Whether one file has rows of both cache states."""

    @classmethod
    def of(cls, *documents: Document) -> _Keys:
        repeated: frozenset[str] = frozenset()
        by_cache = False
        for document in documents:
            fed = [row for row in document["rows"] if row["mode"] != "synthetic"]
            sources = [{"mode": "", "data": s["data"], "source": s["kind"]} for s in document["dataset"]["sources"]]
            repeated |= repeated_kinds([*fed, *sources])
            by_cache = by_cache or len({row["cache"] for row in fed}) > 1
        return cls(repeated, by_cache)

    def rows_of(self, document: Document, which: str) -> dict[tuple[Any, ...], dict[str, Any]]:
        rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in document["rows"]:
            training = row.get("training") or {}
            key = (*(row.get(field) for field in SAME_ROW), training.get("model"), training.get("compiled"))
            if row["mode"] != "synthetic":
                key += (source_name(row, self.repeated), row["cache"] if self.by_cache else "")
            if key in rows:
                raise ComparisonError(
                    f"the {which} file", f"two rows {self.full_name(row)}", "one", "Measure them into two files."
                )
            rows[key] = row
        return rows

    def data_of(self, document: Document) -> dict[str, Any]:
        dataset = document["dataset"]
        sizes = {
            source["data"] if source["kind"] in self.repeated else source["kind"]: source["bytes"]
            for source in dataset["sources"]
        }
        return {"samples": dataset["samples"], "fingerprint": dataset["fingerprint"], "bytes": sizes}

    def name(self, row: dict[str, Any]) -> str:
        return row_name(row, self.repeated)

    def full_name(self, row: dict[str, Any]) -> str:
        batch = f"batch {row.get('batch_size')}, workers {row.get('workers')}"
        return f"{self.name(row)}, {row['mode']}, {batch}, {row['cache']}"
