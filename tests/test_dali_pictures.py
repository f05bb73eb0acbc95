"""Unusual, damaged and turned pictures through the "dali" backend: the pixels, or the error, of the reference."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

import fastdata

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed")

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
TOLERANCE = {"cpu": 0.3, "cuda:0": 1.0}
TRAIN = (fastdata.RandomResizedCrop(64), fastdata.RandomHorizontalFlip())
EVAL = (fastdata.Resize(72), fastdata.CenterCrop(64))
SUBSAMPLINGS = {"4:4:4": 0, "4:2:2": 1, "4:2:0": 2}


def smooth(width: int = 200, height: int = 150, seed: int = 0) -> Image.Image:
    """A picture with structure but without noise."""
    coarse = np.random.default_rng(seed).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def jpeg(picture: Image.Image, **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, "JPEG", **({"quality": 90} | options))
    return out.getvalue()


def png(picture: Image.Image) -> bytes:
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write files into one class folder; ids follow the order of the names."""

    def write_files(**files: bytes) -> Path:
        folder = tmp_path / "set" / "only"
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / f"{name}.JPEG").write_bytes(data)
        return folder.parent

    return write_files


def load(
    root: Path, backend: str, *, device: str = "cpu", **arguments: Any
) -> tuple[dict[int, NDArray[np.uint8]], Any]:
    """Load one epoch: id -> (H, W, 3) uint8, and the report."""
    settings: dict[str, Any] = {
        "transform": EVAL, "batch_size": 8, "dtype": "uint8", "shuffle": False, "workers": 2, "on_error": "skip",
    }  # fmt: skip
    pictures: dict[int, NDArray[np.uint8]] = {}
    with fastdata.open_pipeline(root, backend=backend, device=device, **(settings | arguments)) as loader:
        for batch in loader:
            for sample_id, image in zip(batch.ids.tolist(), batch.images, strict=True):
                pictures[sample_id] = image.permute(1, 2, 0).cpu().numpy()
        return pictures, loader.report()


def assert_like_the_reference(root: Path, device: str, **arguments: Any) -> Any:
    """Compare with the pil backend; return DALI's report."""
    expected, reference_report = load(root, "pil", **arguments)
    found, report = load(root, "dali", device=device, **arguments)
    assert found.keys() == expected.keys()
    assert [s.sample_id for s in report.skipped] == [s.sample_id for s in reference_report.skipped]
    for sample_id, picture in found.items():
        difference = np.abs(picture.astype(int) - expected[sample_id]).mean()
        assert difference <= TOLERANCE[device], (sample_id, difference)
    return report


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transform", [TRAIN, EVAL, (fastdata.Resize((40, 90)),)], ids=["train", "eval", "pair"])
@pytest.mark.parametrize("subsampling", SUBSAMPLINGS.values(), ids=SUBSAMPLINGS.keys())
def test_each_chroma_subsampling_agrees_with_the_reference(
    write: Callable[..., Path], subsampling: int, transform: Any, device: str
) -> None:
    root = write(
        plain=jpeg(smooth(), subsampling=subsampling),
        progressive=jpeg(smooth(seed=1), subsampling=subsampling, progressive=True),
        odd_size=jpeg(smooth(333, 217, seed=2), subsampling=subsampling),
        optimised=jpeg(smooth(seed=3), subsampling=subsampling, optimize=True, restart_marker_rows=1),
    )
    report = assert_like_the_reference(root, device, transform=transform)
    assert not report.fallbacks
    assert not report.details["dali_errors"]


@pytest.mark.parametrize("subsampling", SUBSAMPLINGS.values(), ids=SUBSAMPLINGS.keys())
def test_decoding_on_the_cpu_gives_the_reference_pixels_exactly(write: Callable[..., Path], subsampling: int) -> None:
    # An output as large as the picture makes the resize an identity, so what is left is the decode.
    root = write(a=jpeg(smooth(), subsampling=subsampling), b=jpeg(smooth(seed=4), progressive=True))
    same = {"transform": (fastdata.Resize((150, 200)),)}
    expected, _ = load(root, "pil", **same)
    found, report = load(root, "dali", **same)
    assert not report.fallbacks
    for sample_id, picture in found.items():
        assert np.array_equal(picture, expected[sample_id])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("orientation", ["apply", "ignore"])
