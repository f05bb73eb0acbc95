"""The benchmark: plans which rows are measured, runs them in turn, and makes each row of its repeats."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastdata.fresh import MeasureError
from fastdata.job import Job
from fastdata.pagecache import CacheKeeper
from fastdata.report import CEILING_DISTURBED_SHARE, HIGHEST_SHARE_PERCENT
from fastdata.spread import TOO_FEW_REPEATS, median_confidence, median_interval, spread_percent
from fastdata.task import Task
from fastdata.training import WAIT_HIDDEN

METERS = (
    "cpu_percent",
    "other_cpu_percent",
    "peak_memory_mb",
    "disk_read_mb",
    "gpu_util_percent",
    "gpu_sm_active_percent",
    "jpeg_engine_percent",
    "gpu_memory_mb",
    "gpu_power_w",
)
"""Readings that a row holds as the median of its repeats, or as null with a reason."""
WINDOW_TOLERANCE = 0.05
"""Share by which windows of ranks on one machine may differ where their CPU time is told from others'."""
SUMMED_OVER_RANKS = {"cpu_percent", "peak_memory_mb", "disk_read_mb", "gpu_memory_mb", "gpu_power_w"}

Progress = Callable[[int, int, Task, str], None]
"""Called with (runs done, runs in all, task, what came out)."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What a benchmark gave."""

    rows: list[Row]
    """In the order of the tasks; a task that failed has none."""
    failures: list[dict[str, str]]
    """``backend``, ``data``, ``mode`` and ``error`` of each task that failed."""


def interleave(count: int, repeats: int) -> Iterator[tuple[int, int]]:
    """Yield (repeat, index): every repeat visits all rows, in turn forwards and backwards.

    A machine that slows down over time, or a neighbour that comes and goes, then meets all rows alike.
    """
    for repeat in range(repeats):
        places = range(count) if repeat % 2 == 0 else reversed(range(count))
        for index in places:
            yield repeat, index


def run_benchmark(tasks: Sequence[Task], repeats: int, job: Job, progress: Progress = lambda *_: None) -> Outcome:
    """Measure every task `repeats` times, each time in a fresh process on every rank of the job.

    Args:
        tasks: One for each row.
        repeats: Measurements of each.
        job: The ranks that measure together.
        progress: Told of every measurement.
    """
    keeper = CacheKeeper()
    runs: list[list[dict[str, Any]]] = [[] for _ in tasks]
    failed: dict[int, str] = {}
    total = len(tasks) * repeats
    for done, (repeat, index) in enumerate(interleave(len(tasks), repeats)):
        task = tasks[index]
        if index in failed:
            progress(done + 1, total, task, "left out")
            continue
        state = keeper.prepare(task.data, task.cache) if task.mode != "synthetic" else {"cache": task.cache}
        try:
            figures = job.measure(task, f"{repeat}/{index}")
        except MeasureError as exc:
            failed[index] = exc.found
            progress(done + 1, total, task, f"failed: {exc.found}")
            continue
        runs[index].append(merge_ranks(figures) | {"cache_state": state})
        progress(done + 1, total, task, f"{runs[index][-1]['images_per_s']:,.0f} img/s")
    rows = [make_row(task, runs[i]) for i, task in enumerate(tasks) if runs[i] and i not in failed]
    add_share_of_ceiling(rows)
    failures = [
        {"backend": tasks[i].backend, "data": tasks[i].data, "mode": tasks[i].mode, "error": text}
        for i, text in sorted(failed.items())
    ]
    return Outcome(rows, failures)


