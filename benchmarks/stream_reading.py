"""Speed of streams against indexed shards and against the plain webdataset library, on the same cores and files.

    python benchmarks/stream_reading.py SHARDS [--workers N] [--seconds S] [--rounds R] [--json FILE]

Each round measures every reader once, one after another, so that other load on the machine hits all of them; the figure
is the median over rounds. "http" reads from a server in a process of its own on this machine. "parts only" reads and
groups samples without decoding: the ceiling of one stream. Files are in the page cache after the first warm-up.
CPU time is that of the loader's processes, without the server; other load on the machine changes it least.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil

import fastdata
from fastdata.baselines import plain_webdataset
from fastdata.sources.stream import open_stream
from fastdata.task import Task

WARM_UP_S = 2.0
PORT = 18_437


@contextmanager
def pipeline(data: Any, workers: int, **arguments: Any) -> Iterator[Iterable[Any]]:
    """Open the webdataset backend as a training would."""
    with fastdata.open_pipeline(
        data,
        backend="webdataset",
        transform=fastdata.imagenet_train(224),
        batch_size=64,
        workers=workers,
        **arguments,
    ) as loader:
        yield loader


@contextmanager
def plain(data: str, workers: int) -> Iterator[Iterable[Any]]:
    """Open the plain library with PIL decode."""
    yield plain_webdataset(Task(data=data, backend="plain webdataset", batch_size=64, workers=workers)).batches


@contextmanager
def undecoded(data: str) -> Iterator[Iterable[Any]]:
    """Read and group samples, and do nothing with them."""
    stream = open_stream(data, "folders")

    class Parts:
        def __iter__(self) -> Iterator[tuple[list[Any], None]]:
            with contextlib.closing(stream.read(range(len(stream.shards)), 4, 1)) as samples:
                for sample in samples:
                    yield [sample], None

    yield Parts()


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, int]]:
    """Serve a folder over http; the address and the server's process id."""
    command = [sys.executable, "-m", "http.server", str(PORT), "--bind", "127.0.0.1", "--directory", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(1.0)
    try:
        yield f"http://127.0.0.1:{PORT}", process.pid
    finally:
        process.kill()
        process.wait()


def cpu_s(without: int) -> float:
    """Return CPU seconds of this process and all it started, those that ended included, but one process."""
    total = 0.0
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid != without:
                total += sum(process.cpu_times()[:4])
    return total


def measure(
    opened: contextlib.AbstractContextManager[Iterable[Any]], seconds: float, server: int
) -> tuple[float, float]:
    """Return images a second, and CPU milliseconds an image, after a warm-up, over as many epochs as the time takes."""
    with opened as batches:
        started, begun, count, cpu = time.perf_counter(), 0.0, 0, 0.0
        while True:
            for images, _ in batches:
                now = time.perf_counter()
                if begun:
                    count += len(images)
                    if now - begun >= seconds:
                        return round(count / (now - begun), 1), round((cpu_s(server) - cpu) / count * 1e3, 3)
                elif now - started >= WARM_UP_S:
                    begun, cpu = now, cpu_s(server)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=Path, help="folder of shards")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    chosen = parser.parse_args()
    folder, workers = str(chosen.shards), chosen.workers
    streamed: dict[str, Any] = {"shuffle": fastdata.BufferShuffle(500)}
    local = {**streamed, "options": fastdata.WebDatasetOptions(stream=True)}
    with served(chosen.shards) as (address, server):
        urls = [f"{address}/{path.name}" for path in sorted(chosen.shards.glob("*.tar"))]
        readers: dict[str, Callable[[], contextlib.AbstractContextManager[Iterable[Any]]]] = {
            "webdataset backend, indexed": functools.partial(pipeline, folder, workers),
            "webdataset backend, local stream": functools.partial(pipeline, folder, workers, **local),
            "webdataset backend, http stream": functools.partial(pipeline, urls, workers, **streamed),
            "plain webdataset, PIL": functools.partial(plain, folder, workers),
            "local stream, parts only": functools.partial(undecoded, folder),
        }
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in readers}
        for _ in range(chosen.rounds):
            for name, opened in readers.items():
                runs[name].append(measure(opened(), chosen.seconds, server))
                print(name, runs[name][-1], flush=True)
    rows = [
        {
            "reader": name,
            "images_per_s": statistics.median(speed for speed, _ in found),
            "cpu_ms_per_image": statistics.median(cpu for _, cpu in found),
            "runs": found,
        }
        for name, found in runs.items()
    ]
    for row in rows:
        print(f"{row['reader']:36} {row['images_per_s']:10.1f} img/s {row['cpu_ms_per_image']:8.2f} ms of CPU an image")
    if chosen.json:
        chosen.json.write_text(json.dumps({"workers": workers, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
