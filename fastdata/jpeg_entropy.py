"""Huffman decoding of JPEG blocks: from a sequential scan to DC values and AC tokens.

A block is held as its DC value and its AC *tokens*: ``symbol << 16 | extra bits``, as coded. Tokens are what the
picture holds without loss, and neither restart markers nor Huffman tables change them. Code lengths and canonical codes
follow ITU-T T.81, annexes C and F. The way back is `fastdata.jpeg_encode`.

A damaged scan is one that a decoder could only guess at: an undefined code, a coefficient past the 63rd, data that end
early or go on, a wrong restart marker. It gets no tokens, even where libjpeg would carry on with a warning.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fastdata._native import (
    Pointer,
    byte_pointer,
    compiled,
    helper,
    inlined,
    integer,
    long_pointer,
    short_pointer,
    word_pointer,
)

LOOK_BITS: Final = 10
"""Codes up to this length are decoded by one table look-up."""
TABLES: Final = 8
"""Rows of a set of tables: DC tables 0..3, then AC tables 0..3."""
LIMITS: Final = 36
"""Numbers that `define_table` keeps a table for its longer codes."""
MAX_DC_BITS: Final = 11
"""Largest category of a DC difference in 8-bit pictures (T.81, table F.1)."""


Pointers = Any
"""Pointers to look-ups, limits and symbols."""


def empty_tables() -> tuple[NDArray[np.uint16], NDArray[np.int64], NDArray[np.uint8]]:
    """Return (8, 1024) look-ups, (8, 36) code limits and (8, 256) symbols, none of them defined."""
    return (
        np.zeros((TABLES, 1 << LOOK_BITS), np.uint16),
        np.zeros((TABLES, LIMITS), np.int64),
        np.zeros((TABLES, 256), np.uint8),
    )


@compiled
def define_table(
    counts: NDArray[np.uint8],
    symbols: NDArray[np.uint8],
    look: NDArray[np.uint16],
    limits: NDArray[np.int64],
    values: NDArray[np.uint8],
) -> bool:
    """Fill one table from a DHT segment's 16 counts and its symbols; return whether they form a code.

    ``look[first 10 bits]`` is ``length << 8 | symbol``, 0 for longer codes. ``limits[length]`` is one more than the
    last code of that length, and ``limits[18 + length]`` what to add to a code for its place in `values`.
    """
    look[:] = 0
    limits[:] = 0
    code, at = 0, 0
    for length in range(1, 17):
        count = integer(counts[length - 1])
        if code + count > 1 << length:
            return False
        limits[18 + length] = at - code
        for _ in range(count):
            values[at] = symbols[at]
            if length <= LOOK_BITS:
                first = code << (LOOK_BITS - length)
                for i in range(first, first + (1 << (LOOK_BITS - length))):
                    look[i] = (length << 8) | integer(symbols[at])
            code += 1
            at += 1
        limits[length] = code
        code <<= 1
    return at > 0


@inlined
def pointers(look: NDArray[np.uint16], limits: NDArray[np.int64], values: NDArray[np.uint8]) -> Pointers:
    """Return pointers to a set of tables (see `define_table`), for `next_code`."""
    return short_pointer(look.ctypes.data), long_pointer(limits.ctypes.data), byte_pointer(values.ctypes.data)


@helper
def fill_slowly(
    source: Pointer, size_bytes: int, at: int, buffer: int, bits: int, beyond: int
) -> tuple[int, int, int, int]:
    """Read bytes until more than 48 bits are held, removing stuffing; at a marker, add zeros and count them."""
    while bits <= 48:
        if at < size_bytes and source[at] != 0xFF:
            buffer = (buffer << 8) | integer(source[at])
            at += 1
        elif at + 1 < size_bytes and source[at + 1] == 0:
            buffer = (buffer << 8) | 0xFF
            at += 2
        else:
            buffer <<= 8
            beyond += 8
        bits += 8
    return at, buffer, bits, beyond


@inlined
def fill(source: Pointer, size_bytes: int, at: int, buffer: int, bits: int, beyond: int) -> tuple[int, int, int, int]:
    """Make sure that more than 32 bits are held: a code and its extra bits take at most 31.

    `buffer` holds its next bits lowest-last; `bits` counts them, `beyond` how many of them lie past the data.
    """
    if bits > 32:
        return at, buffer, bits, beyond
    if at + 4 <= size_bytes:
        word = (
            (integer(source[at]) << 24)
            | (integer(source[at + 1]) << 16)
            | (integer(source[at + 2]) << 8)
            | integer(source[at + 3])
        )
        if ((word ^ 0xFFFFFFFF) - 0x01010101) & word & 0x80808080 == 0:  # no byte is 0xFF
            return at + 4, (buffer << 32) | word, bits + 32, beyond
    return fill_slowly(source, size_bytes, at, buffer, bits, beyond)


@helper
def long_code(buffer: int, bits: int, row: int, tables: Pointers) -> int:
    """Return ``length << 8 | symbol`` of a code longer than the look-up, 0 where no code fits."""
    _, limits, values = tables
    for length in range(LOOK_BITS + 1, 17):
        code = (buffer >> (bits - length)) & ((1 << length) - 1)
        if code < limits[row * LIMITS + length]:
            place = code + limits[row * LIMITS + 18 + length]
            return (length << 8) | integer(values[row * 256 + place]) if 0 <= place < 256 else 0
    return 0


@inlined
def next_code(buffer: int, bits: int, row: int, tables: Pointers) -> int:
    """Return ``length << 8 | symbol`` of the next code in table `row`, 0 where no code fits."""
    found = integer(tables[0][(row << LOOK_BITS) + ((buffer >> (bits - LOOK_BITS)) & ((1 << LOOK_BITS) - 1))])
    return found if found else long_code(buffer, bits, row, tables)


@inlined
def extend(value: int, size: int) -> int:
    """Return the signed number that `size` extra bits stand for (T.81, figure F.12).

    Without a branch: signs cannot be predicted.
    """
    negative = (value - ((1 << size) >> 1)) >> 63
    return value + (negative & (1 - (1 << size)))


@helper
def after_segment(source: Pointer, size_bytes: int, at: int, bits: int, beyond: int) -> int:
    """Return the place of the marker byte that ends entropy-coded data, -1 where data are missing or left over."""
    if bits < beyond or bits - beyond >= 8 or at >= size_bytes or source[at] != 0xFF:
        return -1
    while at + 1 < size_bytes and source[at + 1] == 0xFF:  # fill bytes
        at += 1
    return at + 1 if at + 1 < size_bytes and source[at + 1] != 0 else -1


@helper
def after_restart(source: Pointer, size_bytes: int, at: int, bits: int, beyond: int, number: int) -> int:
    """Return the place after restart marker `number`, which has to come next; -1 where it does not."""
    at = after_segment(source, size_bytes, at, bits, beyond)
    return at + 1 if at >= 0 and source[at] == 0xD0 + (number & 7) else -1


@inlined
def _decode_ac(
    source: Pointer,
    size_bytes: int,
    at: int,
    buffer: int,
    bits: int,
    beyond: int,
    row: int,
    tables: Pointers,
    tokens: Pointer,
    token: int,
    frequencies: Pointer,
) -> tuple[int, int, int, int, int]:
    """Decode the AC tokens of one block; return the state after them and the next token, -1 for damage."""
    k = 1
    while k < 64:
        at, buffer, bits, beyond = fill(source, size_bytes, at, buffer, bits, beyond)
        found = next_code(buffer, bits, row, tables)
        size = found & 15
        bits -= (found >> 8) + size
        tokens[token] = ((found & 255) << 16) | ((buffer >> bits) & ((1 << size) - 1))
        token += 1
        frequencies[found & 255] += 1
        k += ((found >> 4) & 15) + 1
        if size == 0 and found & 0xF0 != 0xF0:
            if found & 0xF0 or found == 0:
                return at, buffer, bits, beyond, -1
            break
    return at, buffer, bits, beyond, token if k <= 64 and bits >= beyond else -1


@compiled
def decode_scan(
    data: NDArray[np.uint8],
    at: int,
    mcus: int,
    restart_interval: int,
    pattern: NDArray[np.int64],
    look: NDArray[np.uint16],
    limits: NDArray[np.int64],
    values: NDArray[np.uint8],
    dc: NDArray[np.int16],
    counts: NDArray[np.uint8],
    tokens: NDArray[np.uint32],
    frequencies: NDArray[np.int64],
) -> tuple[int, int]:
    """Decode one sequential scan into blocks in coded order.

    Args:
        data: The file.
        at: Its first entropy-coded byte.
        mcus: MCUs in the scan.
        restart_interval: MCUs between restart markers, 0 without.
        pattern: (blocks of an MCU, 3): the component's place in the scan, its DC table, its AC table + 4.
        look: See `define_table`; so are `limits` and `values`.
        limits: (8, 36).
        values: (8, 256).
        dc: (blocks,) filled with DC values.
        counts: (blocks,) filled with the number of AC tokens.
        tokens: Filled with all AC tokens; holds at least 64 a block or as many as the data have bits.
        frequencies: (2, 256) raised by the AC symbols: those of the scan's first component, and of the others.

    Returns:
        Where the marker byte after the scan lies, -1 for damage; and the number of tokens.
    """
    source, size_bytes, tables = byte_pointer(data.ctypes.data), integer(data.size), pointers(look, limits, values)
    written = word_pointer(tokens.ctypes.data)
    predicted = np.zeros(4, np.int64)
    buffer, bits, beyond, block, token = 0, 0, 0, 0, 0
    left, restarts = restart_interval, 0
    for _ in range(mcus):
        if restart_interval and left == 0:
            at = after_restart(source, size_bytes, at, bits, beyond, restarts)
            if at < 0:
                return -1, 0
            buffer, bits, beyond = 0, 0, 0
            predicted[:] = 0
            left, restarts = restart_interval, restarts + 1
        left -= 1
        for part in range(len(pattern)):
            component = pattern[part, 0]
            at, buffer, bits, beyond = fill(source, size_bytes, at, buffer, bits, beyond)
            found = next_code(buffer, bits, pattern[part, 1], tables)
            size = found & 255
            if found == 0 or size > MAX_DC_BITS:
                return -1, 0
            bits -= (found >> 8) + size
            predicted[component] += extend((buffer >> bits) & ((1 << size) - 1), size)
            dc[block] = predicted[component]
            if dc[block] != predicted[component]:
                return -1, 0  # more than 16 bits
            first, symbols = token, long_pointer(integer(frequencies.ctypes.data) + (2048 if component else 0))
            at, buffer, bits, beyond, token = _decode_ac(
                source, size_bytes, at, buffer, bits, beyond, pattern[part, 2], tables, written, token, symbols
            )
            if token < 0:
                return -1, 0
            counts[block] = token - first
            block += 1
    return after_segment(source, size_bytes, at, bits, beyond), token
