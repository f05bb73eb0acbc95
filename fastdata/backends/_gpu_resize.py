"""Crop, antialiased resize, EXIF turn, mirror and normalisation of a whole batch on the GPU, in two kernel launches.

The result is, integer for integer, what `fastdata.resample` makes of the same pixels on the CPU. Pictures may lie
anywhere on the device, in any order of their axes: each is a row of numbers (`FIELDS`), and a turned picture is one
whose strides run another way, so that nothing is copied to turn it. Pictures that are finished already go through as
the resize from their size to the same size, which changes nothing.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from fastdata.decode import _TURN_TABLE
from fastdata.errors import BackendUnavailableError
from fastdata.geometry import Geometry, upright_sizes
from fastdata.resample import read_ranges
from fastdata.spec import PipelineSpec

_AXIS: Final = ("stride", "length", "full", "first", "read_end", "taps", "table")
FIELDS: Final = (
    "address",  # of the upright picture's pixel at Geometry.low; while records are made, from the picture's first byte
    "plane",  # bytes from one channel to the next
    "flip",
    "columns_first",  # whether Pillow's first pass runs along the columns
    *(f"{axis}_{name}" for axis in ("rows", "columns") for name in _AXIS),
)
"""What the kernels are told of a picture, as int64. Of each axis: bytes from pixel to pixel; the pixels that become
`full` pixels, of which those from `first` on are wanted; the end of what is read; weights of an output pixel; where
their table begins. Pixels count from `Geometry.low`."""
_ROWS, _COLUMNS = FIELDS.index("rows_stride"), FIELDS.index("columns_stride")
_STRIDE, _LENGTH, _FULL, _FIRST, _READ_END, _TAPS, _TABLE = range(len(_AXIS))
_ADVICE: Final = (
    "Install it (pip install triton; PyTorch's CUDA builds for Linux bring it) and a C compiler, or decode on the CPU: "
    'fastdata.TorchvisionOptions(decode="host").'
)
_WEIGHTS_BLOCK: Final = 128
_PIXELS_BLOCK: Final = 256


def describe_decoded(
    geometry: Geometry,
    boxes: NDArray[np.int64],
    turns: NDArray[np.int64],
    widths: NDArray[np.int64],
    heights: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Describe decoded pictures, channel after channel in memory, as they are stored.

    Args:
        geometry: Of n pictures.
        boxes: (n, 4) top, left, height, width of what is decoded of each picture, in stored pixels.
        turns: (n,) EXIF orientations 1..8; 0 counts as 1.
        widths: (n,) columns of the whole stored pictures.
        heights: (n,) rows of the whole stored pictures.

    Returns:
        (n, len(FIELDS)) int64; addresses count from the first byte of each decoded picture.
    """
    swap, reverse_rows, reverse_columns = _TURN_TABLE[turns].T
    upright_widths, upright_heights = upright_sizes(widths, heights, turns)
    top, left, box_height, box_width = boxes.T
    # Bytes from one row and column of the upright picture to the next.
    y_stride = np.where(swap, 1, box_width) * np.where(reverse_rows, -1, 1)
    x_stride = np.where(swap, box_width, 1) * np.where(reverse_columns, -1, 1)
    # The upright pixel (0, 0) is a corner of the stored picture.
    y_corner = np.where(reverse_rows, upright_heights - 1, 0)
    x_corner = np.where(reverse_columns, upright_widths - 1, 0)
    stored_row, stored_column = np.where(swap, (x_corner, y_corner), (y_corner, x_corner))
    corner = (stored_row - top) * box_width + (stored_column - left)
    records = _describe(geometry.high - geometry.low, geometry.full, geometry.offset, geometry.output_size)
    records[:, 0] = corner + geometry.low[:, 0] * y_stride + geometry.low[:, 1] * x_stride
    records[:, 1] = box_height * box_width
    records[:, 2] = geometry.flips
    records[:, _ROWS + _STRIDE], records[:, _COLUMNS + _STRIDE] = y_stride, x_stride
    return records


def describe_finished(count: int, size: tuple[int, int]) -> NDArray[np.int64]:
    """Describe pictures of the final size, pixel after pixel in memory; addresses are those in an array of them all.

    Args:
        count: Pictures n.
        size: (height, width).
    """
    sizes = np.broadcast_to(np.array(size, np.int64), (count, 2))
    records = _describe(sizes, sizes, np.zeros((count, 2), np.int64), size)
    records[:, 0] = np.arange(count) * size[0] * size[1] * 3
    records[:, 1] = 1
    records[:, _ROWS + _STRIDE], records[:, _COLUMNS + _STRIDE] = size[1] * 3, 3
    return records


