"""Arithmetic-coded JPEG files that tests make for themselves, from baseline ones: an encoder after ITU-T T.81, annex D.

Slow and plain: the code register is one Python integer for a whole segment, so no carry has to be carried on.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastdata import jpeg, jpeg_arithmetic, jpeg_scans
from fastdata.jpeg_picture import Picture, read_picture

FIXED = 10_000
"""The context whose estimate stays at one half."""


@dataclass(frozen=True)
class Scan:
    """What one scan brings."""

    components: tuple[int, ...]
    first_k: int = 0
    last_k: int = 63
    high_bit: int = 0
    low_bit: int = 0


@dataclass(frozen=True)
class Conditioning:
    """What a DAC segment says, for all tables."""

    lower: int = 0
    upper: int = 1
    last_low_k: int = 5


def progressive_scans(components: int) -> list[Scan]:
    """Return scans of each kind: first and later bits, of DC and of two bands."""
    each, everything = range(components), tuple(range(components))
    return [
        Scan(everything, 0, 0, 0, 1),
        *(Scan((c,), 1, 5, 0, 2) for c in each),
        *(Scan((c,), 6, 63, 0, 2) for c in each),
        *(Scan((c,), 1, 63, 2, 1) for c in each),
        Scan(everything, 0, 0, 1, 0),
        *(Scan((c,), 1, 63, 1, 0) for c in each),
    ]


def arithmetic(
    data: bytes,
    *,
    progressive: bool = False,
    scans: Sequence[Scan] | None = None,
    restart_interval: int = 0,
    conditioning: Conditioning | None = None,
) -> bytes:
    """Code the coefficients of a baseline file arithmetically.

    Args:
        data: The file.
        progressive: Whether to write SOF10 instead of SOF9.
        scans: None: one for all components, or `progressive_scans`.
        restart_interval: MCUs, 0 without.
        conditioning: Written to a DAC segment; None: without one.
    """
    picture = read_picture(np.frombuffer(data, np.uint8), jpeg.read_header(data))
    components = picture.header.components
    if scans is None:
        scans = progressive_scans(components) if progressive else [Scan(tuple(range(components)))]
    values = np.zeros((len(picture.dc), 64), np.int16)
    order = picture.order(tuple(range(components)))
    jpeg_scans.expand(order, picture.dc, picture.counts, picture.tokens, values, np.zeros(len(values), np.int64))
    written = b"\xff\xd8" + (_segment(0xE0, picture.jfif) if picture.jfif else b"")
    written += b"".join(_segment(0xDB, table) for table in picture.quantisation.values())
    written += _segment(0xCA if progressive else 0xC9, picture.frame)
    if restart_interval:
        written += _segment(0xDD, struct.pack(">H", restart_interval))
    if conditioning is not None:
        dc = conditioning.upper << 4 | conditioning.lower
        written += _segment(
            0xCC, bytes([0x00, dc, 0x01, dc, 0x10, conditioning.last_low_k, 0x11, conditioning.last_low_k])
        )
    for scan in scans:
        selectors = b"".join(bytes([picture.frame[6 + 3 * c], 0x11 if c else 0]) for c in scan.components)
        band = bytes([scan.first_k, scan.last_k, scan.high_bit << 4 | scan.low_bit])
        written += _segment(0xDA, bytes([len(scan.components)]) + selectors + band)
        segments = _Blocks(picture, scan, values, conditioning or Conditioning()).segments(restart_interval)
        for number, segment in enumerate(segments):
            written += (bytes([0xFF, 0xD0 + (number - 1) % 8]) if number else b"") + segment
    return written + b"\xff\xd9"


class Coder:
    """The encoder of T.81, D.1."""

    def __init__(self) -> None:
        self._low, self._width, self._shifted = 0, 0x10000, 0
        self._indices = {FIXED: 2 * 113}

    def put(self, context: int, decision: bool | int) -> None:
        """Code a decision in a context."""
        index = self._indices.get(context, 0)
        estimate = int(jpeg_arithmetic.ESTIMATES[index])
        less, is_less = estimate >> 16, (index & 1) != int(decision)
        self._width -= less
        if not is_less and self._width >= 0x8000:
            return
        if (self._width >= less) == is_less:  # the larger part goes to what is more probable
            self._low, self._width = self._low + self._width, less
        self._indices[context] = estimate & 255 if is_less else estimate >> 8 & 255
        shift = 16 - self._width.bit_length()
        self._low, self._width, self._shifted = self._low << shift, self._width << shift, self._shifted + shift

    def end(self) -> bytes:
        """Return the segment: the number of most trailing zeros, without its zero bytes at the end, stuffed."""
        code = (self._low + self._width - 1) & ~0xFFFF
        code += 0x8000 if code < self._low else 0
        padding = -self._shifted % 8
        whole = (code << padding).to_bytes((16 + self._shifted + padding) // 8, "big").rstrip(b"\0")
        return whole.replace(b"\xff", b"\xff\0")


class _Blocks:
    """Codes the blocks of one scan (T.81, F.1.4 and G.1.3)."""

    def __init__(self, picture: Picture, scan: Scan, values: NDArray[np.int16], conditioning: Conditioning) -> None:
        self._scan, self._values, self._conditioning = scan, values, conditioning
        self._order = picture.order(scan.components).tolist()
        sizes = picture.grids[list(scan.components), 2] * picture.grids[list(scan.components), 3]
        self._pattern = list(np.repeat(scan.components, sizes)) if len(scan.components) > 1 else list(scan.components)

    def segments(self, restart_interval: int) -> Iterator[bytes]:
        """Yield the entropy-coded data between restart markers."""
        step = restart_interval * len(self._pattern) or len(self._order)
        for start in range(0, len(self._order), step):
            self._coder, self._before, self._contexts = Coder(), [0] * 4, [0] * 4
            for i in range(start, min(start + step, len(self._order))):
                self._put_block(int(self._pattern[i % len(self._pattern)]), self._values[self._order[i]].tolist())
            yield self._coder.end()

    def _put_block(self, component: int, block: list[int]) -> None:
        scan = self._scan
        if scan.high_bit:
            if scan.first_k == 0:
                self._coder.put(FIXED, block[0] >> scan.low_bit & 1)
            else:
                self._put_refinement(256 * min(component, 1), block)
            return
        if scan.first_k == 0:
            self._put_dc(component, block[0] >> scan.low_bit)
        if scan.last_k > 0:
            self._put_ac(256 * min(component, 1), [_shifted(value, scan.low_bit) for value in block])

    def _put_dc(self, component: int, value: int) -> None:
        difference, self._before[component] = value - self._before[component], value
        first = 5000 + 64 * min(component, 1)
        context = first + self._contexts[component]
        self._coder.put(context, difference != 0)
        size, negative = abs(difference) - 1, difference < 0
        limits = (1 << self._conditioning.lower) >> 1, 1 << self._conditioning.upper
        kind = 0 if abs(difference) <= limits[0] else (4 if abs(difference) <= limits[1] else 12)
        self._contexts[component] = kind + 4 * negative if kind else 0
        if difference == 0:
            return
        self._coder.put(context + 1, negative)
        self._coder.put(context + 2 + negative, size > 0)
        if size > 0:
            self._put_magnitude(first + 20, 1, size)

    def _put_magnitude(self, context: int, power: int, size: int) -> None:
        while 2 * power <= size:
            self._coder.put(context, 1)
            power, context = 2 * power, context + 1
        self._coder.put(context, 0)
        while power > 1:
            power >>= 1
            self._coder.put(context + 14, size & power > 0)

    def _put_ac(self, first: int, block: list[int]) -> None:
        k = max(1, self._scan.first_k)
        last = max((i for i in range(k, self._scan.last_k + 1) if block[i]), default=0)
        while k <= last:
            self._coder.put(first + 3 * k, 0)
            while block[k] == 0:
                self._coder.put(first + 3 * k + 1, 0)
                k += 1
            self._coder.put(first + 3 * k + 1, 1)
            self._coder.put(FIXED, block[k] < 0)
            size = abs(block[k]) - 1
            self._coder.put(first + 3 * k + 2, size > 0)
            if size > 0:
                self._coder.put(first + 3 * k + 2, size > 1)
            if size > 1:
                self._put_magnitude(first + (192 if k <= self._conditioning.last_low_k else 220), 2, size)
            k += 1
        if k <= self._scan.last_k:
            self._coder.put(first + 3 * k, 1)

    def _put_refinement(self, first: int, block: list[int]) -> None:
        scan = self._scan
        known, now = ([_shifted(value, bit) for value in block] for bit in (scan.high_bit, scan.low_bit))
        band = range(scan.first_k, scan.last_k + 1)
        last_known = max((k for k in band if known[k]), default=0)
        last = max((k for k in band if now[k]), default=0)
        asked = True  # whether the block may end here: not within a run
        for k in band:
            if asked and k > last_known:
                self._coder.put(first + 3 * k, k > last)
                if k > last:
                    return
            if known[k]:
                self._coder.put(first + 3 * k + 2, abs(now[k]) & 1)
            else:
                self._coder.put(first + 3 * k + 1, now[k] != 0)
                if now[k]:
                    self._coder.put(FIXED, now[k] < 0)
            asked = now[k] != 0


def _shifted(value: int, bits: int) -> int:
    """Divide by a power of two, towards 0 (T.81, G.1.2.1)."""
    return value >> bits if value >= 0 else -(-value >> bits)


def _segment(marker: int, payload: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(payload) + 2) + payload
