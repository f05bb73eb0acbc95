"""One file that holds a JSON header and named arrays, opened as a memory map.

Layout: 8 bytes magic, 8 bytes header length (little-endian), the header as ASCII JSON, then each array at a multiple of
64 bytes. The header's ``arrays`` gives dtype, shape and offset (from the file's start) of each, ``file_bytes`` the size
of the whole file, ``arrays_sha256`` the digest over all bytes that follow the header. Opening reads the header alone,
so it costs the same for ten samples and ten million, and processes share the pages.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastdata.errors import SourceError

_MAGIC = b"FASTDATA"
_ALIGN = 64
_HEADER_SPARE_BYTES = 256  # for the three fields that are known only when the header's own length is


def write_array_file(
    path: str | Path, header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], *, durable: bool = True
) -> None:
    """Write an array file under a temporary name and rename it into place, so that it is whole or not there.

    Args:
        path: Where it appears.
        header: JSON-able values; the keys ``arrays``, ``file_bytes`` and ``arrays_sha256`` are taken.
        arrays: Arrays of any shape; stored little-endian and C-contiguous.
        durable: Wait until the file and its name are on the disk.
    """
    path = Path(path)
    stored = {name: _little_endian(array) for name, array in arrays.items()}
    layout: dict[str, dict[str, Any]] = {
        name: {"dtype": array.dtype.str, "shape": list(array.shape)} for name, array in stored.items()
    }
    fields = {**header, "arrays": {name: {**entry, "offset": 2**53} for name, entry in layout.items()}}
    header_bytes = len(json.dumps(fields)) + _HEADER_SPARE_BYTES
    start = at = _round_up(16 + header_bytes)
    for name, array in stored.items():
        layout[name]["offset"] = at
        at = _round_up(at + array.nbytes)
    digest = hashlib.sha256()
    for array in stored.values():
        digest.update(array.data.cast("B") if array.size else b"")
        digest.update(bytes(_round_up(array.nbytes) - array.nbytes))
    fields = {**header, "arrays": layout, "file_bytes": at, "arrays_sha256": digest.hexdigest()}
    text = json.dumps(fields).encode("ascii").ljust(start - 16)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(_MAGIC + len(text).to_bytes(8, "little") + text)
            for array in stored.values():
                if array.size:
                    file.write(array.data.cast("B"))
                file.write(bytes(_round_up(array.nbytes) - array.nbytes))
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def read_array_file(path: str | Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Map an array file.

    Returns:
        Its header, and its arrays: read-only views into one shared memory map.

    Raises:
        SourceError: The file is not there, cut, or no array file.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 16:
                raise SourceError(str(path), f"{size} bytes", "an index file")
            view = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
    except OSError as exc:
        raise SourceError(str(path), exc.strerror or str(exc), "a readable index file") from exc
    header_end = 16 + int.from_bytes(view[8:16], "little")
    if bytes(view[:8]) != _MAGIC or header_end > size:
        raise SourceError(str(path), "other content, or a cut header", "an index file")
    try:
        header = json.loads(bytes(view[16:header_end]))
        layout, file_bytes = header["arrays"], header["file_bytes"]
    except (ValueError, KeyError, TypeError) as exc:
        raise SourceError(str(path), "a damaged header", "an index file") from exc
    if file_bytes != size:
        raise SourceError(str(path), f"{size} bytes", f"{file_bytes} bytes as its header says", "It is cut or altered.")
    arrays = {name: _array_at(view, entry) for name, entry in layout.items()}
    return header, arrays


def array_file_digest(path: str | Path) -> tuple[str, str]:
    """Return the sha256 over the arrays of a file as its header gives it, and as its bytes are now."""
    header, _ = read_array_file(path)
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        file.seek(8)
        file.seek(16 + int.from_bytes(file.read(8), "little"))
        while block := file.read(1 << 20):
            digest.update(block)
    return header["arrays_sha256"], digest.hexdigest()


def sync_folder(path: str | Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _array_at(view: memoryview, entry: Mapping[str, Any]) -> NDArray[Any]:
    shape = entry["shape"]
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(view, np.dtype(entry["dtype"]), count, entry["offset"]).reshape(shape)


def _little_endian(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<"))


def _round_up(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