def _describe(
    lengths: NDArray[np.int64], full: NDArray[np.int64], first: NDArray[np.int64], size: tuple[int, int]
) -> NDArray[np.int64]:
    """Fill in what does not depend on where the pictures lie; lengths, full, first: (n, 2), rows then columns."""
    records = np.zeros((len(lengths), len(FIELDS)), np.int64)
    begin, end = read_ranges(np.zeros_like(lengths), lengths, full, first, np.array(size, np.int64))
    # A half-open interval of 2 * support holds at most so many pixel centres of a weight above zero.
    taps = np.minimum(np.ceil(2 * np.maximum(lengths / full, 1.0)).astype(np.int64), end - begin)
    for axis, at in enumerate((_ROWS, _COLUMNS)):
        records[:, at + _LENGTH], records[:, at + _FULL] = lengths[:, axis], full[:, axis]
        records[:, at + _FIRST], records[:, at + _READ_END] = first[:, axis], end[:, axis]
        records[:, at + _TAPS] = taps[:, axis]
    fewer = lengths - full
    records[:, 3] = (fewer[:, 0] > 0) & (fewer[:, 0] > 2 * fewer[:, 1])  # as in `fastdata.resample`
    return records


class GpuResize:
    """Launches the kernels. Holds constants only, so one serves all batches of a pipeline."""

    def __init__(self, spec: PipelineSpec, *, finish: bool) -> None:
        """Import the kernels.

        Args:
            spec: What is asked for.
            finish: Whether the result is final: normalised, of the asked dtype and memory format. Else uint8.

        Raises:
            BackendUnavailableError: Triton is missing.
        """
        self._kernels = load_kernels()
        self._device = torch.device(spec.device)
        self._size = spec.recipe.output_size
        self._dtype: torch.dtype = getattr(torch, spec.dtype) if finish else torch.uint8
        plain = finish and spec.memory_format == "contiguous"
        self._layout = torch.contiguous_format if plain else torch.channels_last
        normalize = spec.recipe.normalize
        mean, std = (normalize.mean, normalize.std) if normalize else ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
        # (x / 255 - mean) / std as one multiply-add.
        self._scale = tuple(1 / (255 * s) for s in std)
        self._shift = tuple(-m / s for m, s in zip(mean, std, strict=True))

    def __call__(self, records: NDArray[np.int64]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Start the resize of n pictures on the current stream.

        Args:
            records: (n, len(FIELDS)) int64, n >= 1, with addresses on the device. Tables are laid out here.

        Returns:
            (n, 3, H, W) pictures, and what must not be freed before the stream has come so far (besides the sources).
        """
        height, width = self._size
        rows, columns = records[:, _ROWS + _TAPS] * height, records[:, _COLUMNS + _TAPS] * width
        ends = np.cumsum(rows + columns)
        records[:, _ROWS + _TABLE] = ends - rows - columns
        records[:, _COLUMNS + _TABLE] = ends - columns
        on_gpu = self._device.type == "cuda"
        staged = torch.empty(records.shape, dtype=torch.int64, pin_memory=on_gpu)
        staged.numpy()[:] = records
        pictures = staged.to(self._device, non_blocking=True)
        n, fields = records.shape
        begins = torch.empty((n, height + width), dtype=torch.int32, device=self._device)
        weights = torch.empty(int(ends[-1]), dtype=torch.int32, device=self._device)
        out = torch.empty((n, 3, height, width), dtype=self._dtype, device=self._device, memory_format=self._layout)
        # Without fusing multiply and add: the weights are those of a CPU, which rounds in between.
        self._kernels.weights_kernel[(-(-max(height, width) // _WEIGHTS_BLOCK), 2, n)](
            pictures, begins, weights, fields, height, width, block=_WEIGHTS_BLOCK, enable_fp_fusion=False
        )
        out_picture, out_channel, out_row, out_column = out.stride()
        self._kernels.resize_kernel[(-(-height * width // _PIXELS_BLOCK), n)](
            pictures, begins, weights, out, fields, height, width,
            out_picture, out_row, out_column, out_channel, *self._scale, *self._shift,
            normalize=self._dtype != torch.uint8, block=_PIXELS_BLOCK,
        )  # fmt: skip
        return out, (staged, pictures, begins, weights)

    def warm_up(self) -> None:
        """Compile the kernels, about a second where Triton has no cached ones, and wait for their first run.

        Raises:
            BackendUnavailableError: They do not compile here.
        """
        size = self._size
        picture = torch.zeros((1, *size, 3), dtype=torch.uint8, device=self._device)
        records = describe_finished(1, size)
        records[:, 0] += picture.data_ptr()
        try:
            _pictures, _borrowed = self(records)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()  # before what it reads and writes is freed
        except Exception as exc:  # a missing compiler, driver or header raises nearly anything within Triton
            found = str(exc).strip().partition("\n")[0]
            raise BackendUnavailableError(
                "Triton", f"{type(exc).__name__}: {found}", "kernels that compile", _ADVICE
            ) from exc


def load_kernels() -> Any:
    """Import the kernels.

    Raises:
        BackendUnavailableError: Triton is missing or does not import.
    """
    try:
        from fastdata.backends import _gpu_kernels
    except (ImportError, OSError) as exc:
        raise BackendUnavailableError("Triton", f"cannot be imported: {exc}", "", _ADVICE) from exc
    return _gpu_kernels
