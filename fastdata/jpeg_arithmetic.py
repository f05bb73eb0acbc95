"""Arithmetic decoding of JPEG scans, sequential and progressive, into the coefficients of `fastdata.jpeg_scans`.

The decoder is that of ITU-T T.81, D.2, the decisions are those of F.1.4 and G.1.3. What counts as damage is a
value out of range, a run past the band, bytes that no decision needs, a wrong restart marker, and more than
`MAX_MISSING_BYTES` zeros that had to be taken for bytes at the end of a segment. An encoder may leave zero bytes out
there, so data that end early are no damage by themselves: then decoders agree on the picture all the same.
"""

from __future__ import annotations

from typing import Any, Final

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
    signed_short_pointer,
)

MAX_MISSING_BYTES: Final = 32
"""Of zeros, at the end of a segment. Blank pictures have some; in others, each is left out once in 256 segments.

Scans that refine DC values may miss any number: their decisions are all of probability one half, so that a blank part
of a picture ends in as many zeros as it has blocks.
"""

# ITU-T T.81, table D.3, by index: probability of the less probable symbol, next index after it, next index after the
# more probable one. Where the less probable symbol also changes places with the other, the index is in _EXCHANGES.
_STATES: Final = (
    (0x5A1D, 1, 1), (0x2586, 14, 2), (0x1114, 16, 3), (0x080B, 18, 4), (0x03D8, 20, 5), (0x01DA, 23, 6),
    (0x00E5, 25, 7), (0x006F, 28, 8), (0x0036, 30, 9), (0x001A, 33, 10), (0x000D, 35, 11), (0x0006, 9, 12),
    (0x0003, 10, 13), (0x0001, 12, 13), (0x5A7F, 15, 15), (0x3F25, 36, 16), (0x2CF2, 38, 17), (0x207C, 39, 18),
    (0x17B9, 40, 19), (0x1182, 42, 20), (0x0CEF, 43, 21), (0x09A1, 45, 22), (0x072F, 46, 23), (0x055C, 48, 24),
    (0x0406, 49, 25), (0x0303, 51, 26), (0x0240, 52, 27), (0x01B1, 54, 28), (0x0144, 56, 29), (0x00F5, 57, 30),
    (0x00B7, 59, 31), (0x008A, 60, 32), (0x0068, 62, 33), (0x004E, 63, 34), (0x003B, 32, 35), (0x002C, 33, 9),
    (0x5AE1, 37, 37), (0x484C, 64, 38), (0x3A0D, 65, 39), (0x2EF1, 67, 40), (0x261F, 68, 41), (0x1F33, 69, 42),
    (0x19A8, 70, 43), (0x1518, 72, 44), (0x1177, 73, 45), (0x0E74, 74, 46), (0x0BFB, 75, 47), (0x09F8, 77, 48),
    (0x0861, 78, 49), (0x0706, 79, 50), (0x05CD, 48, 51), (0x04DE, 50, 52), (0x040F, 50, 53), (0x0363, 51, 54),
    (0x02D4, 52, 55), (0x025C, 53, 56), (0x01F8, 54, 57), (0x01A4, 55, 58), (0x0160, 56, 59), (0x0125, 57, 60),
    (0x00F6, 58, 61), (0x00CB, 59, 62), (0x00AB, 61, 63), (0x008F, 61, 32), (0x5B12, 65, 65), (0x4D04, 80, 66),
    (0x412C, 81, 67), (0x37D8, 82, 68), (0x2FE8, 83, 69), (0x293C, 84, 70), (0x2379, 86, 71), (0x1EDF, 87, 72),
    (0x1AA9, 87, 73), (0x174E, 72, 74), (0x1424, 72, 75), (0x119C, 74, 76), (0x0F6B, 74, 77), (0x0D51, 75, 78),
    (0x0BB6, 77, 79), (0x0A40, 77, 48), (0x5832, 80, 81), (0x4D1C, 88, 82), (0x438E, 89, 83), (0x3BDD, 90, 84),
    (0x34EE, 91, 85), (0x2EAE, 92, 86), (0x299A, 93, 87), (0x2516, 86, 71), (0x5570, 88, 89), (0x4CA9, 95, 90),
    (0x44D9, 96, 91), (0x3E22, 97, 92), (0x3824, 99, 93), (0x32B4, 99, 94), (0x2E17, 93, 86), (0x56A8, 95, 96),
    (0x4F46, 101, 97), (0x47E5, 102, 98), (0x41CF, 103, 99), (0x3C3D, 104, 100), (0x375E, 99, 93),
    (0x5231, 105, 102), (0x4C0F, 106, 103), (0x4639, 107, 104), (0x415E, 103, 99), (0x5627, 105, 106),
    (0x50E7, 108, 107), (0x4B85, 109, 103), (0x5597, 110, 109), (0x504F, 111, 107), (0x5A10, 110, 111),
    (0x5522, 112, 109), (0x59EB, 112, 111),
    (0x5A1D, 113, 113),  # not of the table: the fixed estimate of one half (F.1.4)
)  # fmt: skip
_EXCHANGES: Final = frozenset((0, 14, 36, 64, 80, 88, 95, 105, 110, 112))

