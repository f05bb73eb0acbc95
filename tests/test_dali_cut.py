"""Crop-ready shards through the "dali" backend: cut before DALI sees them, and not a pixel different."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fastdata
from fastdata.jpeg_cut import CUT
from fastdata.shards.convert import convert_folder
from fastdata.shards.options import ConvertOptions
from fastdata.transcode import make_crop_ready

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed")

TRAIN = (fastdata.RandomResizedCrop(40), fastdata.RandomHorizontalFlip())
EVAL = (fastdata.Resize(64), fastdata.CenterCrop(40))
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same pictures as they come and crop-ready, in folders and in shards: samplings, turns, odd sizes, a PNG."""
    root = tmp_path_factory.mktemp("cut")
    plain, ready = (root / name / "only" for name in ("plain", "ready"))
    rng = np.random.default_rng(3)
    for folder in (plain, ready):
        folder.mkdir(parents=True)
    for number in range(40):
        height, width = (int(side) for side in rng.integers(30, 260, 2))
        coarse = rng.integers(0, 256, (height // 12 + 2, width // 12 + 2, 3), dtype=np.uint8)
        smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        # Grain, as a photograph has it: in smooth files restart markers weigh so much that they are left as they are.
        picture = Image.fromarray(
            (np.asarray(smooth) + rng.normal(0, 12, (height, width, 3))).clip(0, 255).astype("u1")
        )
        exif = Image.Exif()
        exif[0x0112] = 1 + number % 8
        mode = "L" if number % 10 == 9 else "RGB"
        options: dict[str, Any] = {} if mode == "L" else {"subsampling": number % 3}
        path = plain / f"{number:02d}.jpg"
        if number == 39:
            picture.save(path, "PNG")
        else:
            picture.convert(mode).save(path, quality=88, exif=exif, **options)
        data = path.read_bytes()
        (ready / path.name).write_bytes(data if number == 39 else make_crop_ready(data).data)
    for name in ("plain", "ready"):
        convert_folder(root / name, root / f"{name} shards", ConvertOptions(), workers=1)
    return {name: root / name for name in ("plain", "ready", "plain shards", "ready shards")}


def images(data: Path, **arguments: Any) -> torch.Tensor:
    settings: dict[str, Any] = {
        "backend": "dali", "transform": TRAIN, "batch_size": 16, "dtype": "uint8", "workers": 2, "seed": 2,
    }  # fmt: skip
    with fastdata.open_pipeline(data, **(settings | arguments)) as loader:
        batches = [batch for _ in range(2) for batch in loader]
    return torch.cat([batch.images[batch.ids.argsort()] for batch in batches]).cpu()


@pytest.mark.parametrize("orientation", ["apply", "ignore"])
@pytest.mark.parametrize("region_decode", [True, False])
@pytest.mark.parametrize("transform", [TRAIN, EVAL], ids=["train", "eval"])
def test_folders_and_shards_plain_and_crop_ready_give_identical_batches(
    sets: dict[str, Path], transform: Any, region_decode: bool, orientation: str
) -> None:
    arguments: dict[str, Any] = {
        "transform": transform, "orientation": orientation,
        "options": fastdata.DaliOptions(region_decode=region_decode),
    }  # fmt: skip
    expected = images(sets["plain"], **arguments)
    for name in ("ready", "plain shards", "ready shards"):
        assert torch.equal(images(sets[name], **arguments), expected), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chroma", ["fast", "exact"])
@pytest.mark.parametrize("transform", [TRAIN, EVAL], ids=["train", "eval"])
def test_crop_ready_batches_agree_with_the_reference(
    sets: dict[str, Path], transform: Any, chroma: str, device: str
) -> None:
    options = fastdata.DaliOptions(chroma=chroma, region_decode=False)  # type: ignore[arg-type]
    found = images(sets["ready"], transform=transform, device=device, options=options)
    expected = images(sets["plain"], backend="pil", transform=transform)
    difference = (found.double() - expected.double()).abs().mean(dim=(1, 2, 3))
    assert difference.max() <= (0.3 if device == "cpu" else 1.0)


def test_dali_gets_cuts_and_not_whole_files(sets: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    import fastdata.backends._dali_feed as feed

    fed, whole, cut, kept = 0, 0, 0, 0
    honest = feed.write_cuts

    def watching(files: Any, plans: Any, *rest: Any) -> None:
        nonlocal fed, whole, cut, kept
        fed += int(plans["bytes"].sum())
        whole += int(files.lengths.sum())
        cut += int((plans["outcome"] == CUT).sum())
        kept += int((plans["outcome"] != CUT).sum())
        honest(files, plans, *rest)

    monkeypatch.setattr(feed, "write_cuts", watching)
    images(sets["ready"])
    assert cut >= 2 * 39
    assert kept <= 3  # the PNG, in two epochs and perhaps in the one that was begun ahead
    assert fed < 0.8 * whole
