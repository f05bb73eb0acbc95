"""``fastdata bench``, ``fastdata compare`` and ``fastdata backends``."""

from __future__ import annotations

import dataclasses
import datetime
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from fastdata.job import Job
    from fastdata.task import Task

_FILE_CHARACTERS = 150
"""Width of the table where it goes into a file or a pipe."""
_BENCH_EXAMPLE = """
Example: [bold]fastdata bench photos/train shards/train --device cuda --model resnet50 --html out.html[/]
"""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("bench", epilog=_BENCH_EXAMPLE)(bench)
    app.command("compare", epilog="Example: [bold]fastdata compare before.json after.json[/]")(compare)
    app.command("backends", epilog="Example: [bold]fastdata backends[/]")(backends)


def bench(
    data: Annotated[
        list[str], typer.Argument(metavar="DATA...", help="Folders or shard sets; several must hold the same samples.")
    ],
    backend: Annotated[
        list[str] | None, typer.Option(help="Backend to measure, repeatable. Default: all that work here.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples a batch and rank.")] = 256,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of a window, at least.")] = 10.0,
    min_batches: Annotated[int, typer.Option(min=1, help="Batches in a window, at least.")] = 10,
    repeats: Annotated[
        int, typer.Option(min=1, help="Fresh processes for each row: 6 give a 95 % interval, fewer than 5 none.")
    ] = 6,
    quick: Annotated[
        bool, typer.Option("--quick", help="One repeat of 3 s, about 10 s a row with start-up: no spread.")
    ] = False,
    workers: Annotated[int | None, typer.Option(min=0, help="Workers. Default: the usable cores.")] = None,
    prefetch: Annotated[int, typer.Option(min=1, help="Batches made ahead.")] = 2,
    device: Annotated[str | None, typer.Option(help='"cpu", "cuda", "cuda:N". Default: a GPU if there is one.')] = None,
    dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16 or uint8.")] = "float32",
    size: Annotated[int, typer.Option(min=1, help="Side of the delivered images in pixels.")] = 224,
    block_shuffle: Annotated[int, typer.Option(min=0, help="Also measure shards in blocks of this many.")] = 0,
    model: Annotated[
        str | None, typer.Option(help="Also train: resnet18, resnet50, vit_b_16 or package.module:factory.")
    ] = None,
    compile_model: Annotated[bool, typer.Option("--compile", help="Apply torch.compile to the model.")] = False,
    cold: Annotated[
        bool, typer.Option("--cold", help="Drop the files from the page cache before each window.")
    ] = False,
    baselines: Annotated[
        bool, typer.Option("--baselines", help="Also measure plain ImageFolder, plain webdataset and plain DALI.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write the page with plots here.")] = None,
) -> None:
    """Measure how fast each backend feeds images, and what that costs.

    Under torchrun all ranks measure together, and the table has one row for the job.
    """
    from rich.console import Console

    from fastdata.job import join_job
    from fastdata.outfile import refuse_unwritable
    from fastdata.task import Task

    refuse_unwritable(json_file, html_file)
    _refuse_unknown(dtype, model)
    job = join_job()
    try:
        template = Task(
            data=data[0],
            backend="",
            batch_size=batch_size,
            device=_device(device, job),
            dtype=dtype,
            size=size,
            workers="auto" if workers is None else workers,
            prefetch=prefetch,
            cache="cold" if cold else "warm",
            seconds=min(seconds, 3.0) if quick else seconds,
            min_batches=min_batches,
            warmup_s=1.0 if quick else 2.0,
        )
        console = Console(stderr=True, quiet=job.rank != 0)
        plan = _Plan(template, data, backend, block_shuffle, baselines, model, compile_model)
        failed = _measure(plan, 1 if quick else repeats, job, console, json_file, html_file)
    finally:
        job.close()
    if failed:
        raise typer.Exit(1)


def compare(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="The earlier benchmark file.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="The later benchmark file.")],
    fail_if_slower: Annotated[
        bool, typer.Option("--fail-if-slower", help="Fail if a row is slower, or if too few repeats cannot tell.")
    ] = False,
) -> None:
    """Tell which rows of two benchmark files differ by more than both spread.

    Files of different data, machines or cache states are refused.
    """
    from fastdata.compare import compare as compare_documents
    from fastdata.compare import show_comparison, slower_rows
    from fastdata.report import read_document

    comparison = compare_documents(read_document(before), read_document(after))
    show_comparison(comparison, _screen())
    if fail_if_slower and slower_rows(comparison):
        raise typer.Exit(1)


