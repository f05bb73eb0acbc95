"""The bytes of our shards: USTAR members without time stamps or owners, and exact sizes before anything is written."""

from __future__ import annotations

from fastdata.errors import UsageError

BLOCK = 512
RECORD = 10_240
"""Archives end on a multiple of this, as GNU tar and Python write them."""
END_BLOCKS_BYTES = 2 * BLOCK
MAX_MEMBER_BYTES = 8**11 - 1
"""What USTAR's eleven octal digits hold."""

_PADDING = bytes(BLOCK)
_MODE_TO_GID = b"0000644\0" + b"0000000\0" + b"0000000\0"
_TIME = b"00000000000\0"
_AFTER_CHECKSUM = b"0" + bytes(100) + b"ustar\x0000" + bytes(32 + 32) + b"0000000\0" + b"0000000\0" + bytes(155 + 12)
_CONSTANT_SUM = sum(_MODE_TO_GID) + sum(_TIME) + sum(_AFTER_CHECKSUM) + 8 * ord(" ")


def shard_name(number: int) -> str:
    """Return the file name of a shard."""
    return f"shard-{number:06d}.tar"


def sample_key(sample_id: int) -> str:
    """Return the key of a sample: nine decimal digits, so that no file name can clash or confuse a reader."""
    return f"{sample_id:09d}"


def header(name: str, size: int) -> bytes:
    """Return the 512-byte USTAR header of one member: mode 0644, owner 0, time 0.

    Args:
        name: ASCII, at most 99 characters.
        size: Bytes of data, at most `MAX_MEMBER_BYTES`.
    """
    name_field = name.encode("ascii").ljust(100, b"\0")
    size_field = b"%011o\0" % size
    checksum = sum(name_field) + sum(size_field) + _CONSTANT_SUM
    return name_field + _MODE_TO_GID + size_field + _TIME + b"%06o\0 " % checksum + _AFTER_CHECKSUM


def label_parts(key: str, data_bytes: int, label: int) -> bytes:
    """Return what follows a picture of so many bytes: its padding, and the label's member."""
    text = b"%d" % label
    return _PADDING[: -data_bytes % BLOCK] + header(f"{key}.cls", len(text)) + text.ljust(BLOCK, b"\0")


def sample_bytes(data_bytes: int) -> int:
    """Return how many bytes a sample takes in a shard: two headers, the padded picture, one block of label."""
    return 3 * BLOCK + -(-data_bytes // BLOCK) * BLOCK


def archive_bytes(payload_bytes: int) -> int:
    """Return the size of the file that holds members of this many bytes."""
    return -(-(payload_bytes + END_BLOCKS_BYTES) // RECORD) * RECORD


def archive_end(payload_bytes: int) -> bytes:
    """Return what ends an archive whose members take this many bytes."""
    return bytes(archive_bytes(payload_bytes) - payload_bytes)


def check_cap(max_bytes: int) -> None:
    """Refuse a cap that could not hold one small sample.

    Raises:
        UsageError: It is below one record.
    """
    if max_bytes < RECORD:
        raise UsageError("max_bytes", f"{max_bytes}", f"at least {RECORD} bytes: the smallest tar")
