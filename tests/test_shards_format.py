"""What lies in our shards: names, bytes, sizes, order (traps of kinds K5 to K7)."""

from __future__ import annotations

import hashlib
import os
import random
import tarfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastdata.errors import SourceError, UsageError
from fastdata.shards import ConvertOptions, convert_folder
from fastdata.shards.tarformat import archive_bytes, header, sample_bytes
from fastdata.sources.folder import open_folder
from fastdata.sources.tar import open_shards
from tests.pictures import CLASSES, encode, flat, gray, tree

PICTURE = flat((10, 200, 30))


def make(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(PICTURE)
    return root


def contents(out: Path) -> list[tuple[str, bytes]]:
    """Return (name, bytes) of all members of all shards, in order."""
    found = []
    for path in sorted(out.glob("*.tar")):
        with tarfile.open(path) as tar:
            for info in tar:
                member = tar.extractfile(info)
                assert member is not None
                found.append((info.name, member.read()))
    return found


def shard_digests(out: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())}


def check_equals_folder(out: Path, folder: Path) -> None:
    """Every file is in the shards once, byte for byte, under its id and with its label."""
    source = open_folder(folder)
    assert source.labels is not None
    members = dict(contents(out))
    assert len(members) == 2 * len(source)
    for i in range(len(source)):
        assert members[f"{i:09d}.jpg"] == source.read(i)
        assert members[f"{i:09d}.cls"] == b"%d" % source.labels[i]


def test_every_file_is_there_once_with_its_bytes_and_label(tmp_path: Path) -> None:
    """B56: equal names in different classes; B60: picture and label side by side."""
    tree(tmp_path / "tree", 3)
    convert_folder(tmp_path / "tree", tmp_path / "out")
    check_equals_folder(tmp_path / "out", tmp_path / "tree")
    names = [name for name, _ in contents(tmp_path / "out")]
    assert [name[:-4] for name in names[::2]] == [name[:-4] for name in names[1::2]]
    assert {name[-4:] for name in names[::2]} == {".jpg"}


def test_keys_are_unique_over_many_shards(tmp_path: Path) -> None:
    """B56, with several shards; B63: each at most the cap."""
    tree(tmp_path / "tree", 3)
    result = convert_folder(tmp_path / "tree", tmp_path / "out", ConvertOptions(max_bytes=10_240))
    assert result.splits[0].shards == 4
    check_equals_folder(tmp_path / "out", tmp_path / "tree")


def test_original_bytes_are_kept_whatever_the_picture(tmp_path: Path) -> None:
    """B62."""
    paths = tree(tmp_path / "tree", 5)
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "tree" / "ant" / "cmyk.jpg").write_bytes(encode(Image.new("CMYK", (64, 48), (0, 255, 255, 0))))
    (tmp_path / "tree" / "bee" / "exif.jpg").write_bytes(encode(Image.new("RGB", (64, 48)), exif=exif))
    (tmp_path / "tree" / "cat" / "progressive.jpg").write_bytes(encode(Image.new("RGB", (64, 48)), progressive=True))
    (tmp_path / "tree" / "dog" / "gray.jpg").write_bytes(gray(77))
    convert_folder(tmp_path / "tree", tmp_path / "out")
    assert len(paths) + 4 == 24
    check_equals_folder(tmp_path / "out", tmp_path / "tree")


def test_types_are_told_by_content_and_sizes_and_turns_are_in_the_index(tmp_path: Path) -> None:
    """B01, and the index's columns."""
    folder = tmp_path / "tree" / "k"
    folder.mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112] = 8
    (folder / "0.JPEG").write_bytes(flat((10, 200, 30), (20, 30), "PNG"))
    (folder / "1.png").write_bytes(encode(Image.new("RGB", (50, 40)), exif=exif))
    (folder / "2.jpg").write_bytes(flat((10, 200, 30), (21, 31), "WEBP"))
    (folder / "3.jpg").write_bytes(flat((10, 200, 30), (22, 32), "BMP"))
    convert_folder(tmp_path / "tree", tmp_path / "out", ConvertOptions(shuffle=False))
    names = [name for name, _ in contents(tmp_path / "out")]
    assert names[::2] == ["000000000.png", "000000001.jpg", "000000002.webp", "000000003.bmp"]
    columns = open_shards(tmp_path / "out").index.columns
    assert columns["width"].tolist() == [20, 50, 21, 22]
    assert columns["height"].tolist() == [30, 40, 31, 32]
    assert columns["orientation"].tolist() == [1, 8, 1, 1]


