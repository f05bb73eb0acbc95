"""What is done to a picture, as data: frozen dataclasses with torchvision's meaning and defaults, and their checks.

Backends lower these values to what they run best (DALI fuses the crop into the decode); nothing here touches pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from fastdata.errors import UsageError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

PictureCallable = Callable[[Any], Any]
"""A user's function on a (3, H, W) uint8 tensor that returns one of the same kind, one H and W for all samples."""


@dataclass(frozen=True)
class RandomResizedCrop:
    """Crop a random window and resize it (antialiased bilinear), as ``torchvision.transforms.RandomResizedCrop``."""

    size: int | tuple[int, int]
    """Output side, or (height, width), in pixels."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Range of the window's area as a share of the picture's."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Range of the window's width / height, drawn evenly on a log scale."""

    def __post_init__(self) -> None:
        """Check sizes and ranges."""
        _pair_of_sizes(self, self.size)
        _ordered(self, "scale", self.scale, 0.0, 1.0)
        _ordered(self, "ratio", self.ratio, 0.0, float("inf"))


@dataclass(frozen=True)
class Resize:
    """Resize (antialiased bilinear): an int is the short side, keeping the aspect; a pair is (height, width)."""

    size: int | tuple[int, int]
    """Short side, or (height, width), in pixels."""

    def __post_init__(self) -> None:
        """Check the size."""
        _pair_of_sizes(self, self.size)


@dataclass(frozen=True)
class CenterCrop:
    """Take the central window. Follows a `Resize` whose result is at least as large."""

    size: int | tuple[int, int]
    """Output side, or (height, width), in pixels."""

    def __post_init__(self) -> None:
        """Check the size."""
        _pair_of_sizes(self, self.size)


@dataclass(frozen=True)
class RandomHorizontalFlip:
    """Mirror left and right with probability `p`."""

    p: float = 0.5
    """Probability, 0..1."""

    def __post_init__(self) -> None:
        """Check the probability."""
        _probability(self, self.p)


