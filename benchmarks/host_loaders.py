"""Compares loaders on the CPU end to end: ``python benchmarks/host_loaders.py FOLDER [OPTIONS]``.

FOLDER holds photographs in class folders. Every side delivers uint8 batches of a random resized crop, in a fresh
process for each round; the rounds of all sides take turns, forwards and backwards. One epoch warms up (page cache,
kernels, workers), then whole epochs are counted, their ends included. Figures are medians with the least and the most.
"CPU" is that of a side's whole process tree, which a busy machine changes less than the speed; "held" is how long a
thread of fastdata keeps the interpreter for one image.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

BATCH, SIZE = 256, 224


@dataclass(frozen=True)
class Side:
    """One loader on one form of the photographs."""

    name: str
    """As it stands in the table."""
    data: str
    """"folder", "shards", "crop-ready" or "ffcv"."""
    kind: str
    """A key of `LOADERS`."""
    decode: str = "exact"
    """Of fastdata's host options."""


SIDES = (
    Side("plain ImageFolder + DataLoader", "folder", "image_folder"),
    Side("plain torchvision.io + DataLoader", "folder", "torchvision_io"),
    Side("FFCV, JPEG mode", "ffcv", "ffcv"),
    Side("fastdata pil", "folder", "pil"),
    Side("fastdata torchvision", "folder", "torchvision"),
    Side("fastdata torchvision", "shards", "torchvision"),
    Side("fastdata torchvision", "crop-ready", "torchvision"),
    Side("fastdata webdataset", "shards", "webdataset"),
    Side("fastdata webdataset", "crop-ready", "webdataset"),
    Side("fastdata webdataset", "crop-ready", "webdataset", "fast"),
)
FIRST_BATCH = (Side("fastdata pil", "folder", "pil"), Side("fastdata webdataset", "crop-ready", "webdataset"))


