"""Numbers and sizes in messages."""

from __future__ import annotations

import pytest

from fastdata.wording import counted, sized


@pytest.mark.parametrize(
    ("count", "noun", "expected"),
    [(0, "file", "0 files"), (1, "class", "1 class"), (2, "class", "2 classes"), (3, "batch", "3 batches"),
     (1234, "shard", "1,234 shards")],
)  # fmt: skip
def test_a_count_has_the_noun_in_its_number(count: int, noun: str, expected: str) -> None:
    assert counted(count, noun) == expected


@pytest.mark.parametrize(
    ("size_bytes", "expected"),
    [(0, "0 bytes"), (1, "1 byte"), (512, "512 bytes"), (12_345, "12.3 kB"), (45_600_000, "45.6 MB"),
     (999_000_000, "999.0 MB"), (1_000_000_000, "1.00 GB"), (1_234_567_000_000, "1,234.57 GB")],
)  # fmt: skip
def test_a_size_has_the_unit_that_fits_it(size_bytes: int, expected: str) -> None:
    assert sized(size_bytes) == expected
