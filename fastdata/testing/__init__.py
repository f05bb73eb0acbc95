"""The contract as a test class: a backend's test file is one subclass of `PipelineConformance`, yours included.

    from fastdata.testing import PipelineConformance

    class TestMyBackend(PipelineConformance):
        backend = "my_package.loader:MyPipeline"

pytest collects the inherited tests; each makes its own small folder in which every picture tells its number by its
colour, so that a lost, doubled or swapped sample shows in the pixels, not only in what the backend says of them.
"""

import pytest

pytest.register_assert_rewrite("fastdata.testing.conformance")  # so that a failure shows the values

from fastdata.testing.conformance import PipelineConformance  # noqa: E402
from fastdata.testing.pictures import (  # noqa: E402
    color_of,
    corrupt,
    ids_in_pixels,
    varied_chroma,
    write_numbered_folder,
    write_varied_folder,
)

__all__ = [
    "PipelineConformance",
    "color_of",
    "corrupt",
    "ids_in_pixels",
    "varied_chroma",
    "write_numbered_folder",
    "write_varied_folder",
]
