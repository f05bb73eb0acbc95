"""The table that turns grey levels into delivered values on the CPU."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from fastdata.backends._finish import BatchFinish
from fastdata.spec import PipelineSpec
from fastdata.transforms import Normalize, RandomResizedCrop, sort_recipe

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NO_IDS = np.empty(0, np.int64)


def every_level() -> torch.Tensor:
    """(3, 16, 16, 3) uint8: each level of each channel beside other levels of the others."""
    levels = torch.arange(256).view(1, 16, 16, 1)
    return (levels + torch.tensor([0, 85, 170]) + torch.arange(3).view(3, 1, 1, 1)).remainder(256).to(torch.uint8)


def finish(dtype: str, memory_format: Literal["channels_last", "contiguous"]) -> BatchFinish:
    recipe = sort_recipe([RandomResizedCrop(16), Normalize(MEAN, STD)] if dtype != "uint8" else RandomResizedCrop(16))
    return BatchFinish(PipelineSpec(recipe=recipe, batch_size=4, dtype=dtype, memory_format=memory_format))


@pytest.mark.parametrize("memory_format", ["channels_last", "contiguous"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_level_becomes_what_torch_computes_to_the_last_bit(
    dtype: str, memory_format: Literal["channels_last", "contiguous"]
) -> None:
    levels = every_level()
    delivered = finish(dtype, memory_format)(levels, NO_IDS, 0)
    scale = torch.tensor([1 / (255 * s) for s in STD]).view(1, 3, 1, 1)
    shift = torch.tensor([-m / s for m, s in zip(MEAN, STD, strict=True)]).view(1, 3, 1, 1)
    expected = torch.addcmul(shift, levels.permute(0, 3, 1, 2).float(), scale).to(getattr(torch, dtype))
    assert torch.equal(delivered, expected)
    order = torch.channels_last if memory_format == "channels_last" else torch.contiguous_format
    assert delivered.is_contiguous(memory_format=order)


def test_uint8_changes_its_order_alone() -> None:
    levels = every_level()
    delivered = finish("uint8", "contiguous")(levels, NO_IDS, 0)
    assert delivered.is_contiguous()
    assert torch.equal(delivered, levels.permute(0, 3, 1, 2))


def test_a_kept_batch_keeps_its_values_and_a_dropped_one_gives_its_memory_back() -> None:
    make, levels = finish("float32", "channels_last"), every_level()
    kept = [make(levels[:1] // (number + 1), NO_IDS, 0) for number in range(6)]  # more than the pool holds
    values = [batch.clone() for batch in kept]
    place = kept[0].data_ptr()
    assert len({batch.data_ptr() for batch in kept}) == 6
    make(levels, NO_IDS, 0)
    assert all(torch.equal(batch, value) for batch, value in zip(kept, values, strict=True))
    view = kept[0][0, :, 2:]
    del kept[0]
    assert make(levels, NO_IDS, 0).data_ptr() != place  # a view still needs it
    del view
    assert make(levels, NO_IDS, 0).data_ptr() == place
