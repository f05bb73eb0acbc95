"""Compares a finished set of shards with its index, byte for byte, and names each fault."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fastdata.cores import usable_cores
from fastdata.errors import ShardError, SourceError
from fastdata.progress import Bar
from fastdata.shards.outfolder import read_splits
from fastdata.shards.tarformat import BLOCK, archive_bytes, header, label_parts, sample_bytes, sample_key
from fastdata.sources.arrayfile import array_file_digest
from fastdata.sources.mapping import map_file
from fastdata.sources.paths import to_text
from fastdata.sources.shardindex import CLASSES_NAME, INDEX_NAME, WORK_NAME, ShardIndex, ShardInfo, read_index
from fastdata.sources.tarscan import member_name, members
from fastdata.wording import counted

_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class Fault:
    """One thing that is not as the index says."""

    path: str
    """The shard, index or other file."""
    member: str
    """The member of the shard, or "" where the whole file is meant."""
    found: str
    """What is wrong."""

    def __str__(self) -> str:
        return f"{self.path}{' member ' * bool(self.member)}{self.member}: {self.found}"


@dataclass(frozen=True)
class VerifyResult:
    """What a verification came to."""

    samples: int
    """Number of samples that the index lists, over all splits."""
    shards: int
    """Number of shards that the index lists."""
    size_bytes: int
    """Of these shards, as the index says."""
    faults: tuple[Fault, ...]
    """Empty where every byte is as it was written."""


def verify_shards(out: str | Path, *, workers: int | None = None) -> VerifyResult:
    """Check a set of shards, or all splits in a folder: that nothing is missing, cut, zeroed, altered or surplus.

    Args:
        out: The folder that was converted to.
        workers: Threads, each checks one shard at a time; None: one for each usable core.

    Raises:
        ShardError: There is no finished set in the folder.
    """
    out = Path(out)
    if out.is_file():
        raise ShardError(str(out), "a file", "the folder of shards")
    if (out / WORK_NAME).exists():
        raise ShardError(
            str(out),
            "an unfinished conversion",
            "a finished set of shards",
            "Finish it with `fastdata shard --resume`.",
        )
    splits = read_splits(out)
    folders = [out / name for name in splits] or [out]
    results = [_verify_set(folder, workers or usable_cores()) for folder in folders]
    return VerifyResult(
        sum(result.samples for result in results),
        sum(result.shards for result in results),
        sum(result.size_bytes for result in results),
        tuple(fault for result in results for fault in result.faults),
    )


def _verify_set(folder: Path, workers: int) -> VerifyResult:
    path = folder / INDEX_NAME
    if not path.exists():
        raise ShardError(str(path), "no such file", "the index of a finished set of shards")
    try:
        index = read_index(path)
    except SourceError as error:
        return VerifyResult(0, 0, 0, (Fault(str(path), "", error.found),))
    faults = [*_check_index(path, index), *_check_names(folder, index)]
    size_bytes = sum(shard.size_bytes for shard in index.shards)
    with Bar(f"Verifying {folder}", len(index), "images") as bar, ThreadPoolExecutor(workers) as pool:
        found = pool.map(lambda number: _check_shard(folder, index, number), range(len(index.shards)))
        for shard, shard_faults in zip(index.shards, found, strict=True):
            faults += shard_faults
            bar.advance(shard.samples, shard.size_bytes)
    return VerifyResult(len(index), len(index.shards), size_bytes, tuple(faults))


def _check_index(path: Path, index: ShardIndex) -> Iterator[Fault]:
    said, found = array_file_digest(path)
    if said != found:
        yield Fault(str(path), "", f"altered: sha256 of its arrays is {found[:16]}..., its header says {said[:16]}...")
    if sum(shard.samples for shard in index.shards) != len(index):
        yield Fault(
            str(path),
            "",
            f"its shards hold {counted(sum(s.samples for s in index.shards), 'sample')}, it lists {len(index):,}",
        )
    classes = path.with_name(CLASSES_NAME)
    try:
        if json.loads(classes.read_text("utf-8")) != {name: label for label, name in enumerate(index.classes)}:
            yield Fault(str(classes), "", "other classes than the index has")
    except (OSError, ValueError) as exc:
        yield Fault(str(classes), "", f"unreadable: {exc}")


def _check_names(folder: Path, index: ShardIndex) -> Iterator[Fault]:
    known = {shard.name for shard in index.shards}
    for path in sorted(folder.glob("*.tar")):
        if path.name not in known:
            yield Fault(str(path), "", "surplus: the index does not know this shard")


def _check_shard(folder: Path, index: ShardIndex, number: int) -> list[Fault]:
    info, path = index.shards[number], folder / index.shards[number].name
    faults: list[Fault] = []
    try:
        size, digest = _digest(path)
    except FileNotFoundError:
        return [Fault(str(path), "", f"missing, with {counted(info.samples, 'sample')}")]
    except OSError as exc:
        return [Fault(str(path), "", f"unreadable: {exc.strerror or exc}")]
    if size != info.size_bytes:
        faults.append(Fault(str(path), "", f"{'cut' if size < info.size_bytes else 'longer'}: {size} bytes, "
                                           f"the index says {info.size_bytes}"))  # fmt: skip
    elif digest != info.sha256:
        faults.append(
            Fault(str(path), "", f"altered: sha256 is {digest[:16]}..., the index says {info.sha256[:16]}...")
        )
    faults += _check_members(path, info, index, number)
    return faults


def _digest(path: Path) -> tuple[int, str]:
    # Read, not mapped: a disk error then is an OSError, where a map would kill the process.
    digest, size = hashlib.sha256(), 0
    buffer = bytearray(_BLOCK_BYTES)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            size += count
    return size, digest.hexdigest()


def _check_members(path: Path, info: ShardInfo, index: ShardIndex, number: int) -> Iterator[Fault]:
    """Compare each member with what the converter wrote, and name those that should not be there."""
    view, _ = map_file(path)
    rows = index.storage_order[index.shard_starts[number] : index.shard_starts[number + 1]]
    expected_names: set[str] = set()
    at = 0
    for row in rows.tolist():
        columns = [int(index.columns[name][row]) for name in ("ids", "offset", "size", "labels", "crc32")]
        name, found = _check_sample(view, at, *columns)
        if found:
            yield Fault(str(path), name, found)
        expected_names |= {name, f"{sample_key(columns[0])}.cls"}
        at += sample_bytes(columns[2])
    if archive_bytes(at) != info.size_bytes:
        yield Fault(str(path), "", f"its members take {archive_bytes(at)} bytes, the index says {info.size_bytes}")
    try:
        for member in members(view, str(path)):
            if to_text(member.name) not in expected_names:
                yield Fault(str(path), to_text(member.name), "surplus: the index does not know this member")
    except ShardError as error:
        yield Fault(str(path), error.member, error.found)


def _check_sample(
    view: memoryview, at: int, sample_id: int, offset: int, size: int, label: int, crc32: int
) -> tuple[str, str]:
    """Return the picture member's name and what is wrong with the sample, "" where nothing is."""
    key = sample_key(sample_id)
    if offset != at + BLOCK or at + sample_bytes(size) > len(view):
        return (
            f"{key}.*",
            "cut off" if offset == at + BLOCK else f"the index says byte {offset}, it is due at {at + BLOCK}",
        )
    name = member_name(view, offset)
    if not name.startswith(f"{key}.") or bytes(view[at:offset]) != header(name, size):
        return f"{key}.*", "zeroed" if not any(view[at : offset + size]) else "an altered header"
    data = view[offset : offset + size]
    if zlib.crc32(data) != crc32:
        return name, "zeroed" if not any(data) else "altered"
    if bytes(view[offset + size : at + sample_bytes(size)]) != label_parts(key, size, label):
        return name, "another label than the index has, or an altered label member"
    return name, ""
