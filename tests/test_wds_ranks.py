"""Two processes that wait for each other after every batch of a stream: nobody waits for ever."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shard_files import write_numbered_shards

SCRIPT = """
import json, sys
import torch, torch.distributed as dist
import fastdata

folder, store, rank, split, length = sys.argv[1:]
dist.init_process_group("gloo", init_method="file://" + store, rank=int(rank), world_size=2)
options = fastdata.WebDatasetOptions(stream=True, split=split, length=int(length) if length != "0" else None)
epochs = []
with fastdata.open_pipeline(folder, backend="webdataset", transform=fastdata.Resize((16, 16)), batch_size=4, workers=1,
                            shuffle=fastdata.BufferShuffle(16), options=options) as loader:
    for _ in range(3):
        ids = []
        for images, labels in loader:
            dist.all_reduce(torch.ones(1))
            ids.append(len(labels))
        epochs.append([len(ids), sum(ids)])
dist.barrier()
dist.destroy_process_group()
print(json.dumps(epochs))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("split", "length"), [("samples", 0), ("shards", 60)])
def test_uneven_shards_on_two_ranks_end_together_in_every_epoch(tmp_path: Path, split: str, length: int) -> None:
    folder = write_numbered_shards(tmp_path / "shards", [7, 20, 33])
    arguments = [[str(folder), str(tmp_path / "store"), str(rank), split, str(length)] for rank in range(2)]
    ranks = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, *argv], stdout=subprocess.PIPE, text=True) for argv in arguments
    ]
    try:
        epochs = [json.loads(rank.communicate(timeout=60)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for first, second in zip(*epochs, strict=True):
        assert first[0] == second[0] == 8
        assert first[1] + second[1] == 60
