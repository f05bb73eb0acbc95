"""Checks the pixels of decoding on a GPU: ``python benchmarks/torchvision_cuda_check.py [PHOTOS]``; under a minute.

Repeats one epoch, from a folder and from its crop-ready shards, and compares each picture bit for bit with the first
time, and with libjpeg told to repeat chroma samples, as nvJPEG does: the mean difference must be next to nothing. That
from the Pillow reference, which interpolates chroma, is told as well, and bounded for photographs. The last repeats run
with a caller's stream that lags behind. With PHOTOS, a folder of class folders with JPEGs, these are checked too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from PIL import Image

import fastdata
from fastdata.shards import ConvertOptions, convert_folder

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gray": ("L", {"subsampling": 0}),
    "gray that claims 4-2-2": ("L", {"subsampling": 1}),
    "gray that claims 4-2-0": ("L", {"subsampling": 2}),
    "gray that claims 4-2-0, progressive": ("L", {"subsampling": 2, "progressive": True}),
    "4-4-4": ("RGB", {"subsampling": 0}),
    "4-2-2": ("RGB", {"subsampling": 1}),
    "4-2-0": ("RGB", {"subsampling": 2}),
    "4-2-0, progressive": ("RGB", {"subsampling": 2, "progressive": True}),
}
"""Mode and options of Pillow's encoder, by class folder."""
REPEATING = "tests.cuda_stand_in:RepeatingPipeline"
"""Decodes by libjpeg with repeated chroma."""
REPEATING_LEVELS, PHOTO_LEVELS = 0.05, 1.0
"""Mean grey levels that a picture may differ from that, and a photograph from the Pillow reference."""
LAGGING_REPEATS = 3


@dataclass(frozen=True)
class Row:
    """What was found for one kind of picture in one form of the data."""

    data: str
    kind: str
    pictures: int
    changed: int
    """Pictures that were not the same bits in every repeat."""
    repeating_levels: float
    """Mean difference from libjpeg with repeated chroma, of the picture that differs most in any repeat."""
    reference_levels: float
    """Mean difference from the Pillow reference, of the picture that differs most in any repeat."""

    def holds(self) -> bool:
        """Whether pixels repeat and are near enough."""
        near = self.kind != "photograph" or self.reference_levels <= PHOTO_LEVELS
        return not self.changed and self.repeating_levels <= REPEATING_LEVELS and near


def main() -> int:
    """Make the data, check, print; return 1 where something does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("photos", type=Path, nargs="?", help="folder of class folders with JPEGs")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--per-kind", type=int, default=24, help="pictures of each kind to make")
    parser.add_argument("--photographs", type=int, default=256, help="of PHOTOS, at most")
    parser.add_argument("--backend", default="torchvision", help="another one with the same options, for trying this")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    started = time.perf_counter()
    rows: list[Row] = []
    fallbacks: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory(prefix="fastdata-") as work:
        folders = {"made": write_pictures(Path(work) / "made", arguments.per_kind)}
        if arguments.photos is not None:
            folders["photographs"] = copy_photos(arguments.photos, Path(work) / "photographs", arguments.photographs)
        for name, folder in folders.items():
            ready = Path(work) / f"{name}-ready"
            convert_folder(folder, ready, ConvertOptions(crop_ready=True))
            expected, names = references(folder), sorted(path.name for path in folder.iterdir())
            for form, data in (("folder", folder), ("crop-ready", ready)):
                runs, found = repeat(arguments, data)
                fallbacks[f"{name}, {form}"] = found
                rows += judge(f"{name}, {form}", runs, expected, names)
    for row in rows:
        print(
            f"{'ok  ' if row.holds() else 'FAIL'} {row.data:<24} {row.kind:<36} {row.pictures:>4} pictures  "
            f"{row.changed:>3} changed; off by at most {row.repeating_levels:6.3f} (repeated chroma), "
            f"{row.reference_levels:6.3f} (Pillow)"
        )
    print(f"loaded by the reference: {fallbacks}; {time.perf_counter() - started:.0f} s")
    if arguments.out is not None:
        report = {"schema": 1, "rows": [asdict(row) for row in rows], "fallbacks": fallbacks}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(row.holds() for row in rows) else 1


def write_pictures(folder: Path, per_kind: int) -> Path:
    """Write JPEGs of every kind, 40 to 500 pixels a side, each a random field of colours 16 pixels wide."""
    rng = np.random.default_rng(11)
    for kind, (mode, options) in KINDS.items():
        (folder / kind).mkdir(parents=True)
        for number in range(per_kind):
            height, width = (int(x) for x in rng.integers(40, 500, 2))
            coarse = rng.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
            picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).convert(mode)
            picture.save(folder / kind / f"{number:03d}.jpg", quality=90, **options)
    return folder


def copy_photos(photos: Path, folder: Path, most: int) -> Path:
    """Copy photographs into one class folder."""
    files = sorted(path for path in photos.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not files:
        raise SystemExit(f"{photos}: no JPEGs")
    (folder / "photograph").mkdir(parents=True)
    for number, path in enumerate(files[:: max(1, len(files) // most)][:most]):
        shutil.copyfile(path, folder / "photograph" / f"{number:04d}.jpg")
    return folder


def open_loader(data: Path, **arguments: Any) -> fastdata.Pipeline:
    """Open data for training at 128 x 128, as uint8, in the order of an epoch."""
    transform = (fastdata.RandomResizedCrop(128), fastdata.RandomHorizontalFlip())
    return fastdata.open_pipeline(data, transform=transform, batch_size=32, dtype="uint8", seed=3, **arguments)


def collect(batches: Iterable[fastdata.Batch]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (ids, images, labels) sorted by id, on the host."""
    kept = list(batches)
    ids = torch.cat([batch.ids for batch in kept])
    order = ids.argsort()
    images = torch.cat([batch.images.cpu() for batch in kept])
    labels = torch.cat([batch.labels.cpu() for batch in kept if batch.labels is not None])
    return ids[order], images[order], labels[order]


