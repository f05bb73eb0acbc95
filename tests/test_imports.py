"""What `import fastdata` loads, and that its public names are in order."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fastdata

ROOT = Path(__file__).parent.parent
HEAVY = ("PIL", "llvmlite", "numba", "nvidia.dali", "simplejpeg", "torch", "torchvision", "webdataset")
BACKENDS = tuple(
    f"fastdata.backends.{path.stem}"
    for path in (ROOT / "fastdata" / "backends").glob("*.py")
    if path.stem != "__init__"
)


def modules_after(code: str) -> set[str]:
    """Return the names of the modules that a fresh interpreter holds after `code`."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        "import fastdata",
        "from fastdata import imagenet_train; imagenet_train(224)",
        "from fastdata import BlockShuffle, Skip",
        "from fastdata import FastDataError",
    ],
)
def test_what_describes_a_pipeline_loads_neither_torch_nor_a_backend(code: str) -> None:
    loaded = modules_after(code)
    assert "fastdata" in loaded
    assert not loaded & {*HEAVY, *BACKENDS}


@pytest.mark.parametrize("code", ["from fastdata import open_pipeline", "import fastdata.cli"])
def test_what_chooses_a_backend_loads_none(code: str) -> None:
    loaded = modules_after(code)
    assert not loaded & {"torch", "torchvision", "numba", "simplejpeg", "webdataset", "nvidia.dali", *BACKENDS}


def test_all_is_sorted_and_each_name_exists() -> None:
    assert sorted(fastdata.__all__) == fastdata.__all__
    assert len(set(fastdata.__all__)) == len(fastdata.__all__)
    for name in fastdata.__all__:
        assert getattr(fastdata, name) is not None


def test_dir_lists_the_public_names_before_they_are_imported() -> None:
    assert set(fastdata.__all__) <= set(dir(fastdata))


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        fastdata.no_such_name  # noqa: B018


@pytest.mark.parametrize("name", fastdata.__all__)
def test_a_public_name_has_its_own_docstring(name: str) -> None:
    value = getattr(fastdata, name)
    text = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
    assert text
    # A dataclass without a docstring gets its own signature as one.
    assert not re.match(rf"{name}\(", text)


@pytest.mark.parametrize("name", fastdata.__all__)
def test_a_public_class_documents_its_public_methods(name: str) -> None:
    value = getattr(fastdata, name)
    if not inspect.isclass(value):
        return
    members = {key: member for key, member in vars(value).items() if not key.startswith("_")}
    methods = {key: member for key, member in members.items() if inspect.isroutine(member) or type(member) is property}
    assert [key for key, member in methods.items() if not inspect.getdoc(member)] == []


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "fastdata" / "py.typed").is_file()


def test_the_supported_pythons_are_the_classified_ones() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", project["requires-python"]).groups()  # type: ignore[union-attr]
    named = [int(text.rsplit(".")[-1]) for text in project["classifiers"] if re.search(r"Python :: 3\.\d+$", text)]
    assert named == list(range(int(low), int(high)))
