"""Measures the "torchvision" backend decoding on a GPU: ``python benchmarks/torchvision_cuda.py PHOTOS --out FILE``.

Rows, interleaved, each repeat in a fresh process, loader only: decoding on the GPU and on the host, each from a folder,
its plain shards and its crop-ready shards; and as ceilings ``decode_jpeg`` alone on bytes in memory (whole files, and
files cut beforehand) and the resize alone on pictures that lie decoded on the device.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fastdata
from fastdata.task import Loader, Task

CUDA = {"decode": "cuda"}
HELD_BATCHES = 8
"""Batches that the ceilings go round: enough that no cache holds them, few enough for any memory."""


def main() -> int:
    """Make the data, measure, write the file; return 1 where a row failed."""
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="fastdata-", dir=arguments.work) as work:
        folder, plain, ready = make_data(arguments.photos, Path(work), arguments.pictures)
        report = run(arguments, folder, plain, ready)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")  # whatever becomes of the profiles
        report["profiles"] = {data.name: profile(arguments, data) for data in (folder, plain, ready)}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    for row in report["rows"]:
        figures = f"{row['images_per_s']:>9,.0f} img/s  {row['cpu_percent'] or 0:>5,.0f} % CPU"
        print(f"{row['backend']:<34} {row['source'] or '':<18} {row['workers'] or '':>3} workers {figures}")
    for failure in report["failures"]:
        print(f"FAILED {failure['backend']}: {failure['error']}", file=sys.stderr)
    return 1 if report["failures"] else 0


def parse_arguments() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("photos", type=Path, help="folder of class folders with JPEGs")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--pictures", type=int, default=2048, help="copies to make of them, all together")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each window, at least")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--workers", type=int, nargs="*", default=[], help="numbers to try with decode on the GPU")
    parser.add_argument("--work", type=Path, help="where the copies go; default: the system's temporary folder")
    return parser.parse_args()


def make_data(photos: Path, work: Path, pictures: int) -> tuple[Path, Path, Path]:
    """Copy photographs until there are enough; return the folder, its plain and its crop-ready shards."""
    from fastdata.shards import ConvertOptions, convert_folder

    files = sorted(path for path in photos.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not files:
        raise SystemExit(f"{photos}: no JPEGs")
    folder = work / "folder"
    for number, path in zip(range(pictures), cycle(files), strict=False):
        target = folder / path.parent.name / f"{number:06d}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    convert_folder(folder, work / "plain", ConvertOptions())
    convert_folder(folder, work / "crop-ready", ConvertOptions(crop_ready=True))
    return folder, work / "plain", work / "crop-ready"


def run(arguments: argparse.Namespace, folder: Path, plain: Path, ready: Path) -> dict[str, Any]:
    """Measure all rows and describe the machine."""
    from fastdata.benchmark import run_benchmark
    from fastdata.job import Job
    from fastdata.machine import describe_machine, describe_versions

    template = Task(
        data=str(folder),
        backend="torchvision",
        batch_size=arguments.batch_size,
        device=arguments.device,
        dtype="float16",
        seconds=arguments.seconds,
        warmup_s=1.0,
    )
    tasks = []
    for data in map(str, (folder, plain, ready)):
        tasks += [replace(template, data=data, options=CUDA), replace(template, data=data)]
        tasks += [replace(template, data=data, options=CUDA, workers=workers) for workers in arguments.workers]
    for data, kind in ((folder, "whole"), (ready, "cut")):
        for factory in ("decode_alone", "resize_alone"):
            name = f"{factory.replace('_', ' ')}, {kind}"
            tasks.append(replace(template, data=str(data), backend=name, loader=f"torchvision_cuda:{factory}"))

    def progress(done: int, total: int, task: Task, text: str) -> None:
        print(f"[{done}/{total}] {task.backend} {task.options} {Path(task.data).name}: {text}", flush=True)

    outcome = run_benchmark(tasks, arguments.repeats, Job(), progress)
    rows = [row | {"backend": f"{row['backend']} {row['options'].get('decode', '')}".strip()} for row in outcome.rows]
    return {
        "schema": 1,
        "machine": describe_machine(arguments.device),
        "versions": describe_versions(),
        "dataset": {"photos": arguments.photos.name, "pictures": arguments.pictures},
        "rows": rows,
        "failures": outcome.failures,
    }


def profile(arguments: argparse.Namespace, data: Path) -> dict[str, Any]:
    """Return where the time of a second epoch goes, in ms a batch of the decoding thread (prepare: of all workers)."""
    task = Task(str(data), "torchvision", batch_size=arguments.batch_size, device=arguments.device)
    with open_cuda(task) as loader:
        for _ in range(2):
            for _batch in loader:
                pass
        report = loader.report()
    batches = max(1, report.details["batches"])
    stages = {name: 1e3 * report.details[name] / batches for name in ("prepare_s", "waited_s", "decode_s", "launch_s")}
    return {name.replace("_s", "_ms"): round(value, 3) for name, value in stages.items()} | {
        "fallbacks": dict(report.fallbacks)
    }


def open_cuda(task: Task) -> fastdata.Pipeline:
    """Open the task's data for decoding on the GPU."""
    return fastdata.open_pipeline(
        task.data,
        backend="torchvision",
        transform=fastdata.imagenet_train(task.size),
        batch_size=task.batch_size,
        device=task.device,
        dtype="float16",
        drop_last=True,
        options=fastdata.TorchvisionOptions(decode="cuda"),
    )


