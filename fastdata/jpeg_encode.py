"""Huffman coding of JPEG blocks: the best codes for them, and a scan with restart markers.

Blocks are DC values and AC tokens as `fastdata.jpeg_entropy` describes them. Code construction follows ITU-T T.81,
annexes C, F and K.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from fastdata._native import (
    Pointer,
    byte_pointer,
    compiled,
    count_leading_zeros,
    helper,
    inlined,
    integer,
    long_pointer,
    word_pointer,
)
from fastdata.jpeg_entropy import MAX_DC_BITS

MAX_BLOCK_BYTES: Final = 520
"""More than a block can take: 64 codes of 16 bits with 15 extra bits each, every byte stuffed."""


@helper
def _depths(weights: NDArray[np.int64], of_length: NDArray[np.int64]) -> None:
    """Count the leaves at each depth of the Huffman tree over ascending `weights`."""
    leaves = len(weights)
    weight, parent = np.zeros(2 * leaves, np.int64), np.zeros(2 * leaves, np.int64)
    weight[:leaves] = weights
    leaf, node = 0, leaves  # two queues: the leaves, and the merged nodes, whose weights rise too
    for merged in range(leaves, 2 * leaves - 1):
        for _ in range(2):
            if leaf < leaves and (node >= merged or weight[leaf] <= weight[node]):
                taken, leaf = leaf, leaf + 1
            else:
                taken, node = node, node + 1
            weight[merged] += weight[taken]
            parent[taken] = merged
    depth = np.zeros(2 * leaves, np.int64)
    for i in range(2 * leaves - 3, -1, -1):
        depth[i] = depth[parent[i]] + 1
        if i < leaves:
            of_length[depth[i]] += 1


@compiled
def code_lengths(frequencies: NDArray[np.int64], counts: NDArray[np.uint8], symbols: NDArray[np.uint8]) -> int:
    """Find the shortest Huffman code of at most 16 bits that leaves the all-ones code free (T.81, annex K.2).

    Args:
        frequencies: (256,) how often each symbol occurs.
        counts: (16,) filled with the number of codes of each length.
        symbols: (256,) filled with the symbols in the order of their codes.

    Returns:
        The number of symbols.
    """
    order = np.argsort(-frequencies)
    used = np.count_nonzero(frequencies)
    symbols[:used] = order[:used]
    weights = np.zeros(used + 1, np.int64)  # the first stands for the all-ones code
    weights[1:] = frequencies[order[:used]][::-1]
    of_length = np.zeros(300, np.int64)
    _depths(weights, of_length)
    for length in range(299, 16, -1):
        while of_length[length] > 0:  # T.81, figure K.3: move a pair up, split a shorter code to make room
            shorter = length - 2
            while of_length[shorter] == 0:
                shorter -= 1
            of_length[length] -= 2
            of_length[length - 1] += 1
            of_length[shorter + 1] += 2
            of_length[shorter] -= 1
    of_length[np.flatnonzero(of_length)[-1]] -= 1
    for length in range(1, 17):
        counts[length - 1] = of_length[length]
    return int(used)


@compiled
def code_table(counts: NDArray[np.uint8], symbols: NDArray[np.uint8], codes: NDArray[np.int64]) -> None:
    """Fill ``codes[symbol]`` with ``code << 8 | length``, 0 for symbols without a code (T.81, annex C)."""
    codes[:] = 0
    code, at = 0, 0
    for length in range(1, 17):
        for _ in range(counts[length - 1]):
            codes[symbols[at]] = (code << 8) | length
            code += 1
            at += 1
        code <<= 1


@inlined
def bit_size(value: int) -> int:
    """Return the bits of ``abs(value)``."""
    bits: int = 64 - count_leading_zeros(abs(value))
    return bits


@compiled
def count_differences(
    pattern: NDArray[np.int64],
    mcus: int,
    restart_interval: int,
    dc: NDArray[np.int16],
    frequencies: NDArray[np.int64],
) -> bool:
    """Count the DC symbols of each table when restarts come every `restart_interval` MCUs.

    Args:
        pattern: (blocks of an MCU,) the component of each block.
        mcus: MCUs of the picture.
        restart_interval: MCUs.
        dc: (blocks,).
        frequencies: (2, 256) raised: those of component 0, and of the others.

    Returns:
        Whether every DC difference can be coded.
    """
    predicted = np.zeros(4, np.int64)
    block, left = 0, 0
    for _ in range(mcus):
        if left == 0:
            predicted[:] = 0
            left = restart_interval
        left -= 1
        for part in range(len(pattern)):
            component = pattern[part]
            table = 0 if component == 0 else 1
            size = bit_size(integer(dc[block]) - predicted[component])
            if size > MAX_DC_BITS:
                return False
            predicted[component] = dc[block]
            frequencies[table, size] += 1
            block += 1
    return True


@inlined
def _put_bytes(out: Pointer, at: int, word: int, count: int) -> int:
    """Write the `count` bytes of `word`, stuffed; return the place after them."""
    for shift in range(8 * (count - 1), -1, -8):
        byte = (word >> shift) & 255
        out[at] = byte
        at += 1
        if byte == 0xFF:
            out[at] = 0
            at += 1
    return at


@inlined
def _put(out: Pointer, at: int, held: int, bits: int, code: int, size: int) -> tuple[int, int, int]:
    """Append `size` <= 31 bits to the `bits` < 32 bits that are held, writing four bytes when there are as many."""
    held = (held << size) | code
    bits += size
    if bits < 32:
        return at, held, bits
    bits -= 32
    word = (held >> bits) & 0xFFFFFFFF
    if ((word ^ 0xFFFFFFFF) - 0x01010101) & word & 0x80808080:
        return _put_bytes(out, at, word, 4), held, bits
    out[at] = word >> 24
    out[at + 1] = (word >> 16) & 255
    out[at + 2] = (word >> 8) & 255
    out[at + 3] = word & 255
    return at + 4, held, bits


@compiled
def encode_scan(
    pattern: NDArray[np.int64],
    mcus: int,
    restart_interval: int,
    dc: NDArray[np.int16],
    counts: NDArray[np.uint8],
    tokens: NDArray[np.uint32],
    codes: NDArray[np.int64],
    out: NDArray[np.uint8],
    lengths: NDArray[np.int64],
) -> int:
    """Code blocks with restart markers.

    Args:
        pattern: (blocks of an MCU,) the component of each block.
        mcus: MCUs of the picture.
        restart_interval: MCUs.
        dc: (blocks,).
        counts: (blocks,).
        tokens: (tokens,).
        codes: (4, 256) from `code_table`: DC of component 0, DC of the others, AC of component 0, AC of the others.
        out: Filled with the entropy-coded data, restart markers included, without an end marker.
        lengths: (mcus / restart_interval,) filled with the bytes of each segment, without its marker.

    Returns:
        Bytes written, -1 where `out` is too small.
    """
    predicted = np.zeros(4, np.int64)
    block, token, at, held, bits = 0, 0, 0, 0, 0
    room = integer(out.size) - MAX_BLOCK_BYTES * integer(len(pattern)) - 16
    segment, start, left = 0, 0, restart_interval
    target, source = byte_pointer(out.ctypes.data), word_pointer(tokens.ctypes.data)
    ac_codes = long_pointer(codes.ctypes.data)
    for mcu in range(mcus):
        if at > room:
            return -1
        for part in range(len(pattern)):
            component = pattern[part]
            table = 0 if component == 0 else 1
            difference = integer(dc[block]) - predicted[component]
            predicted[component] = dc[block]
            size = bit_size(difference)
            extra = difference + ((difference >> 63) & ((1 << size) - 1))  # without a branch: signs are random
            found = codes[table, size]
            at, held, bits = _put(target, at, held, bits, ((found >> 8) << size) | extra, (found & 255) + size)
            first_code = 256 * (table + 2)
            for _ in range(counts[block]):
                symbol = integer(source[token]) >> 16
                extra = integer(source[token]) & 0xFFFF
                size = symbol & 15
                found = ac_codes[first_code + symbol]
                at, held, bits = _put(target, at, held, bits, ((found >> 8) << size) | extra, (found & 255) + size)
                token += 1
            block += 1
        left -= 1
        if left == 0 or mcu == mcus - 1:
            padding = -bits & 7  # with ones (T.81, F.1.2.3)
            held = (held << padding) | ((1 << padding) - 1)
            at = _put_bytes(target, at, held, (bits + padding) >> 3)
            lengths[segment] = at - start
            held, bits, left = 0, 0, restart_interval
            if mcu < mcus - 1:
                target[at] = 0xFF
                target[at + 1] = 0xD0 + (segment & 7)
                at += 2
            segment, start = segment + 1, at
            predicted[:] = 0
    return at
