"""Backend "webdataset": tar shards. Local ones by position through their index, remote ones as a stream."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from fastdata.backends._host import HostPipeline
from fastdata.errors import UsageError
from fastdata.pipeline import Delivery, EpochPlan, StreamPlan
from fastdata.sources import IndexedSource
from fastdata.sources.open import is_stream
from fastdata.sources.stream import ShardStream, open_stream
from fastdata.spec import Labels, WebDatasetOptions


class WebDatasetPipeline(HostPipeline):
    """Loads pictures from shards with libjpeg-turbo on the CPU."""

    name = "webdataset"
    decoder = "turbo"
    options_type = WebDatasetOptions
    source_kinds = ("shards", "crop-ready shards", "stream")
    _plan_in_work: EpochPlan | None = None

    @classmethod
    def open_source(cls, data: Any, labels: Labels, options: Any, *, skip_damaged: bool) -> IndexedSource | ShardStream:
        """Open local shards by their index; URLs, commands and what the user wants so as a stream."""
        chosen = options if isinstance(options, WebDatasetOptions) else WebDatasetOptions()
        if not chosen.stream and not is_stream(data):
            _refuse_stream_options(chosen)
            return super().open_source(data, labels, options, skip_damaged=skip_damaged)
        return open_stream(data, labels, allow_pipe=chosen.allow_pipe, length=chosen.length, split=chosen.split)

    def _batches(self, plan: EpochPlan) -> Generator[Delivery, None, None]:
        self._plan_in_work = plan
        return super()._batches(plan)

    def _details(self) -> dict[str, Any]:
        details = super()._details()
        if isinstance(self._plan_in_work, StreamPlan):
            details["repeated"] = self._plan_in_work.repeated
        return details


def _refuse_stream_options(options: WebDatasetOptions) -> None:
    for name in ("length", "split"):
        if getattr(options, name) != getattr(WebDatasetOptions, name):
            raise UsageError(
                f"WebDatasetOptions.{name}",
                f"{getattr(options, name)!r} for local shards, which have an index",
                "it only with a stream",
                "Leave it out: length and split are exact with an index. Or read them as a stream: stream=True.",
            )
