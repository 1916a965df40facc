"""The commands as the README writes them, and how they fail."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from golden.__main__ import app, main
from golden.selftest import last_selftest

README = Path(__file__).parents[1] / "README.md"


def golden(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command in this process; return its exit status."""
    monkeypatch.setattr("sys.argv", ["golden", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_every_command_of_the_readme_parses() -> None:
    text = README.read_text(encoding="utf-8")
    commands = re.findall(r"^python -m golden (.*?)(?: +#.*)?$", text, re.MULTILINE)
    assert len(commands) == 6
    group: Any = typer.main.get_command(app)
    for line in commands:
        name, *arguments = line.split()
        group.commands[name].make_context(name, arguments)
    for option in re.findall(r"`(--[a-z-]+)", text.partition("## Proving")[2]):
        known = {o for c in group.commands.values() for p in c.params for o in p.opts}
        assert option in known


def test_help_teaches() -> None:
    shown = CliRunner().invoke(app, ["replay", "--help"], env={"COLUMNS": "200"}).output
    for part in ("Killed at any point", "row-anchor", "Exit status"):
        assert part in shown


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["replay", "{tmp}", "{tmp}/run", "--checkpoint", "{tmp}"], 2, "bad_file: "),
        (["replay", "{tmp}", "{tmp}/run", "--checkpoint", "x", "--reference", "server",
          "--level", "tokens"], 2, "invalid_setting: level"),
        (["fetch", "{tmp}/set", "--from", "{tmp}"], 2, "character_profiles.json"),
        (["synth", "{tmp}", "{tmp}/set"], 2, "bad_file: "),
        (["verify", "{tmp}"], 1, "problems"),
        (["check", "{tmp}"], 1, "differences from the published shape"),
    ],
)  # fmt: skip
def test_errors_are_messages(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    message: str,
) -> None:
    found = golden(monkeypatch, *(argument.format(tmp=tmp_path) for argument in arguments))
    shown = "".join(capsys.readouterr())
    assert found == status
    assert message in shown
    assert "Traceback" not in shown


def test_no_selftest_is_known_before_one_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHARRM_CACHE", str(tmp_path))
    assert last_selftest() is None