@pytest.mark.parametrize("transform", [TRAIN, EVAL], ids=["train", "eval"])
def test_all_eight_orientations_agree_with_the_reference(
    write: Callable[..., Path], orientation: str, transform: Any, device: str
) -> None:
    files = {}
    for value in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = value
        files[f"o{value}"] = jpeg(smooth(), exif=exif, subsampling=0)
    report = assert_like_the_reference(write(**files), device, transform=transform, orientation=orientation)
    assert not report.fallbacks


@pytest.mark.parametrize("device", DEVICES)
def test_gray_cmyk_alpha_palette_16_bit_and_mislabelled_types_keep_their_place(
    write: Callable[..., Path], device: str
) -> None:
    transparent = Image.new("RGBA", (64, 48), (255, 0, 0, 0))
    palette = smooth(64, 48).convert("P")
    root = write(
        a_png=png(Image.new("RGB", (64, 48), (10, 200, 30))),
        b_cmyk=jpeg(Image.new("CMYK", (64, 48), (0, 255, 255, 0)), quality=95),
        c_gray=jpeg(Image.new("L", (64, 48), 77), quality=95),
        d_alpha=png(transparent),
        e_palette=png(palette),
        f_sixteen=png(Image.fromarray(np.full((48, 64), 32768, np.uint16))),
        g_color=jpeg(Image.new("RGB", (64, 48), (100, 150, 200)), quality=95),
    )
    report = assert_like_the_reference(root, device)
    found, _ = load(root, "dali", device=device)
    assert np.array_equal(found[0], np.full((64, 64, 3), (10, 200, 30)))
    assert np.abs(found[1].astype(int) - (255, 0, 0)).max() <= 3
    assert np.abs(found[2].astype(int) - 77).max() <= 1
    assert np.array_equal(found[3], np.full((64, 64, 3), (255, 0, 0)))
    assert np.abs(found[5].astype(int) - 127.5).max() <= 1.5
    assert sum(report.fallbacks.values()) == 5