@dataclass(frozen=True)
class ColorJitter:
    """Change brightness, contrast, saturation and hue by factors drawn per sample, in an order drawn per sample.

    Runs on the device batch of every backend.
    """

    brightness: float | tuple[float, float] = 0.0
    """Factor range, or x for (max(0, 1 - x), 1 + x)."""
    contrast: float | tuple[float, float] = 0.0
    """Factor range, or x for (max(0, 1 - x), 1 + x)."""
    saturation: float | tuple[float, float] = 0.0
    """Factor range, or x for (max(0, 1 - x), 1 + x)."""
    hue: float | tuple[float, float] = 0.0
    """Shift range within -0.5..0.5 of the colour circle, or x for (-x, x)."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("brightness", "contrast", "saturation"):
            _ordered(self, name, jitter_range(getattr(self, name), centre=1.0), 0.0, float("inf"))
        _ordered(self, "hue", jitter_range(self.hue, centre=0.0), -0.5, 0.5)


@dataclass(frozen=True)
class RandomGrayscale:
    """Replace a sample by its luma (three equal channels) with probability `p`. Runs on the device batch."""

    p: float = 0.1
    """Probability, 0..1."""

    def __post_init__(self) -> None:
        """Check the probability."""
        _probability(self, self.p)


@dataclass(frozen=True)
class Normalize:
    """Scale to 0..1, then subtract `mean` and divide by `std` per channel. Left out where ``dtype="uint8"``."""

    mean: tuple[float, float, float] = IMAGENET_MEAN
    """Per channel (R, G, B), on the 0..1 scale."""
    std: tuple[float, float, float] = IMAGENET_STD
    """Per channel (R, G, B), on the 0..1 scale, each above 0."""

    def __post_init__(self) -> None:
        """Check lengths and signs."""
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != 3:
                raise UsageError(f"Normalize.{name}", f"{len(values)} values", "3: one for each of R, G, B")
        if min(self.std) <= 0:
            raise UsageError("Normalize.std", f"{self.std}", "values above 0")


@dataclass(frozen=True)
class RandomErasing:
    """Overwrite a random rectangle with `value` with probability `p`, after `Normalize`. Runs on the device batch."""

    p: float = 0.5
    """Probability, 0..1."""
    scale: tuple[float, float] = (0.02, 0.33)
    """Range of the rectangle's area as a share of the output's."""
    ratio: tuple[float, float] = (0.3, 3.3)
    """Range of the rectangle's height / width, drawn evenly on a log scale (torchvision's meaning)."""
    value: float = 0.0
    """What is written, on the scale of the output."""

    def __post_init__(self) -> None:
        """Check probability and ranges."""
        _probability(self, self.p)
        _ordered(self, "scale", self.scale, 0.0, 1.0)
        _ordered(self, "ratio", self.ratio, 0.0, float("inf"))


Transform = (
    RandomResizedCrop
    | Resize
    | CenterCrop
    | RandomHorizontalFlip
    | ColorJitter
    | RandomGrayscale
    | Normalize
    | RandomErasing
    | PictureCallable
)


@dataclass(frozen=True)
class Recipe:
    """A checked transform list, sorted into the stages that every backend runs in this order."""

    crop: RandomResizedCrop | None
    """The random window, or None in an evaluation recipe."""
    resize: Resize | None
    """The evaluation resize, or None."""
    center_crop: CenterCrop | None
    """The evaluation window after `resize`, or None."""
    output_size: tuple[int, int]
    """(height, width) of every delivered picture, before user callables."""
    flip: RandomHorizontalFlip | None
    """The mirror, or None."""
    callables: tuple[PictureCallable, ...]
    """User functions on the (3, H, W) uint8 tensor, in order; only host backends run them."""
    color: tuple[ColorJitter | RandomGrayscale, ...]
    """Colour changes on the device batch, in order."""
    normalize: Normalize | None
    """The normalisation, or None: floating dtypes are then scaled to 0..1 only."""
    erasing: RandomErasing | None
    """The erased rectangle, or None."""


def imagenet_train(size: int = 224) -> tuple[Transform, ...]:
    """Return the usual training recipe: random resized crop, mirror, ImageNet normalisation.

    Args:
        size: Output side in pixels.
    """
    return (RandomResizedCrop(size), RandomHorizontalFlip(), Normalize())


def imagenet_eval(size: int = 224) -> tuple[Transform, ...]:
    """Return the usual evaluation recipe: resize the short side to size / 0.875 (256 for 224), centre crop, normalise.

    Args:
        size: Output side in pixels.
    """
    return (Resize(int(size / 0.875)), CenterCrop(size), Normalize())


_STAGES: tuple[tuple[type, ...], ...] = (
    (RandomResizedCrop, Resize),
    (CenterCrop,),
    (RandomHorizontalFlip,),
    (),  # user callables
    (ColorJitter, RandomGrayscale),
    (Normalize,),
    (RandomErasing,),
)
_CALLABLE_STAGE = 3


def sort_recipe(transforms: Sequence[Transform] | Transform) -> Recipe:
    """Check a transform list and sort it into stages.

    Args:
        transforms: One transform or a sequence, in the order of `Recipe`'s fields.

    Raises:
        UsageError: The list has no transform that fixes the output size, repeats a stage that may come once, or is out
            of order. The order matters and is never changed silently.
    """
    items = tuple(transforms) if isinstance(transforms, Sequence) else (transforms,)
    found: dict[type | str, Any] = {}
    callables: list[PictureCallable] = []
    color: list[ColorJitter | RandomGrayscale] = []
    last = -1
    for item in items:
        stage = _stage(item)
        if stage < last:
            raise UsageError(
                "transform",
                f"{_name(item)} after a later stage",
                "the order: crop or resize, centre crop, flip, callables, colour, Normalize, RandomErasing",
                "Reorder the list.",
            )
        last = stage
        if stage == _CALLABLE_STAGE:
            callables.append(cast("PictureCallable", item))
        elif isinstance(item, ColorJitter | RandomGrayscale):
            color.append(item)
        elif type(item) in found or (stage == 0 and (RandomResizedCrop in found or Resize in found)):
            raise UsageError("transform", f"a second {_name(item)}", "each stage once")
        else:
            found[type(item)] = item
    return Recipe(
        crop=found.get(RandomResizedCrop),
        resize=found.get(Resize),
        center_crop=found.get(CenterCrop),
        output_size=_output_size(found),
        flip=found.get(RandomHorizontalFlip),
        callables=tuple(callables),
        color=tuple(color),
        normalize=found.get(Normalize),
        erasing=found.get(RandomErasing),
    )


def jitter_range(value: float | tuple[float, float], *, centre: float) -> tuple[float, float]:
    """Return the (low, high) range that a `ColorJitter` field stands for."""
    if isinstance(value, tuple):
        return value
    low = centre - value
    return (max(0.0, low) if centre else low, centre + value)


def size_pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return (height, width) of an output size given as a side or a pair."""
    return (size, size) if isinstance(size, int) else size


