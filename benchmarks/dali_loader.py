"""The "dali" backend against DALI alone at its best, loader only, in one interleaved run.

Both sides are swept over threads and the JPEG engines' share first (one short window each); then the best setting of
each is measured `--repeats` times, in turn, each time in a fresh process. Crop-ready copies of the same pictures are
measured beside them, decoded by window, whole, and whole with interpolated chroma.

    python benchmarks/dali_loader.py PHOTOS --out benchmarks/results/dali-loader-h200.json
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.dali_common import Results, Workspace, base_parser, copies, row_of, summarize
from fastdata.cores import usable_cores
from fastdata.errors import FastDataError
from fastdata.fresh import run_fresh
from fastdata.task import Task

ALONE = "benchmarks.dali_common:dali_alone"


def main() -> None:
    """Measure and write the file."""
    parser = base_parser(__doc__ or "")
    parser.add_argument("--dtype", default="float16", choices=("float16", "float32", "uint8"))
    parser.add_argument("--loads", type=float, nargs="+", default=[0.65, 0.8, 0.95], help="hw_decoder_load values")
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument(
        "--readers", type=int, nargs="+", default=[1, 2, 4], help="read_threads values, at the best rest"
    )
    parser.add_argument("--sweep-seconds", type=float, default=2.0)
    parser.add_argument("--no-crop-ready", action="store_true")
    arguments = parser.parse_args()
    results = Results(arguments)
    with Workspace() as work:
        plain = copies(arguments.data, work / "plain", arguments.samples)
        template = Task(
            str(plain),
            "dali",
            batch_size=arguments.batch_size,
            device=arguments.device,
            dtype=arguments.dtype,
            workers=arguments.workers or usable_cores(),
            seconds=arguments.seconds,
            warmup_s=arguments.warmup,
        )
        alone = replace(template, backend="DALI alone", loader=ALONE)
        sides = {"DALI alone": alone, "dali": replace(template, options={"chroma": "fast"})}
        if not arguments.no_crop_ready:
            ready = replace(
                template, data=str(copies(arguments.data, work / "ready", arguments.samples, crop_ready=True))
            )
            sides |= {
                "dali, crop-ready, by window": replace(ready, options={"chroma": "fast"}),
                "dali, crop-ready, whole": replace(ready, options={"chroma": "fast", "region_decode": False}),
                "dali, crop-ready, whole, exact chroma": replace(ready, options={"chroma": "exact"}),
            }
        best = {name: _sweep(name, task, arguments, results) for name, task in sides.items()}
        best["dali, exact chroma"] = replace(best["dali"], options={**best["dali"].options, "chroma": "exact"})
        _repeat(best, arguments.repeats, results)
    finals = [row for row in results.content["rows"] if row["stage"] == "final"]
    results.content["summary"] = summary = summarize(finals, "DALI alone", "times_dali_alone")
    results.write()
    for name, line in summary.items():
        print(f"{name:45s} {line}")


def _sweep(name: str, task: Task, arguments: Any, results: Results) -> Task:
    """Return the task with its fastest settings."""
    ours = task.backend == "dali"
    threads_name = "decode_threads" if ours else "threads"
    loads = arguments.loads if arguments.device != "cpu" else [0.0]
    candidates = [{threads_name: count, "hw_decoder_load": load} for count in arguments.threads for load in loads]
    best, fastest = {**task.options, **candidates[0]}, 0.0

    def try_out(options: dict[str, Any]) -> None:
        nonlocal best, fastest
        if not results.in_time:
            return
        trial = replace(task, options={**task.options, **options}, seconds=arguments.sweep_seconds, warmup_s=1.0)
        rate = _measure(name, trial, "sweep", results)
        if rate > fastest:
            best, fastest = trial.options, rate

    for options in candidates:
        try_out(options)
    if ours:
        for readers in arguments.readers:
            try_out({**best, "read_threads": readers})
    return replace(task, options=best)


def _repeat(tasks: dict[str, Task], repeats: int, results: Results) -> None:
    for _ in range(repeats):
        for name, task in tasks.items():
            if results.in_time:
                _measure(name, task, "final", results)


def _measure(name: str, task: Task, stage: str, results: Results) -> float:
    """Measure once in a fresh process; a failure is a row too."""
    try:
        row = row_of(name, task, run_fresh(task))
    except FastDataError as error:
        results.add(name=name, stage=stage, options=task.options, error=str(error))
        return 0.0
    results.add(stage=stage, **row)
    return float(row["images_per_s"])


if __name__ == "__main__":
    main()
