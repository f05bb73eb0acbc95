"""Progressive and multi-scan JPEGs: their scans are gathered into coefficients, and those become blocks of one scan.

Coefficients are (blocks, 64) int16 in zigzag order, component after component, each padded to whole MCUs. Bit k of a
block's *nonzero*, an int64, is set where its AC coefficient k is not 0; only there and for DC is the memory defined. An
*order* lists the blocks of a scan as they are coded. The procedures are those of ITU-T T.81, annex G; what counts as
damage, and what a block's tokens are, is said in `fastdata.jpeg_entropy`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fastdata._native import (
    Pointer,
    byte_pointer,
    compiled,
    count_ones,
    count_trailing_zeros,
    inlined,
    integer,
    long_pointer,
    signed_short_pointer,
    word_pointer,
)
from fastdata.jpeg_encode import bit_size
from fastdata.jpeg_entropy import (
    MAX_DC_BITS,
    Pointers,
    after_restart,
    after_segment,
    extend,
    fill,
    next_code,
    pointers,
)


@compiled
def interleaved_order(grids: NDArray[np.int64], mcus_across: int, mcus_down: int, order: NDArray[np.int64]) -> None:
    """List the blocks of a scan of whole MCUs.

    Args:
        grids: (components of the scan, 4): first block, blocks a row, blocks of an MCU across, and down.
        mcus_across: MCUs.
        mcus_down: MCUs.
        order: Filled with the blocks in coded order.
    """
    at = 0
    for row in range(mcus_down):
        for column in range(mcus_across):
            for part in range(len(grids)):
                first, stride, across, down = grids[part, 0], grids[part, 1], grids[part, 2], grids[part, 3]
                for y in range(down):
                    for x in range(across):
                        order[at] = first + (row * down + y) * stride + column * across + x
                        at += 1


def plain_order(first: int, stride: int, blocks_across: int, blocks_down: int) -> NDArray[np.int64]:
    """List the blocks of a scan of one component, which leaves out the padding."""
    rows = first + stride * np.arange(blocks_down, dtype=np.int64)
    return (rows[:, None] + np.arange(blocks_across, dtype=np.int64)).reshape(-1)


@compiled
def expand(
    order: NDArray[np.int64],
    dc: NDArray[np.int16],
    counts: NDArray[np.uint8],
    tokens: NDArray[np.uint32],
    coefficients: NDArray[np.int16],
    nonzero: NDArray[np.int64],
) -> None:
    """Write the blocks of a sequential scan into `coefficients` and `nonzero`."""
    token = 0
    for i in range(len(order)):
        block = coefficients[order[i]]
        block[0] = dc[i]
        k, found = 1, 0
        for at in range(token, token + counts[i]):
            symbol = integer(tokens[at]) >> 16
            k += symbol >> 4
            size = symbol & 15
            if size:
                block[k] = extend(integer(tokens[at]) & 0xFFFF, size)
                found |= 1 << k
            k += 1
        nonzero[order[i]] = found
        token += counts[i]


@compiled
def collapse(
    order: NDArray[np.int64],
    pattern: NDArray[np.int64],
    coefficients: NDArray[np.int16],
    nonzero: NDArray[np.int64],
    dc: NDArray[np.int16],
    counts: NDArray[np.uint8],
    tokens: NDArray[np.uint32],
    frequencies: NDArray[np.int64],
) -> int:
    """Turn coefficients into blocks in coded order.

    Args:
        order: All blocks.
        pattern: (blocks of an MCU,) the component of each block.
        coefficients: See above.
        nonzero: See above.
        dc: Filled, as by `fastdata.jpeg_entropy.decode_scan`; so are `counts`, `tokens` and `frequencies`.
        counts: See `dc`.
        tokens: Holds 64 a block.
        frequencies: See `dc`.

    Returns:
        The number of tokens, -1 where one has over 10 bits.
    """
    written = word_pointer(tokens.ctypes.data)
    token, part = 0, -1
    for i in range(len(order)):
        part = part + 1 if part + 1 < len(pattern) else 0
        symbols = long_pointer(integer(frequencies.ctypes.data) + (2048 if pattern[part] else 0))
        block = signed_short_pointer(integer(coefficients.ctypes.data) + 128 * order[i])
        left = nonzero[order[i]]
        dc[i] = block[0]
        first, before = token, 0
        while left:
            k = count_trailing_zeros(left)
            left &= left - 1
            run = k - before - 1
            before = k
            while run > 15:
                written[token] = 0xF0 << 16
                symbols[0xF0] += 1
                token += 1
                run -= 16
            value = integer(block[k])
            size = bit_size(value)
            if size > MAX_DC_BITS - 1:
                return -1
            extra = value + ((value >> 63) & ((1 << size) - 1))
            written[token] = (((run << 4) | size) << 16) | extra
            symbols[(run << 4) | size] += 1
            token += 1
        if before < 63:
            written[token] = 0
            symbols[0] += 1
            token += 1
        counts[i] = token - first
    return token


@inlined
def _bits(buffer: int, bits: int, count: int) -> int:
    return (buffer >> (bits - count)) & ((1 << count) - 1)


@compiled
def decode_dc(
    data: NDArray[np.uint8],
    at: int,
    order: NDArray[np.int64],
    pattern: NDArray[np.int64],
    restart_interval: int,
    low_bit: int,
    refine: bool,
    look: NDArray[np.uint16],
    limits: NDArray[np.int64],
    values: NDArray[np.uint8],
    coefficients: NDArray[np.int16],
) -> int:
    """Decode a DC scan of a progressive picture.

    Args:
        data: The file.
        at: The first entropy-coded byte of the scan.
        order: Blocks of the scan.
        pattern: (blocks of an MCU, 3): the component's place in the scan, its DC table, unused.
        restart_interval: MCUs, 0 without.
        low_bit: Position of the bits that the scan brings.
        refine: Whether it brings one more bit of known values.
        look: (8, 1024), see `fastdata.jpeg_entropy.define_table`.
        limits: (8, 36).
        values: (8, 256).
        coefficients: (blocks, 64) changed in place.

    Returns:
        Where the marker byte after the scan lies, -1 for damage.
    """
    source, size_bytes, tables = byte_pointer(data.ctypes.data), integer(data.size), pointers(look, limits, values)
    predicted = np.zeros(4, np.int64)
    buffer, bits, beyond = 0, 0, 0
    blocks_per_mcu = integer(len(pattern))
    until_restart, part = restart_interval * blocks_per_mcu, -1
    for i in range(len(order)):
        if until_restart and i and i % until_restart == 0:
            at = after_restart(source, size_bytes, at, bits, beyond, i // until_restart - 1)
            if at < 0:
                return -1
            buffer, bits, beyond = 0, 0, 0
            predicted[:] = 0
        at, buffer, bits, beyond = fill(source, size_bytes, at, buffer, bits, beyond)
        if refine:
            coefficients[order[i], 0] |= _bits(buffer, bits, 1) << low_bit
            bits -= 1
            continue
        part = part + 1 if part + 1 < blocks_per_mcu else 0
        component, table = pattern[part, 0], pattern[part, 1]
        found = next_code(buffer, bits, table, tables)
        size = found & 255
        if found == 0 or size > MAX_DC_BITS:
            return -1
        bits -= found >> 8
        predicted[component] += extend(_bits(buffer, bits, size), size)
        bits -= size
        value = predicted[component] << low_bit
        if bits < beyond or value < -32768 or value > 32767:
            return -1
        coefficients[order[i], 0] = value
    return after_segment(source, size_bytes, at, bits, beyond)


@compiled
def decode_ac(
    data: NDArray[np.uint8],
    at: int,
    order: NDArray[np.int64],
    restart_interval: int,
    first_k: int,
    last_k: int,
    low_bit: int,
    table: int,
    look: NDArray[np.uint16],
    limits: NDArray[np.int64],
    values: NDArray[np.uint8],
    coefficients: NDArray[np.int16],
    nonzero: NDArray[np.int64],
) -> int:
    """Decode the first AC scan of a band; `table` is its AC table + 4. Returns as `decode_dc`."""
    source, size_bytes, tables = byte_pointer(data.ctypes.data), integer(data.size), pointers(look, limits, values)
    buffer, bits, beyond, blocks_to_skip = 0, 0, 0, 0
    for i in range(len(order)):
        if restart_interval and i and i % restart_interval == 0:
            at = after_restart(source, size_bytes, at, bits, beyond, i // restart_interval - 1)
            if at < 0 or blocks_to_skip:
                return -1
            buffer, bits, beyond = 0, 0, 0
        if blocks_to_skip:
            blocks_to_skip -= 1
            continue
        block = signed_short_pointer(integer(coefficients.ctypes.data) + 128 * order[i])
        k, brought = first_k, 0
        while k <= last_k:
            at, buffer, bits, beyond = fill(source, size_bytes, at, buffer, bits, beyond)
            found = next_code(buffer, bits, table, tables)
            bits -= found >> 8
            run, size = (found >> 4) & 15, found & 15
            if size == 0 and run < 15:
                blocks_to_skip = (1 << run) - 1 + _bits(buffer, bits, run)
                bits -= run
                break
            k += run
            value = extend(_bits(buffer, bits, size), size) << low_bit
            bits -= size
            if k > last_k or abs(value) > 32767:
                return -1
            block[k] = value
            brought |= (value != 0) << k
            k += 1
        nonzero[order[i]] |= brought
        if bits < beyond or found == 0:
            return -1
    return after_segment(source, size_bytes, at, bits, beyond) if blocks_to_skip == 0 else -1


@inlined
def _correct(block: Pointer, known: int, corrections: int, step: int) -> None:
    """Move each known value of a block away from 0 by `step` where its correction, the first one highest, is 1."""
    for shift in range(count_ones(known) - 1, -1, -1):
        k = count_trailing_zeros(known)
        known &= known - 1
        value = integer(block[k])
        sign = value >> 63
        block[k] = value + (((step ^ sign) - sign) & -((corrections >> shift) & 1))


@inlined
def _take_corrections(
    source: Pointer, size_bytes: int, at: int, buffer: int, bits: int, beyond: int, count: int, corrections: int
) -> tuple[int, int, int, int, int]:
    """Append `count` bits to `corrections`; return the state after them, and all."""
    while count > bits:
        part = min(count, bits)
        corrections = (corrections << part) | _bits(buffer, bits, part)
        bits -= part
        count -= part
        at, buffer, bits, beyond = fill(source, size_bytes, at, buffer, bits, beyond)
    corrections = (corrections << count) | _bits(buffer, bits, count)
    return at, buffer, bits - count, beyond, corrections


@inlined
def _refine_block(
    source: Pointer,
    size_bytes: int,
    at: int,
    buffer: int,
    bits: int,
    beyond: int,
    blocks_to_skip: int,
    band: int,
    step: int,
    table: int,
    tables: Pointers,
    block: Pointer,
    nonzero: Pointer,
) -> tuple[int, int, int, int, int]:
    """Refine the band of one block; return the state and the blocks to skip after it, -1 for damage."""
    known = nonzero[0] & band
    ahead, zeros = known, ~known & band  # known values and zeros that were not passed yet
    corrections, brought = 0, 0
    while blocks_to_skip == 0 and ahead | zeros:
        at, buffer, bits, beyond = fill(source, size_bytes, at, buffer, bits, beyond)
        found = next_code(buffer, bits, table, tables)
        bits -= found >> 8
        run, size = (found >> 4) & 15, found & 15
        if found == 0 or size > 1:
            return at, buffer, bits, beyond, -1
        if size == 0 and run < 15:
            blocks_to_skip = (1 << run) + _bits(buffer, bits, run)
            bits -= run
            break
        value = step * (2 * _bits(buffer, bits, size) - 1)
        bits -= size
        for i in range(4):  # without a branch for short runs, whose length cannot be predicted
            zeros &= zeros - 1 if run > i else -1
        for _ in range(run - 4):
            zeros &= zeros - 1
        if size and zeros == 0:
            return at, buffer, bits, beyond, -1
        place = zeros & -zeros
        zeros ^= place
        passed = ahead & (place - 1)  # all where no zero is left
        ahead ^= passed
        at, buffer, bits, beyond, corrections = _take_corrections(
            source, size_bytes, at, buffer, bits, beyond, count_ones(passed), corrections
        )
        if size:
            block[count_trailing_zeros(place)] = value
            brought |= place
    if blocks_to_skip:
        blocks_to_skip -= 1
        at, buffer, bits, beyond, corrections = _take_corrections(
            source, size_bytes, at, buffer, bits, beyond, count_ones(ahead), corrections
        )
    _correct(block, known, corrections, step)
    nonzero[0] |= brought
    return at, buffer, bits, beyond, blocks_to_skip if bits >= beyond else -1


@compiled
def refine_ac(
    data: NDArray[np.uint8],
    at: int,
    order: NDArray[np.int64],
    restart_interval: int,
    first_k: int,
    last_k: int,
    low_bit: int,
    table: int,
    look: NDArray[np.uint16],
    limits: NDArray[np.int64],
    values: NDArray[np.uint8],
    coefficients: NDArray[np.int16],
    nonzero: NDArray[np.int64],
) -> int:
    """Decode a scan that brings one more bit of a band; arguments and result as for `decode_ac`."""
    step, band = 1 << low_bit, (-1 << first_k) & ~(-2 << last_k)
    source, size_bytes, tables = byte_pointer(data.ctypes.data), integer(data.size), pointers(look, limits, values)
    buffer, bits, beyond, blocks_to_skip = 0, 0, 0, 0
    for i in range(len(order)):
        if restart_interval and i and i % restart_interval == 0:
            at = after_restart(source, size_bytes, at, bits, beyond, i // restart_interval - 1)
            if at < 0 or blocks_to_skip:
                return -1
            buffer, bits, beyond = 0, 0, 0
        block = signed_short_pointer(integer(coefficients.ctypes.data) + 128 * order[i])
        brought = long_pointer(integer(nonzero.ctypes.data) + 8 * order[i])
        at, buffer, bits, beyond, blocks_to_skip = _refine_block(
            source, size_bytes, at, buffer, bits, beyond, blocks_to_skip, band, step, table, tables, block, brought
        )
        if blocks_to_skip < 0:
            return -1
    return after_segment(source, size_bytes, at, bits, beyond) if blocks_to_skip == 0 else -1
