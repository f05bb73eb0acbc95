"""Labels from a CSV file, from a callable, or none."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from fastdata.errors import SourceError, UsageError
from fastdata.sources.folder import FolderSource, open_folder
from tests.pictures import flat


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    (folder / "sub").mkdir(parents=True)
    for name in ("a.jpg", "b.jpg", "c 1,2.jpg", "sub/d.jpg"):
        (folder / name).write_bytes(flat((1, 2, 3)))
    return folder


def with_csv(root: Path, text: str) -> FolderSource:
    path = root.parent / "labels.csv"
    path.write_text(text, "utf-8")
    return open_folder(root, labels=path)


def test_none_gives_no_labels_and_needs_no_class_folders(root: Path) -> None:
    source = open_folder(root, labels=None)
    assert (source.labels, source.classes, len(source)) == (None, (), 4)


@pytest.mark.parametrize("heading", ["", "path,label\n", "\ufefffile name,class\n"])
def test_one_column_of_whole_numbers_gives_int64(root: Path, heading: str) -> None:
    source = with_csv(root, heading + 'b.jpg,3\nsub/d.jpg,-1\na.jpg,7\n"c 1,2.jpg",0\n')
    assert source.labels is not None
    assert source.labels.dtype == np.int64
    assert source.labels.tolist() == [7, 3, 0, -1]


def test_one_column_of_numbers_gives_float32_rows(root: Path) -> None:
    source = with_csv(root, 'a.jpg,0.5\nb.jpg,2\n"c 1,2.jpg",-3e2\n./sub/d.jpg,1\n')
    assert source.labels is not None
    assert (source.labels.dtype, source.labels.shape) == (np.float32, (4, 1))
    assert source.labels[:, 0].tolist() == [0.5, 2, -300, 1]


def test_many_columns_give_float32_rows(root: Path) -> None:
    source = with_csv(root, 'a.jpg,0,1,0\nb.jpg,1,1,0\n"c 1,2.jpg",0,0,1\nsub/d.jpg,0,0,0\n')
    assert source.labels is not None
    assert (source.labels.dtype, source.labels.shape) == (np.float32, (4, 3))
    assert source.labels[1].tolist() == [1, 1, 0]


def test_text_gives_classes_sorted_as_text(root: Path) -> None:
    source = with_csv(root, 'a.jpg,dog\nb.jpg,B\n"c 1,2.jpg",ant\nsub/d.jpg,dog\n')
    assert source.labels is not None
    assert source.classes == ("B", "ant", "dog")
    assert source.labels.tolist() == [2, 0, 1, 2]


def test_a_file_that_names_some_pictures_selects_them_and_keeps_their_ids(root: Path) -> None:
    source = with_csv(root, "sub/d.jpg,1\nb.jpg,0\n")
    assert source.ids.tolist() == [1, 3]
    assert source.labels is not None
    assert source.labels.tolist() == [0, 1]
    assert source.where(1).endswith("sub/d.jpg")
    assert source.ignored["not in the label file"] == 2
    assert source.fingerprint != open_folder(root, labels=None).fingerprint
    again = pickle.loads(pickle.dumps(source))
    assert again.ids.tolist() == [1, 3]
    assert again.labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.jpg,1\nmissing.jpg,2\n", r"line 2: 'missing\.jpg', which is no picture there"),
        ("a.jpg,1\nb.jpg,2\na.jpg,3\n", r"line 3: 'a\.jpg' a second time"),
        ("a.jpg,1\nb.jpg,\n", "line 2: 0 labels"),
        ("a.jpg,1\nb.jpg\n", "line 2: 0 labels"),
        ("a.jpg,1,2\nb.jpg,1\n", "line 2: 1 labels; expected 2"),
        ("a.jpg,1\nb.jpg,dog\n", "line 2: 'dog'"),
        ("a.jpg,dog\nb.jpg,1\n", "line 2: '1'"),
        ("a.jpg,1,2\nb.jpg,1,x\n", "line 2: "),
        ("a.jpg,1.5\nb.jpg,nan\n", "line 2: 'nan'; expected a finite number"),
        ("a.jpg,1.5\nb.jpg,1e39\n", "line 2: '1e39'; expected a finite number"),
        (f"a.jpg,1,2\nb.jpg,1,{10**400}\n", "line 2: .*; expected 2 finite numbers"),
        (f"a.jpg,1\nb.jpg,{2**70}\n", f"line 2: '{2**70}'; expected a whole number of 64 bits"),
        (f"b.jpg,{-(2**63) - 1}\na.jpg,1\n", "line 1: '-9223372036854775809'; expected a whole number of 64 bits"),
        (f"a.jpg,1\nb.jpg,{'9' * 5000}\n", "line 2: '999"),
        ("a.jpg,1\nb.jpg,--3\n", "line 2: '--3'"),
        ("path,label\n", "no row that names a picture"),
        ("", "no row that names a picture"),
    ],
)
def test_a_bad_row_is_named(root: Path, text: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        with_csv(root, text)


def test_white_space_around_a_path_counts_only_where_a_picture_is_named_so(root: Path) -> None:
    (root / " lead.jpg").write_bytes(flat((1, 2, 3)))
    (root / " a.jpg").write_bytes(flat((1, 2, 3)))
    source = with_csv(root, " lead.jpg,1\n b.jpg ,2\na.jpg,3\n a.jpg,4\n ./sub/d.jpg,5\n")
    assert source.labels is not None
    names = [source.relative_path(place).decode() for place in range(5)]
    assert dict(zip(names, source.labels.tolist(), strict=True)) == {
        " lead.jpg": 1, "b.jpg": 2, "a.jpg": 3, " a.jpg": 4, "sub/d.jpg": 5
    }  # fmt: skip


def test_class_indices_reach_both_ends_of_64_bits(root: Path) -> None:
    source = with_csv(root, f"a.jpg,{2**63 - 1}\nb.jpg,{-(2**63)}\n")
    assert source.labels is not None
    assert source.labels.tolist() == [2**63 - 1, -(2**63)]


def test_a_missing_file_is_named(root: Path) -> None:
    with pytest.raises(SourceError, match=r"nowhere\.csv"):
        open_folder(root, labels=root / "nowhere.csv")


def test_a_callable_gets_the_full_path(root: Path) -> None:
    seen: list[str] = []

    def label(path: str) -> int:
        seen.append(path)
        return len(Path(path).stem)

    source = open_folder(root, labels=label)
    assert seen == [str(root / name) for name in ("a.jpg", "b.jpg", "c 1,2.jpg", "sub/d.jpg")]
    assert source.labels is not None
    assert source.labels.dtype == np.int64
    assert source.labels.tolist() == [1, 1, 5, 1]


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [(True, np.int64, (4,)), (np.int32(3), np.int64, (4,)), (0.5, np.float32, (4, 1)), ([0, 1], np.float32, (4, 2)),
     (np.zeros(3), np.float32, (4, 3))],
)  # fmt: skip
def test_a_callable_may_return_numbers_and_sequences(root: Path, value: object, dtype: type, shape: tuple[int]) -> None:
    labels = open_folder(root, labels=lambda _: value).labels
    assert labels is not None
    assert (labels.dtype, labels.shape) == (dtype, shape)


def test_a_callable_that_fails_or_returns_nothing_names_the_picture(root: Path) -> None:
    with pytest.raises(SourceError, match=r"a\.jpg: labels= raised ZeroDivisionError"):
        open_folder(root, labels=lambda _: 1 / 0)
    with pytest.raises(SourceError, match=r"a\.jpg: labels= returned None"):
        open_folder(root, labels=lambda _: None)
    with pytest.raises(SourceError, match=r"b\.jpg: labels= returned \[1\]"):
        open_folder(root, labels=lambda path: [1, 2] if path.endswith("a.jpg") else [1])


def test_something_else_is_refused(root: Path) -> None:
    with pytest.raises(UsageError, match="labels"):
        open_folder(root, labels=3)  # type: ignore[arg-type]
