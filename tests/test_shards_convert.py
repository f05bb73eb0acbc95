"""What a conversion does with bad files, splits, class maps, sizes, and a folder that is not empty."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fastdata.cli import make_app
from fastdata.errors import FastDataError, ShardError, SourceError, UsageError
from fastdata.jpeg import read_header
from fastdata.shards import ConvertOptions, convert_folder
from fastdata.shards.facts import read_facts
from fastdata.shards.options import parse_split
from fastdata.shards.reencode import MakeCropReady, Shrink, _Both
from fastdata.sources.folder import FolderSource, open_folder
from fastdata.sources.open import open_source
from fastdata.sources.paths import printable
from fastdata.sources.tar import TarSource, open_shards
from tests.pictures import encode, flat, noise, smooth_pixels, tree

BAD = {"zero.JPEG": b"", "page.JPEG": b"<html>404</html>", "soi.JPEG": b"\xff\xd8"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tree(tmp_path / "tree", 6)
    return tmp_path / "tree"


def names(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir())


def numbers(source: TarSource) -> list[int]:
    """Return the number that each sample's pixels hold."""
    found = []
    for i in range(len(source)):
        pixels = np.asarray(Image.open(io.BytesIO(source.read(i))))
        found.append(int(pixels[..., 0].mean()) // 16 + 16 * (int(pixels[..., 1].mean()) // 16))
    return found


class TestBadFiles:
    """B17, B25, B64."""

    @pytest.mark.parametrize("name", BAD)
    def test_the_first_bad_file_stops_the_conversion_and_is_named(self, folder: Path, name: str) -> None:
        (folder / "ant" / name).write_bytes(BAD[name])
        with pytest.raises(SourceError, match=f"ant/{name}: .*`fastdata check`.*--on-error skip"):
            convert_folder(folder, folder.parent / "out")
        assert not (folder.parent / "out").exists()

    def test_bad_files_are_skipped_and_reported(self, folder: Path) -> None:
        for name, data in BAD.items():
            (folder / "ant" / name).write_bytes(data)
        out = folder.parent / "out"
        result = convert_folder(folder, out, ConvertOptions(on_error="skip"))
        assert (result.splits[0].samples, result.splits[0].skipped) == (24, 3)
        report = json.loads((out / "skipped.json").read_text())
        assert {entry["path"]: entry["id"] for entry in report} == {
            f"ant/{n}": 6 + i for i, n in enumerate(sorted(BAD))
        }
        assert all(entry["reason"] and "--on-error" not in entry["reason"] for entry in report)
        source = open_shards(out)
        assert source.ids.tolist() == [*range(6), *range(9, 27)]
        assert source.labels is not None
        assert numbers(source) == [6 * label + i for label in range(4) for i in range(6)]
        assert source.labels.tolist() == [label for label in range(4) for _ in range(6)]

    def test_every_tenth_file_bad_moves_no_label(self, tmp_path: Path) -> None:
        """B25."""
        paths = tree(tmp_path / "tree", 25)
        for path in paths[::10]:
            path.write_bytes(b"")
        convert_folder(tmp_path / "tree", tmp_path / "out", ConvertOptions(on_error="skip", max_bytes=30_720))
        source = open_shards(tmp_path / "out")
        assert source.labels is not None
        assert numbers(source) == [i for i in range(100) if i % 10]
        assert source.labels.tolist() == [number // 25 for number in numbers(source)]

    def test_a_file_that_no_shard_can_hold_is_named_with_its_size(self, folder: Path) -> None:
        with open(folder / "cat" / "big.JPEG", "wb") as file:  # B53's trick: zeros after a JPEG cost no disk
            file.write(flat((1, 2, 3)))
            file.truncate(150_000)
        out = folder.parent / "out"
        with pytest.raises(SourceError, match=r"cat/big\.JPEG: 150000 bytes.*at most 100000 bytes"):
            convert_folder(folder, out, ConvertOptions(max_bytes=100_000))
        assert not out.exists()
        result = convert_folder(folder, out, ConvertOptions(max_bytes=100_000, on_error="skip"))
        assert (result.splits[0].samples, result.splits[0].skipped) == (24, 1)
        assert all(path.stat().st_size <= 100_000 for path in out.glob("*.tar"))

    def test_a_file_larger_than_the_default_cap_is_not_read(self, folder: Path) -> None:
        """B64."""
        with open(folder / "cat" / "huge.JPEG", "wb") as file:
            file.write(flat((1, 2, 3)))
            file.truncate(2_100_000_000)
        with pytest.raises(SourceError, match=r"cat/huge\.JPEG: 2100000000 bytes"):
            convert_folder(folder, folder.parent / "out")

    def test_shards_whose_samples_are_all_bad_leave_no_gap(self, folder: Path) -> None:
        for path in folder.glob("[bc]*/*"):
            path.write_bytes(b"")
        out = folder.parent / "out"
        convert_folder(folder, out, ConvertOptions(on_error="skip", max_bytes=10_240, shuffle=False))
        assert names(out) == [
            "classes.json",
            "index.fastdata",
            *(f"shard-{i:06d}.tar" for i in range(4)),
            "skipped.json",
        ]
        assert all(shard.samples for shard in open_shards(out).index.shards)

    def test_nothing_but_bad_files_is_an_error_and_leaves_nothing(self, folder: Path) -> None:
        for path in folder.glob("*/*"):
            path.write_bytes(b"")
        with pytest.raises(SourceError, match="no file could be stored"):
            convert_folder(folder, folder.parent / "out", ConvertOptions(on_error="skip"))
        assert not (folder.parent / "out").exists()

    def test_a_cut_picture_is_found_by_its_missing_end(self, folder: Path) -> None:
        """B15, as far as a header shows it."""
        whole = noise()
        (folder / "ant" / "half.jpg").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(SourceError, match=r"half\.jpg: "):
            convert_folder(folder, folder.parent / "out")


class TestSplits:
    def test_splits_share_each_class_and_keep_the_folders_ids(self, folder: Path) -> None:
        out = folder.parent / "out"
        convert_folder(folder, out, ConvertOptions(split=parse_split("train=0.75,val=0.25")))
        whole = open_folder(folder)
        parts = [open_shards(out / name) for name in ("train", "val")]
        assert sorted([*parts[0].ids, *parts[1].ids]) == whole.ids.tolist()
        assert [len(part) for part in parts] == [18, 6]
        for part in parts:
            assert part.labels is not None
            assert np.bincount(part.labels).max() - np.bincount(part.labels).min() <= 1
            assert part.classes == whole.classes
            for i, sample in enumerate(part.ids.tolist()):
                assert part.read(i) == whole.read(sample)
                assert part.original_path(i) == whole.relative_path(sample)

    def test_small_classes_together_get_their_share(self, tmp_path: Path) -> None:
        for label in range(20):
            path = tmp_path / "tree" / f"c{label:02d}" / "only.jpg"
            path.parent.mkdir(parents=True)
            path.write_bytes(flat((label, 0, 0)))
        convert_folder(tmp_path / "tree", tmp_path / "out", ConvertOptions(split=(("train", 0.9), ("val", 0.1))))
        assert len(open_shards(tmp_path / "out" / "val")) == 2

    def test_the_seed_decides_the_split(self, folder: Path) -> None:
        ids = []
        for name, seed in (("a", 1), ("b", 1), ("c", 2)):
            out = folder.parent / name
            convert_folder(folder, out, ConvertOptions(split=(("t", 0.5), ("v", 0.5)), seed=seed))
            ids.append(open_shards(out / "t").ids.tolist())
        assert ids[0] == ids[1] != ids[2]

    @pytest.mark.parametrize(
        "text", ["train=0.9", "train=0.9,val=0.2", "a=0.5,a=0.5", "train", "../x=0.5,y=0.5", "a=1,b=0"]
    )
    def test_impossible_shares_are_refused(self, text: str) -> None:
        with pytest.raises(UsageError, match="split"):
            ConvertOptions(split=parse_split(text))

    def test_a_split_without_a_sample_is_refused(self, tmp_path: Path) -> None:
        tree(tmp_path / "tree", 1)
        with pytest.raises(UsageError, match=r"val=0.01 of 4 samples is none"):
            convert_folder(tmp_path / "tree", tmp_path / "out", ConvertOptions(split=(("train", 0.99), ("val", 0.01))))
        assert not (tmp_path / "out").exists()

    def test_opening_the_folder_above_the_splits_says_which_there_are(self, folder: Path) -> None:
        out = folder.parent / "out"
        convert_folder(folder, out, ConvertOptions(split=(("train", 0.5), ("val", 0.5))))
        with pytest.raises(SourceError, match=r"splits \(train, val\).*out/train"):
            open_source(out)


class TestClassMaps:
    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("map.json", '{"dog": 0, "cat": 1, "bee": 2, "ant": 3, "eel": 4}'),
            ("map.json", '["dog", "cat", "bee", "ant", "eel"]'),
            ("map.txt", "dog\ncat\n\nbee\nant\neel\n"),
        ],
    )
    def test_labels_come_from_the_map(self, folder: Path, name: str, text: str) -> None:
        path = folder.parent / name
        path.write_text(text)
        convert_folder(folder, folder.parent / "out", ConvertOptions(class_map=path))
        source = open_shards(folder.parent / "out")
        assert source.labels is not None
        assert source.classes == ("dog", "cat", "bee", "ant", "eel")
        assert source.labels.tolist() == [3] * 6 + [2] * 6 + [1] * 6 + [0] * 6

    @pytest.mark.parametrize(
        ("text", "message"),
        [('["ant", "bee"]', "lacks 2 classes .*: cat, dog"), ('{"ant": 0, "bee": 0}', "each once"), ("[1", "class_map"),
         ('["ant", "ant"]', "each class name once"), ("{}", "each class name once"), ('{"a": "x"}', "labels 0..n-1")],
    )  # fmt: skip
    def test_a_map_that_does_not_fit_is_refused(self, folder: Path, text: str, message: str) -> None:
        path = folder.parent / "map.json"
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            convert_folder(folder, folder.parent / "out", ConvertOptions(class_map=path))


