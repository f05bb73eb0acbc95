"""The benchmark file and the terminal table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fastdata.errors import FastDataError
from fastdata.machine import describe_machine, describe_versions
from fastdata.outfile import write_whole
from fastdata.spread import CONFIDENCE, MIN_REPEATS, median_confidence
from fastdata.wording import counted

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1
REQUIRED_ROW_FIELDS = frozenset(
    {
        "backend",
        "mode",
        "images_per_s",
        "images_per_s_runs",
        "cpu_percent",
        "cpu_cores_available",
        "gpu_util_percent",
        "gpu_sm_active_percent",
        "jpeg_engine_percent",
        "first_batch_s",
        "peak_memory_mb",
        "data_wait_percent",
        "images",
        "skipped",
        "cache",
    }
)
DISTURBED_SHARE = 0.05
"""Share of the available cores from which on other processes are named as a disturbance."""
CEILING_DISTURBED_SHARE = 0.10
"""Share of the available cores above which other processes make a share of the ceiling worthless."""
HIGHEST_SHARE_PERCENT = 105.0
"""Above this, a share of the ceiling says that the ceiling was measured wrongly: feeding cannot make a model faster."""
METHOD = (
    "A fresh process for each repeat of each row; repeats of all rows take turns, forwards and backwards.",
    "The clock starts once everything that was made ahead during start-up has been dropped, and stops when the last"
    " counted batch (in training: its step) is finished on the device. Images are counted from the delivered tensors.",
    "Ends of epochs inside a window count: who trains pays for them.",
    "CPU: user + system time of the whole process tree between start and end of the window; 100 % is one core.",
    "Memory: the highest sampled proportional set size (PSS) of the tree, so that shared pages count once.",
    "Time to first batch: from the loader's constructor to the first batch on the device; the import of torch and the"
    " start of CUDA come before it.",
    "Wait: the time that the loop spends in fetching the next batch. A loop that only fetches waits nearly always. In"
    " training on a GPU the host runs ahead, and a wait may hide behind the GPU's work: there is no figure, and what"
    " waiting costs is what the share of the ceiling lacks.",
    f"The share of the ceiling is withheld above {HIGHEST_SHARE_PERCENT:.0f} %, and where other processes used more"
    f" than {100 * CEILING_DISTURBED_SHARE:.0f} % of the cores during the row or its ceiling.",
    "Intervals are of the median over repeats, from one of the repeats to another; they hold whatever the distribution"
    f" of the rates: with {MIN_REPEATS} repeats in {100 * (median_confidence(MIN_REPEATS) or 0):.1f} % of cases, with"
    f" more in at least {100 * CONFIDENCE:.0f} %. Fewer repeats have none.",
    "Under torchrun, others' CPU is what all ranks of a machine leave of its CPU time.",
)
"""How the figures came about, in sentences for readers of the report."""

_SILENT_REASONS = {
    "share_of_ceiling_percent",
    "epoch_end_s",
    "images_per_s_spread_percent",
    "images_per_s_interval_confidence",
    "cache_resident_percent",
    "other_cpu_percent",
}
"""Fields whose reasons stand in the file, but would only fill the notes."""

Document = dict[str, Any]


def make_document(
    rows: Sequence[dict[str, Any]],
    *,
    dataset: dict[str, Any],
    device: str,
    gpus: int,
    command: str,
    created: str,
    failures: Sequence[dict[str, str]] = (),
    unavailable: Sequence[dict[str, str]] = (),
) -> Document:
    """Return the benchmark file's content.

    Args:
        rows: From `fastdata.benchmark.run_benchmark`.
        dataset: What was read.
        device: The first rank's device.
        gpus: CUDA devices used.
        command: The command line that was given.
        created: Date and time, ISO 8601.
        failures: Tasks that gave no row.
        unavailable: Backends that do not work here: ``backend`` and ``reason``.
    """
    return {
        "schema": SCHEMA,
        "created": created,
        "command": command,
        "machine": describe_machine(device, gpus),
        "versions": describe_versions(),
        "dataset": dataset,
        "method": list(METHOD),
        "rows": list(rows),
        "failures": list(failures),
        "unavailable": list(unavailable),
    }


def write_document(document: Document, path: Path) -> None:
    """Write a benchmark file; it appears whole or not at all."""
    write_whole(path, json.dumps(document, indent=1) + "\n")


def read_document(path: Path) -> Document:
    """Read a benchmark file.

    Raises:
        FastDataError: It cannot be read, is no benchmark file, or has another schema version.
    """
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as exc:
        found = "no such file" if isinstance(exc, FileNotFoundError) else getattr(exc, "strerror", None) or str(exc)
        raise FastDataError(str(path), found, "a file that `fastdata bench --json` wrote") from exc
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise FastDataError(str(path), f"schema {schema!r}", f"schema {SCHEMA}", "Measure again with this version.")
    for number, row in enumerate(document["rows"]):
        missing = REQUIRED_ROW_FIELDS - row.keys()
        if missing:
            raise FastDataError(f"{path} row {number}", f"without {', '.join(sorted(missing))}", "a whole row")
    return cast("Document", document)


def repeated_kinds(rows: Iterable[dict[str, Any]]) -> frozenset[str]:
    """Return the kinds of source of which the rows read two or more data: rows of these go by their data."""
    kinds = {(row["data"], str(row.get("source"))) for row in rows if row["mode"] != "synthetic"}
    return frozenset(kind for kind, count in Counter(kind for _, kind in kinds).items() if count > 1)


def source_name(row: dict[str, Any], repeated: frozenset[str]) -> str:
    """Return what a row reads: the kind of source, or its data where the kind is one of `repeated`."""
    kind = row.get("source")
    return str(row["data"] if not kind or kind in repeated else kind)


def row_name(row: dict[str, Any], repeated: frozenset[str] = frozenset()) -> str:
    """Return a short name for a row: backend, source, and order where it is not the full permutation.

    Args:
        row: Of a benchmark file.
        repeated: From `repeated_kinds`.
    """
    if row["mode"] == "synthetic":
        return "ceiling (one cached batch)"
    name = f"{row['backend']} · {source_name(row, repeated)}"
    return f"{name} · {row['order']}" if str(row.get("order", "")).startswith("blocks") else name


def collect_notes(document: Document) -> list[str]:
    """Return what a reader must know besides the figures, each once: reasons of missing values, caches, failures."""
    notes: dict[str, list[str]] = {}
    repeated = repeated_kinds(document["rows"])
    for row in document["rows"]:
        name = row_name(row, repeated)
        for field, reason in row.get("reasons", {}).items():
            if field not in _SILENT_REASONS or (field == "share_of_ceiling_percent" and row["mode"] == "train"):
                notes.setdefault(reason, [])
                if field not in notes[reason]:
                    notes[reason].append(field)
        if row.get("cache_note"):
            notes.setdefault(f"{row['cache_note']} ({name})", ["cache"])
        if row["skipped"]:
            notes.setdefault(f"{counted(row['skipped'], 'sample')} skipped ({name})", ["skipped"])
        for why, count in row.get("fallbacks", {}).items():
            notes.setdefault(f"{counted(count, 'sample')} went to the reference decoder: {why} ({name})", ["fallbacks"])
    lines = [f"{', '.join(fields)}: {reason}" for reason, fields in notes.items()]
    lines += disturbances(document["rows"])
    lines += [f"{item['backend']} not measured: {item['reason']}" for item in document["unavailable"]]
    lines += [f"{i['backend']} on {i['data']} ({i['mode']}) FAILED: {i['error']}" for i in document["failures"]]
    return lines


def disturbances(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return in how many rows other processes used how much of the processor; nothing where all were quiet."""
    others = [row["other_cpu_percent"] for row in rows if row.get("other_cpu_percent") is not None]
    limit = DISTURBED_SHARE * 100 * max((row["cpu_cores_available"] for row in rows), default=1.0)
    disturbing = [percent for percent in others if percent > limit]
    if not disturbing:
        return []
    used = " to ".join(dict.fromkeys(f"{percent:,.0f}" for percent in (min(disturbing), max(disturbing))))
    return [
        f"img/s: other processes used {used} % CPU during {len(disturbing)} of {len(rows)} rows,"
        " whose figures are too low"
    ]