# Statistics: one byte a context, 2 * index + more probable symbol. Contexts lie as in T.81, tables F.4 and F.5.
_DC_CONTEXTS: Final = 64  # of each of four tables
_DC_CATEGORIES: Final = 20  # X1
_AC_CONTEXTS: Final = 256  # of each of four tables, behind those for DC
_AC_LOW_CATEGORIES: Final = 189  # X2 up to Kx
_AC_HIGH_CATEGORIES: Final = 217  # X2 above Kx
_MAGNITUDE_BITS: Final = 14  # from a category's context to that of its magnitude bits
_FIXED: Final = 4 * (_DC_CONTEXTS + _AC_CONTEXTS)
_FIXED_STATE: Final = 2 * 113

# The decoder's state. The code register holds the standard's Cx and, below it, `_SPARE` bits read ahead.
_AT, _CODE, _SPARE, _WIDTH, _MISSING = range(5)
_DIFFERENCE, _PREDICTED = 8, 12  # of up to four components: context of the next DC difference, and DC value
_NUMBERS: Final = 16

Coder = Any
"""What decisions need inside a kernel: the file, its size, the decoder's state, statistics, estimates."""


def _estimates() -> NDArray[np.int64]:
    """Return (228,) what follows a decision in a context: probability << 16 | next if more probable << 8 | if less."""
    rows = []
    for index, (probability, after_less, after_more) in enumerate(_STATES):
        for symbol in range(2):
            less = 2 * after_less + (symbol ^ (index in _EXCHANGES))
            rows.append(probability << 16 | (2 * after_more + symbol) << 8 | less)
    return np.array(rows, np.int64)


ESTIMATES: Final = _estimates()


def scratch_memory() -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return what `decode_scan` needs for the decoder's state and its statistics."""
    return np.empty(_NUMBERS, np.int64), np.empty(_FIXED + 1, np.uint8)


def default_conditioning() -> NDArray[np.int64]:
    """Return (8, 2) what holds without a DAC segment (T.81, F.1.4): see `define_conditioning`."""
    return np.array([(0, 2)] * 4 + [(5, 0)] * 4, np.int64)


def define_conditioning(table: int, value: int, conditioning: NDArray[np.int64]) -> bool:
    """Take over an entry of a DAC segment; return whether it is valid (T.81, B.2.4.3).

    Args:
        table: The entry's first byte: class (0 DC, 1 AC) and number.
        value: Its second byte.
        conditioning: (8, 2) changed in place. Rows 0 to 3, DC: largest difference that counts as none, and as small.
            Rows 4 to 7, AC: largest k of the low coefficients, unused.
    """
    row = (table >> 4) * 4 + (table & 3)
    if table & 0xEC:
        return False
    if row >= 4:
        conditioning[row] = value, 0
        return 1 <= value <= 63
    lower, upper = value & 15, value >> 4
    conditioning[row] = (1 << lower) >> 1, 1 << upper
    return lower <= upper


@helper
def _read_ahead(coder: Coder) -> None:
    """Read bytes into the code register, removing stuffing; at a marker, take zeros and count them (T.81, D.2)."""
    source, size_bytes, state, _, _ = coder
    at, code, spare = state[_AT], state[_CODE], state[_SPARE]
    while spare <= 32:
        if at < size_bytes and source[at] != 0xFF:
            code = (code << 8) | integer(source[at])
            at += 1
        elif at + 1 < size_bytes and source[at + 1] == 0:
            code = (code << 8) | 0xFF
            at += 2
        else:
            code <<= 8
            state[_MISSING] += 1
        spare += 8
    state[_AT], state[_CODE], state[_SPARE] = at, code, spare


@helper
def _start(coder: Coder, at: int) -> None:
    """Start a segment at `at`: statistics, predictions and code register (T.81, D.2 and F.1.4)."""
    _, _, state, statistics, _ = coder
    for i in range(_NUMBERS):
        state[i] = 0
    for i in range(_FIXED):
        statistics[i] = 0
    statistics[_FIXED] = _FIXED_STATE
    state[_AT], state[_WIDTH], state[_SPARE] = at, 0x10000, -16
    _read_ahead(coder)