def test_dots_in_names_never_reach_a_key(tmp_path: Path) -> None:
    """B53, B54: and one field name whatever the extension's case."""
    names = ("n01.5/a.b.c.JPEG", "n01.5/22.05.JPEG", "n01.5/22.06.jpeg", "v1.2/x..JPG")
    convert_folder(make(tmp_path / "tree", *names), tmp_path / "out")
    check_equals_folder(tmp_path / "out", tmp_path / "tree")
    source = open_shards(tmp_path / "out")
    assert sorted(source.original_path(i).decode() for i in range(4)) == sorted(names)


def test_junk_and_other_files_stay_out(tmp_path: Path) -> None:
    """B41, B46."""
    tree(tmp_path / "tree", 2)
    for name in ("ant/._0000.JPEG", "ant/.DS_Store", "bee/Thumbs.db", "cat/labels.txt", "readme.md"):
        (tmp_path / "tree" / name).write_bytes(b"\x00\x05\x16\x07")
    result = convert_folder(tmp_path / "tree", tmp_path / "out")
    assert result.ignored == {"hidden": 2, "system files": 1, "not pictures": 2}
    check_equals_folder(tmp_path / "out", tmp_path / "tree")


def test_names_of_classes_come_back_unchanged(tmp_path: Path) -> None:
    """B45, B49, B50."""
    classes = ("1", "10", "2", "B", "a", "a&b", "c{1,2}", "hot dog", "猫")
    convert_folder(make(tmp_path / "tree", *(f"{name}/é 1.JPEG" for name in classes)), tmp_path / "out")
    source = open_shards(tmp_path / "out")
    assert source.classes == classes
    assert source.labels is not None
    assert source.labels.tolist() == [
        classes.index(source.original_path(i).decode().split("/")[0]) for i in range(len(classes))
    ]


def test_long_names_become_short_keys(tmp_path: Path) -> None:
    """B58."""
    names = [f"{'c' * length}/{'f' * 115}{n}.JPEG" for length in (120, 160) for n in (1, 2)]
    convert_folder(make(tmp_path / "tree", *names), tmp_path / "out")
    check_equals_folder(tmp_path / "out", tmp_path / "tree")


