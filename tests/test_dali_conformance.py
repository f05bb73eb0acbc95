"""The contract, kept by the "dali" backend on the CPU and, where there is one, on the GPU."""

from __future__ import annotations

from typing import ClassVar

import pytest

from fastdata.testing import PipelineConformance

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed")


class TestDaliOnTheCpu(PipelineConformance):
    backend = "dali"
    worker_counts = (1, 3)  # 0 is refused: DALI never decodes in the calling thread
    tolerance = 0.3


@pytest.mark.gpu
class TestDaliOnTheGpu(PipelineConformance):
    backend = "dali"
    worker_counts = (1, 3)  # 0 is refused: DALI never decodes in the calling thread
    device: ClassVar[str] = "cuda:0"
    tolerance = 1.0