@helper
def _decide(coder: Coder, context: int) -> int:
    """Return the next decision, 0 or 1, in a context (T.81, D.2)."""
    _, _, state, statistics, estimates = coder
    index = integer(statistics[context])
    estimate = estimates[index]
    less = estimate >> 16
    width = state[_WIDTH] - less
    spare = state[_SPARE]
    threshold = width << spare
    decision = index & 1
    if state[_CODE] < threshold:
        if width >= 0x8000:
            state[_WIDTH] = width
            return decision
        is_less = width < less  # the smaller part is that of the less probable symbol
    else:
        state[_CODE] -= threshold
        is_less = width >= less
        width = less
    statistics[context] = estimate & 255 if is_less else (estimate >> 8) & 255
    shift = count_leading_zeros(width) - 48
    state[_WIDTH] = width << shift
    state[_SPARE] = spare - shift
    if spare - shift < 16:  # the next shift may take 15
        _read_ahead(coder)
    return decision ^ (1 if is_less else 0)


@helper
def _magnitude(coder: Coder, context: int, power: int) -> int:
    """Decode a magnitude whose categories from `power` on start at `context`; return 0 where it takes over 15 bits."""
    while _decide(coder, context):
        power <<= 1
        context += 1
        if power == 0x8000:
            return 0
    value = power
    while power > 1:
        power >>= 1
        if _decide(coder, context + _MAGNITUDE_BITS):
            value |= power
    return value + 1


@helper
def _dc_difference(coder: Coder, component: int, table: int, none: int, small: int) -> int:
    """Decode a DC difference (T.81, F.1.4.1); 0x10000 for damage."""
    state = coder[2]
    first = _DC_CONTEXTS * table
    context = first + state[_DIFFERENCE + component]
    if not _decide(coder, context):
        state[_DIFFERENCE + component] = 0
        return 0
    negative = _decide(coder, context + 1)
    magnitude = 1
    if _decide(coder, context + 2 + negative):
        magnitude = _magnitude(coder, first + _DC_CATEGORIES, 1)
        if magnitude == 0:
            return 0x10000
    kind = 0 if magnitude <= none else (4 if magnitude <= small else 12)
    state[_DIFFERENCE + component] = kind + 4 * negative if kind else 0
    return -magnitude if negative else magnitude


@inlined
def _ac_context(table: int, k: int) -> int:
    """Return the context of the end of block at `k`; those of zero and of size follow (T.81, table F.5)."""
    return 4 * _DC_CONTEXTS + _AC_CONTEXTS * table + 3 * (k - 1)


@helper
def _decode_ac(
    coder: Coder, table: int, last_low_k: int, block: Pointer, first_k: int, last_k: int, low_bit: int
) -> int:
    """Decode a band of a block (T.81, F.1.4.2); return its bits of `nonzero`, -1 (with k = 0) for damage."""
    k, found = first_k, 0
    while k <= last_k:
        if _decide(coder, _ac_context(table, k)):
            return found
        while not _decide(coder, _ac_context(table, k) + 1):
            k += 1
            if k > last_k:
                return -1
        negative = _decide(coder, _FIXED)
        size, magnitude = _ac_context(table, k) + 2, 1
        if _decide(coder, size):
            magnitude = 2
            if _decide(coder, size):
                categories = _AC_LOW_CATEGORIES if k <= last_low_k else _AC_HIGH_CATEGORIES
                magnitude = _magnitude(coder, _ac_context(table, 1) + categories, 2)
        value = magnitude << low_bit
        if value == 0 or value > 32767:
            return -1
        block[k] = -value if negative else value
        found |= 1 << k
        k += 1
    return found


@helper
def _refine_ac(coder: Coder, table: int, block: Pointer, known: int, first_k: int, last_k: int, low_bit: int) -> int:
    """Bring one more bit to a band (T.81, G.1.3.3); return its bits of `nonzero`, -1 (with k = 0) for damage."""
    step, found = 1 << low_bit, known
    k, last_known = first_k, 63 - count_leading_zeros(known & ~(-2 << last_k))
    while k <= last_k:
        if k > last_known and _decide(coder, _ac_context(table, k)):
            return found
        while True:
            context = _ac_context(table, k)
            if (known >> k) & 1:
                if _decide(coder, context + 2):
                    block[k] += step if block[k] > 0 else -step
                break
            if _decide(coder, context + 1):
                block[k] = -step if _decide(coder, _FIXED) else step
                found |= 1 << k
                break
            k += 1
            if k > last_k:
                return -1
        k += 1
    return found


