"""Packs one split: worker threads load samples ahead, one thread takes them in storage order and fills shards.

What lies in a shard follows from the storage order and the sizes of what is stored, never from which thread was faster.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastdata.errors import SourceError
from fastdata.progress import Bar
from fastdata.shards.load import Loaded, Loader, Refused
from fastdata.shards.options import ConvertOptions
from fastdata.shards.outfolder import remove_shards_from
from fastdata.shards.shardfile import ShardFile
from fastdata.shards.tarformat import BLOCK, archive_bytes, shard_name
from fastdata.shards.workfolder import ShardRecord, WorkFolder
from fastdata.sources.arrayfile import sync_folder
from fastdata.sources.folder import FolderSource

_CHUNK = 16  # samples a task at most: handing over a task costs about as much as a small sample
_CHUNK_BYTES = 2 << 20
_CHUNKS_AHEAD = 4  # for each worker
_NO_BYTES = memoryview(b"")
_BAD_FILE = (
    "Repair or remove it (`fastdata check` lists all such files), or leave such files out: "
    '--on-error skip (in Python: on_error="skip").'
)


@dataclass(frozen=True)
class PackJob:
    """What is the same for all splits of a conversion."""

    source: FolderSource
    """Where samples come from."""
    loader: Loader
    """Loads samples of it."""
    options: ConvertOptions
    """What shards hold."""
    work: WorkFolder
    """Where shards grow and their records lie."""
    workers: int
    """Threads that load."""


def pack_split(
    job: PackJob, split: str, folder: Path, order: NDArray[np.int64], finished: Sequence[ShardRecord], bar: Bar
) -> list[ShardRecord]:
    """Write the shards of one split, after those that an earlier run finished.

    Args:
        job: The conversion.
        split: The split's name, "" for the whole set.
        folder: Where shards get their names.
        order: (n,) int64 positions in storage order.
        finished: Records of the shards to go on behind, see `unaltered`.
        bar: Counts samples.

    Returns:
        A record of each shard, in order, those of the earlier run included.

    Raises:
        FastDataError: A file cannot be stored and may not be skipped; names it.
    """
    records = list(finished)
    job.work.forget(split, len(records))
    remove_shards_from(folder, len(records))
    start = records[-1].next_place if records else 0
    if start == len(order):
        bar.advance(len(order))
        return records
    bar.advance(start)
    with ExitStack() as stack:
        pools = [stack.enter_context(_pool(count, name)) for count, name in
                 ((job.workers, "load"), (1, "write"), (1, "hash"), (1, "finish"))]  # fmt: skip
        packer = _Packer(job, split, folder, pools, records)
        stack.callback(packer.discard)
        for place, sample in enumerate(_load_in_order(job, order[start:], pools[0]), start):
            packer.take(place, sample)
            bar.advance(1, sample.data_bytes if isinstance(sample, Loaded) else 0)
        packer.end(len(order))
    return records


def unaltered(
    job: PackJob, records: Sequence[ShardRecord], folder: Path, order: NDArray[np.int64], bar: Bar
) -> list[ShardRecord]:
    """Return the records before the first whose files or shard changed: it, and so all behind it, is made again.

    Args:
        job: The conversion.
        records: Of the shards that an earlier run finished.
        folder: Where the shards lie.
        order: (n,) int64 positions in storage order.
        bar: Counts shards.
    """
    starts = [0, *(record.next_place for record in records)]

    def changed(number: int) -> bool:
        record = records[number]
        places = order[starts[number] : starts[number + 1]].tolist()
        if [job.source.stamp(position) for position in places] != list(map(tuple, record.stamps.tolist())):
            return True
        try:
            with open(folder / shard_name(number), "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() != record.sha256
        except OSError:  # a shard that cannot be read back is as good as lost
            return True

    with _pool(job.workers, "look") as pool:
        looks = [pool.submit(changed, number) for number in range(len(records))]
        try:
            for number, look in enumerate(looks):
                if look.result():
                    return list(records[:number])
                bar.advance(1, records[number].size_bytes)
        finally:
            for look in looks:
                look.cancel()
    return list(records)


class _Packer:
    """Fills shards one after another and has each finished in the background."""

    def __init__(
        self, job: PackJob, split: str, folder: Path, pools: Sequence[ThreadPoolExecutor], records: list[ShardRecord]
    ) -> None:
        self._job, self._split, self._folder, self._records = job, split, folder, records
        self._write_pool, self._hash_pool, self._finish_pool = pools[1:]
        self._number = len(records)
        self._file: ShardFile | None = None
        self._samples: list[Loaded] = []
        self._offsets: list[int] = []
        self._next_place = 0
        self._skipped: list[tuple[int, str]] = []
        self._skipped_since: list[tuple[int, str]] = []  # after the last stored sample
        self._stamps: list[tuple[int, int]] = []
        self._stamps_since: list[tuple[int, int]] = []
        self._finishing: deque[Future[ShardRecord]] = deque()
        self._failed = False

    def take(self, place: int, sample: Loaded | Refused) -> None:
        """Store one sample, or note that it is left out."""
        self._stamps_since.append(sample.stamp)
        if isinstance(sample, Refused):
            if self._job.options.on_error == "raise":
                error = sample.error
                raise error if error.remedy else SourceError(error.subject, error.found, error.expected, _BAD_FILE)
            self._skipped_since.append((sample.position, str(sample.error)))
            return
        size = sample.stop - sample.start
        if self._file is not None and archive_bytes(self._file.payload_bytes + size) > self._job.options.max_bytes:
            self._close_shard()
        if self._file is None:
            self._file = ShardFile(
                self._job.work.temporary(self._split, self._number), self._write_pool, self._hash_pool
            )
        self._offsets.append(self._file.payload_bytes + BLOCK)
        self._samples.append(replace(sample, segment=_NO_BYTES))
        self._file.add(sample.segment, sample.start, sample.stop)
        self._take_since()
        self._next_place = place + 1

    def end(self, size: int) -> None:
        """Finish the last shard, and wait until all are named."""
        if self._file is not None:
            self._take_since()
            self._next_place = size
            self._close_shard()
        self._collect(0)

    def discard(self) -> None:
        """Remove a shard that did not become whole. Does nothing after `end`."""
        if self._file is not None:
            self._file.discard()
            self._file = None

    def _take_since(self) -> None:
        """Count what came after the last stored sample to the open shard."""
        self._skipped += self._skipped_since
        self._stamps += self._stamps_since
        self._skipped_since, self._stamps_since = [], []

    def _close_shard(self) -> None:
        assert self._file is not None
        self._collect(1)
        self._finishing.append(
            self._finish_pool.submit(
                self._finish,
                self._file,
                self._number,
                self._rows(),
                np.array(self._stamps, np.int64),
                self._next_place,
                tuple(self._skipped),
                tuple((sample.position, sample.not_crop_ready) for sample in self._samples if sample.not_crop_ready),
                Counter(sample.note for sample in self._samples if sample.note),
            )
        )
        self._file, self._number = None, self._number + 1
        self._samples, self._offsets, self._skipped, self._stamps = [], [], [], []

    def _collect(self, most: int) -> None:
        while len(self._finishing) > most:
            self._records.append(self._finishing.popleft().result())

    def _rows(self) -> dict[str, NDArray[Any]]:
        samples = self._samples
        rows: dict[str, NDArray[Any]] = {
            "position": np.array([sample.position for sample in samples], np.int64),
            "offset": np.array(self._offsets, np.int64),
            "size": np.array([sample.data_bytes for sample in samples], np.int64),
            "width": np.array([sample.facts.width for sample in samples], np.int32),
            "height": np.array([sample.facts.height for sample in samples], np.int32),
            "orientation": np.array([sample.facts.orientation for sample in samples], np.uint8),
            "crc32": np.array([sample.crc32 for sample in samples], np.uint32),
        }
        if samples[0].stored_sha256:
            for name in ("source_sha256", "stored_sha256"):
                digests = b"".join(getattr(sample, name) for sample in samples)
                rows[name] = np.frombuffer(digests, np.uint8).reshape(len(samples), 32)
        return rows

    def _finish(
        self,
        file: ShardFile,
        number: int,
        rows: dict[str, NDArray[Any]],
        stamps: NDArray[np.int64],
        next_place: int,
        skipped: tuple[tuple[int, str], ...],
        not_crop_ready: tuple[tuple[int, str], ...],
        notes: Counter[str],
    ) -> ShardRecord:
        try:
            if self._failed:  # named shards have no gaps
                raise CancelledError
            sha256, size_bytes = file.finish()
            samples = len(rows["position"])
            record = ShardRecord(samples, size_bytes, sha256, next_place, skipped, not_crop_ready, notes, rows, stamps)
            self._job.work.keep_record(self._split, number, record)
            file.publish(self._folder / shard_name(number))
            sync_folder(self._folder)
        except BaseException:
            self._failed = True
            file.discard()
            raise
        return record


def _load_in_order(job: PackJob, positions: NDArray[np.int64], pool: ThreadPoolExecutor) -> Iterator[Loaded | Refused]:
    """Yield samples in the order of their positions, loaded ahead by the pool's threads."""
    ahead: deque[Future[list[Loaded | Refused]]] = deque()
    at = 0
    mean_bytes = float(_CHUNK_BYTES)
    try:
        while at < len(positions) or ahead:
            while at < len(positions) and len(ahead) < _CHUNKS_AHEAD * job.workers:
                count = max(1, min(_CHUNK, int(_CHUNK_BYTES / mean_bytes)))
                ahead.append(pool.submit(job.loader.load, positions[at : at + count].tolist()))
                at += count
            chunk = ahead.popleft().result()
            stored = [sample.data_bytes for sample in chunk if isinstance(sample, Loaded)]
            if stored:
                mean_bytes = max(1.0, 0.75 * mean_bytes + 0.25 * sum(stored) / len(stored))
            yield from chunk
    finally:
        for future in ahead:
            future.cancel()


def _pool(count: int, name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix=f"fastdata-{name}")
