"""Shards for tests: made by the converter from a folder, or by hand, with everything that other writers do."""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from fastdata.shards import ConvertOptions, convert_folder
from fastdata.sources.tar import open_shards
from fastdata.testing import color_of

Member = tuple[str, bytes]

SMALL_SHARDS = ConvertOptions(max_bytes=30 * 1024)
"""A handful of small pictures each."""


def picture(number: int, form: str = "JPEG") -> bytes:
    """Encode a flat picture whose colour tells its number."""
    file = io.BytesIO()
    Image.new("RGB", (64, 48), color_of(number)).save(file, form, quality=95)
    return file.getvalue()


def sample(number: int, key: str | None = None) -> list[Member]:
    """Return picture and label (number // 10) of one sample, as the converter writes them."""
    key = f"{number:09d}" if key is None else key
    return [(f"{key}.jpg", picture(number)), (f"{key}.cls", str(number // 10).encode())]


def write_tar(path: Path, members: Sequence[Member], mode: str = "w") -> Path:
    """Write members into a tar as they come."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def write_numbered_shards(folder: Path, sizes: Sequence[int]) -> Path:
    """Write ``shard-%06d.tar`` of numbered samples, without an index; return the folder."""
    number = 0
    for shard, size in enumerate(sizes):
        members = [member for i in range(number, number + size) for member in sample(i)]
        write_tar(folder / f"shard-{shard:06d}.tar", members)
        number += size
    return folder


def convert_with_damage(folder: Path, options: ConvertOptions = SMALL_SHARDS) -> Path:
    """Convert a folder to small shards beside it; files that are no pictures become members that are none.

    The converter refuses such files, so a healthy picture takes their place until the shards are written.
    """
    out = folder.parent / f"{folder.name}-shards"
    if out.exists():
        return out
    healthy = folder.parent / f"{folder.name}-healthy"
    shutil.copytree(folder, healthy)
    damaged: list[int] = []
    for number, path in enumerate(sorted(healthy.rglob("*.jpg"))):
        if path.read_bytes()[:2] != b"\xff\xd8":
            Image.new("RGB", (64, 48)).save(path)
            damaged.append(number)
    convert_folder(healthy, out, options)
    if damaged:
        _damage(out, damaged)
    return out


def _damage(out: Path, ids: Sequence[int]) -> None:
    source = open_shards(out)
    columns = source.index.columns
    for position, sample_id in enumerate(source.ids.tolist()):
        if sample_id in ids:
            with open(source.index.shards[int(columns["shard"][position])].name, "r+b") as file:
                file.seek(int(columns["offset"][position]))
                file.write(b"<html>404</html>".ljust(int(columns["size"][position]), b" "))
    source.close()
