"""Shards that other writers made: keys, labels, damage, and the index that is kept of them (B60, B74, B77, B79)."""

from __future__ import annotations

import gzip
import os
import tarfile
from pathlib import Path

import pytest

from fastdata.errors import ShardError, SourceError
from fastdata.sources import tar as tar_module
from fastdata.sources.tar import TarSource, open_shards
from tests.pictures import flat
from tests.shard_files import Member, picture, sample, write_numbered_shards, write_tar


def opened(path: Path, *members: Member) -> TarSource:
    return open_shards(write_tar(path / "a.tar", members))


def labels(source: TarSource) -> list[int]:
    assert source.labels is not None
    return [int(label) for label in source.labels]


def test_pictures_of_every_type_and_case_are_samples(tmp_path: Path) -> None:
    names = ("0.jpg", "1.JPG", "2.jpeg", "3.JPEG", "4.png", "5.webp", "dir/6.Jpg", "a/b/7.jpg")
    members = [
        m for n, name in enumerate(names) for m in ((name, picture(n)), (f"{name.rpartition('.')[0]}.cls", b"%d" % n))
    ]
    source = opened(tmp_path, *members)
    assert labels(source) == list(range(8))
    assert [bytes(source.read(i)) for i in range(8)] == [picture(i) for i in range(8)]


def test_keys_with_dots_stay_apart(tmp_path: Path) -> None:
    """B53, from the reading side."""
    source = opened(tmp_path, *(m for n, key in enumerate(("22.05", "22.06", "v1.2/x.", "n01.5/a.b.c"))
                                for m in ((f"{key}.jpg", picture(n)), (f"{key}.cls", b"%d" % n))))  # fmt: skip
    assert labels(source) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "label"),
    [("3", 3), ("03", 3), (" 3\n", 3), ("-1", -1), ('{"label": 7, "x": 1}', 7), ('{"cls": 2}', 2), ('{"class": 5}', 5)],
)
@pytest.mark.parametrize("extension", ["cls", "json", "CLS"])
def test_labels_are_text_numbers_or_json(tmp_path: Path, text: str, label: int, extension: str) -> None:
    """B79."""
    assert labels(opened(tmp_path, ("a.jpg", picture(0)), (f"a.{extension}", text.encode()))) == [label]


@pytest.mark.parametrize("text", ["dog", "", " ", "1.5", "[1]", "true", '{"x": 1}', "{", "\u0663"])
def test_other_labels_are_errors_never_0(tmp_path: Path, text: str) -> None:
    """B79."""
    with pytest.raises(ShardError, match=r"a\.tar member a\.cls: the label"):
        opened(tmp_path, ("a.jpg", picture(0)), ("a.cls", text.encode()))


def test_picture_and_label_need_not_be_neighbours(tmp_path: Path) -> None:
    """B60."""
    source = opened(tmp_path, ("a.jpg", picture(1)), ("b.jpg", picture(2)), ("b.cls", b"2"), ("a.cls", b"1"))
    assert labels(source) == [1, 2]
    assert [bytes(source.read(i)) for i in range(2)] == [picture(1), picture(2)]


def test_a_sample_without_label_or_picture_is_named(tmp_path: Path) -> None:
    """B79."""
    five = [m for i in range(5) for m in sample(i)]
    with pytest.raises(ShardError, match=r"a\.tar member 000000003\.jpg: a picture without its label"):
        opened(tmp_path, *(m for m in five if m[0] != "000000003.cls"))
    with pytest.raises(ShardError, match=r"a\.tar member 000000003\.cls: a label without its picture"):
        opened(tmp_path, *(m for m in five if m[0] != "000000003.jpg"))
    source = open_shards(tmp_path / "a.tar", skip_damaged=True)
    assert (len(source), len(source.faults)) == (4, 1)
    source = open_shards(write_tar(tmp_path / "b.tar", [m for m in five if m[0].endswith("jpg")]), labels=None)
    assert len(source) == 5


