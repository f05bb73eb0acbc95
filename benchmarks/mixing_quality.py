"""How well each shuffle mixes, against the full permutation: two numbers for each, and a drawing.

    python benchmarks/mixing_quality.py [--svg FILE] [--json FILE]

The set: 64 shards of 10,000 samples in 1,000 classes of equal size, once stored class by class (the worst case, what
`tar` over a sorted folder gives), once stored in random order (what `fastdata shard` writes). Batches of 256.

*Class spread* looks at one epoch: the variance of a class's share among batches, over that of the full permutation.
1 is as good as the full permutation; at 40 a batch's mix of classes is as noisy as that of a batch 40 times smaller.

*Company* looks at two epochs: how often two samples that share a batch in one epoch share one in the next, over that
of the full permutation. 1 is as good; 100 means that a sample meets the same others a hundred times too often.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fastdata.order import BlockOrder, FullOrder, ShardLayout
from fastdata.plan import SHARDS_AHEAD, SHARDS_SIDE_BY_SIDE
from fastdata.sources.sidebyside import read_side_by_side
from fastdata.spec import BlockShuffle
from fastdata.stream_order import mix, shard_order

SHARDS, SHARD_SAMPLES, CLASSES, BATCH = 64, 10_000, 1_000, 256
SAMPLES = SHARDS * SHARD_SAMPLES
Order = Callable[[int], NDArray[np.int64]]
"""Epoch to (SAMPLES,) places in storage, in the order of delivery."""


class _Shard:
    """Stands for the reader of one shard."""

    def __init__(self, number: int) -> None:
        self._places = range(number * SHARD_SAMPLES, (number + 1) * SHARD_SAMPLES)

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def stop(self) -> None:
        """Nothing waits."""


def full(epoch: int) -> NDArray[np.int64]:
    """Order of ``shuffle=True``."""
    return FullOrder(SAMPLES, 0, epoch).positions(0, SAMPLES)


def blocks(shards: int) -> Order:
    """Order of ``BlockShuffle(shards)``."""
    layout = ShardLayout(np.arange(SAMPLES), np.arange(0, SAMPLES + 1, SHARD_SAMPLES))
    return lambda epoch: BlockOrder(layout, BlockShuffle(shards), 0, epoch).positions(0, SAMPLES)


def buffer(samples: int, side_by_side: int = SHARDS_SIDE_BY_SIDE) -> Order:
    """Order of ``BufferShuffle(samples)``, through the code that streams use."""

    def order(epoch: int) -> NDArray[np.int64]:
        readers = [_Shard(number) for number in shard_order(SHARDS, 0, epoch).tolist()]
        stream = read_side_by_side(readers, side_by_side, SHARDS_AHEAD, lambda _: 512)
        return np.fromiter(mix(stream, samples, 0, epoch, 0), np.int64, SAMPLES)

    return order


ORDERS: dict[str, Order] = {
    "True": full,
    "BlockShuffle(32)": blocks(32),
    "BlockShuffle(8)": blocks(8),
    "BlockShuffle(1)": blocks(1),
    "BufferShuffle(100_000)": buffer(100_000),
    "BufferShuffle(10_000)": buffer(10_000),
    "BufferShuffle(1_000)": buffer(1_000),
    "10_000, but one shard at a time": buffer(10_000, 1),
}


def class_spread(order: NDArray[np.int64], classes: NDArray[np.int64]) -> float:
    """Return the variance of class counts among batches over that of a full permutation (hypergeometric)."""
    batches = SAMPLES // BATCH
    cells = np.arange(batches * BATCH) // BATCH * CLASSES + classes[order[: batches * BATCH]]
    counts = np.bincount(cells, minlength=batches * CLASSES).astype(np.float64)
    share = 1 / CLASSES
    expected = BATCH * share * (1 - share) * (SAMPLES - BATCH) / (SAMPLES - 1)
    return float(((counts - BATCH * share) ** 2).mean() / expected)


def company(one: NDArray[np.int64], other: NDArray[np.int64]) -> float:
    """Return how often pairs of one epoch's batches meet again in the other's, over that of a full permutation."""
    batch_of = np.empty(SAMPLES, np.int64)
    batch_of[one] = np.arange(SAMPLES) // BATCH
    batches = SAMPLES // BATCH
    again = np.sort(batch_of[other[: batches * BATCH]].reshape(batches, BATCH), axis=1)
    # Runs of equal numbers in a sorted row are samples that were together before: r of them are r * (r - 1) / 2 pairs.
    starts = np.ones_like(again, dtype=bool)
    starts[:, 1:] = again[:, 1:] != again[:, :-1]
    runs = np.diff(np.append(np.flatnonzero(starts.ravel()), again.size))
    met = (runs * (runs - 1) / 2).sum()
    pairs = batches * BATCH * (BATCH - 1) / 2
    return float(met / (pairs * (BATCH - 1) / (SAMPLES - 1)))


def measure() -> list[dict[str, float | str]]:
    """Return a row for each order."""
    by_class = np.arange(SAMPLES) // (SAMPLES // CLASSES)
    mixed = np.random.default_rng(0).permutation(by_class)
    rows: list[dict[str, float | str]] = []
    for name, order in ORDERS.items():
        first, second = order(0), order(1)
        assert np.array_equal(np.sort(first), np.arange(SAMPLES))
        rows.append(
            {
                "shuffle": name,
                "class_spread_sorted_shards": round(class_spread(first, by_class), 2),
                "class_spread_mixed_shards": round(class_spread(first, mixed), 2),
                "company": round(company(first, second), 2),
            }
        )
        print(rows[-1], flush=True)
    return rows


def draw(rows: list[dict[str, float | str]]) -> str:
    """Return an SVG: a dot for each figure on a logarithmic scale from 1 (the full permutation)."""
    left, top, width, line, decades = 290, 78, 440, 34, 2
    height = top + line * len(rows) + 34
    series = (
        ("class_spread_sorted_shards", "#c2611f", "class spread, shards stored class by class"),
        ("class_spread_mixed_shards", "#2b8a57", "class spread, shards stored in random order"),
        ("company", "#2f6fb7", "company, both"),
    )

    def at(value: float) -> float:
        return left + width * max(0.0, np.log10(value)) / decades

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 70} {height}" '
        'font-family="system-ui, DejaVu Sans, sans-serif" font-size="13">',
        f'<rect width="{left + width + 70}" height="{height}" fill="#ffffff"/>',
        '<g fill="#1c1917">',
        '<text x="16" y="24" font-size="15" font-weight="600">Times worse than a full permutation (1 = as good)</text>',
    ]
    x = 16.0
    for _, color, label in series:
        parts.append(f'<circle cx="{x + 5}" cy="45" r="5" fill="{color}"/><text x="{x + 16}" y="49">{label}</text>')
        x += 30 + 6.6 * len(label)
    for decade in range(decades + 1):
        place = at(10**decade)
        parts.append(f'<line x1="{place}" y1="{top - 10}" x2="{place}" y2="{height - 30}" stroke="#e7e5e4"/>')
        parts.append(f'<text x="{place}" y="{height - 12}" text-anchor="middle" fill="#57534e">{10**decade}</text>')
    for number, row in enumerate(rows):
        y = top + line * number + 8
        parts.append(f'<text x="{left - 16}" y="{y + 4}" text-anchor="end">{row["shuffle"]}</text>')
        parts.append(f'<line x1="{left}" y1="{y}" x2="{left + width}" y2="{y}" stroke="#f0efed"/>')
        for shift, (key, color, _) in enumerate(series):
            value = float(row[key])
            dot = y + (shift - 1) * 7
            parts.append(f'<line x1="{left}" y1="{dot}" x2="{at(value):.1f}" y2="{dot}" stroke="{color}"/>')
            parts.append(f'<circle cx="{at(value):.1f}" cy="{dot}" r="4" fill="{color}"/>')
            if value >= 1.5:
                parts.append(
                    f'<text x="{at(value) + 8:.1f}" y="{dot + 4}" font-size="10" fill="{color}">{value:.3g}</text>'
                )
    return "\n".join([*parts, "</g>", "</svg>", ""])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--svg", type=Path, help="where to draw")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    chosen = parser.parse_args()
    found = measure()
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    if chosen.svg:
        chosen.svg.write_text(draw(found))
