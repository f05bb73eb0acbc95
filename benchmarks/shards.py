"""Converter against ``tar cf && sync``, opening a large index, and scanning a large folder: all figures of shards.

Usage: python benchmarks/shards.py FOLDER [--scratch DIR] [--rounds N] [--samples N] [--files N]

FOLDER holds class folders of JPEGs, warm in the page cache; both sides run in turn on it. `--realtime` gives both the
first claim on the cores (Linux, root), for machines that others use too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fastdata.shards import convert_folder
from fastdata.sources.folder import open_folder
from fastdata.sources.paths import PathTable
from fastdata.sources.shardindex import ShardIndex, ShardInfo, read_index, write_index

_OPEN_INDEX = """
import sys, time, psutil
from pathlib import Path
from fastdata.sources.shardindex import read_index
from fastdata.sources.tar import TarSource
before, started_s = psutil.Process().memory_full_info().uss, time.perf_counter()
source = TarSource("synthetic", read_index(Path(sys.argv[1])), with_labels=True)
opened_s = time.perf_counter() - started_s
for column in source.index.columns.values():
    column.sum()
print(len(source), opened_s, (psutil.Process().memory_full_info().uss - before) / 1e6)
"""


def compare_with_tar(folder: Path, scratch: Path, rounds: int, realtime: bool) -> None:
    """Write the folder as shards and as a plain tar, in turn."""
    if realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    source = open_folder(folder)
    size_bytes = sum(len(source.read(i)) for i in range(len(source)))  # also warms the page cache
    out, archive = scratch / "shards", scratch / "plain.tar"
    ratios = []
    for number in range(rounds + 1):
        started_s = time.perf_counter()
        subprocess.run(f'tar cf "{archive}" -C "{folder.parent}" "{folder.name}" && sync', shell=True, check=True)
        tar_s = time.perf_counter() - started_s
        archive.unlink()
        os.sync()  # else the fsyncs of the next run wait for this removal
        started_s = time.perf_counter()
        convert_folder(folder, out)
        ours_s = time.perf_counter() - started_s
        shutil.rmtree(out)
        os.sync()
        if number == 0:
            continue  # the first round compiles, and finds the disk's journal empty
        ratios.append(tar_s / ours_s)
        print(
            f"tar && sync {tar_s:.2f} s, fastdata {ours_s:.2f} s: {len(source) / ours_s:,.0f} images/s, "
            f"{size_bytes / 1e6 / ours_s:,.0f} MB/s, {ratios[-1]:.2f} of tar's speed"
        )
    print(f"median: {statistics.median(ratios):.2f} of tar's speed, sha256 and crc32 included")


def open_large_index(scratch: Path, samples: int) -> None:
    """Open an index of so many samples in a new process, while another has it mapped."""
    shards = max(1, samples // 18_000)
    number = np.arange(samples, dtype=np.int64)
    shard = (number * shards // samples).astype(np.int32)
    starts = np.searchsorted(shard, np.arange(shards + 1)).astype(np.int64)
    columns = {
        "ids": number,
        "shard": shard,
        "offset": (number - starts[shard]) * 111_616 + 512,
        "size": np.full(samples, 110_000, np.int64),
        "labels": number % 1000,
        "width": np.full(samples, 500, np.int32),
        "height": np.full(samples, 375, np.int32),
        "orientation": np.ones(samples, np.uint8),
        "crc32": np.zeros(samples, np.uint32),
    }
    shard_infos = tuple(
        ShardInfo(f"shard-{i:06d}.tar", 2_000_000_000, count, "0" * 64)
        for i, count in enumerate(np.diff(starts).tolist())
    )
    index = ShardIndex(
        shards=shard_infos,
        columns=columns,
        paths=PathTable(np.zeros(30 * samples, np.uint8), np.arange(samples + 1, dtype=np.int64) * 30),
        storage_order=number,
        shard_starts=starts,
        classes=tuple(f"n{i:08d}" for i in range(1000)),
        fingerprint="0" * 32,
    )
    path = scratch / "index.fastdata"
    write_index(path, index)
    held = read_index(path)
    for column in held.columns.values():
        column.sum()
    done = subprocess.run([sys.executable, "-c", _OPEN_INDEX, path], capture_output=True, text=True, check=True)
    count, opened_s, private_mb = done.stdout.split()
    print(
        f"index of {int(count):,} samples ({path.stat().st_size / 1e6:,.0f} MB): "
        f"opened in {float(opened_s) * 1e3:.1f} ms, "
        f"{float(private_mb):.1f} MB private in a second process that reads all columns"
    )
    path.unlink()


def scan_large_folder(scratch: Path, files: int) -> None:
    """Scan a folder of so many empty files, and open it again from the kept index."""
    root = scratch / "many"
    for number in range(files):
        folder = root / f"n{number // 1000:08d}"
        if number % 1000 == 0:
            folder.mkdir(parents=True)
        os.close(os.open(folder / f"ILSVRC_{number:08d}.JPEG", os.O_CREAT | os.O_WRONLY))
    time.sleep(2.5)  # a folder that just changed is not kept
    for what in ("scanned", "opened from the kept index"):
        started_s = time.perf_counter()
        source = open_folder(root, cache_dir=scratch / "cache")
        print(f"{len(source):,} files {what} in {time.perf_counter() - started_s:.2f} s")


def main() -> None:
    """Measure all three."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scratch", type=Path, help="on the disk to write to; default: the system's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--realtime", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        open_large_index(Path(scratch), arguments.samples)
        scan_large_folder(Path(scratch), arguments.files)
        compare_with_tar(arguments.folder, Path(scratch), arguments.rounds, arguments.realtime)


if __name__ == "__main__":
    main()
