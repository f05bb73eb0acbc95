"""The contract, kept by the "dali" backend on the CPU and, where there is one, on the GPU; on folders and on shards."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from fastdata.shards.convert import convert_folder
from fastdata.shards.options import ConvertOptions
from fastdata.testing import PipelineConformance

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed")


class TestDaliOnTheCpu(PipelineConformance):
    backend = "dali"
    tolerance = 0.3


class TestDaliOnTheCpuWithCropReadyShards(TestDaliOnTheCpu):
    def make_data(self, folder: Path) -> Path:
        out = folder.parent / f"{folder.name}-shards"
        convert_folder(folder, out, ConvertOptions(crop_ready=True, on_error="skip"), workers=1)
        return out


@pytest.mark.gpu
class TestDaliOnTheGpu(PipelineConformance):
    backend = "dali"
    device: ClassVar[str] = "cuda:0"
    tolerance = 1.0
