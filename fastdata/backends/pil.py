"""Backend "pil": Pillow decodes. The reference that all other backends are held against."""

from __future__ import annotations

from fastdata.backends._host import HostPipeline


class PilPipeline(HostPipeline):
    """Loads pictures with Pillow on the CPU."""

    name = "pil"
    decoder = "pil"
