"""Numbers and sizes in messages."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: "1 shard", "1,234 shards", "2 classes", "3 batches"."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def sized(size_bytes: float) -> str:
    """Return a size in the decimal unit that fits it: "512 bytes", "12.3 kB", "45.6 MB", "1,234.56 GB"."""
    if size_bytes < 1e3:
        return counted(round(size_bytes), "byte")
    if size_bytes < 1e6:
        return f"{size_bytes / 1e3:.1f} kB"
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes < 1e9 else f"{size_bytes / 1e9:,.2f} GB"
