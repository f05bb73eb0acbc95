"""Numbers in messages."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: "1 shard", "1,234 shards", "2 classes", "3 batches"."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"