def show(document: Document, console: Console) -> None:
    """Print what all rows share, the table and its notes; a narrow terminal gets fewer columns, never cut figures."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    rows = document["rows"]
    shared, labels = _shared_facts(rows), _labels(rows)
    machine = document["machine"]
    cards = ", ".join(str(card["name"]) for card in machine["gpus"] if card["name"]) or "no GPU"
    lines = [f"{machine['cpu']}, {machine['cpu_cores_available']:g} cores, {cards}"]
    lines += [f"All rows: {', '.join(shared)}"] if shared else []
    for line in lines:
        console.print(line, markup=False, highlight=False)
    columns, left_out = _fitting_columns(rows, console.width - min(_LABEL_CHARACTERS, max(map(len, labels), default=0)))
    caption = "CPU %: the whole process tree, 100 = one core. Memory: PSS of the tree."
    if any(row.get("images_per_s_interval") is not None for row in rows):
        caption += f" Interval: of the median over repeats, {confidence_text(rows)}."
    if left_out:
        names = ", ".join(column.heading for column in left_out)
        caption = f"CPU %: the whole process tree, 100 = one core. A wider terminal and --json also have: {names}."
    table = Table(caption=caption, caption_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", overflow="fold")
    for column in columns:
        table.add_column(column.heading, justify="right", no_wrap=True)
    for label, row in zip(labels, rows, strict=True):
        table.add_row(escape(label), *(column.text(row) for column in columns))
    if rows:
        console.print(table)
    for line in collect_notes(document):
        console.print(f"- {line}", markup=False, highlight=False)


def _facts(row: dict[str, Any], repeated: frozenset[str]) -> list[str]:
    """Return what tells rows apart besides the backend, each part in words."""
    model = (row.get("training") or {}).get("model", "").rpartition(":")[2]
    order = str(row.get("order") or "")
    return [
        source_name(row, repeated),
        order if order.startswith("blocks") else "",
        f"{row['mode']} {model}".rstrip(),
        f"{row['cache']} cache",
    ]


def _told_apart(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the facts of each row that is fed from files; data stand for their kind where two are of one kind."""
    fed = [row for row in rows if row["mode"] != "synthetic"]
    repeated = repeated_kinds(fed)
    return [_facts(row, repeated) for row in fed]


