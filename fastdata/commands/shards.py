"""``fastdata shard``, ``fastdata verify`` and ``fastdata check``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fastdata.wording import counted, sized

if TYPE_CHECKING:
    from fastdata.check import CheckReport
    from fastdata.shards.convert import ConvertResult

_SHOWN = 5  # paths of each kind; --json has all

_SHARD_EXAMPLE = """
Example: [bold]fastdata shard photos/train shards/train[/], or with a split:
[bold]fastdata shard photos shards --split train=0.9,val=0.1 --on-error skip[/]
"""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("shard", epilog=_SHARD_EXAMPLE)(shard)
    app.command("verify", epilog="Example: [bold]fastdata verify shards/train[/]")(verify)
    app.command("check", epilog="Example: [bold]fastdata check photos/train --json report.json[/]")(check)


def shard(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Folder of class folders.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the shards; made if it is not there.")],
    max_bytes: Annotated[int, typer.Option(help="Size that no shard's file exceeds.")] = 2_000_000_000,
    workers: Annotated[int | None, typer.Option(min=1, help="Threads. Default: the usable cores.")] = None,
    shuffle: Annotated[bool, typer.Option("--shuffle/--no-shuffle", help="Store samples in a random order.")] = True,
    seed: Annotated[int, typer.Option(help="Of that order and of the split.")] = 0,
    class_map: Annotated[
        Path | None,
        typer.Option(help="JSON (name to label, or a list) or text (one name a line): label of each class."),
    ] = None,
    split: Annotated[str, typer.Option(help="Shares by name, divided within each class: train=0.9,val=0.1")] = "",
    on_error: Annotated[str, typer.Option(help="What a bad file does: raise, or skip (with a report).")] = "raise",
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an earlier run was stopped.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace shards that are there.")] = False,
    resize: Annotated[int | None, typer.Option(min=1, help="Shrink to this short side in pixels (JPEG).")] = None,
    quality: Annotated[int, typer.Option(min=1, max=95, help="JPEG quality with --resize.")] = 90,
    crop_ready: Annotated[
        bool, typer.Option("--crop-ready", help="Rewrite JPEGs, without loss, so that crops are cut before decoding.")
    ] = False,
    max_growth: Annotated[
        float, typer.Option(min=0, help="With --crop-ready: files that would grow by a larger share stay as they are.")
    ] = 0.15,
    check: Annotated[
        str, typer.Option(help="With --crop-ready: compare none, coefficients or pixels of each rewritten file.")
    ] = "coefficients",
) -> None:
    """Convert a folder of class folders to tar shards that webdataset, Hugging Face datasets and tar read.

    Original bytes are kept unless --resize or --crop-ready is given. The index beside the shards is written last: a set
    without it is not finished.
    """
    from fastdata.shards.convert import convert_folder
    from fastdata.shards.options import ConvertOptions, parse_split
    from fastdata.shards.outfolder import holds_shards

    options = ConvertOptions(
        max_bytes=max_bytes,
        shuffle=shuffle,
        seed=seed,
        class_map=class_map,
        split=parse_split(split),
        on_error=on_error,  # type: ignore[arg-type]
        resize=resize,
        quality=quality,
        crop_ready=crop_ready,
        max_growth=max_growth,
        check=check,  # type: ignore[arg-type]
    )
    holds_earlier = out.is_dir() and holds_shards(out, [name for name, _ in options.split])
    result = convert_folder(source, out, options, workers=workers, resume=resume, overwrite=overwrite)
    _show_conversion(result, resumed=resume and holds_earlier)


def verify(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder that was converted to.")],
    workers: Annotated[int | None, typer.Option(min=1, help="Threads. Default: the usable cores.")] = None,
) -> None:
    """Compare shards with their index, byte for byte, and name each fault; exit code 1 if there is any."""
    from rich.console import Console

    from fastdata.shards.verify import verify_shards

    result = verify_shards(out, workers=workers)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for fault in result.faults:
        console.print(str(fault))
    size = f"{counted(result.samples, 'sample')} in {counted(result.shards, 'shard')}, {sized(result.size_bytes)}"
    console.print(f"{counted(len(result.faults), 'fault')}: {size}" if result.faults else f"no fault: {size}")
    if result.faults:
        raise typer.Exit(1)


def check(
    data: Annotated[Path, typer.Argument(metavar="SRC", help="Folder of class folders or pictures, or shards.")],
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all findings here; - prints them.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Threads. Default: the usable cores.")] = None,
) -> None:
    """Find files that some or all backends cannot read, mislabelled types, odd colour, orientation and junk.

    Every picture is decoded once. Exit code 1 if any cannot be, or a class has none.
    """
    import sys

    from fastdata.check import check_data
    from fastdata.outfile import refuse_unwritable, write_whole

    to_stdout = str(json_file) == "-"
    if not to_stdout:
        refuse_unwritable(json_file)
    report = check_data(data, workers=workers)
    text = json.dumps(report.as_json(), indent=1) + "\n"
    if to_stdout:
        sys.stdout.write(text)
    else:
        if json_file is not None:
            write_whole(json_file, text)
        _show_check(report)
    if not report.ok:
        raise typer.Exit(1)


def _show_conversion(result: ConvertResult, *, resumed: bool) -> None:
    from rich.console import Console

    from fastdata.shards.outfolder import NOT_CROP_READY_NAME, SKIPPED_NAME

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    size_bytes = sum(split.size_bytes for split in result.splits)
    samples = sum(split.samples for split in result.splits)
    for split in result.splits:
        console.print(
            f"{split.folder}: {counted(split.samples, 'sample')} in {counted(split.shards, 'shard')},"
            f" {sized(split.size_bytes)}"
        )
        if split.skipped:
            console.print(f"{counted(split.skipped, 'file')} left out, see {split.folder / SKIPPED_NAME}")
        if split.not_crop_ready:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in split.not_crop_ready.items())
            what = counted(sum(split.not_crop_ready.values()), "file")
            console.print(f"{what} not crop-ready ({reasons}), see {split.folder / NOT_CROP_READY_NAME}")
    if result.ignored:
        console.print("ignored: " + ", ".join(f"{count:,} {kind}" for kind, count in result.ignored.items()))
    rate = f"{samples / result.total_s:,.0f} images/s, {sized(size_bytes / result.total_s)}/s"
    # How much of the set this run has made is not known where it went on with another's work.
    console.print(f"{result.total_s:,.1f} s" + (", resumed" if resumed else f": {rate}"))


def _show_check(report: CheckReport) -> None:
    from rich.console import Console

    from fastdata.check import KINDS

    console = Console(highlight=False, markup=False, soft_wrap=True)
    types = ", ".join(f"{count:,} {name}" for name, count in sorted(report.types.items()))
    console.print(f"{report.root}: {counted(report.files, 'picture')}, {sized(report.size_bytes)} ({types})")
    if report.classes:
        sizes = sorted(report.classes.values())
        console.print(
            f"{counted(len(sizes), 'class')} of {sizes[0]:,} to {counted(sizes[-1], 'picture')},"
            f" median {sizes[len(sizes) // 2]:,}"
        )
    if report.ignored:
        console.print("ignored: " + ", ".join(f"{count:,} {kind}" for kind, count in report.ignored.items()))
    for kind, meaning in KINDS.items():
        found = [finding for finding in report.findings if finding.kind == kind]
        if not found:
            continue
        console.print(f"\n{kind}: {len(found):,} ({meaning})")
        for finding in found[:_SHOWN]:
            console.print(f"  {finding.path}: {finding.detail}")
        if len(found) > _SHOWN:
            console.print(f"  and {len(found) - _SHOWN:,} more (--json FILE has all)")
    if not report.findings:
        console.print("nothing to remark")