@pytest.mark.parametrize("device", DEVICES)
def test_tiny_and_extreme_shapes_come_out_whole(write: Callable[..., Path], device: str) -> None:
    ramp = np.repeat((np.arange(1000) * 255 // 999).astype(np.uint8)[None], 1, axis=0)
    root = write(
        a_dot=jpeg(Image.new("RGB", (1, 1), (10, 200, 30)), quality=95),
        b_wide=jpeg(Image.fromarray(ramp), quality=95),
        c_tall=jpeg(Image.fromarray(ramp.T.copy()), quality=95),
        d_small=jpeg(smooth(8, 8), subsampling=0),
        e_narrow=jpeg(smooth(17, 3), subsampling=0),
        f_other=jpeg(smooth(100, 80), subsampling=0),
    )
    for transform in (fastdata.imagenet_train(224), fastdata.imagenet_eval(224)):
        found, _ = load(root, "dali", device=device, transform=transform)
        assert {picture.shape for picture in found.values()} == {(224, 224, 3)}
        assert np.abs(found[0].astype(int) - (10, 200, 30)).max() <= 3
    assert_like_the_reference(root, device, transform=fastdata.imagenet_eval(224))
    for seed in range(5):
        found, _ = load(root, "dali", device=device, transform=fastdata.imagenet_train(224), seed=seed)
        assert np.abs(found[1].astype(int) - 127).max() <= 4
        assert np.abs(found[2].astype(int) - 127).max() <= 4


@pytest.mark.parametrize("device", DEVICES)
def test_downscaling_averages(write: Callable[..., Path], device: str) -> None:
    stripes = np.where(np.isin(np.arange(512) % 8, (3, 4)), 255, 0).astype(np.uint8)
    root = write(stripes=jpeg(Image.fromarray(np.repeat(stripes[None], 512, axis=0)), quality=100))
    found, _ = load(root, "dali", device=device, transform=(fastdata.Resize((64, 64)),))
    assert np.abs(found[0][4:-4, 4:-4].astype(int) - 64).max() <= 4


@pytest.mark.parametrize("device", DEVICES)
def test_junk_after_or_before_the_end_marker_changes_nothing(write: Callable[..., Path], device: str) -> None:
    good = jpeg(smooth())
    end = good.rindex(b"\xff\xd9")
    root = write(a=good, b=good + bytes(1000), c=good + good, d=good[:end] + b"\x7f" + good[end:])
    found, report = load(root, "dali", device=device)
    assert len(found) == 4
    for picture in found.values():
        assert np.array_equal(picture, found[0])
    assert not report.skipped


@pytest.mark.parametrize("device", DEVICES)
def test_damaged_files_share_the_references_fate_and_touch_no_neighbour(
    write: Callable[..., Path], device: str
) -> None:
    noise = Image.fromarray(np.random.default_rng(7).integers(0, 256, (256, 256, 3), dtype=np.uint8))
    good = jpeg(noise)
    sof = good.index(b"\xff\xc0")
    huge = bytearray(jpeg(smooth(64, 48)))
    at = huge.index(b"\xff\xc0")
    huge[at + 5 : at + 9] = b"\xff\xdc\xff\xdc"
    tables = good.index(b"\xff\xc4")
    files = {
        "a_good": good,
        "b_half": good[: len(good) // 2],
        "c_progressive_cut": jpeg(noise, progressive=True)[:40_000],
        "d_zero_bytes": b"",
        "e_page": b"<html>404</html>",
        "f_start_only": b"\xff\xd8",
        "g_huge": bytes(huge),
        "h_12_bit": good[: sof + 4] + b"\x0c" + good[sof + 5 :],
        "i_lossless": good[: sof + 1] + b"\xc3" + good[sof + 2 :],
        "j_bad_tables": good[: tables + 5] + b"\xff" * 16 + good[tables + 21 :],
        "k_good": jpeg(smooth(seed=9)),
    }
    root = write(**files)
    report = assert_like_the_reference(root, device)
    assert {s.sample_id for s in report.skipped} == set(range(1, 10))
    for skipped in report.skipped:
        assert list(files)[skipped.sample_id] in skipped.where
    alone = write_alone(root, ["a_good", "k_good"])
    expected, _ = load(alone, "dali", device=device)
    found, _ = load(root, "dali", device=device)
    assert np.array_equal(found[0], expected[0])
    assert np.array_equal(found[10], expected[1])


def write_alone(root: Path, names: list[str]) -> Path:
    """Copy some files into a set of their own."""
    other = root.parent / "alone" / "only"
    other.mkdir(parents=True)
    for name in names:
        (other / f"{name}.JPEG").write_bytes((root / "only" / f"{name}.JPEG").read_bytes())
    return other.parent


def test_damage_inside_the_scan_leaves_the_other_pictures_equal(write: Callable[..., Path], capfd: Any) -> None:
    noise = Image.fromarray(np.random.default_rng(7).integers(0, 256, (256, 256, 3), dtype=np.uint8))
    good = jpeg(noise)
    files = {f"n{i}": jpeg(smooth(seed=i)) for i in range(8)}
    expected, _ = load(write(**files), "dali")
    middle = len(good) // 2
    files["n3"] = good[:middle] + bytes(64) + good[middle + 64 :]
    root = write(**files)
    found, _ = load(root, "dali")
    assert sorted(found) == list(range(8))
    for sample_id in set(range(8)) - {3}:
        assert np.array_equal(found[sample_id], expected[sample_id])
    reference, _ = load(root, "pil")
    assert np.abs(found[3].astype(int) - reference[3]).mean() <= 0.3
    capfd.readouterr()  # libjpeg's own remark on the damaged file


@pytest.mark.parametrize("device", DEVICES)
def test_normalised_values_agree_with_the_reference_in_each_dtype(write: Callable[..., Path], device: str) -> None:
    root = write(**{f"n{i}": jpeg(smooth(seed=i), subsampling=0) for i in range(4)})
    for dtype, step in (("float32", 0.0), ("float16", 2**-10), ("bfloat16", 2**-7)):
        batches = []
        for backend in ("pil", "dali"):
            with fastdata.open_pipeline(
                root, backend=backend, transform=fastdata.imagenet_train(64), batch_size=4, shuffle=False, dtype=dtype,
                device=device if backend == "dali" else "cpu", workers=1,
            ) as loader:  # fmt: skip
                batches.append(next(iter(loader)).images.float().cpu())
        # One grey level is about 0.0175 after normalisation.
        assert (batches[0] - batches[1]).abs().mean() <= 0.3 * 0.0175 + step
        assert torch.allclose(batches[0].mean(dim=(1, 2, 3)), batches[1].mean(dim=(1, 2, 3)), atol=0.02)
