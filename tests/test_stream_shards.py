"""Reading shards from start to end: what other writers do, and everything that must not pass in silence."""

from __future__ import annotations

import gzip
import json
import tarfile
from pathlib import Path

import pytest

from fastdata.errors import ShardError, SourceError, UsageError
from fastdata.sources.stream import open_stream
from fastdata.sources.streamed import Lost, StreamedSample
from tests.shard_files import Member, picture, sample, write_numbered_shards, write_tar


def read(data: object, labels: str | None = "folders") -> tuple[list[StreamedSample], list[Lost]]:
    stream = open_stream(data, labels)
    items = list(stream.read(range(len(stream.shards)), side_by_side=1, ahead=1))
    return [i for i in items if isinstance(i, StreamedSample)], [i for i in items if isinstance(i, Lost)]


def read_tar(
    tmp_path: Path, members: list[Member], labels: str | None = "folders"
) -> tuple[list[StreamedSample], list[Lost]]:
    return read(write_tar(tmp_path / "shard-000000.tar", members), labels)


def test_samples_come_with_the_ids_of_their_keys(tmp_path: Path) -> None:
    samples, lost = read_tar(tmp_path, [m for n in (7, 3, 250) for m in sample(n)])
    assert [(s.sample_id, s.label, s.encoded) for s in samples] == [(n, n // 10, picture(n)) for n in (7, 3, 250)]
    assert samples[0].member == "000000007.jpg"
    assert not lost


def test_other_keys_give_ids_of_shard_and_place_that_no_own_key_has(tmp_path: Path) -> None:
    for shard in range(2):
        write_tar(tmp_path / f"{shard}.tar", [m for n in range(3) for m in sample(n, f"photo-{n}")])
    samples, _ = read(tmp_path)
    assert [s.sample_id for s in samples] == [(shard + 1) * 2**40 + n for shard in range(2) for n in range(3)]


def test_keys_may_hold_dots_folders_and_upper_case_extensions(tmp_path: Path) -> None:
    members = [
        *[("ant/a.b.v2.JPG", picture(1)), ("ant/a.b.v2.CLS", b"1")],
        *[("bee/a.b.v2.jpeg", picture(2)), ("bee/a.b.v2.cls", b"2")],
        *[("__odd__/x.png", picture(3, "PNG")), ("__odd__/x.cls", b"3")],
        *[("y.webp", picture(4, "WEBP")), ("y.json", b'{"label": 4}'), ("y.txt", b"a caption")],
    ]
    samples, lost = read_tar(tmp_path, members)
    assert [(s.label, s.member) for s in samples] == [
        (1, "ant/a.b.v2.JPG"),
        (2, "bee/a.b.v2.jpeg"),
        (3, "__odd__/x.png"),
        (4, "y.webp"),
    ]
    assert not lost


@pytest.mark.parametrize(
    ("name", "text", "label"),
    [
        ("cls", b"3", 3),
        ("cls", b"03", 3),
        ("cls", b" 3\n", 3),
        ("json", b"3", 3),
        ("json", json.dumps({"label": 3, "caption": "a dog"}).encode(), 3),
        ("json", json.dumps({"cls": 3}).encode(), 3),
        ("cls", b"dog", None),
        ("cls", b"", None),
        ("json", b'{"caption": "a dog"}', None),
        ("json", b"true", None),
    ],
)
def test_labels_are_numbers_or_json_and_nothing_else(tmp_path: Path, name: str, text: bytes, label: int | None) -> None:
    samples, lost = read_tar(tmp_path, [("a.jpg", picture(0)), (f"a.{name}", text)])
    if label is not None:
        assert [s.label for s in samples] == [label]
        return
    assert not samples
    assert f"shard-000000.tar member a.{name}" in str(lost[0].error)
    assert "decimal number" in str(lost[0].error)


def test_a_cls_member_wins_over_json(tmp_path: Path) -> None:
    samples, _ = read_tar(tmp_path, [("a.json", b'{"label": 9}'), ("a.jpg", picture(0)), ("a.cls", b"1")])
    assert [s.label for s in samples] == [1]


def test_a_missing_label_or_picture_is_named_and_moves_no_other(tmp_path: Path) -> None:
    members = [m for n in range(5) for m in sample(n)]
    for missing, said in (("000000003.cls", "a picture without its label"), ("000000003.jpg", "a label without its")):
        samples, lost = read_tar(tmp_path, [m for m in members if m[0] != missing])
        assert [s.sample_id for s in samples] == [0, 1, 2, 4]
        assert len(lost) == 1
        assert said in lost[0].error.found
        assert lost[0].error.member.startswith("000000003.")
    assert read_tar(tmp_path, members[::2], labels=None)[0][4].sample_id == 4


def test_parts_that_are_not_side_by_side_make_whole_samples(tmp_path: Path) -> None:
    members = [*sample(1), *sample(2)]
    samples, lost = read_tar(tmp_path, [members[0], members[2], members[1], members[3]])
    assert [(s.sample_id, s.label) for s in samples] == [(1, 0), (2, 0)]
    assert not lost


def test_a_member_that_comes_twice_is_named_with_its_shard(tmp_path: Path) -> None:
    one = sample(1)
    for members in ([one[0], one[0], one[1]], [*one, *sample(2), one[0]]):
        samples, lost = read_tar(tmp_path, [*members, *sample(5)])
        assert {s.sample_id for s in samples} >= {1, 5}
        assert len(lost) == 1
        assert "shard-000000.tar member 000000001.jpg" in str(lost[0].error)
        assert lost[0].error.__context__ is None


def test_a_cut_inside_a_picture_gives_what_came_before_and_names_the_shard(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "shard-000000.tar", [m for n in range(10) for m in sample(n)])
    with tarfile.open(path) as tar:
        offset = tar.getmember("000000006.jpg").offset_data
    path.write_bytes(path.read_bytes()[: offset + 300])
    samples, lost = read(path)
    assert [s.sample_id for s in samples] == list(range(6))
    assert len(lost) == 1
    assert "shard-000000.tar" in str(lost[0].error)


@pytest.mark.parametrize("member", ["000000006.jpg", "000000006.cls"])
@pytest.mark.parametrize("how", ["cut", "cut in header", "zeroed", "garbled"])
def test_an_archive_that_stops_between_members_is_no_whole_one(tmp_path: Path, member: str, how: str) -> None:
    path = write_tar(tmp_path / "shard-000000.tar", [m for n in range(10) for m in sample(n)])
    with tarfile.open(path) as tar:
        header = tar.getmember(member).offset
    data = bytearray(path.read_bytes())
    if how == "cut":
        del data[header:]
    elif how == "cut in header":
        del data[header + 100 :]
    else:
        data[header : header + 512] = bytes(512) if how == "zeroed" else b"x" * 512
    path.write_bytes(data)
    samples, lost = read(path)
    assert [s.sample_id for s in samples] == list(range(6))
    assert len(lost) == 1
    assert f"byte {header}" in str(lost[0].error)


@pytest.mark.parametrize("data", [b"", b"no tar at all\n" * 100, b"\x1f\x8b no gzip"])
def test_a_file_that_is_no_archive_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "shard-000000.tar"
    path.write_bytes(data)
    samples, lost = read(path)
    assert not samples
    assert "shard-000000.tar" in str(lost[0].error)


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_compressed_shards_are_read_and_cut_ones_noticed(tmp_path: Path, mode: str) -> None:
    path = write_tar(tmp_path / "shard.tar", [m for n in range(8) for m in sample(n)], mode)
    assert len(read(path)[0]) == 8
    path.write_bytes(path.read_bytes()[:-20])
    samples, lost = read(path)
    assert len(samples) <= 8
    assert len(lost) == 1


def test_a_gzip_with_a_tar_that_stops_is_noticed(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "shard.tar", sample(1))
    path.write_bytes(gzip.compress(path.read_bytes()[:1536]))
    assert len(read(path)[1]) == 1


def test_long_names_of_gnu_and_pax_archives_are_read(tmp_path: Path) -> None:
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        members = [(f"{'d' * 160}/{'f' * 115}{n}.jpg", picture(n)) for n in range(2)]
        path = tmp_path / f"{form}.tar"
        with tarfile.open(path, "w", format=form) as tar:
            for name, data in members:
                (tmp_path / "one").write_bytes(data)
                tar.add(tmp_path / "one", name)
        samples, lost = read(path, labels=None)
        assert [s.member for s in samples] == [name for name, _ in members]
        assert not lost


def test_all_ways_to_name_shards_give_the_same_samples(tmp_path: Path) -> None:
    folder = write_numbered_shards(tmp_path / "my data; touch PWNED & 'q'", [3, 3, 3, 3])
    paths = [str(folder / f"shard-{n:06d}.tar") for n in range(4)]
    for data in (folder, f"{folder}/shard-*.tar", f"{folder}/shard-{{000000..000003}}.tar", paths, paths[::-1]):
        assert [s.sample_id for s in read(data)[0]] == list(range(12))
    assert not list(tmp_path.rglob("PWNED*"))


def test_shards_that_are_not_there_are_named_before_reading(tmp_path: Path) -> None:
    folder = write_numbered_shards(tmp_path, [1] * 10)
    (folder / "shard-000004.tar").unlink()
    with pytest.raises(ShardError, match=r"shard-000004\.tar"):
        open_stream(f"{folder}/shard-{{000000..000009}}.tar", "folders")
    with pytest.raises(SourceError, match=r"nothing-\*"):
        open_stream(f"{folder}/nothing-*.tar", "folders")
    with pytest.raises(SourceError, match="twice"):
        open_stream([str(folder / "shard-000001.tar")] * 2, "folders")


def test_labels_from_elsewhere_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="labels"):
        open_stream(write_numbered_shards(tmp_path, [1]), tmp_path / "labels.csv")
