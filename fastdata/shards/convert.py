"""The converter: a folder of class folders becomes sets of shards that nothing gets lost from.

The state of the folder that is written to is always one of three: nothing of ours; unfinished, with a work folder that
knows what is done; finished, with an index. A run moves it forward, or refuses and changes nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdata.cores import usable_cores
from fastdata.errors import ShardError, SourceError, UsageError
from fastdata.progress import Bar
from fastdata.shards.load import Loader
from fastdata.shards.options import ConvertOptions
from fastdata.shards.outfolder import (
    SPLITS_NAME,
    clear_set,
    holds_shards,
    refuse_others_tars,
    refuse_unwritable_folder,
)
from fastdata.shards.pack import PackJob, pack_split, unaltered
from fastdata.shards.plan import SplitPlan, map_labels, plan_splits, source_digest
from fastdata.shards.publish import publish_split
from fastdata.shards.reencode import make_reencode
from fastdata.shards.workfolder import ShardRecord, WorkFolder, write_text
from fastdata.sources.folder import open_folder
from fastdata.sources.shardindex import INDEX_NAME, WORK_NAME, read_index

_DEFAULTS = ConvertOptions()


@dataclass(frozen=True)
class SplitResult:
    """What one set of shards came to."""

    name: str
    """Of the split; "" for the whole set."""
    folder: Path
    """Where its shards lie."""
    samples: int
    """Number of samples stored."""
    shards: int
    """Number of shards."""
    size_bytes: int
    """Of all shards."""
    skipped: int
    """Files that were left out; ``skipped.json`` beside the shards names them."""
    not_crop_ready: Mapping[str, int]
    """Files that could not be made crop-ready, by reason; ``not-crop-ready.json`` beside the shards names them."""


@dataclass(frozen=True)
class ConvertResult:
    """What a conversion came to."""

    splits: tuple[SplitResult, ...]
    """The sets that were written."""
    ignored: Mapping[str, int]
    """Files of the folder that are no samples, by kind."""
    total_s: float
    """Seconds."""


def convert_folder(
    source_folder: str | Path,
    out: str | Path,
    options: ConvertOptions = _DEFAULTS,
    *,
    workers: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> ConvertResult:
    """Convert a folder of class folders to shards.

    Args:
        source_folder: The folder.
        out: Where the shards go; made if it is not there. With splits, each lies in a folder of its name in it.
        options: What the shards hold.
        workers: Threads that read and re-encode; None: one for each usable core. Changes speed only.
        resume: Go on where an earlier run with the same input and options was stopped; finished shards stay untouched
            while they have the digest that was noted when they were written.
        overwrite: Remove an earlier set first.

    Raises:
        SourceError: The folder cannot be read, or a file is no readable picture (unless skipped); names the path.
        ShardError: `out` holds other shards, another process writes there, or the earlier run was another one.
        UsageError: Options that do not fit the folder.
    """
    started_s = time.monotonic()
    out = Path(out)
    if resume and overwrite:
        raise UsageError("resume", "both resume and overwrite", "one of them")
    _refuse_nested(Path(source_folder), out)
    made_out = not out.exists()
    if made_out:
        refuse_unwritable_folder(out)
    source = open_folder(source_folder)
    labels, classes = map_labels(source, options.class_map)
    plans = plan_splits(labels, options)
    names = [plan.name for plan in plans]
    plan = {"options": options.identity(), "source_digest": source_digest(source, labels, classes)}
    refuse_others_tars(out, names)
    if not (out / WORK_NAME).exists() and holds_shards(out, names) and not overwrite:
        _refuse_other_set(out, names, plan, resume)
        return ConvertResult(_read_results(out, names), source.ignored, time.monotonic() - started_s)
    if not made_out:  # only now: a finished set that is resumed may lie where nobody can write
        refuse_unwritable_folder(out)
    with WorkFolder(out) as work:
        _take_over(out, work, names, plan, resume=resume, overwrite=overwrite)
        loader = Loader(source, labels, options, make_reencode(options))
        job = PackJob(source, loader, options, work, workers or usable_cores())
        facts = {"stored": options.stored, **plan, "ignored": source.ignored}
        try:
            packed = _pack_all(job, plans, out)
            for split, records in zip(plans, packed, strict=True):
                publish_split(out / split.name, records, source, labels, classes, facts)
            if options.split:
                counts = {s.name: sum(r.samples for r in records) for s, records in zip(plans, packed, strict=True)}
                write_text(out / SPLITS_NAME, json.dumps(counts) + "\n")
        except OSError as exc:  # reading is mapped where it happens, so this is about writing: most often a full disk
            _leave(out, work, plans, made_out)
            raise ShardError(
                str(out),
                f"writing failed: {exc.strerror or exc}",
                "a folder with room for the shards",
                "Shards that were finished are kept: make room and pass --resume.",
            ) from exc
        except BaseException:
            _leave(out, work, plans, made_out)
            raise
        work.remove()
    return ConvertResult(_read_results(out, names), source.ignored, time.monotonic() - started_s)


def _pack_all(job: PackJob, plans: Sequence[SplitPlan], out: Path) -> list[list[ShardRecord]]:
    packed, finished = [], _finished(job, plans, out)
    with Bar("Writing shards", sum(len(plan.positions) for plan in plans), "images") as bar:
        for plan, kept in zip(plans, finished, strict=True):
            folder = out / plan.name
            folder.mkdir(exist_ok=True)
            records = pack_split(job, plan.name, folder, plan.positions, kept, bar)
            if not records:
                name = f" of the split {plan.name}" if plan.name else ""
                raise SourceError(job.source.root, f"no file{name} could be stored", "at least one readable picture")
            packed.append(records)
    return packed


def _finished(job: PackJob, plans: Sequence[SplitPlan], out: Path) -> list[list[ShardRecord]]:
    """Return the records of shards that an earlier run finished and nothing has changed since, for each split."""
    noted = [job.work.records(plan.name, out / plan.name) for plan in plans]
    with Bar("Checking finished shards", sum(map(len, noted)), "shards") as bar:
        return [
            unaltered(job, records, out / plan.name, plan.positions, bar)
            for plan, records in zip(plans, noted, strict=True)
        ]


def _refuse_nested(source_folder: Path, out: Path) -> None:
    source_path, out_path = source_folder.resolve(), out.resolve()
    if source_path == out_path or source_path in out_path.parents:
        raise UsageError("OUT", f"{out} lies in {source_folder}", "another folder", "Shards are no class of pictures.")
    if out.exists() and not out.is_dir():
        raise UsageError("OUT", f"{out} is a file", "a folder")


def _refuse_other_set(out: Path, names: Sequence[str], plan: Mapping[str, Any], resume: bool) -> None:
    """Refuse a folder with a finished set, unless a resumed run wants exactly this one.

    Raises:
        ShardError: It is another set, or no resume was asked for.
    """
    if not resume:
        raise ShardError(
            str(out),
            "it holds shards already",
            "an empty folder",
            "Choose another, or pass --overwrite to replace them.",
        )
    for name in names:
        path = out / name / INDEX_NAME
        facts = read_index(path).facts if path.exists() else {}
        if any(facts.get(key) != value for key, value in plan.items()):
            raise _another_run(out, facts, plan)


def _another_run(out: Path, found: Mapping[str, Any], plan: Mapping[str, Any]) -> ShardError:
    then, now = found.get("options") or {}, plan["options"]
    changed = [f"{key} was {then.get(key)!r}, is {now[key]!r}" for key in now if then.get(key) != now[key]]
    what = ", ".join(changed) or "the source folder changed since"
    return ShardError(
        str(out),
        f"shards of another conversion ({what})",
        "the same input and options",
        "Pass --overwrite to start anew.",
    )


def _take_over(
    out: Path, work: WorkFolder, names: Sequence[str], plan: dict[str, Any], *, resume: bool, overwrite: bool
) -> None:
    """Bring the folder into the unfinished state with this plan, or refuse and leave it as it was.

    Raises:
        ShardError: An earlier run's work is there that this one may not touch.
    """
    try:
        earlier = work.plan
        old_names = [str(name) for name, _ in earlier["options"]["split"]] if earlier else []
    except ShardError:
        if not overwrite:
            raise
        earlier, old_names = None, work.recorded_splits()
    if earlier is not None and not overwrite:
        if not resume:
            raise ShardError(
                str(out),
                "an unfinished conversion",
                "an empty folder",
                "Pass --resume to finish it, or --overwrite to start anew.",
            )
        if earlier != json.loads(json.dumps(plan)):
            raise _another_run(out, earlier, plan)
        if not any(work.records(name, out / name) for name in names):
            clear_set(out, names)  # an earlier --overwrite may have been stopped while it removed a set
        return
    if earlier is None and not overwrite and holds_shards(out, names):  # another process finished just before our lock
        work.remove()
        raise ShardError(str(out), "it holds shards already", "an empty folder", "Pass --overwrite to replace them.")
    work.start(plan)
    clear_set(out, [*names, *old_names])


def _leave(out: Path, work: WorkFolder, plans: Sequence[SplitPlan], made_out: bool) -> None:
    """Keep finished shards of a run that failed for a resume; if there are none, leave nothing behind."""
    if any(work.records(plan.name, out / plan.name) for plan in plans):
        for plan in plans:
            work.forget(plan.name, len(work.records(plan.name, out / plan.name)))
        return
    work.remove()
    for folder in [out / plan.name for plan in plans if plan.name] + [out] * made_out:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _read_results(out: Path, names: Sequence[str]) -> tuple[SplitResult, ...]:
    results = []
    for name in names:
        index = read_index(out / name / INDEX_NAME)
        size_bytes = sum(shard.size_bytes for shard in index.shards)
        skipped = int(index.facts.get("skipped", 0))
        not_crop_ready = dict(index.facts.get("not_crop_ready", {}))
        results.append(
            SplitResult(name, out / name, len(index), len(index.shards), size_bytes, skipped, not_crop_ready)
        )
    return tuple(results)