def merge_ranks(figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Make one measurement of those of a job's ranks: counts add up, the slowest rank ends the window.

    Args:
        figures: What `fastdata.measure.measure` returned on each rank, by rank.
    """
    if len(figures) == 1:
        return dict(figures[0])
    merged = dict(figures[0])
    window_s = max(f["window_s"] for f in figures)
    images = sum(f["images"] for f in figures)
    merged |= {
        "images": images,
        "window_s": window_s,
        "images_per_s": images / window_s,
        "first_batch_s": max(f["first_batch_s"] for f in figures),
        "data_wait_percent": _middle(statistics.fmean, [f["data_wait_percent"] for f in figures]),
        "skipped": sum(f["skipped"] for f in figures),
        "fallbacks": dict(sum((Counter(f["fallbacks"]) for f in figures), Counter())),
        "processes": sum(f["processes"] for f in figures),
        "readings": {name: _merge_readings(name, [f["readings"][name] for f in figures]) for name in METERS}
        | {"other_cpu_percent": _other_cpu(figures)},
        "ranks": [
            {key: f[key] for key in ("images", "window_s", "images_per_s", "data_wait_percent", "first_batch_s")}
            for f in figures
        ],
    }
    return merged


def make_row(task: Task, runs: Sequence[dict[str, Any]]) -> Row:
    """Make a row of the repeats of one task: medians, the single rates, their interval, and what was measured."""
    rates = [run["images_per_s"] for run in runs]
    interval = median_interval(rates)
    facts, last = runs[0]["facts"], runs[-1]
    reasons: dict[str, str] = {}
    row: Row = {
        "backend": task.backend,
        "mode": task.mode,
        "data": task.data,
        "source": facts.get("source"),
        "order": facts.get("order"),
        "output": runs[0]["output"],
        "crops": f"RandomResizedCrop({task.size}), mirror",
        "batch_size": task.batch_size,
        "device": task.device,
        "dtype": task.dtype,
        "workers": facts.get("workers"),
        "prefetch": facts.get("prefetch"),
        "last_batch": "dropped where partial" if task.drops_last else "delivered as it is",
        "options": task.options or facts.get("options") or {},
        "world_size": len(last.get("ranks", [last])),
        "training": runs[0]["training"],
        "images_per_s": statistics.median(rates),
        "images_per_s_runs": rates,
        "images_per_s_interval": list(interval) if interval else None,
        "images_per_s_interval_confidence": median_confidence(len(rates)),
        "images_per_s_spread_percent": spread_percent(rates),
        "cpu_cores_available": runs[0]["cpu_cores_available"],
        "first_batch_s": statistics.median(run["first_batch_s"] for run in runs),
        "data_wait_percent": _middle(statistics.median, [run["data_wait_percent"] for run in runs]),
        "images": sum(run["images"] for run in runs),
        "batches": sum(run["batches"] for run in runs),
        "window_s": statistics.median(run["window_s"] for run in runs),
        "warmup_batches": statistics.median(run["warmup_batches"] for run in runs),
        "epoch_ends": sum(run["epoch_ends"] for run in runs),
        "skipped": sum(run["skipped"] for run in runs),
        "fallbacks": dict(sum((Counter(run["fallbacks"]) for run in runs), Counter())),
        "processes": last["processes"],
        "waits": last["waits"],
        "share_of_ceiling_percent": None,
    }
    if interval is None:
        reasons["images_per_s_interval"] = reasons["images_per_s_interval_confidence"] = TOO_FEW_REPEATS
    if row["images_per_s_spread_percent"] is None:
        reasons["images_per_s_spread_percent"] = "one repeat has no spread"
    if row["data_wait_percent"] is None:
        reasons["data_wait_percent"] = WAIT_HIDDEN
    if task.mode != "train":
        reasons["share_of_ceiling_percent"] = "only training rows have a ceiling"
    ends = [run["epoch_end_s"] for run in runs if run["epoch_end_s"] is not None]
    row["epoch_end_s"] = statistics.median(ends) if ends else None
    if not ends:
        reasons["epoch_end_s"] = "no epoch ended inside the window"
    for name in METERS:
        readings = [run["readings"][name] for run in runs]
        values = [reading["value"] for reading in readings if reading["value"] is not None]
        row[name] = statistics.median(values) if len(values) == len(readings) else None
        if row[name] is None:
            reasons[name] = next(reading["reason"] for reading in readings if reading["value"] is None)
    row |= _cache_of([run["cache_state"] for run in runs], reasons)
    if "ranks" in last:
        row["ranks"] = last["ranks"]
        row["rank_spread_percent"] = spread_percent([rank["images_per_s"] for rank in last["ranks"]])
    row["reasons"] = reasons
    return row


def add_share_of_ceiling(rows: Sequence[Row]) -> None:
    """Give each training row its rate in percent of the synthetic row with the same model and batch size.

    The share is withheld, with the reason, where `fastdata.report.METHOD` says so.
    """
    ceilings = {_training_key(row): row for row in rows if row["mode"] == "synthetic"}
    for row in rows:
        if row["mode"] == "train":
            share, reason = _share_of(row, ceilings.get(_training_key(row)))
            row["share_of_ceiling_percent"] = share
            if reason:
                row["reasons"]["share_of_ceiling_percent"] = reason


def with_synthetic(tasks: Sequence[Task]) -> list[Task]:
    """Return training tasks with the synthetic one, which is their ceiling, before them."""
    if not tasks:
        return []
    ceiling = dataclasses.replace(tasks[0], backend="synthetic", mode="synthetic", options={}, cache="warm")
    return [ceiling, *tasks]


def _share_of(row: Row, ceiling: Row | None) -> tuple[float | None, str]:
    """Return the share in percent and "", or None and why there is none."""
    if ceiling is None:
        return None, "the synthetic row failed"
    if _is_disturbed(row) or _is_disturbed(ceiling):
        percent = 100 * CEILING_DISTURBED_SHARE
        return None, f"other processes used more than {percent:.0f} % of the cores during the row or its ceiling"
    share = 100.0 * row["images_per_s"] / ceiling["images_per_s"]
    if share > HIGHEST_SHARE_PERCENT:
        return None, f"above {HIGHEST_SHARE_PERCENT:.0f} %: the ceiling was disturbed, or measured too slow"
    return share, ""


def _is_disturbed(row: Row) -> bool:
    other: float | None = row["other_cpu_percent"]
    return other is not None and other > 100.0 * CEILING_DISTURBED_SHARE * row["cpu_cores_available"]


def _training_key(row: Row) -> tuple[Any, ...]:
    return (row["training"]["model"], row["training"]["compiled"], row["batch_size"], row["device"], row["dtype"])


def _merge_readings(name: str, readings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    for reading in readings:
        if reading["value"] is None:
            return reading
    values = [reading["value"] for reading in readings]
    return {"value": sum(values) if name in SUMMED_OVER_RANKS else statistics.fmean(values), "reason": ""}


def _other_cpu(figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what processes outside of the job used, on the machine where they used most.

    A rank's own reading counts the other ranks of its machine as others. Their CPU time is subtracted, which is right
    where their windows, which open together, are also equally long.
    """
    machines: dict[str, list[dict[str, Any]]] = {}
    for rank in figures:
        machines.setdefault(rank["machine_id"], []).append(rank)
    others = []
    for ranks in machines.values():
        longest = max(ranks, key=lambda rank: float(rank["window_s"]))
        reading = longest["readings"]["other_cpu_percent"]
        if reading["value"] is None:
            return dict(reading)
        if min(rank["window_s"] for rank in ranks) < (1 - WINDOW_TOLERANCE) * longest["window_s"]:
            return {"value": None, "reason": "ranks of one machine ended their windows at different times"}
        cpu_s = [rank["readings"]["cpu_percent"]["value"] * rank["window_s"] for rank in ranks if rank is not longest]
        others.append(max(0.0, reading["value"] - sum(cpu_s) / longest["window_s"]))
    return {"value": max(others), "reason": ""}


def _middle(of: Callable[[list[float]], float], values: Sequence[float | None]) -> float | None:
    """Return the middle of values, or None where one is missing."""
    known = [value for value in values if value is not None]
    return of(known) if len(known) == len(values) else None


def _cache_of(states: Sequence[dict[str, Any]], reasons: dict[str, str]) -> dict[str, Any]:
    """Return the row's cache fields: "cold" only where every repeat was."""
    percents = [state["resident_percent"] for state in states if state.get("resident_percent") is not None]
    if not percents:
        reasons["cache_resident_percent"] = next((s["note"] for s in states if s.get("note")), "nothing is read")
    return {
        "cache": "cold" if all(state["cache"] == "cold" for state in states) else "warm",
        "cache_resident_percent": statistics.median(percents) if percents else None,
        "cache_note": next((state["note"] for state in states if state.get("note")), ""),
    }