@dataclass(frozen=True)
class References:
    """What an epoch should be, by id."""

    pillow: torch.Tensor
    repeating: torch.Tensor
    """By libjpeg with repeated chroma."""
    labels: torch.Tensor


def references(folder: Path) -> References:
    """Load both references on the host."""
    with open_loader(folder, backend="pil") as loader:
        _, pillow, labels = collect(loader)
    with open_loader(folder, backend=REPEATING, options=fastdata.TorchvisionOptions(decode="cuda")) as loader:
        _, repeating, _ = collect(loader)
    return References(pillow, repeating, labels)


def repeat(arguments: argparse.Namespace, data: Path) -> tuple[list[torch.Tensor], dict[str, int]]:
    """Return the pictures of each repeat of epoch 0 by id, and what the reference loaded."""
    on_gpu = fastdata.TorchvisionOptions(decode="cuda")
    runs: list[torch.Tensor] = []
    with open_loader(data, backend=arguments.backend, device=arguments.device, options=on_gpu) as loader:
        for number in range(arguments.repeats):
            loader.set_epoch(0)
            if arguments.device != "cpu" and number >= arguments.repeats - LAGGING_REPEATS:
                with torch.cuda.stream(torch.cuda.Stream(arguments.device)):
                    runs.append(collect(lag(loader, arguments.device))[1])
            else:
                runs.append(collect(loader)[1])
        return runs, dict(loader.report().fallbacks)


def lag(batches: Iterable[fastdata.Batch], device: str) -> Iterable[fastdata.Batch]:
    """Copy each batch behind some milliseconds of other work on the current stream, and free the original at once."""
    load = torch.randn(4096, 4096, device=device)
    for batch in batches:
        for _ in range(5):
            load = torch.nn.functional.normalize(load @ load)
        yield fastdata.Batch(batch.images.clone(), batch.labels, batch.ids)


def judge(data: str, runs: list[torch.Tensor], expected: References, names: list[str]) -> list[Row]:
    """Return a row for each kind of picture."""
    if any(run.shape != expected.pillow.shape for run in runs):
        raise SystemExit(f"{data}: {[tuple(run.shape) for run in runs]}, {tuple(expected.pillow.shape)} expected")
    changed = torch.stack([(run != runs[0]).flatten(1).any(1) for run in runs]).any(0)
    repeating, pillow = (
        torch.stack([(run.float() - wanted.float()).abs().mean(dim=(1, 2, 3)) for run in runs]).amax(0)
        for wanted in (expected.repeating, expected.pillow)
    )
    rows = []
    for label, kind in enumerate(names):
        of_kind = expected.labels == label
        worst = float(repeating[of_kind].max()), float(pillow[of_kind].max())
        rows.append(Row(data, kind, int(of_kind.sum()), int(changed[of_kind].sum()), *worst))
    return rows


if __name__ == "__main__":
    sys.exit(main())