class TestReencoding:
    @pytest.fixture
    def photos(self, tmp_path: Path) -> Path:
        root = tmp_path / "photos" / "k"
        root.mkdir(parents=True)
        exif = Image.Exif()
        exif[0x0112] = 6
        (root / "0.jpg").write_bytes(encode(Image.fromarray(smooth_pixels(160, 96))))
        (root / "1.jpg").write_bytes(encode(Image.fromarray(smooth_pixels(160, 96)), exif=exif))
        (root / "2.jpg").write_bytes(encode(Image.fromarray(smooth_pixels(40, 30))))
        (root / "3.png").write_bytes(encode(Image.fromarray(smooth_pixels(90, 80)), "PNG"))
        return tmp_path / "photos"

    def test_resize_shrinks_the_short_side_turned_upright_and_says_so(self, photos: Path) -> None:
        out = photos.parent / "out"
        convert_folder(photos, out, ConvertOptions(resize=48, quality=80, shuffle=False))
        source = open_shards(out)
        assert source.index.facts["stored"] == "resized"
        assert source.index.facts["options"]["resize"] == 48
        assert source.index.facts["options"]["quality"] == 80
        assert source.index.facts["notes"] == {"resized": 3, "small enough": 1}
        sizes = [Image.open(io.BytesIO(source.read(i))).size for i in range(4)]
        assert sizes == [(80, 48), (48, 80), (40, 30), (54, 48)]
        columns = source.index.columns
        assert list(zip(columns["width"], columns["height"], strict=True)) == sizes
        assert columns["orientation"].tolist() == [1, 1, 1, 1]
        assert source.where(3).endswith("000000003.jpg")
        upright, turned = (np.asarray(Image.open(io.BytesIO(source.read(i))), int) for i in (0, 1))
        assert np.abs(np.rot90(upright, -1) - turned).mean() < 2

    def test_digests_of_source_and_stored_bytes_are_kept_where_they_differ(self, photos: Path) -> None:
        from hashlib import sha256

        out = photos.parent / "out"
        convert_folder(photos, out, ConvertOptions(resize=48))
        source, files = open_shards(out), open_folder(photos)
        for i in range(4):
            assert source.index.columns["source_sha256"][i].tobytes() == sha256(files.read(i)).digest()
            assert source.index.columns["stored_sha256"][i].tobytes() == sha256(source.read(i)).digest()

    def test_crop_ready_shards_decode_to_the_same_pixels(self, photos: Path) -> None:
        out = photos.parent / "out"
        convert_folder(photos, out, ConvertOptions(crop_ready=True))
        source, files = open_shards(out), open_folder(photos)
        assert source.kind == "crop-ready shards"
        for i in range(4):
            stored, original = (np.asarray(Image.open(io.BytesIO(s.read(i))).convert("RGB")) for s in (source, files))
            assert np.array_equal(stored, original)
        made = [read_header(source.read(i)).crop_ready for i in range(4)]
        assert sum(made) == source.index.facts["notes"].get("crop-ready", 0) >= 1
        assert source.index.columns["orientation"].tolist() == [1, 6, 1, 1]

    def test_files_that_stay_as_they_are_are_listed_with_their_reason(self, photos: Path) -> None:
        rng = np.random.default_rng(0)
        rough = Image.fromarray(rng.integers(0, 256, (90, 120, 3)).astype(np.uint8))
        (photos / "k" / "4.jpg").write_bytes(encode(rough))
        whole = encode(rough, quality=80)
        (photos / "k" / "5.jpg").write_bytes(whole[: len(whole) // 2] + whole[-2:])
        out = photos.parent / "out"
        result = convert_folder(photos, out, ConvertOptions(crop_ready=True), workers=2)
        listed = {row["path"]: row["reason"] for row in json.loads((out / "not-crop-ready.json").read_text())}
        assert listed["k/3.png"] == "not a JPEG"
        assert listed["k/5.jpg"] == "damaged scan"
        assert "k/4.jpg" not in listed
        source, files = open_shards(out), open_folder(photos)
        same = {printable(files.relative_path(i)) for i in range(6) if source.read(i) == files.read(i)}
        assert same == set(listed)
        assert result.splits[0].not_crop_ready == dict(Counter(listed.values()))
        convert_folder(photos, out, overwrite=True)
        assert not (out / "not-crop-ready.json").exists()

    def test_the_terminal_says_where_the_list_is(self, photos: Path) -> None:
        out = photos.parent / "out"
        said = CliRunner().invoke(make_app(), ["shard", str(photos), str(out), "--crop-ready"]).stderr
        assert f"1 not a JPEG), see {out / 'not-crop-ready.json'}" in said
        plain = CliRunner().invoke(make_app(), ["shard", str(photos), str(out), "--overwrite"]).stderr
        assert "crop-ready" not in plain

    def test_a_picture_that_was_shrunk_and_is_not_crop_ready_is_kept_shrunk_with_the_reason(self) -> None:
        data = encode(Image.fromarray(smooth_pixels(160, 96)))
        reencode = _Both(Shrink(48, 90), MakeCropReady(-0.9, "coefficients"))  # a limit that nothing keeps
        made = reencode(data, read_facts(data))
        assert made.data is not None
        assert Image.open(io.BytesIO(made.data)).size == (80, 48)
        assert (made.note, made.not_crop_ready) == (
            "resized, grows by more than the limit",
            "grows by more than the limit",
        )

    @pytest.mark.parametrize("options", [{"quality": 0}, {"quality": 96}, {"resize": 0}, {"on_error": "ignore"}])
    def test_impossible_options_are_refused(self, options: dict[str, object]) -> None:
        with pytest.raises(UsageError):
            ConvertOptions(**options)  # type: ignore[arg-type]


class TestFolderThatIsNotEmpty:
    def test_other_shards_are_not_touched_unless_asked(self, folder: Path) -> None:
        out = folder.parent / "out"
        convert_folder(folder, out, ConvertOptions(max_bytes=10_240))
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        with pytest.raises(ShardError, match=r"it holds shards already.*--overwrite"):
            convert_folder(folder, out)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
        convert_folder(folder, out, overwrite=True)
        assert names(out) == ["classes.json", "index.fastdata", "shard-000000.tar"]
        assert len(open_shards(out)) == 24

    def test_overwriting_splits_removes_the_old_ones_and_nothing_else(self, folder: Path) -> None:
        out = folder.parent / "out"
        convert_folder(folder, out, ConvertOptions(split=(("train", 0.5), ("val", 0.5))))
        (out / "notes.txt").write_text("mine")
        convert_folder(folder, out, overwrite=True)
        assert names(out) == ["classes.json", "index.fastdata", "notes.txt", "shard-000000.tar"]

    def test_tars_of_another_origin_are_never_removed(self, folder: Path) -> None:
        out = folder.parent / "out"
        out.mkdir()
        (out / "mine.tar").write_bytes(b"precious")
        for overwrite in (False, True):
            with pytest.raises(ShardError, match=r"mine\.tar: a tar of another origin"):
                convert_folder(folder, out, overwrite=overwrite)
        assert names(out) == ["mine.tar"]

    def test_a_finished_set_is_left_alone_by_resume(self, folder: Path) -> None:
        out = folder.parent / "out"
        convert_folder(folder, out)
        times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
        assert convert_folder(folder, out, resume=True).splits[0].samples == 24
        assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == times

    @pytest.mark.parametrize("place", ["inside", "same"])
    def test_the_source_folder_is_no_place_for_shards(self, folder: Path, place: str) -> None:
        with pytest.raises(UsageError, match="OUT"):
            convert_folder(folder, folder / "shards" if place == "inside" else folder)

    def test_a_file_is_no_place_for_shards(self, folder: Path) -> None:
        (folder.parent / "out").write_text("")
        with pytest.raises(UsageError, match="is a file"):
            convert_folder(folder, folder.parent / "out")


@pytest.mark.parametrize("options", [ConvertOptions(crop_ready=True), ConvertOptions(max_bytes=30 * 1024)])
def test_every_form_of_a_folder_has_its_fingerprint(folder: Path, options: ConvertOptions) -> None:
    convert_folder(folder, folder.parent / "out", options)
    assert open_shards(folder.parent / "out").fingerprint == open_folder(folder).fingerprint


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("damage", [Path.exists, lambda folder: (folder / "ant" / "0000.JPEG").write_bytes(b"")])
def test_the_fingerprint_is_that_of_the_folder_if_nothing_was_skipped(
    folder: Path, shuffle: bool, damage: Callable[[Path], object]
) -> None:
    damage(folder)
    convert_folder(folder, folder.parent / "out", ConvertOptions(on_error="skip", shuffle=shuffle))
    shards, files = open_shards(folder.parent / "out"), open_folder(folder)
    assert (shards.fingerprint == files.fingerprint) == (len(shards) == len(files))


def test_a_full_disk_is_one_clear_error_and_keeps_what_was_finished(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    import fastdata.shards.shardfile as shardfile

    room = 45_000
    write = os.writev

    def writev(handle: int, pieces: list[memoryview]) -> int:
        nonlocal room
        room -= sum(map(len, pieces))
        if room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, pieces)

    monkeypatch.setattr(shardfile.os, "writev", writev)
    out, options = folder.parent / "out", ConvertOptions(max_bytes=10_240)
    with pytest.raises(FastDataError, match=r"No space left on device.*--resume"):
        convert_folder(folder, out, options)
    finished = names(out)
    assert finished[0] == ".fastdata-work"
    assert len(finished) > 1
    assert not list((out / ".fastdata-work").glob("*.partial"))
    with pytest.raises(ShardError, match="unfinished conversion"):
        open_shards(out)
    room = 10**9
    convert_folder(folder, out, options, resume=True)
    convert_folder(folder, folder.parent / "clean", options)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {
        p.name: p.read_bytes() for p in (folder.parent / "clean").iterdir()
    }


def test_a_file_that_cannot_be_read_is_named_and_no_half_sample_is_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B71: the 13th file cannot be read."""
    real = FolderSource.read_into

    def read_into(self: FolderSource, position: int, room: Callable[[int], memoryview]) -> memoryview:
        if position == 12:
            raise SourceError(self.where(position), "Permission denied", "a readable file")
        return real(self, position, room)

    monkeypatch.setattr(FolderSource, "read_into", read_into)
    out = folder.parent / "out"
    with pytest.raises(SourceError, match=r"cat/0000\.JPEG: Permission denied"):
        convert_folder(folder, out, ConvertOptions(max_bytes=10_240, shuffle=False))
    import tarfile

    for path in out.glob("*.tar"):
        with tarfile.open(path) as tar:
            members = tar.getnames()
        assert [name[:-4] for name in members[::2]] == [name[:-4] for name in members[1::2]]
    assert not list(out.rglob("*.partial"))
