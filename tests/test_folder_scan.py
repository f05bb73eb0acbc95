"""The folder index: what counts as a sample, in which order, and what is left out (traps of kind K5)."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdata.check import check_data
from fastdata.errors import SourceError, UsageError
from fastdata.sources import scan as scan_module
from fastdata.sources.folder import FolderSource, open_folder
from fastdata.sources.paths import PathTable
from tests.pictures import CLASSES, flat, tree

PICTURE = flat((10, 200, 30))


def make(root: Path, *names: str) -> Path:
    """Write one picture under each name."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(PICTURE)
    return root


def relative_paths(source: FolderSource) -> list[str]:
    return [source.relative_path(i).decode("utf-8") for i in range(len(source))]


def test_extensions_count_whatever_their_case(tmp_path: Path) -> None:
    """B40."""
    source = open_folder(make(tmp_path / "root", "k/a.jpg", "k/b.JPG", "k/c.jpeg", "k/d.JPEG", "k/e.Jpeg"))
    assert len(source) == 5


def test_files_of_operating_systems_are_ignored_and_counted(tmp_path: Path) -> None:
    """B41."""
    tree(tmp_path, 2)
    for name in CLASSES:
        (tmp_path / name / "._0000.JPEG").write_bytes(b"\x00\x05\x16\x07".ljust(4096, b"\0"))
        for junk in (".DS_Store", "Thumbs.db", "desktop.ini"):
            (tmp_path / name / junk).write_bytes(b"junk")
    source = open_folder(tmp_path)
    assert (len(source), source.classes) == (8, CLASSES)
    assert source.ignored == {"hidden": 8, "system files": 8}