def backends() -> None:
    """List which backends work here, and for the others why not and how to get them."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from fastdata.registry import backend_names, check_backend

    table = Table("backend", "works", "reason", "how to get it", header_style="bold")
    for name in backend_names():
        found = check_backend(name)
        works = "[green]yes[/]" if found.works else "[red]no[/]"
        table.add_row(escape(name), works, escape(found.reason), escape(found.remedy))  # a remedy holds [dali]
    Console().print(table)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Which rows a command line asks for."""

    template: Task
    data: list[str]
    backends: list[str] | None
    block_shards: int
    baselines: bool
    model: str | None
    compiled: bool

    def tasks(self, works: list[str], kinds: dict[str, str]) -> tuple[list[Task], list[dict[str, str]]]:
        """Return the tasks in the order of the table, and what is left out with its reason.

        Args:
            works: Backends that work here.
            kinds: The kind of source of each data.
        """
        from fastdata.baselines import baseline_tasks
        from fastdata.benchmark import with_synthetic
        from fastdata.registry import load_backend
        from fastdata.sources.open import is_shards

        rows: list[Task] = []
        left_out: list[dict[str, str]] = []
        for data in self.data:
            here = dataclasses.replace(self.template, data=data)
            for name in works:
                reads = load_backend(name).source_kinds
                if kinds[data] not in reads:
                    left_out.append({"backend": name, "reason": _why_unread(data, kinds[data], reads)})
                    continue
                rows.append(dataclasses.replace(here, backend=name))
                if self.block_shards and is_shards(data):
                    rows.append(dataclasses.replace(here, backend=name, block_shards=self.block_shards))
            if self.baselines:
                plain, missing = baseline_tasks(here)
                rows += plain
                left_out += missing
        if self.model:
            training = [
                dataclasses.replace(row, mode="train", model=self.model, compiled=self.compiled) for row in rows
            ]
            rows += with_synthetic(training)
        return rows, left_out


def _measure(
    plan: _Plan, repeats: int, job: Job, console: Console, json_file: Path | None, html_file: Path | None
) -> bool:
    """Run the plan, print and write the results on rank 0; return whether a row failed."""
    from fastdata.baselines import with_best_settings
    from fastdata.benchmark import run_benchmark
    from fastdata.dataset import describe_data
    from fastdata.outfile import write_whole
    from fastdata.report import make_document, show, write_document
    from fastdata.report_html import render_html

    dataset = describe_data(plan.data)
    works, unavailable = _choose_backends(plan.backends)
    kinds = {source["data"]: source["kind"] for source in dataset["sources"]}
    tasks, left_out = plan.tasks(works, kinds)
    if not tasks:
        _nothing_works([*unavailable, *left_out])
    with console.status("starting") as status:

        def progress(done: int, total: int, task: Task, came_out: str) -> None:
            line = f"[{done}/{total}] {task.backend} · {task.data} · {task.mode}: {came_out}"
            status.update(f"measured {done} of {total}")
            console.print(line, markup=False, highlight=False)

        status.update("measuring")
        tasks, sweeps = with_best_settings(tasks, job, progress)
        outcome = run_benchmark(tasks, repeats, job, progress)
    for row in outcome.rows:
        if row["mode"] != "synthetic":
            row["source"] = kinds[row["data"]]  # a baseline knows folder and shards only
    if job.rank == 0:
        document = make_document(
            outcome.rows,
            dataset=dataset,
            device=plan.template.device,
            gpus=job.world_size,
            command=shlex.join(["fastdata", *sys.argv[1:]]),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            failures=outcome.failures,
            unavailable=[*unavailable, *left_out],
        )
        document["sweeps"] = sweeps
        show(document, _screen())
        if json_file:
            write_document(document, json_file)
        if html_file:
            write_whole(html_file, render_html(document))
    return bool(outcome.failures)


def _screen() -> Console:
    from rich.console import Console

    screen = Console()
    return screen if screen.is_terminal else Console(width=_FILE_CHARACTERS)


def _choose_backends(asked: list[str] | None) -> tuple[list[str], list[dict[str, str]]]:
    """Return the backends that work, and the others with the reason; one that was asked for must work."""
    from fastdata.errors import BackendUnavailableError
    from fastdata.registry import backend_names, check_backend, load_backend

    if asked:
        for name in asked:
            load_backend(name)  # raises for a name that nobody has
            found = check_backend(name)
            if not found.works:
                raise BackendUnavailableError(name, found.reason, "a backend that works here", found.remedy)
        return list(dict.fromkeys(asked)), []
    checks = [check_backend(name) for name in backend_names()]
    unavailable = [{"backend": c.name, "reason": f"{c.reason} {c.remedy}".strip()} for c in checks if not c.works]
    return [c.name for c in checks if c.works], unavailable


def _why_unread(data: str, kind: str, reads: Iterable[str]) -> str:
    if kind == "folder" and "shards" in reads:
        return f"it reads shards, {data} is a folder: convert the folder with `fastdata shard`"
    return f"it reads {' or '.join(reads)}; {data} is a {kind}"


def _nothing_works(unavailable: list[dict[str, str]]) -> None:
    from fastdata.errors import BackendUnavailableError

    if len(unavailable) == 1:
        raise BackendUnavailableError(unavailable[0]["backend"], unavailable[0]["reason"])
    reasons = "; ".join(f"{item['backend']}: {item['reason']}" for item in unavailable)
    raise BackendUnavailableError("every backend", reasons, "one that works here", "See `fastdata backends`.")


def _device(asked: str | None, job: Job) -> str:
    import torch

    from fastdata.errors import UsageError

    if asked is None:
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    if asked.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError("--device", asked, "a machine with a GPU that torch can use", "Use --device cpu.")
    if asked == "cuda":
        return f"cuda:{job.local_rank}"
    if job.world_size > 1 and asked != "cpu":
        raise UsageError("--device", asked, '"cuda" under torchrun: each rank takes its own card')
    return asked


def _refuse_unknown(dtype: str, model: str | None) -> None:
    from typing import get_args

    from fastdata.errors import UsageError
    from fastdata.spec import DType
    from fastdata.training import check_model

    if dtype not in get_args(DType):
        raise UsageError("--dtype", f"{dtype!r}", "one of " + ", ".join(get_args(DType)))
    if model is not None:
        check_model(model)
