"""What makes two sources the same samples, as one short digest."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from fastdata.sources.paths import PathTable


def sample_fingerprint(ids: NDArray[np.int64], paths: PathTable) -> str:
    """Return a hex digest, 32 characters, over the ids and names of samples.

    A folder, its shards and its crop-ready shards share it, as the shards' index keeps the folder's paths. Labels are
    left out: other labels for the same pictures change neither their order nor what loading them costs. File contents
    are not looked at. A million samples take about 50 ms.

    Args:
        ids: (n,) ascending.
        paths: The name of each of them: n paths below the folder, or members of other writers' shards.
    """
    digest = hashlib.blake2b(len(ids).to_bytes(8, "little"), digest_size=16)
    for array, dtype in ((ids, "<i8"), (paths.offsets, "<i8"), (paths.blob, "u1")):
        digest.update(np.ascontiguousarray(array, dtype).data)
    return digest.hexdigest()
