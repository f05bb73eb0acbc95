"""The host backends on folders, held to the contract."""

from __future__ import annotations

from fastdata.testing import PipelineConformance


class TestPil(PipelineConformance):
    backend = "pil"
    tolerance = 0.0


class TestTorchvision(PipelineConformance):
    backend = "torchvision"
