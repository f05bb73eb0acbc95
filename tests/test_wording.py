"""Numbers in messages."""

from __future__ import annotations

import pytest

from fastdata.wording import counted


@pytest.mark.parametrize(
    ("count", "noun", "expected"),
    [(0, "file", "0 files"), (1, "class", "1 class"), (2, "class", "2 classes"), (3, "batch", "3 batches"),
     (1234, "shard", "1,234 shards")],
)  # fmt: skip
def test_a_count_has_the_noun_in_its_number(count: int, noun: str, expected: str) -> None:
    assert counted(count, noun) == expected