def test_a_member_that_comes_twice_is_named_with_its_shard(tmp_path: Path) -> None:
    """B77: one of 21 shards."""
    write_numbered_shards(tmp_path, [2] * 20)
    write_tar(tmp_path / "shard-000020.tar", [*sample(7), *sample(8), *sample(7)])
    with pytest.raises(ShardError) as caught:
        open_shards(tmp_path)
    assert "shard-000020.tar member 000000007.jpg: the same member comes twice" in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    with pytest.raises(ShardError, match=r"member a\.png: a second member of the sample \(a\.jpg\)"):
        opened(tmp_path, ("a.jpg", picture(0)), ("a.png", picture(0)), ("a.cls", b"1"))


def test_members_that_are_no_samples_are_counted(tmp_path: Path) -> None:
    source = opened(tmp_path, *sample(1), ("000000001.txt", b"a dog"), ("._000000001.jpg", b"\0\5"), ("README", b"x"),
                    ("meta.json", b"{}"))  # fmt: skip
    assert len(source) == 1
    assert source.index.facts["ignored"] == {
        ".txt": 1,
        "hidden or without extension": 2,
        "members without a picture": 1,
    }


class TestDamage:
    """B74."""

    @pytest.fixture
    def cut(self, tmp_path: Path) -> Path:
        """Return a folder of two shards of ten, the second cut in the middle of its seventh picture."""
        write_numbered_shards(tmp_path / "s", [10, 10])
        source = open_shards(tmp_path / "s", cache_dir=None)
        os.truncate(tmp_path / "s" / "shard-000001.tar", int(source.index.columns["offset"][16]) + 50)
        source.close()
        return tmp_path / "s"

    def test_a_cut_shard_is_an_error_that_names_it(self, cut: Path) -> None:
        with pytest.raises(ShardError, match=r"shard-000001\.tar member 000000016\.jpg: it ends at byte"):
            open_shards(cut)

    def test_whole_samples_before_the_cut_are_read_where_damage_is_skipped(self, cut: Path) -> None:
        source = open_shards(cut, skip_damaged=True)
        assert [bytes(source.read(i)) for i in range(len(source))] == [picture(i) for i in range(16)]
        assert len(source.faults) == 1
        assert "shard-000001.tar" in source.faults[0]

    def test_a_shard_cut_between_members_is_an_error_too(self, tmp_path: Path) -> None:
        shard = write_numbered_shards(tmp_path / "s", [3]) / "shard-000000.tar"
        os.truncate(shard, int(open_shards(shard).index.columns["offset"][2]) - 512)
        with pytest.raises(ShardError, match="without the archive's end mark"):
            open_shards(shard)

    @pytest.mark.parametrize(
        ("data", "message"),
        [(b"", "0 bytes"), (b"this is text\n" * 99, "no tar header at byte 0"), (b"short", "without the archive's end"),
         (bytes(10_240), "no samples"), (gzip.compress(bytes(10_240)), "")],
    )  # fmt: skip
    def test_what_is_no_tar_is_named(self, tmp_path: Path, data: bytes, message: str) -> None:
        (tmp_path / "x.tar").write_bytes(data)
        with pytest.raises(SourceError, match=rf"x\.tar.*{message}"):
            open_shards(tmp_path / "x.tar")
        write_tar(tmp_path / "a.tar", sample(0))
        if message != "no samples":
            source = open_shards([tmp_path / "x.tar", tmp_path / "a.tar"], skip_damaged=True)
            assert (len(source), len(source.faults)) == (1, 1)

    def test_data_behind_the_end_mark_are_not_lost_in_silence(self, tmp_path: Path) -> None:
        one, two = (write_tar(tmp_path / name, sample(i)).read_bytes() for i, name in enumerate(("a.tar", "b.tar")))
        (tmp_path / "joined.tar").write_bytes(one + two)
        with pytest.raises(ShardError, match=r"joined\.tar: an end mark at byte"):
            open_shards(tmp_path / "joined.tar")


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_tar_format_is_read(tmp_path: Path, form: int) -> None:
    import io

    long_name = "d" * 90 + "/" + "f" * (60 if form == tarfile.USTAR_FORMAT else 140)
    with tarfile.open(tmp_path / "a.tar", "w", format=form) as tar:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, data in (
            (f"{long_name}.jpg", picture(3)),
            (f"{long_name}.cls", b"3"),
            ("é.jpg", picture(4)),
            ("é.cls", b"4"),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.mtime = 1.5 if form == tarfile.PAX_FORMAT else 1  # a fraction makes Python add a PAX block
            tar.addfile(info, io.BytesIO(data))
    source = open_shards(tmp_path / "a.tar")
    assert labels(source) == [3, 4]
    assert bytes(source.read(0)) == picture(3)
    assert source.original_path(1).decode() == "é.jpg"


def test_gnu_tar_archives_are_read(tmp_path: Path) -> None:
    import subprocess

    for number in range(3):
        (tmp_path / f"{number}.jpg").write_bytes(picture(number))
        (tmp_path / f"{number}.cls").write_text(str(number))
    names = [f"{n}.{e}" for n in range(3) for e in ("jpg", "cls")]
    subprocess.run(["tar", "cf", "a.tar", *names], cwd=tmp_path, check=True)
    assert labels(open_shards(tmp_path / "a.tar")) == [0, 1, 2]


def test_a_sparse_large_member_keeps_its_place(tmp_path: Path) -> None:
    """B53's trick: a JPEG of 8.6 GB, which USTAR's octal size cannot hold."""
    size = 8**11 + 1000
    data = flat((1, 2, 3))
    header = tarfile.TarInfo("big.jpg")
    header.size = size
    with open(tmp_path / "a.tar", "wb") as file:
        file.write(header.tobuf(tarfile.GNU_FORMAT))
        file.write(data)
        file.seek(512 + -(-size // 512) * 512)
        label = tarfile.TarInfo("big.cls")
        label.size = 1
        file.write(label.tobuf(tarfile.GNU_FORMAT) + b"5".ljust(512, b"\0") + bytes(1024))
    source = open_shards(tmp_path / "a.tar")
    assert labels(source) == [5]
    assert len(source.read(0)) == size
    assert bytes(source.read(0)[: len(data)]) == data


class TestKeptIndex:
    @pytest.fixture
    def shards(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(tar_module, "CACHE_FROM_SAMPLES", 5)
        write_numbered_shards(tmp_path / "s", [3, 3])
        self.age(tmp_path / "s")
        return tmp_path / "s"

    @staticmethod
    def age(folder: Path, stamp_ns: int = 10**18) -> None:
        for path in folder.glob("*.tar"):
            os.utime(path, ns=(stamp_ns, stamp_ns))

    def opened(self, shards: Path, **more: object) -> TarSource:
        return open_shards(shards, cache_dir=shards.parent / "cache", **more)  # type: ignore[arg-type]

    def test_a_second_opening_reads_no_header(self, shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = self.opened(shards)
        monkeypatch.setattr(tar_module, "scan_shard", lambda *_, **__: pytest.fail("scanned a shard"))
        second = self.opened(shards)
        assert labels(second) == labels(first)
        assert [bytes(second.read(i)) for i in range(6)] == [picture(i) for i in range(6)]

    def test_changed_shards_are_scanned_again(self, shards: Path) -> None:
        self.opened(shards)
        write_tar(shards / "shard-000001.tar", [m for i in (3, 4, 5, 6) for m in sample(i)])
        self.age(shards, 10**18 + 1)
        assert len(self.opened(shards)) == 7

    def test_shards_that_just_changed_are_not_kept(self, shards: Path) -> None:
        os.utime(shards / "shard-000001.tar")
        self.opened(shards)
        assert not (shards.parent / "cache").exists()

    def test_labels_asked_for_later_are_there(self, shards: Path) -> None:
        assert self.opened(shards, labels=None).labels is None
        assert labels(self.opened(shards)) == [0] * 6
