"""How far the pixels of the "dali" backend lie from the Pillow reference, per chroma subsampling, decoder and setting.

Each picture is encoded anew with each subsampling, so that rows differ by nothing else. "decode" is an output as large
as the picture, where the resize is an identity; "train" and "eval" are the whole pipeline at 224. Differences are in
grey levels of the uint8 output: the mean over an image (its median and worst over all images), and the largest of all.

    python benchmarks/dali_agreement.py PHOTOS --out benchmarks/results/dali-agreement-h200.json
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import fastdata
from benchmarks.dali_common import Results, Workspace, base_parser

SUBSAMPLINGS = ("444", "422", "420", "440", "411", "Gray")
SIDE = 320
"""Pictures are brought to this size for "decode", so that one output size fits all."""


def main() -> None:
    """Compare and write the file."""
    parser = base_parser(__doc__ or "")
    parser.add_argument("--pictures", type=int, default=128)
    parser.add_argument("--quality", type=int, default=90)
    arguments = parser.parse_args()
    results = Results(arguments)
    with Workspace() as work:
        sources = sorted(path for path in arguments.data.rglob("*") if path.is_file() and path.parent != arguments.data)
        for subsampling in SUBSAMPLINGS:
            sets = _encode(sources[: arguments.pictures], work / subsampling, subsampling, arguments.quality)
            for stage, (folder, transform) in _stages(sets).items():
                reference = _images(folder, "pil", "cpu", transform, None)
                for setting, options in _settings(arguments.device).items():
                    found = _images(folder, "dali", arguments.device, transform, options)
                    results.add(subsampling=subsampling, stage=stage, setting=setting, **_difference(found, reference))
    results.content["table"] = table = _table(results.content["rows"])
    results.write()
    print(table)


def _encode(sources: list[Path], out: Path, subsampling: str, quality: int) -> dict[str, Path]:
    """Write the pictures as they are ("any size") and in one size ("one size"); return the two folders."""
    import simplejpeg

    folders = {"any size": out / "any", "one size": out / "one"}
    for number, path in enumerate(sources):
        with Image.open(path) as opened:
            picture = opened.convert("RGB")
        versions = {"any size": picture, "one size": picture.resize((SIDE, SIDE), Image.Resampling.LANCZOS)}
        for name, version in versions.items():
            pixels, space = np.array(version), "RGB"
            if subsampling == "Gray":
                pixels, space = np.array(version.convert("L"))[:, :, None], "GRAY"
            data = simplejpeg.encode_jpeg(pixels, quality, space, subsampling, fastdct=False)
            folder = folders[name] / "only"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number:05d}.jpg").write_bytes(data)
    return folders


def _stages(sets: dict[str, Path]) -> dict[str, tuple[Path, Any]]:
    return {
        "decode": (sets["one size"], (fastdata.Resize((SIDE, SIDE)),)),
        "train": (sets["any size"], (fastdata.RandomResizedCrop(224), fastdata.RandomHorizontalFlip())),
        "eval": (sets["any size"], (fastdata.Resize(256), fastdata.CenterCrop(224))),
    }


def _settings(device: str) -> dict[str, fastdata.DaliOptions]:
    if device == "cpu":
        return {"cpu": fastdata.DaliOptions(), "cpu, whole": fastdata.DaliOptions(region_decode=False)}
    return {
        f"{name}, {where}": fastdata.DaliOptions(hw_decoder_load=load, **options)
        for where, load in (("engine", 1.0), ("kernels", 0.0))
        for name, options in (
            ("window, fast chroma", {}),
            ("whole, fast chroma", {"region_decode": False}),
            ("whole, exact chroma", {"chroma": "exact"}),
        )
    }


def _images(folder: Path, backend: str, device: str, transform: Any, options: Any) -> NDArray[np.uint8]:
    """Return one epoch in the order of ids, (n, 3, H, W)."""
    with fastdata.open_pipeline(
        folder,
        backend=backend,
        device=device,
        transform=transform,
        options=options,
        batch_size=32,
        dtype="uint8",
        shuffle=False,
    ) as loader:
        found = np.concatenate([batch.images.cpu().numpy() for batch in loader])
        report = loader.report()
    if report.fallbacks or report.skipped:
        raise RuntimeError(f"{backend} on {folder}: fallbacks {report.fallbacks}, skipped {report.skipped}")
    return found


def _difference(found: NDArray[np.uint8], reference: NDArray[np.uint8]) -> dict[str, float]:
    difference = np.abs(found.astype(np.int16) - reference)
    means = difference.mean(axis=(1, 2, 3))
    return {
        "images": len(means),
        "median_of_means": float(np.median(means)),
        "worst_mean": float(means.max()),
        "largest": int(difference.max()),
    }


def _table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| subsampling | stage | decoder | median of image means | worst image mean | largest pixel difference |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['subsampling']} | {row['stage']} | {row['setting']} | {row['median_of_means']:.3f} "
        f"| {row['worst_mean']:.3f} | {row['largest']} |"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