def decode_alone(task: Task) -> Loader:
    """Return a loader that decodes JPEGs which lie in memory, and yields the same empty batch each time."""
    import torch

    from fastdata.backends._gpu_decode import nvjpeg_decoder

    decode = nvjpeg_decoder(task.device)
    lists = [jpegs for jpegs, _ in held_batches(task)]
    empty = torch.zeros((task.batch_size, 3, task.size, task.size), dtype=torch.float16, device=task.device)

    def batches() -> Iterator[Any]:
        for jpegs in cycle(lists):
            decode(jpegs)
            yield empty, None

    return Loader(batches(), ready_batches=1, facts={"source": "memory", "workers": 0})


def resize_alone(task: Task) -> Loader:
    """Return a loader that crops, resizes and normalises pictures which lie decoded on the device."""
    from fastdata.backends._gpu_decode import nvjpeg_decoder
    from fastdata.backends._gpu_resize import GpuResize
    from fastdata.training import synchronise

    decode = nvjpeg_decoder(task.device)
    with open_cuda(task) as loader:
        resize = GpuResize(loader.spec, finish=True)
    decoded = []
    for jpegs, records in held_batches(task):
        pictures = decode(jpegs)
        records[:, 0] += [picture.data_ptr() for picture in pictures]
        decoded.append((pictures, records))

    def batches() -> Iterator[Any]:
        for number, (_, records) in enumerate(cycle(decoded)):
            yield resize(records)[0], None
            if number % 16 == 15:
                synchronise(task.device)  # else launches queue up without end

    return Loader(batches(), ready_batches=1, facts={"source": "device memory", "workers": 0})


def held_batches(task: Task) -> list[tuple[list[Any], Any]]:
    """Return some full batches of JPEGs, cut where they can be, and the records of their windows."""
    import numpy as np

    from fastdata.backends._gpu_host import HostStage

    held = []
    with open_cuda(task) as loader:
        host = HostStage(loader.source, loader.spec, pin_memory=loader.execution.pin_memory)
        for step in loader._plan(0, 0):
            prepared, _ = host.prepare(step, 0, len(step.ids))
            order = np.resize(np.arange(len(prepared.taken)), task.batch_size)  # where some were refused, others twice
            held.append(([prepared.jpegs[i] for i in order], prepared.records[order]))
            if len(held) == HELD_BATCHES:
                break
    return held


if __name__ == "__main__":
    sys.exit(main())