def _stage(item: object) -> int:
    for number, kinds in enumerate(_STAGES):
        if isinstance(item, kinds):
            return number
    if callable(item):
        return _CALLABLE_STAGE
    raise UsageError(
        "transform",
        f"{item!r}",
        "fastdata's transforms or callables on a (3, H, W) uint8 tensor",
        "See fastdata.imagenet_train for an example.",
    )


def _output_size(found: dict[type | str, Any]) -> tuple[int, int]:
    crop, resize, center = found.get(RandomResizedCrop), found.get(Resize), found.get(CenterCrop)
    if crop is not None:
        if center is not None:
            raise UsageError("transform", "CenterCrop after RandomResizedCrop", "one of the two")
        return size_pair(crop.size)
    if resize is None:
        raise UsageError(
            "transform",
            "nothing that fixes the size of the output",
            "RandomResizedCrop(size), Resize((height, width)) or Resize(side) + CenterCrop(size)",
            "Start from fastdata.imagenet_train(224) or fastdata.imagenet_eval(224).",
        )
    if center is None:
        if isinstance(resize.size, int):
            raise UsageError(
                "transform",
                f"Resize({resize.size}) alone, which keeps each picture's aspect",
                "pictures of one size in a batch",
                f"Add CenterCrop({resize.size}), or ask for Resize(({resize.size}, {resize.size})).",
            )
        return size_pair(resize.size)
    smallest, wanted = size_pair(resize.size), size_pair(center.size)
    if wanted[0] > smallest[0] or wanted[1] > smallest[1]:
        raise UsageError(
            "transform", f"CenterCrop{wanted} after Resize({resize.size})", "a crop no larger than the resized picture"
        )
    return wanted


def _name(item: Transform) -> str:
    return type(item).__name__ if isinstance(item, tuple(k for kinds in _STAGES for k in kinds)) else repr(item)


def _pair_of_sizes(owner: object, size: int | tuple[int, int]) -> None:
    sides = (size,) if isinstance(size, int) else size
    if not isinstance(sides, tuple) or len(sides) not in (1, 2) or any(not isinstance(s, int) or s < 1 for s in sides):
        raise UsageError(
            f"{type(owner).__name__}.size", f"{size!r}", "a side, or (height, width), in pixels, each >= 1"
        )


def _ordered(owner: object, name: str, pair: tuple[float, float], low: float, high: float) -> None:
    exclusive = name in ("scale", "ratio")
    if len(pair) != 2 or not (low <= pair[0] <= pair[1] <= high) or (exclusive and pair[0] <= 0):
        bound = "above 0" if exclusive else f">= {low}"
        raise UsageError(f"{type(owner).__name__}.{name}", f"{pair}", f"(low, high), low <= high, {bound}, <= {high}")


def _probability(owner: object, p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise UsageError(f"{type(owner).__name__}.p", f"{p}", "a probability, 0..1")
