"""The windows of a batch in the form that DALI's operators take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fastdata.backends._dali_graph import GraphInputs
from fastdata.geometry import Geometry
from fastdata.resample import read_ranges

_DALI_MARGIN = 1
"""Pixels more than Pillow's filter reads: DALI works out the reach of its own in float32."""


def graph_windows(geometry: Geometry) -> GraphInputs:
    """Return what DALI's operators take for a geometry, without pictures.

    The window holds all pixels that the filter reads. Where the whole window becomes the output (training), it is the
    drawn one, at whose edges the filter stops; else (evaluation) it is what the wanted part of the whole picture needs.
    """
    low, high, full, offset = geometry.low, geometry.high, geometry.full, geometry.offset
    wanted = np.array(geometry.output_size)
    scale = (high - low) / full
    begin, end = read_ranges(low, high, full, offset, np.broadcast_to(wanted, full.shape))
    begin = np.maximum(low, begin - _DALI_MARGIN)
    end = np.minimum(high, end + _DALI_MARGIN)
    region_start = low + offset * scale - begin
    region_end = low + (offset + wanted) * scale - begin
    return GraphInputs(
        [],
        begin.astype(np.int32),
        (end - begin).astype(np.int32),
        region_start.astype(np.float32),
        region_end.astype(np.float32),
        geometry.flips.astype(np.int32),
    )


def with_finished(window: GraphInputs, places: NDArray[np.int64], size: tuple[int, int]) -> GraphInputs:
    """Replace the windows of samples that are already cropped, resized and mirrored."""
    start, shape, mirror = window.start.copy(), window.shape.copy(), window.mirror.copy()
    region_start, region_end = window.region_start.copy(), window.region_end.copy()
    start[places], shape[places], mirror[places] = 0, size, 0
    region_start[places], region_end[places] = 0, size
    return replace(window, start=start, shape=shape, mirror=mirror, region_start=region_start, region_end=region_end)