def load_image_folder(data: str, workers: int, _decode: str) -> Iterable[Any]:
    """As PyTorch's ImageNet example, with uint8 output."""
    from torch.utils.data import DataLoader
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    steps = [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
    dataset = ImageFolder(data, transforms.Compose(steps))
    return DataLoader(dataset, BATCH, shuffle=True, num_workers=workers, persistent_workers=True)


class DecodedFolder:
    """A dataset on torchvision.io, with the transforms that torchvision recommends for tensors."""

    def __init__(self, folder: str) -> None:
        """List the folder."""
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2

        self._samples = ImageFolder(folder).samples
        self._transform = v2.Compose([v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()])

    def __len__(self) -> int:
        """Return the number of photographs."""
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """Decode one."""
        from torchvision.io import ImageReadMode, decode_image, read_file

        path, label = self._samples[index]
        return self._transform(decode_image(read_file(path), ImageReadMode.RGB)), label


def load_torchvision_io(data: str, workers: int, _decode: str) -> Iterable[Any]:
    """Decode with torchvision.io in a DataLoader's workers."""
    from torch.utils.data import DataLoader

    return DataLoader(DecodedFolder(data), BATCH, shuffle=True, num_workers=workers, persistent_workers=True)


def load_ffcv(data: str, workers: int, _decode: str) -> Iterable[Any]:
    """As FFCV's documentation has it for ImageNet, as far as uint8 tensors."""
    from ffcv.fields import RGBImageField
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, Squeeze, ToTensor, ToTorchImage

    image = [RandomResizedCropRGBImageDecoder((SIZE, SIZE)), RandomHorizontalFlip(), ToTensor(), ToTorchImage()]
    pipelines = {"image": image, "label": [IntDecoder(), ToTensor(), Squeeze()]}
    return Loader(
        data,
        BATCH,
        num_workers=workers,
        order=OrderOption.RANDOM,
        os_cache=True,
        pipelines=pipelines,
        custom_fields={"image": RGBImageField},
    )


def load_fastdata(backend: str) -> Callable[[str, int, str], Iterable[Any]]:
    """Return the loader of a backend of ours."""

    def load(data: str, workers: int, decode: str) -> Iterable[Any]:
        import fastdata

        kinds = {"webdataset": fastdata.WebDatasetOptions}
        return fastdata.open_pipeline(
            data,
            backend=backend,
            transform=(fastdata.RandomResizedCrop(SIZE), fastdata.RandomHorizontalFlip()),
            batch_size=BATCH,
            dtype="uint8",
            workers=workers,
            options=kinds.get(backend, fastdata.HostOptions)(decode=decode),
        )

    return load


LOADERS: dict[str, Callable[[str, int, str], Iterable[Any]]] = {
    "image_folder": load_image_folder,
    "torchvision_io": load_torchvision_io,
    "ffcv": load_ffcv,
    **{backend: load_fastdata(backend) for backend in ("pil", "torchvision", "webdataset")},
}


def measure(kind: str, data: str, workers: int, epochs: int, decode: str) -> dict[str, Any]:
    """Run one side in this process."""
    import torch

    torch.set_num_threads(1)
    started = time.perf_counter()
    loader = LOADERS[kind](data, workers, decode)
    batches: Iterator[Any] = iter(loader)
    images, _ = next(batches)
    first_batch_s = time.perf_counter() - started
    if images.dtype != torch.uint8 or images.shape[1:] != (3, SIZE, SIZE):
        raise SystemExit(f"{kind} delivered {images.dtype} {tuple(images.shape)}")
    figures: dict[str, Any] = {"first_batch_s": first_batch_s}
    if epochs:
        for _ in batches:
            pass
        count, cpu_s, started = 0, tree_cpu_s(), time.perf_counter()
        for _ in range(epochs):
            for images, _ in loader:
                count += len(images)
        elapsed_s = time.perf_counter() - started
        cpu_us = (tree_cpu_s() - cpu_s) / count * 1e6
        figures |= {"images": count, "images_per_s": count / elapsed_s, "cpu_us_per_image": cpu_us}
    if hasattr(loader, "report"):
        details = loader.report().details
        figures["details"] = details
        loader.close()
    return figures


def tree_cpu_s() -> float:
    """Return the CPU seconds of this process and its workers so far."""
    import psutil

    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(part.user + part.system for part in times)


def write_ffcv(folder: str, out: str, workers: int) -> None:
    """Write FFCV's file with the JPEGs as they are, not encoded anew."""
    import numpy as np
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.rgb_image import IMAGE_MODES
    from ffcv.writer import DatasetWriter
    from PIL import Image
    from torchvision.datasets import ImageFolder

    class StoredJpeg(RGBImageField):  # type: ignore[misc,unused-ignore]
        def encode(self, destination: Any, image: Any, malloc: Any) -> None:
            data = np.frombuffer(Path(image).read_bytes(), np.uint8)
            with Image.open(image) as picture:
                destination["width"], destination["height"] = picture.size
            destination["mode"] = IMAGE_MODES["jpg"]
            destination["data_ptr"], storage = malloc(data.nbytes)
            storage[:] = data

    class Paths:
        samples = ImageFolder(folder).samples

        def __len__(self) -> int:
            return len(self.samples)

        def __getitem__(self, index: int) -> tuple[str, int]:
            return self.samples[index]

    writer = DatasetWriter(out, {"image": StoredJpeg(write_mode="jpg"), "label": IntField()}, num_workers=workers)
    writer.from_indexed_dataset(Paths())


def check_crop_ready(shards: str) -> int:
    """Return how many samples carry the table that crops are cut by; refuse a set with few."""
    from fastdata.jpeg import read_header
    from fastdata.sources.open import open_source

    source = open_source(shards)
    ready = sum(read_header(source.read(position)).crop_ready for position in range(len(source)))
    if ready < 0.9 * len(source):
        raise SystemExit(f"{shards}: only {ready} of {len(source)} samples are crop-ready")
    return ready


def run(arguments: list[str], *, path: str = "", cache: str = "") -> dict[str, Any]:
    """Run this script again in a fresh process; return what it found, or why it failed."""
    environment = dict(os.environ)
    if path:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [path, environment.get("PYTHONPATH", "")]))
    if cache:
        environment["NUMBA_CACHE_DIR"] = cache
    started = time.perf_counter()
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stderr.strip() or done.stdout.strip()).splitlines()[-1]}
    return {**json.loads(done.stdout.splitlines()[-1]), "process_s": time.perf_counter() - started}