@helper
def _after_segment(coder: Coder, band: Pointer) -> int:
    """Return the place of the marker byte that ends the segment, -1 where data are missing or left over."""
    source, size_bytes, state, _, _ = coder
    at, spare = state[_AT], state[_SPARE]
    # An encoder ends with the number of most trailing zeros in its interval (T.81, D.1): none is set below Cx.
    if state[_CODE] & ((1 << spare) - 1):
        return -1
    refines_dc = band[0] == 0 and band[3]
    if 8 * state[_MISSING] - spare > 8 * MAX_MISSING_BYTES and not refines_dc:
        return -1
    if at >= size_bytes or source[at] != 0xFF:
        return -1
    while at + 1 < size_bytes and source[at + 1] == 0xFF:  # fill bytes
        at += 1
    return at + 1 if at + 1 < size_bytes and source[at + 1] != 0 else -1


@helper
def _decode_block(
    coder: Coder, part: Pointer, band: Pointer, conditioning: Pointer, block: Pointer, nonzero: Pointer
) -> bool:
    """Decode what a scan brings to a block; return whether it is undamaged."""
    state = coder[2]
    component, dc_table, ac_table = part[0], part[1], part[2]
    first_k, last_k, low_bit, refine = band[0], band[1], band[2], band[3]
    if refine:
        if first_k == 0:
            block[0] |= _decide(coder, _FIXED) << low_bit
            return True
        found = _refine_ac(coder, ac_table, block, nonzero[0], first_k, last_k, low_bit)
        nonzero[0] = found
        return (found & 1) == 0
    if first_k == 0:
        none, small = conditioning[2 * dc_table], conditioning[2 * dc_table + 1]
        difference = _dc_difference(coder, component, dc_table, none, small)
        state[_PREDICTED + component] += difference
        value = state[_PREDICTED + component] << low_bit
        if difference == 0x10000 or value < -32768 or value > 32767:
            return False
        block[0] = value
    if last_k > 0:
        last_low_k = conditioning[8 + 2 * ac_table]
        found = _decode_ac(coder, ac_table, last_low_k, block, max(first_k, 1), last_k, low_bit)
        nonzero[0] |= found
        return (found & 1) == 0
    return True


@compiled
def decode_scan(
    data: NDArray[np.uint8],
    at: int,
    order: NDArray[np.int64],
    pattern: NDArray[np.int64],
    restart_interval: int,
    band: NDArray[np.int64],
    conditioning: NDArray[np.int64],
    estimates: NDArray[np.int64],
    state: NDArray[np.int64],
    statistics: NDArray[np.uint8],
    coefficients: NDArray[np.int16],
    nonzero: NDArray[np.int64],
) -> int:
    """Decode one scan, sequential or progressive.

    Args:
        data: The file.
        at: The first entropy-coded byte of the scan.
        order: Blocks of the scan.
        pattern: (blocks of an MCU, 3): the component's place in the scan, its DC table, its AC table, 0..3 each.
        restart_interval: MCUs, 0 without.
        band: (4,) first and last coefficient, position of the lowest bit, and whether the scan brings one more bit of
            values known before; 0, 63, 0 and 0 where the picture is sequential.
        conditioning: (8, 2), see `define_conditioning`.
        estimates: `ESTIMATES`.
        state: Scratch memory from `scratch_memory`; so is `statistics`.
        statistics: See `state`.
        coefficients: (blocks, 64) changed in place, see `fastdata.jpeg_scans`.
        nonzero: (blocks,) changed in place.

    Returns:
        Where the marker byte after the scan lies, -1 for damage.
    """
    source, size_bytes = byte_pointer(data.ctypes.data), integer(data.size)
    states, bins = long_pointer(state.ctypes.data), byte_pointer(statistics.ctypes.data)
    coder = (source, size_bytes, states, bins, long_pointer(estimates.ctypes.data))
    bounds, conditions = long_pointer(band.ctypes.data), long_pointer(conditioning.ctypes.data)
    until_restart = restart_interval * integer(len(pattern))
    _start(coder, integer(at))
    for i in range(len(order)):
        if until_restart and i and i % until_restart == 0:
            after = _after_segment(coder, bounds)
            if after < 0 or source[after] != 0xD0 + ((i // until_restart - 1) & 7):
                return -1
            _start(coder, after + 1)
        part = long_pointer(integer(pattern.ctypes.data) + 24 * (i % len(pattern)))
        block = signed_short_pointer(integer(coefficients.ctypes.data) + 128 * order[i])
        if not _decode_block(
            coder, part, bounds, conditions, block, long_pointer(integer(nonzero.ctypes.data) + 8 * order[i])
        ):
            return -1
    return int(_after_segment(coder, bounds))
