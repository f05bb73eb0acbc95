"""Backend "torchvision": torchvision.io decodes ordinary JPEGs, on the CPU or on the GPU (nvJPEG); Pillow the rest."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from fastdata.backends._host import HostPipeline, fast_refusal
from fastdata.errors import UsageError
from fastdata.pipeline import Delivery, EpochPlan, Pipeline
from fastdata.sources import IndexedSource
from fastdata.spec import Execution, HostOptions, PipelineSpec, TorchvisionOptions

if TYPE_CHECKING:
    from fastdata.backends._gpu_decode import Decode, GpuDecoder

_READY = 2
"""Batches that lie on the device ahead of the caller."""


class TorchvisionPipeline(HostPipeline):
    """Loads pictures with torchvision.io: on the CPU, or with ``TorchvisionOptions(decode="cuda")`` on the GPU."""

    name = "torchvision"
    decoder = "torchvision"
    options_type = TorchvisionOptions

    def __init__(self, source: IndexedSource, spec: PipelineSpec, execution: Execution) -> None:
        """Check, and prepare workers and memory; see `Pipeline`.

        Raises:
            BackendUnavailableError: ``decode="cuda"`` where the GPU, torchvision's decoder for it or Triton is missing.
        """
        options = execution.options
        if type(options) is HostOptions:
            if options.decode == "fast":
                raise fast_refusal(self.name)
            execution = replace(execution, options=TorchvisionOptions(options.pool))
        self._gpu: GpuDecoder | None = None
        if not isinstance(options, TorchvisionOptions) or options.decode == "host":
            super().__init__(source, spec, execution)
            return
        if spec.recipe.callables:
            raise UsageError(
                'TorchvisionOptions(decode="cuda")',
                "a Python callable in transform",
                "fastdata's own transforms",
                'Use decode="host", or batch_transform=.',
            )
        from fastdata.backends._gpu_decode import GpuDecoder

        gpu = GpuDecoder(source, spec, execution, self._gpu_decoder(spec.device), self)
        Pipeline.__init__(self, source, spec, execution)
        self._gpu = gpu

    def _gpu_decoder(self, device: str) -> Decode:
        """Return what decodes on a device."""
        from fastdata.backends._gpu_decode import nvjpeg_decoder

        if device == "cpu":
            raise UsageError(
                'TorchvisionOptions(decode="cuda")', 'device="cpu"', 'device="cuda:N"', 'Pass it, or use decode="host".'
            )
        return nvjpeg_decoder(device)

    def _batches(self, plan: EpochPlan) -> Generator[Delivery, None, None]:
        if self._gpu is None:
            yield from super()._batches(plan)
            return
        from fastdata.backends._gpu_decode import RunAhead

        flights = self._gpu.flights(plan)
        with closing(RunAhead(flights, _READY) if self.execution.workers else flights) as ready:
            for flight in ready:
                yield Delivery(self._gpu.receive(flight), flight.failed, flight.fallbacks)

    def _release(self) -> None:
        if self._gpu is not None:
            self._gpu.close()
        else:
            super()._release()

    def _details(self) -> dict[str, Any]:
        if self._gpu is None:
            return super()._details()
        return {"decode": "cuda", "workers": self.execution.workers, **asdict(self._gpu.costs)}
