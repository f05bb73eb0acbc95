"""What a conversion is asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fastdata.errors import UsageError
from fastdata.shards.tarformat import check_cap

DEFAULT_MAX_BYTES = 2_000_000_000
_SPLIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class ConvertOptions:
    """Everything that decides what a set of shards holds; speed is not in here."""

    max_bytes: int = DEFAULT_MAX_BYTES
    """Size that no shard's file exceeds."""
    shuffle: bool = True
    """Store samples in a random order, so that reading in sequence is already mixed."""
    seed: int = 0
    """Of that order and of the split."""
    class_map: Path | None = None
    """File that gives the label of each class (see `fastdata.shards.plan.read_class_map`); None: sorted as text."""
    split: tuple[tuple[str, float], ...] = ()
    """Names and shares of splits, for example ``(("train", 0.9), ("val", 0.1))``; each class is divided alike."""
    on_error: Literal["raise", "skip"] = "raise"
    """What a file that is no readable picture, or too large, does."""
    resize: int | None = None
    """Pixels; pictures whose short side is longer are shrunk to it and saved as JPEG, turned upright."""
    quality: int = 90
    """JPEG quality of resized pictures, 1..95."""
    crop_ready: bool = False
    """Rewrite JPEGs, without loss, so that crops can be cut before decoding."""
    max_growth: float = 0.15
    """Share by which a crop-ready file may be larger than its source; others stay byte for byte."""
    check: Literal["none", "coefficients", "pixels"] = "coefficients"
    """What is compared after a JPEG was rewritten, see `fastdata.transcode.make_crop_ready`. Changes only speed and
    what a defect of the transcoder could do."""

    def __post_init__(self) -> None:
        """Check values.

        Raises:
            UsageError: A value is impossible.
        """
        check_cap(self.max_bytes)
        if self.on_error not in ("raise", "skip"):
            raise UsageError("on_error", f"{self.on_error!r}", '"raise" or "skip"')
        self._check_reencoding()
        names = [name for name, _ in self.split]
        for name, share in self.split:
            if not _SPLIT_NAME.fullmatch(name):
                raise UsageError("split", f"the name {name!r}", "letters, digits, - and _")
            if not 0 < share < 1:
                raise UsageError("split", f"{name}={share}", "a share between 0 and 1")
        if len(set(names)) < len(names):
            raise UsageError("split", f"{names}", "each name once")
        if self.split and abs(sum(share for _, share in self.split) - 1) > 1e-6:
            raise UsageError("split", f"shares that sum to {sum(share for _, share in self.split):g}", "1")

    def _check_reencoding(self) -> None:
        if self.max_growth < 0:
            raise UsageError("max_growth", f"{self.max_growth}", "a share >= 0")
        if self.check not in ("none", "coefficients", "pixels"):
            raise UsageError("check", f"{self.check!r}", '"none", "coefficients" or "pixels"')
        if self.resize is not None and self.resize < 1:
            raise UsageError("resize", f"{self.resize}", "pixels of the short side, at least 1")
        if not 1 <= self.quality <= 95:
            raise UsageError("quality", f"{self.quality}", "1..95")

    @property
    def stored(self) -> str:
        """What the shards hold: "original", "resized" or "crop-ready"."""
        if self.crop_ready:
            return "crop-ready"
        return "resized" if self.resize is not None else "original"

    def identity(self) -> dict[str, Any]:
        """Return what the index states and a resumed conversion must repeat; JSON-able."""
        return {
            "max_bytes": self.max_bytes,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "split": [list(part) for part in self.split],
            "resize": self.resize,
            "quality": self.quality if self.resize is not None else None,
            "crop_ready": self.crop_ready,
            "max_growth": self.max_growth if self.crop_ready else None,
        }


def parse_split(text: str) -> tuple[tuple[str, float], ...]:
    """Read ``train=0.9,val=0.1``.

    Raises:
        UsageError: It is something else.
    """
    parts = []
    for part in filter(None, text.split(",")):
        name, _, share = part.partition("=")
        try:
            parts.append((name.strip(), float(share)))
        except ValueError as exc:
            raise UsageError("split", f"{part!r}", "NAME=SHARE, for example train=0.9,val=0.1") from exc
    return tuple(parts)
