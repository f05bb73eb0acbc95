"""A number that a meter read, or the reason why it could not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """One number, or the reason why there is none."""

    value: float | None
    """In the unit that its name says, or None."""
    reason: str = ""
    """Why `value` is None."""