def test_a_class_without_pictures_is_an_error_that_names_it(tmp_path: Path) -> None:
    """B43."""
    for path in tree(tmp_path, 2):
        if path.parent.name == "bee":
            path.unlink()
    with pytest.raises(SourceError, match="bee: a class folder without pictures"):
        open_folder(tmp_path)


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_classes_are_sorted_as_text_in_any_locale(tmp_path: Path, locale: str) -> None:
    """B45."""
    make(tmp_path / "root", "1/x.jpg", "2/x.jpg", "10/x.jpg", "B/x.jpg", "a/x.jpg")
    code = (
        "import sys; from fastdata.sources.folder import open_folder; s = open_folder(sys.argv[1]);"
        "print(','.join(s.classes), [s.classes.index(s.relative_path(i).decode().split('/')[0]) for i in range(5)]"
        " == s.labels.tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "root"],
        env={**os.environ, "LC_ALL": locale, "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["1,10,2,B,a", "True"]


def test_files_that_are_no_pictures_are_ignored_and_counted(tmp_path: Path) -> None:
    """B46."""
    tree(tmp_path, 2)
    for name in ("ant/labels.txt", "readme.md", "bee/meta.json"):
        (tmp_path / name).write_text("text")
    source = open_folder(tmp_path)
    assert len(source) == 8
    assert source.ignored == {"not pictures": 3}


def test_sub_folders_belong_to_their_class(tmp_path: Path) -> None:
    """B47."""
    source = open_folder(make(tmp_path, "ant/0.JPEG", "ant/sub/1.JPEG", "ant/sub/deep/2.JPEG", "bee/3.JPEG"))
    assert source.labels is not None
    assert source.labels.tolist() == [0, 0, 0, 1]


def test_blanks_and_signs_in_names_are_kept(tmp_path: Path) -> None:
    """B49."""
    root = tmp_path / "my {data} set"
    names = ["hot dog/my pic (1).JPEG", "a&b/x,y.JPEG", "c{1,2}/z.JPEG", "100%/q#1.JPEG"]
    source = open_folder(make(root, *names))
    assert source.classes == ("100%", "a&b", "c{1,2}", "hot dog")
    assert sorted(relative_paths(source)) == sorted(names)
    assert all(source.read(i) == PICTURE for i in range(4))


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_names_beyond_ascii_are_kept_in_any_locale(tmp_path: Path, locale: str) -> None:
    """B50."""
    make(tmp_path / "root", "猫/\u00e9.JPEG", "猫/e\u0301.JPEG", "猫/\U0001f600.JPEG")
    code = (
        "import sys; from fastdata.sources.folder import open_folder; s = open_folder(sys.argv[1]);"
        "assert all(len(s.read(i)) > 100 for i in range(3)); sys.stdout.buffer.write("
        "repr([s.classes, [s.relative_path(i) for i in range(len(s))]]).encode('utf-8'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "root"],
        env={**os.environ, "LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        check=True,
    )
    expected = sorted("猫/".encode() + name.encode() + b".JPEG" for name in ("\u00e9", "e\u0301", "\U0001f600"))
    assert done.stdout.decode("utf-8") == repr([("猫",), expected])


def test_names_that_are_no_utf_8_are_read(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path / "k")
    os.mkdir(folder)
    with open(folder + b"/\xff\xfe.jpg", "wb") as file:
        file.write(PICTURE)
    source = open_folder(tmp_path)
    assert source.read(0) == PICTURE
    assert "\\xff\\xfe.jpg" in source.where(0)


def test_the_order_is_that_of_the_paths_bytes_not_of_the_file_system(tmp_path: Path) -> None:
    """B52."""
    names = [f"{folder}{i:02d}.jpg" for folder in ("a/", "a-b/", "a.b/", "a/x/", "a/x.", "B/") for i in range(5)]
    for seed in (1, 2):
        mixed = random.Random(seed).sample(names, len(names))
        source = open_folder(make(tmp_path / str(seed), *mixed))
        assert relative_paths(source) == sorted(names, key=lambda name: name.encode())
        assert source.ids.tolist() == list(range(30))


def test_links_are_followed_and_loops_end(tmp_path: Path) -> None:
    make(tmp_path / "elsewhere", "one.jpg", "two.jpg")
    root = make(tmp_path / "root", "ant/0.jpg")
    (root / "bee").symlink_to(tmp_path / "elsewhere")
    (root / "ant" / "again").symlink_to(root)
    (root / "ant" / "linked.jpg").symlink_to(tmp_path / "elsewhere" / "one.jpg")
    source = open_folder(root)
    assert relative_paths(source) == ["ant/0.jpg", "ant/linked.jpg", "bee/one.jpg", "bee/two.jpg"]
    assert source.ignored == {"folders that contain themselves": 1}


def test_a_link_that_leads_nowhere_is_no_sample_lost_in_silence(tmp_path: Path) -> None:
    make(tmp_path, "ant/0.jpg")
    (tmp_path / "ant" / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    source = open_folder(tmp_path)
    assert len(source) == 2
    with pytest.raises(SourceError, match=r"gone\.jpg: No such file"):
        source.read(1)


def test_pictures_outside_class_folders_are_counted(tmp_path: Path) -> None:
    source = open_folder(make(tmp_path, "loose.jpg", "ant/0.jpg"))
    assert len(source) == 1
    assert source.ignored == {"pictures outside class folders": 1}


def test_a_missing_an_empty_and_a_flat_folder_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="nothing-here: no such folder"):
        open_folder(tmp_path / "nothing-here")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="it is empty"):
        open_folder(tmp_path / "empty")
    make(tmp_path / "flat", "a.jpg", "b.jpg")
    with pytest.raises(SourceError, match=r"no class folders.*labels=None"):
        open_folder(tmp_path / "flat")
    with pytest.raises(SourceError, match="a file"):
        open_folder(tmp_path / "flat" / "a.jpg")


def test_a_file_that_went_away_is_named(tmp_path: Path) -> None:
    source = open_folder(make(tmp_path, "ant/0.jpg", "ant/1.jpg"))
    (tmp_path / "ant" / "1.jpg").unlink()
    with pytest.raises(SourceError, match=r"ant/1\.jpg: No such file or directory"):
        source.read(1)


class TestCache:
    """The kept index of a large folder."""

    @pytest.fixture
    def root(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(scan_module, "CACHE_FROM_FILES", 4)
        tree(tmp_path / "root", 3)
        self.age(tmp_path / "root")
        return tmp_path / "root"

    @staticmethod
    def age(root: Path) -> None:
        """Give all folders an old time stamp, as if they were written a while ago."""
        for folder in (root, *filter(Path.is_dir, root.rglob("*"))):
            os.utime(folder, ns=(10**18, 10**18))

    def opened(self, root: Path) -> FolderSource:
        return open_folder(root, cache_dir=root.parent / "cache")

    def test_a_second_opening_lists_no_folder(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = self.opened(root)
        monkeypatch.setattr(os, "scandir", lambda _: pytest.fail("listed a folder"))
        second = self.opened(root)
        assert relative_paths(second) == relative_paths(first)
        assert (second.classes, second.fingerprint) == (first.classes, first.fingerprint)
        assert np.array_equal(second.labels, first.labels)

    @pytest.mark.parametrize("change", ["add", "remove", "rename", "new class"])
    def test_a_changed_folder_is_listed_again(self, root: Path, change: str) -> None:
        self.opened(root)
        if change == "add":
            make(root, "bee/new.jpg")
        elif change == "remove":
            (root / "bee" / "0000.JPEG").unlink()
        elif change == "rename":
            (root / "bee" / "0000.JPEG").rename(root / "bee" / "zero.JPEG")
        else:
            make(root, "eel/0.jpg")
        assert relative_paths(self.opened(root)) == relative_paths(open_folder(root, cache_dir=None))

    def test_a_folder_that_just_changed_is_not_kept(self, root: Path) -> None:
        make(root, "bee/new.jpg")  # a change in the same tick of a coarse clock would leave no trace
        self.opened(root)
        assert not (root.parent / "cache").exists()

    def test_a_damaged_cache_is_made_again(self, root: Path) -> None:
        expected = relative_paths(self.opened(root))
        (kept,) = (root.parent / "cache").rglob("*.index")
        whole = kept.read_bytes()
        kept.unlink()  # a file that is mapped must not be cut
        kept.write_bytes(whole[:100])
        assert relative_paths(self.opened(root)) == expected

    def test_another_process_maps_the_kept_index(self, root: Path) -> None:
        source = self.opened(root)
        sent = pickle.dumps(source)
        again = pickle.loads(sent)
        assert relative_paths(again) == relative_paths(source)
        assert b"0000.JPEG" not in sent

    def test_another_process_never_gets_a_newer_index(self, root: Path) -> None:
        sent = pickle.dumps(self.opened(root))
        make(root, "bee/new.jpg")
        self.age(root)
        os.utime(root / "bee", ns=(10**18 + 1, 10**18 + 1))
        assert len(self.opened(root)) == 13
        with pytest.raises(SourceError, match="open it again"):
            pickle.loads(sent)


def test_a_source_is_equal_after_pickling(tmp_path: Path) -> None:
    source = open_folder(make(tmp_path, "ant/0.jpg", "bee/1.jpg"))
    again = pickle.loads(pickle.dumps(source))
    assert again.labels.tolist() == [0, 1]
    assert again.ids.tolist() == [0, 1]
    assert again.fingerprint == source.fingerprint
    assert again.read(1) == PICTURE


class TestSplits:
    def test_splits_are_not_taken_for_classes(self, tmp_path: Path) -> None:
        root = make(tmp_path / "data", "train/ant/0.jpg", "train/bee/1.jpg", "val/ant/2.jpg", "val/bee/3.jpg")
        with pytest.raises(UsageError, match=r"data: the folders train, val, .* Pass .*data/train\."):
            open_folder(root)
        with pytest.raises(UsageError, match="splits, not classes"):
            check_data(root)
        assert open_folder(root / "train").classes == ("ant", "bee")
        assert len(open_folder(root, labels=None)) == 4
        assert open_folder(root, labels=lambda path: path.split("/")[-3] == "val").labels.tolist() == [0, 0, 1, 1]

    def test_a_flat_val_beside_train_is_a_split_too(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="splits, not classes"):
            open_folder(make(tmp_path / "data", "train/ant/0.jpg", "val/1.jpg"))

    @pytest.mark.parametrize(
        "names",
        [
            ("train/ant/0.jpg", "plane/ant/1.jpg"),
            ("train/0.jpg", "val/ant/1.jpg"),
            ("train/0.jpg", "test/1.jpg"),
            ("val/ant/0.jpg", "test/ant/1.jpg"),
            ("train/ant/0.jpg",),
        ],
    )
    def test_folders_that_may_be_classes_are(self, tmp_path: Path, names: tuple[str, ...]) -> None:
        source = open_folder(make(tmp_path / "data", *names))
        assert source.classes == tuple(sorted({name.partition("/")[0] for name in names}))


@pytest.mark.parametrize("other", [("ant/0.jpg", "cat/1.jpg"), ("ant/0.jpg", "bee/2.jpg"), ("an/t0.jpg", "bee/1.jpg")])
def test_folders_with_equally_many_files_have_other_fingerprints(tmp_path: Path, other: tuple[str, str]) -> None:
    source = open_folder(make(tmp_path / "one", "ant/0.jpg", "bee/1.jpg"))
    assert open_folder(make(tmp_path / "other", *other)).fingerprint != source.fingerprint
    assert open_folder(make(tmp_path / "same", "ant/0.jpg", "bee/1.jpg")).fingerprint == source.fingerprint


@given(st.lists(st.binary(max_size=9), max_size=30), st.data())
def test_taken_paths_are_those_asked_for(paths: list[bytes], data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, len(paths) - 1), max_size=40)) if paths else []
    taken = PathTable.from_paths(paths).take(np.array(places, np.int64))
    assert list(taken) == [paths[place] for place in places]


def test_a_path_table_holds_paths_without_an_object_each() -> None:
    """B97: 100,000 paths of 30 bytes."""
    paths = [b"n%08d/ILSVRC_%08d.JPEG" % (i // 1000, i) for i in range(100_000)]
    table = PathTable.from_paths(paths)
    assert list(table) == paths
    assert table.blob.nbytes + table.offsets.nbytes < 40 * len(paths)
