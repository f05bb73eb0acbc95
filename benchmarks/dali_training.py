"""How much of a model's speed training keeps when the "dali" backend feeds it, against one batch that stays on the GPU.

python benchmarks/dali_training.py PHOTOS --out benchmarks/results/dali-training-h200.json
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


def main() -> None:
    """Measure and write the file."""
    parser = base_parser(__doc__ or "")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--compiled", action="store_true", help="torch.compile the model")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument(
        "--options", nargs="*", default=[], metavar="NAME=VALUE", help="fields of DaliOptions, as Python"
    )
    parser.add_argument("--plain-dali", action="store_true", help="also feed with DALI's own iterator")
    parser.add_argument("--crop-ready", action="store_true", help="also feed from crop-ready files")
    arguments = parser.parse_args()
    results = Results(arguments)
    with Workspace() as work:
        fed = Task(
            str(copies(arguments.data, work / "plain", arguments.samples)),
            "dali",
            mode="train",
            batch_size=arguments.batch_size,
            device=arguments.device,
            dtype=arguments.dtype,
            workers=arguments.workers or usable_cores(),
            seconds=arguments.seconds,
            warmup_s=arguments.warmup,
            model=arguments.model,
            compiled=arguments.compiled,
            options=_options(arguments.options),
        )
        tasks = {"one cached batch": replace(fed, mode="synthetic", options={}), "dali": fed}
        if arguments.crop_ready:
            data = copies(arguments.data, work / "ready", arguments.samples, crop_ready=True)
            tasks["dali, crop-ready"] = replace(fed, data=str(data))
        if arguments.plain_dali:
            tasks["plain DALI"] = replace(
                fed, backend="plain DALI", loader="fastdata.baselines:plain_dali", options={"threads": 4}
            )
        for _ in range(arguments.repeats):
            for name, task in tasks.items():
                if results.in_time:
                    _measure(name, task, results)
    results.content["summary"] = summary = summarize(results.content["rows"], "one cached batch", "share_of_cached")
    results.write()
    for name, line in summary.items():
        print(f"{name:25s} {line}")


def _options(texts: list[str]) -> dict[str, Any]:
    import ast

    return {name: ast.literal_eval(value) for name, _, value in (text.partition("=") for text in texts)}


def _measure(name: str, task: Task, results: Results) -> None:
    try:
        results.add(**row_of(name, task, run_fresh(task)))
    except FastDataError as error:
        results.add(name=name, options=task.options, error=str(error))


if __name__ == "__main__":
    main()
