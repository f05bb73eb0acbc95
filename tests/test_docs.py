"""The Python in README.md and docs/ runs, and the commands in them exist: what a reader copies works.

A document's ```` ```python ```` blocks run in order and share their names, in a folder that holds `photos/train` and
`photos/val`. A word after `python` changes that: `gpu` skips the block where CUDA finds no device, `sketch` marks code
that leans on the reader's own (it is compiled, not run). Without CUDA `"cuda:0"` reads as `"cpu"`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```python(?P<mark> \w+)?\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^ *```(?:bash|console|sh)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
MARKS = ("", "gpu", "sketch")


@dataclass(frozen=True)
class Snippet:
    document: Path
    mark: str
    code: str
    """Preceded by as many empty lines as the document has before it, so that errors name the document's lines."""

    def compiled(self, code: str) -> Any:
        return compile(code, str(self.document), "exec")


def snippets(document: Path) -> Iterator[Snippet]:
    """Yield the Python blocks of a Markdown file."""
    text = document.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        lines = text.count("\n", 0, found.start("code"))
        indent = len(found["indent"])
        code = "".join(line[indent:] if line.strip() else line for line in found["code"].splitlines(keepends=True))
        yield Snippet(document, (found["mark"] or "").strip(), "\n" * lines + code)


def command_lines(document: Path) -> Iterator[list[str]]:
    """Yield the words after `fastdata` of each such line in the document's shell blocks."""
    for block in SHELL.findall(document.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.strip().removeprefix("$ "), comments=True)
            if words[:1] == ["fastdata"]:
                yield words[1:]
            elif words[:3] == ["python", "-m", "fastdata"]:
                yield words[3:]


def name(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_snippet_compiles_and_has_a_known_mark(document: Path) -> None:
    for snippet in snippets(document):
        assert snippet.mark in MARKS
        snippet.compiled(snippet.code)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_snippets_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runnable = [snippet for snippet in snippets(document) if snippet.mark != "sketch"]
    if not runnable:
        pytest.skip("no Python to run")
    import torch

    from fastdata.testing import write_numbered_folder

    for split in ("train", "val"):
        write_numbered_folder(tmp_path / "photos" / split, 4)
    monkeypatch.chdir(tmp_path)
    has_gpu = torch.cuda.is_available()
    names: dict[str, Any] = {"__name__": "snippet"}
    for snippet in runnable:
        if snippet.mark == "gpu" and not has_gpu:
            continue
        code = snippet.code if has_gpu else snippet.code.replace('"cuda:0"', '"cpu"')
        exec(snippet.compiled(code), names)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_shown_commands_and_options_exist(document: Path) -> None:
    import typer.main

    from fastdata.cli import make_app

    commands = typer.main.get_group(make_app()).commands
    for words in command_lines(document):
        command, *arguments = words
        if command == "--help":
            continue
        assert command in commands
        known = {"--help"}.union(*([*option.opts, *option.secondary_opts] for option in commands[command].params))
        assert {word.split("=")[0] for word in arguments if word.startswith("--")} <= known


def test_command_lines_are_found_with_and_without_a_prompt(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(
        "```console\n$ fastdata bench a \\\n    --html b  # why\nresult\n```\n```bash\npython -m fastdata x\n```\n"
    )
    assert list(command_lines(document)) == [["bench", "a", "--html", "b"], ["x"]]


def test_the_readme_shows_code_that_runs_here() -> None:
    assert any(snippet.mark == "" for snippet in snippets(ROOT / "README.md"))


def test_a_snippet_keeps_its_place_and_loses_its_indent(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("# Page\n\n- item:\n\n  ```python gpu\n  a = 1\n\n  b = 2\n  ```\n\n```python\nc = 3\n```\n")
    first, second = snippets(document)
    assert (first.mark, first.code) == ("gpu", "\n" * 5 + "a = 1\n\nb = 2\n")
    assert (second.mark, second.code) == ("", "\n" * 11 + "c = 3\n")


def test_a_snippet_that_fails_names_its_line(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("text\n\n```python\nok = 1\nraise ValueError(ok)\n```\n")
    (snippet,) = snippets(document)
    with pytest.raises(ValueError, match="1") as caught:
        exec(snippet.compiled(snippet.code), {})
    assert caught.traceback[-1].lineno + 1 == 5
