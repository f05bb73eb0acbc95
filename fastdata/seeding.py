"""Random state for user code: the global generators are seeded from a key and put back afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def seeded(key: int, device: str = "cpu") -> Iterator[None]:
    """Seed `random`, NumPy's legacy generator and torch within the block, and restore their states after it.

    Args:
        key: 64-bit key; the same key gives the same draws.
        device: Where user code draws: "cpu" or "cuda:N".
    """
    devices = [torch.device(device)] if device.startswith("cuda") else []
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        random.seed(key)
        np.random.seed([key & 0xFFFFFFFF, key >> 32])
        torch.default_generator.manual_seed(key)
        if devices:
            with torch.cuda.device(devices[0]):
                torch.cuda.manual_seed(key)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
