"""What the DALI scripts share: data to measure on, DALI alone as a loader, and JSON results."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fastdata.machine import describe_machine, describe_versions
from fastdata.task import Loader, Task
from fastdata.transforms import IMAGENET_MEAN, IMAGENET_STD


def base_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments that all scripts take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of class folders")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--samples", type=int, default=2000, help="copy the pictures until there are as many")
    parser.add_argument("--seconds", type=float, default=4.0, help="measuring window")
    parser.add_argument("--warmup", type=float, default=1.5, help="seconds before the window")
    parser.add_argument("--repeats", type=int, default=5, help="of each row, interleaved")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds after which no new measurement starts")
    parser.add_argument("--workers", type=int, default=0, help="0: the usable cores")
    return parser


class Results:
    """Collects rows and writes the file after each, so that a run that is ended early leaves what it has."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Describe the machine.

        Args:
            arguments: As parsed by a `base_parser`.
        """
        self._out: Path = arguments.out
        self._deadline = time.monotonic() + arguments.budget
        asked = {name: str(value) for name, value in vars(arguments).items()}
        self.content: dict[str, Any] = {
            "schema": 1,
            "machine": describe_machine(arguments.device),
            "versions": describe_versions(),
            "arguments": asked,
            "rows": [],
        }

    @property
    def in_time(self) -> bool:
        """Whether there is time for another measurement."""
        return time.monotonic() < self._deadline

    def add(self, **row: Any) -> None:
        """Add a row, show it and write the file."""
        self.content["rows"].append(row)
        self.write()
        shown = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
        print(json.dumps(shown, default=str)[:400], flush=True)

    def write(self) -> None:
        """Write the file."""
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._out.write_text(json.dumps(self.content, indent=1, default=str) + "\n")


def copies(source: Path, target: Path, samples: int, *, crop_ready: bool = False) -> Path:
    """Copy pictures under new names until there are `samples`, as files of their own; optionally crop-ready.

    A file that cannot be made crop-ready is copied as it is, as the converter does.
    """
    files = sorted(path for path in source.rglob("*") if path.is_file() and path.parent != source)

    def read(path: Path) -> bytes:
        data = path.read_bytes()
        if not crop_ready:
            return data
        from fastdata.transcode import make_crop_ready

        return make_crop_ready(data, check="none").data or data

    with ThreadPoolExecutor() as pool:
        contents = list(pool.map(read, files))
    for number in range(max(samples, len(files))):
        path = files[number % len(files)]
        folder = target / path.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:07d}{path.suffix}").write_bytes(contents[number % len(files)])
    return target


class Workspace:
    """A temporary folder for copies, on tmpfs where there is room, so that disks play no part."""

    def __enter__(self) -> Path:
        """Return the folder."""
        shared = Path("/dev/shm")
        roomy = shared.is_dir() and shutil.disk_usage(shared).free > 4e9
        self._folder = tempfile.TemporaryDirectory(prefix="fastdata-dali-", dir=shared if roomy else None)
        return Path(self._folder.name)

    def __exit__(self, *_: object) -> None:
        """Remove it."""
        self._folder.cleanup()


def dali_alone(task: Task) -> Loader:
    """DALI as its own examples use it, with nothing of ours: file reader, random crop in the decoder, fused normalise.

    ``task.options``: threads, hw_decoder_load, queue_depth, hints (bool).
    """
    from nvidia.dali import fn, pipeline_def, types

    asked = {"threads": 4, "hw_decoder_load": 0.8, "queue_depth": 3, "hints": True, **task.options}
    on_gpu = task.device.startswith("cuda")
    decoder: dict[str, Any] = {"device": "mixed" if on_gpu else "cpu"}
    if on_gpu:
        decoder["hw_decoder_load"] = asked["hw_decoder_load"]
        if asked["hints"]:
            decoder |= {"preallocate_width_hint": 1024, "preallocate_height_hint": 1024}
    dtypes = {"float16": types.FLOAT16, "float32": types.FLOAT, "uint8": types.UINT8}
    uint8 = task.dtype == "uint8"

    @pipeline_def(
        batch_size=task.batch_size,
        num_threads=asked["threads"],
        device_id=int(task.device.partition(":")[2]) if on_gpu else None,
        prefetch_queue_depth=asked["queue_depth"],
        exec_dynamic=True,
        seed=1,
    )
    def graph() -> Any:
        encoded, labels = fn.readers.file(file_root=task.data, random_shuffle=True, name="reader", read_ahead=True)
        pictures = fn.decoders.image_random_crop(
            encoded, output_type=types.RGB, random_aspect_ratio=[3 / 4, 4 / 3], random_area=[0.08, 1.0], **decoder
        )
        pictures = fn.resize(pictures, size=[task.size, task.size], interp_type=types.INTERP_LINEAR, antialias=True)
        images = fn.crop_mirror_normalize(
            pictures,
            dtype=dtypes[task.dtype],
            output_layout="HWC",
            mean=[0.0] if uint8 else [255 * m for m in IMAGENET_MEAN],
            std=[1.0] if uint8 else [255 * s for s in IMAGENET_STD],
            mirror=fn.random.coin_flip(probability=0.5),
        )
        return images, labels.gpu() if on_gpu else labels

    pipeline = graph()
    pipeline.build()
    samples = sum(pipeline.epoch_size().values())
    return Loader(
        _Endless(pipeline, task.device),
        ready_batches=asked["queue_depth"] + 1,
        facts={"source": "folder", "order": "a window of DALI's reader", "samples": samples, "options": asked},
    )


class _Endless:
    """Batches of a DALI pipeline as torch tensors, without a copy."""

    def __init__(self, pipeline: Any, device: str) -> None:
        self._pipeline = pipeline
        self._device = device

    def __iter__(self) -> Iterator[Any]:
        import torch
        from torch.utils.dlpack import from_dlpack

        while True:
            stream = torch.cuda.current_stream(self._device) if self._device.startswith("cuda") else None
            images, labels = self._pipeline.run(stream)
            yield (
                from_dlpack(images.as_tensor()).permute(0, 3, 1, 2),
                from_dlpack(labels.as_tensor()).view(-1).to(torch.int64),
            )


def summarize(rows: Sequence[dict[str, Any]], base: str, ratio_name: str) -> dict[str, dict[str, Any]]:
    """Return the medians of each side by its name, and how its speed compares with that of `base`.

    Args:
        rows: As `row_of` makes them; those with an error are left out.
        base: The side that the others are compared with.
        ratio_name: What images/s over those of `base` are called; None where `base` has no row.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row["name"] for row in rows if "error" not in row):
        mine = [row for row in rows if row["name"] == name and "error" not in row]
        shares = [row["cpu_percent"] / row["cpu_cores_available"] for row in mine if row.get("cpu_percent") is not None]
        waits = [row["data_wait_percent"] for row in mine]
        found[name] = {
            "images_per_s": statistics.median(row["images_per_s"] for row in mine),
            "runs": [round(row["images_per_s"], 1) for row in mine],
            "data_wait_percent": None if None in waits else statistics.median(waits),
            "cpu_percent_of_cores": statistics.median(shares) if shares else None,
            "options": mine[0]["options"],
        }
    for line in found.values():
        line[ratio_name] = line["images_per_s"] / found[base]["images_per_s"] if base in found else None
    return found


def row_of(name: str, task: Task, figures: dict[str, Any]) -> dict[str, Any]:
    """Return the flat row of one measurement."""
    readings = {key: reading["value"] for key, reading in figures["readings"].items()}
    return {
        "name": name,
        "mode": task.mode,
        "options": task.options,
        "images_per_s": figures["images_per_s"],
        "data_wait_percent": figures["data_wait_percent"],
        "first_batch_s": figures["first_batch_s"],
        "cpu_cores_available": figures["cpu_cores_available"],
        "fallbacks": figures["fallbacks"],
        **readings,
        "task": asdict(task),
    }