def test_shards_are_plain_ustar_and_small(tmp_path: Path) -> None:
    """B59."""
    paths = tree(tmp_path / "tree", 15)
    convert_folder(tmp_path / "tree", tmp_path / "out")
    (shard,) = (tmp_path / "out").glob("*.tar")
    payload = sum(512 + -(-path.stat().st_size // 512) * 512 + 1024 for path in paths)
    assert shard.stat().st_size <= payload + 10_240
    with tarfile.open(shard) as tar:
        for info in tar:
            assert (info.mtime, info.uid, info.gid, info.uname, info.mode) == (0, 0, 0, "", 0o644)
            assert not info.pax_headers


@pytest.mark.parametrize(("name", "size"), [("000000017.jpg", 0), ("000000017.jpg", 123_456), ("x" * 99, 8**11 - 1)])
def test_headers_are_valid_ustar(name: str, size: int) -> None:
    info = tarfile.TarInfo.frombuf(header(name, size), "utf-8", "strict")  # checks the checksum too
    assert (info.name, info.size, info.mode, info.mtime, info.type) == (name, size, 0o644, 0, tarfile.REGTYPE)
    assert header(name, size)[257:265] == b"ustar\x0000"


def test_no_shard_exceeds_the_cap(tmp_path: Path) -> None:
    """B63: 1000 JPEGs of about 700 bytes."""
    folder = tmp_path / "tree" / "k"
    folder.mkdir(parents=True)
    for i in range(1000):
        (folder / f"{i}.jpg").write_bytes(PICTURE)
    result = convert_folder(tmp_path / "tree", tmp_path / "out", ConvertOptions(max_bytes=1_000_000))
    sizes = [os.path.getsize(path) for path in (tmp_path / "out").glob("*.tar")]
    assert len(sizes) == result.splits[0].shards >= 3
    assert max(sizes) <= 1_000_000
    assert len(contents(tmp_path / "out")) == 2000


@pytest.mark.parametrize("count", [1, 4, 5])
def test_a_sample_that_fills_a_shard_exactly_starts_no_empty_one(tmp_path: Path, count: int) -> None:
    """B65: a shard of 10,240 bytes holds three of these samples and the end mark, and not a byte more."""
    picture = PICTURE.ljust(3 * 512)  # 3 * (512 + 3 * 512 + 1024) + 1024 = 10,240
    assert archive_bytes(3 * sample_bytes(len(picture))) == 10_240
    for i in range(count):
        path = tmp_path / "tree" / "k" / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture)
    result = convert_folder(tmp_path / "tree", tmp_path / "out", ConvertOptions(max_bytes=10_240))
    assert [shard.samples for shard in open_shards(tmp_path / "out").index.shards] == {1: [1], 4: [3, 1], 5: [3, 2]}[
        count
    ]
    assert result.splits[0].samples == count


def test_a_folder_without_samples_leaves_no_tar(tmp_path: Path) -> None:
    """B65, 0 samples."""
    (tmp_path / "tree").mkdir()
    with pytest.raises(SourceError, match="it is empty"):
        convert_folder(tmp_path / "tree", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_two_runs_give_identical_bytes_whatever_workers_dates_and_file_system(tmp_path: Path) -> None:
    """B52, B72."""
    digests = []
    for run, workers in ((1, 1), (2, 4)):
        paths = tree(tmp_path / str(run) / "spare", 10)
        for path in random.Random(run).sample(paths, len(paths)):
            new = tmp_path / str(run) / "tree" / path.relative_to(tmp_path / str(run) / "spare")
            new.parent.mkdir(parents=True, exist_ok=True)
            path.rename(new)
            os.utime(new, (run * 1e9, run * 1e9))
        mask = os.umask(0o077 if run == 1 else 0o022)
        try:
            convert_folder(
                tmp_path / str(run) / "tree",
                tmp_path / str(run) / "out",
                ConvertOptions(max_bytes=40_960, seed=5, split=(("train", 0.8), ("val", 0.2))),
                workers=workers,
            )
        finally:
            os.umask(mask)
        digests.append([shard_digests(tmp_path / str(run) / "out" / name) for name in ("train", "val")])
    assert digests[0] == digests[1]
    assert len(digests[0][0]) > 3


def test_re_encoded_shards_are_the_same_whatever_the_number_of_workers(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    for i in range(24):
        path = tmp_path / "tree" / f"c{i % 2}" / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        side = 40 + 8 * (i % 7)
        path.write_bytes(encode(Image.fromarray(noise.integers(0, 256, (side, side + 9, 3), np.uint8))))
    digests = []
    for workers in (1, 5):
        out = tmp_path / f"out{workers}"
        convert_folder(
            tmp_path / "tree", out, ConvertOptions(max_bytes=20_480, resize=48, crop_ready=True), workers=workers
        )
        digests.append(shard_digests(out))
    assert digests[0] == digests[1]


def test_the_storage_order_is_mixed_unless_asked_otherwise(tmp_path: Path) -> None:
    tree(tmp_path / "tree", 10)
    orders = {}
    for name, options in {
        "0": ConvertOptions(seed=0), "1": ConvertOptions(seed=1), "plain": ConvertOptions(shuffle=False)
    }.items():  # fmt: skip
        convert_folder(tmp_path / "tree", tmp_path / name, options)
        orders[name] = [int(member[:9]) for member, _ in contents(tmp_path / name)[::2]]
    assert orders["plain"] == list(range(40))
    assert orders["0"] != orders["1"]
    for name in ("0", "1"):
        assert sorted(orders[name]) == list(range(40))
        labels = [sample // 10 for sample in orders[name]]
        assert sum(a == b for a, b in pairwise(labels)) < 25


def test_a_cap_that_holds_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="max_bytes"):
        ConvertOptions(max_bytes=5000)


def test_the_class_names_of_a_tree_are_in_the_class_file(tmp_path: Path) -> None:
    tree(tmp_path / "tree", 1)
    convert_folder(tmp_path / "tree", tmp_path / "out")
    text = (tmp_path / "out" / "classes.json").read_text()
    assert [name for name in CLASSES if f'"{name}": {CLASSES.index(name)}' in text] == list(CLASSES)
