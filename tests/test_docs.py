"""What README and docs say can be run: numbers of their code, and every option they name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"(?:python -m [a-z._]+(?: [a-z]+)?|charrm certify)[^\n`]*")


def commands() -> dict[tuple[str, ...], set[str]]:
    """Module and subcommand -> the options that the pages show with it."""
    found: dict[tuple[str, ...], set[str]] = {}
    for page in PAGES:
        text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
        for match in COMMAND.finditer(text):
            words = match[0].split("#")[0].replace("python -m ", "").split()
            sub = 2 if words[0] in ("charrm", "golden") else 1
            if words[0] in ("charrm", "golden", "server") or words[0].startswith("bench."):
                options = {word.rstrip(".,;:)") for word in words if word.startswith("--")}
                found.setdefault(tuple(words[:sub]), set()).update(options)
    return found


def test_commands_are_found() -> None:
    assert {("server",), ("charrm", "certify"), ("golden", "replay"), ("bench.offline",)} <= set(
        commands()
    )


@pytest.mark.parametrize("command", sorted(commands()), ids=" ".join)
def test_every_named_option_exists(command: tuple[str, ...]) -> None:
    module, *sub = command
    done = subprocess.run(
        [sys.executable, "-m", module, *sub, "--help"],
        capture_output=True, text=True, timeout=60, env={"COLUMNS": "200", "PATH": "/usr/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    named = set(re.findall(r"--[a-z][a-z0-9-]*", done.stdout))
    assert commands()[command] <= named


def test_the_error_of_the_bias_is_as_stated(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "exactness.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [lengths, errors] = re.findall(r"^\| (?:row of|error) \|(.*)\|$", text, re.MULTILINE)
    exec(code, {})
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    numbers = re.findall(r"[\d,]+", lengths.replace("tokens", ""))
    assert [n.replace(",", "") for n in numbers] == [length for length, _ in printed]
    assert re.findall(r"[\d.]+", errors) == [error for _, error in printed]