def _shared_facts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return what holds for all rows that are fed from files."""
    return [values[0] for values in zip(*_told_apart(rows), strict=True) if values[0] and len(set(values)) == 1]


def _labels(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return each row's name: the backend and what other rows do not have; without "train" it is a loader alone."""
    facts, shared = iter(_told_apart(rows)), _shared_facts(rows)
    return [
        row_name(row)
        if row["mode"] == "synthetic"
        else " · ".join([row["backend"], *(fact for fact in next(facts) if fact not in ("", "loader", *shared))])
        for row in rows
    ]


def number(value: float | None, digits: int = 0, unit: str = "") -> str:
    """Return a number as text, or "n/a" for None."""
    return "n/a" if value is None else f"{value:,.{digits}f}{unit}"


def interval_text(row: dict[str, Any]) -> str:
    """Return the row's interval as text."""
    interval = row.get("images_per_s_interval")
    return "n/a" if interval is None else f"{interval[0]:,.0f}-{interval[1]:,.0f}"


def confidence_text(rows: Sequence[dict[str, Any]]) -> str:
    """Return with which confidence the rows' intervals hold the median: "94 %", or the range where repeats differ."""
    counts = {len(row["images_per_s_runs"]) for row in rows if row.get("images_per_s_interval") is not None}
    percents = [f"{100 * confidence:.0f}" for count in counts if (confidence := median_confidence(count)) is not None]
    return "-".join(sorted({min(percents), max(percents)})) + " %" if percents else "n/a"


def _ceiling_text(row: dict[str, Any]) -> str:
    return "-" if row["mode"] != "train" else number(row["share_of_ceiling_percent"], 1, " %")


@dataclass(frozen=True)
class _Column:
    """A column of the terminal table."""

    heading: str
    text: Callable[[dict[str, Any]], str]
    importance: int
    """Where the terminal is too narrow, columns with the lowest give way."""
    field: str = ""
    """Left out where this field is null in all rows; the notes give the reason."""


_LABEL_CHARACTERS = 31
"""Longer names of rows are wrapped before a column gives way."""
_BETWEEN_COLUMNS = 3
"""Characters of padding and rule that a column costs besides its text."""

_COLUMNS = (
    _Column("img/s", lambda row: number(row["images_per_s"]), 9),
    _Column("interval", interval_text, 5, "images_per_s_interval"),
    _Column("of ceiling", _ceiling_text, 6, "share_of_ceiling_percent"),
    _Column("CPU %", lambda row: number(row["cpu_percent"]), 8),
    _Column("GPU %", lambda row: number(row["gpu_util_percent"]), 8),
    _Column("SM %", lambda row: number(row["gpu_sm_active_percent"]), 1, "gpu_sm_active_percent"),
    _Column("JPEG %", lambda row: number(row["jpeg_engine_percent"]), 4, "jpeg_engine_percent"),
    _Column("first s", lambda row: number(row["first_batch_s"], 2), 7),
    _Column("mem MB", lambda row: number(row["peak_memory_mb"]), 3),
    _Column("wait %", lambda row: number(row["data_wait_percent"]), 2, "data_wait_percent"),
    _Column("skipped", lambda row: number(row["skipped"]), 2),
)


def _fitting_columns(rows: Sequence[dict[str, Any]], width: int) -> tuple[list[_Column], list[_Column]]:
    """Return the columns that fit beside the names of rows, and those that do not, both in the table's order."""
    known = [c for c in _COLUMNS if not c.field or any(row.get(c.field) is not None for row in rows)]
    fitting: list[_Column] = []
    for column in sorted(known, key=lambda column: -column.importance):
        width -= max(len(text) for text in (column.heading, *map(column.text, rows))) + _BETWEEN_COLUMNS
        if width < 0 and fitting:
            break
        fitting.append(column)
    return [c for c in known if c in fitting], [c for c in known if c not in fitting]