def compare(arguments: argparse.Namespace, places: dict[str, str]) -> list[dict[str, Any]]:
    """Run all sides in turn."""
    sides = [
        side
        for side in SIDES
        if not arguments.only or any(word in f"{side.name}, {side.data}" for word in arguments.only)
    ]
    runs: dict[Side, list[dict[str, Any]]] = {side: [] for side in sides}
    for number in range(arguments.rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            if any("error" in found for found in runs[side]):
                continue
            asked = ["--side", side.kind, "--decode", side.decode, "--epochs", str(arguments.epochs)]
            asked += ["--workers", str(arguments.workers), places[side.data]]
            path = arguments.ffcv_path if side.kind == "ffcv" else ""
            found = {"error": "no --ffcv-path"} if places[side.data] == "" else run(asked, path=path)
            runs[side].append(found)
            said = found.get("error") or f"{found['images_per_s']:,.0f} images/s"
            print(f"round {number + 1}: {side.name}, {side.data}, {side.decode}: {said}", file=sys.stderr, flush=True)
    return [row_of(side, found) for side, found in runs.items()]


def row_of(side: Side, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the rounds of one side together."""
    row: dict[str, Any] = {"loader": side.name, "data": side.data, "options": {"decode": side.decode}, "runs": runs}
    failed = [found["error"] for found in runs if "error" in found]
    if failed:
        return {**row, "error": failed[0]}
    speeds = [found["images_per_s"] for found in runs]
    row |= {"images_per_s": statistics.median(speeds), "least": min(speeds), "most": max(speeds)}
    row["cpu_us_per_image"] = statistics.median(found["cpu_us_per_image"] for found in runs)
    held = [found["details"]["python_us_per_image"] for found in runs if "details" in found]
    return row | ({"python_us_per_image": statistics.median(held)} if held else {})


def first_batches(arguments: argparse.Namespace, places: dict[str, str]) -> list[dict[str, Any]]:
    """Time the first batch with an empty and with a warm cache of compiled kernels."""
    rows = []
    for side in FIRST_BATCH:
        for _ in range(arguments.first_batch_rounds):
            with tempfile.TemporaryDirectory() as cache:
                for state in ("empty", "warm"):
                    asked = ["--side", side.kind, "--workers", str(arguments.workers), places[side.data]]
                    found = run([*asked, "--epochs", "0"], cache=cache)
                    rows.append({"loader": side.name, "data": side.data, "compile_cache": state, **found})
                    print(rows[-1], file=sys.stderr, flush=True)
    return rows


def show(document: dict[str, Any]) -> None:
    """Print the table, each side with its ratio to the plain loaders and FFCV."""
    rows = document["rows"]
    bases = {row["loader"]: row["images_per_s"] for row in rows[:3] if "images_per_s" in row}
    print(
        f"{'loader':36}{'data':12}{'decode':8}{'images/s':>9}{'least-most':>14} CPU us  held us  ratios: {list(bases)}"
    )
    for row in rows:
        head = f"{row['loader']:36}{row['data']:12}{row['options']['decode']:8}"
        if "error" in row:
            print(head, row["error"])
            continue
        ratios = "  ".join(f"{row['images_per_s'] / base:.2f}" for base in bases.values())
        spread = f"{row['least']:7,.0f}-{row['most']:<6,.0f}"
        held = f"{row['python_us_per_image']:9.1f}" if "python_us_per_image" in row else " " * 9
        print(f"{head}{row['images_per_s']:9,.0f}{spread}{row['cpu_us_per_image']:7,.0f}{held}  {ratios}")
    for row in document["first_batches"]:
        said = row.get("error") or f"{row['first_batch_s']:.2f} s ({row['process_s']:.2f} s with the process's start)"
        print(f"first batch, {row['loader']} on {row['data']}, {row['compile_cache']} compile cache: {said}")


def main() -> None:
    """Parse the command line; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", metavar="FOLDER")
    parser.add_argument("--shards", default="", help="the same photographs as plain shards; made where not given")
    parser.add_argument("--crop-ready", default="", help="and as crop-ready shards")
    parser.add_argument("--ffcv-path", default="", help="where FFCV is installed, for its process only")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--first-batch-rounds", type=int, default=3)
    parser.add_argument("--only", action="append", default=[], help="sides whose name or data holds this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--decode", default="exact", help=argparse.SUPPRESS)
    parser.add_argument("--write-ffcv", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write_ffcv:
        write_ffcv(arguments.data, arguments.write_ffcv, arguments.workers)
        print("{}")
        return
    if arguments.side:
        figures = measure(arguments.side, arguments.data, arguments.workers, arguments.epochs, arguments.decode)
        print(json.dumps(figures))
        return
    with tempfile.TemporaryDirectory(prefix="host-loaders-") as folder:
        places = prepare(arguments, Path(folder))
        document = {
            "machine": {"cpu": platform.processor() or platform.machine(), "cores": len(os.sched_getaffinity(0))},
            "load_average_before": os.getloadavg(),
            "workers": arguments.workers,
            "crop_ready_samples": check_crop_ready(places["crop-ready"]),
            "rows": compare(arguments, places),
            "first_batches": first_batches(arguments, places),
            "load_average_after": os.getloadavg(),
        }
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    show(document)


def prepare(arguments: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Make the forms of the photographs that were not given; return where each lies."""
    from fastdata.shards.convert import convert_folder
    from fastdata.shards.options import ConvertOptions

    places = {"folder": arguments.data, "shards": arguments.shards, "crop-ready": arguments.crop_ready, "ffcv": ""}
    for form in ("shards", "crop-ready"):
        if not places[form]:
            places[form] = str(folder / form)
            convert_folder(arguments.data, places[form], ConvertOptions(crop_ready=form == "crop-ready"))
    if arguments.ffcv_path:
        beton = str(folder / "photographs.beton")
        found = run(["--write-ffcv", beton, arguments.data], path=arguments.ffcv_path)
        if "error" in found:
            print(f"FFCV cannot be measured: {found['error']}", file=sys.stderr)
        else:
            places["ffcv"] = beton
    return places


if __name__ == "__main__":
    main()
