"""What the pages say is true: the options table is the configuration's, links lead somewhere, the example runs."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import real_models

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_options_page_is_the_configuration() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "options.py"))["page"]
    assert (ROOT / "docs" / "options.md").read_text() == page(), "run: python scripts/options.py"


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_named_files_exist(path: Path) -> None:
    places = (ROOT, ROOT / "src" / "octavo")
    for name in set(re.findall(r"`((?:[\w.]+/)+[\w]+\.py)`", path.read_text())):
        assert "NAME" in name or any((place / name).exists() for place in places), name


@pytest.mark.real_model
def test_the_readme_s_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    real_models.real_gguf("smollm2")
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 12
    exec(compile(code, "README.md", "exec"), {})
    assert "The capital of France is ->" in capsys.readouterr().out


@pytest.mark.real_model
def test_the_tutorial_prints_what_the_commands_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_models.real_gguf("smollm2")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "block-tables.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "block-tables.md", "exec"), {})
    shown = re.findall(r"```\n(\d#.*?)```", page, re.DOTALL)
    assert len(shown) == 3
    for number, wanted in enumerate(shown):
        command = [sys.executable, "-m", "octavo", "trace", "show", "blocks.trace", str(number)]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        assert _without_times(found) == _without_times(wanted)


def _without_times(lives: str) -> list[str]:
    return [" ".join(re.sub(r"\d+\.\d\d ", "", line).split()) for line in lives.splitlines()]
