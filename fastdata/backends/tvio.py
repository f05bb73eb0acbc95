"""Backend "torchvision": torchvision.io decodes ordinary JPEGs, Pillow the rest."""

from __future__ import annotations

from fastdata.backends._host import HostPipeline


class TorchvisionPipeline(HostPipeline):
    """Loads pictures with torchvision.io on the CPU."""

    name = "torchvision"
    decoder = "torchvision"
