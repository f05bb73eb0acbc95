"""The scripts under tools/: what they refuse, and that they leave a caller's folders alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent
TOOLS = ROOT / "tools"

sys.path.insert(0, str(TOOLS))
import demo_photos  # noqa: E402

sys.path.remove(str(TOOLS))


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("tool", ["demo", "test"])
def test_help_explains_the_tool_and_installs_nothing(tool: str) -> None:
    done = run(TOOLS / tool, "--help")
    assert done.returncode == 0
    assert f"tools/{tool}" in done.stdout
    assert "Installing" not in done.stdout


def test_the_demo_refuses_a_folder_that_is_not_there_and_names_it(tmp_path: Path) -> None:
    done = run(TOOLS / "demo", tmp_path / "absent")
    assert done.returncode == 1
    assert str(tmp_path / "absent") in done.stderr


def test_the_demo_refuses_an_option_it_does_not_have() -> None:
    done = run(TOOLS / "demo", "--fast")
    assert done.returncode == 2
    assert "--fast" in done.stderr


def test_the_demo_says_first_what_it_takes_and_last_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "tools").mkdir()
    for name in ("demo", "environment.sh"):
        shutil.copy(TOOLS / name, tmp_path / "tools")
    (tmp_path / "pyproject.toml").touch()
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(sys.executable)
    (programs / "fastdata").write_text('#!/bin/sh\necho "measured: fastdata $*"\n')
    (programs / "fastdata").chmod(0o755)
    stamp = f'printf %s "{tmp_path} $({programs}/python --version) $(cksum <pyproject.toml)" >.venv/installed-dali-demo'
    subprocess.run(["bash", "-c", stamp], cwd=tmp_path, check=True)
    done = run(tmp_path / "tools" / "demo", tmp_path / "photos")
    assert done.returncode == 0, done.stderr
    first, *_, last = [line for line in done.stdout.splitlines() if line]
    assert "6.6 GB" in first
    assert f"cd '{tmp_path}' && . .venv/bin/activate" in last
    assert "measured: fastdata bench" in done.stdout


@pytest.mark.parametrize("script", ["demo", "test", "environment.sh"])
def test_the_shell_scripts_have_no_syntax_errors(script: str) -> None:
    assert run("bash", "-n", TOOLS / script).stderr == ""


def test_the_shard_script_is_the_shard_command() -> None:
    done = run(sys.executable, TOOLS / "shard.py", "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout == run(sys.executable, "-m", "fastdata", "shard", "--help").stdout


@pytest.fixture
def gradient() -> Image.Image:
    ramp = np.add.outer(np.arange(300), np.arange(450)) % 256
    return Image.fromarray(np.stack([ramp, ramp // 2, 255 - ramp], axis=-1).astype(np.uint8))


def test_cuts_of_the_demo_stay_inside_their_photograph() -> None:
    rng = np.random.default_rng(0)
    for _ in range(500):
        left, upper, right, lower = demo_photos.draw_cut(rng, (450, 300)).box
        assert 0 <= left < right <= 450 + 1e-9
        assert 0 <= upper < lower <= 300 + 1e-9


def test_the_same_cut_gives_the_same_file(gradient: Image.Image, tmp_path: Path) -> None:
    cut = demo_photos.draw_cut(np.random.default_rng(1), gradient.size)
    for name in ("a.jpg", "b.jpg"):
        demo_photos.write_cut(gradient, cut, tmp_path / name)
    assert (tmp_path / "a.jpg").read_bytes() == (tmp_path / "b.jpg").read_bytes()
    with Image.open(tmp_path / "a.jpg") as written:
        assert written.size == cut.size
        assert written.mode == "RGB"


def test_a_finished_photo_set_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "photos" / "cat" / "0.jpg").write_bytes(b"mine")
    assert demo_photos.make_photo_set(tmp_path / "photos") == 1
    assert (tmp_path / "photos" / "cat" / "0.jpg").read_bytes() == b"mine"
