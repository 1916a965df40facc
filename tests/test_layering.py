"""The arrows between the rooms, read from the imports of every file."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("charrm", "server", "golden", "bench")
ALLOWED = {
    "charrm": {"charrm"},
    "server": {"server", "charrm"},
    "golden": {"golden", "charrm"},
    "bench": {"bench", "charrm"},
}
HEAVY = {"torch", "transformers", "sentencepiece", "accelerate", "safetensors", "psutil", "numpy"}
# Importable without the extra `serve`: the base install and the client live on these.
LIGHT = ("__init__", "client", "errors", "files", "charactereval", "protocol", "published",
         "results", "demo", "certificate", "cli")  # fmt: skip


def imported(source: str, *, at_import: bool = False) -> set[str]:
    """Top-level packages a module imports; `at_import` leaves out what waits in functions."""
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0] if node.level == 0 else ".")
        elif at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        elif at_import and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes += node.orelse
            continue
        nodes += ast.iter_child_nodes(node)
    return found


def files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def test_the_reader_of_imports_sees_them() -> None:
    """The control: every form of import is found, and the lazy ones only when asked."""
    source = (
        "import a.b, c\nfrom d.e import f\nfrom . import g\n"
        "if TYPE_CHECKING:\n    import h\nelse:\n    import i\n"
        "def j():\n    import k\n    from l import m\nclass N:\n    import o\n"
    )
    assert imported(source) == {"a", "c", "d", ".", "h", "i", "k", "l", "o"}
    assert imported(source, at_import=True) == {"a", "c", "d", ".", "i", "o"}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    forbidden = {*ROOMS, "tests", "helpers", "conftest", "."} - ALLOWED[room]
    wrong = {}
    for path in files(room):
        found = imported(path.read_text(encoding="utf-8")) & forbidden
        if found:
            wrong[str(path.relative_to(ROOT))] = found
    assert wrong == {}


def test_charrm_is_not_empty() -> None:
    assert {"scorer.py", "model.py", "protocol.py"} <= {path.name for path in files("charrm")}


@pytest.mark.parametrize("name", LIGHT)
def test_the_light_modules_import_nothing_heavy(name: str) -> None:
    """Nor do they import a charrm module that does."""
    todo, seen = [name], set()
    while todo:
        module = todo.pop()
        seen.add(module)
        source = (ROOT / "charrm" / f"{module}.py").read_text(encoding="utf-8")
        assert imported(source, at_import=True) & HEAVY == set(), module
        todo += sorted(own_modules(source) - seen)


def own_modules(source: str) -> set[str]:
    """Modules `charrm.x` that a source imports when it is imported itself."""
    tree = ast.parse(source)
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            package, _, module = node.module.partition(".")
            if package == "charrm":
                found |= {module.split(".")[0]} if module else {a.name for a in node.names}
    return {name for name in found if (ROOT / "charrm" / f"{name}.py").is_file()}


def test_own_modules_are_followed() -> None:
    """The control: the scorer reaches a heavy module through its own imports."""
    source = (ROOT / "charrm" / "scorer.py").read_text(encoding="utf-8")
    assert {"checkpoint", "identity", "protocol", "runtime", "tokenizer"} <= own_modules(source)
    checkpoint = (ROOT / "charrm" / "checkpoint.py").read_text(encoding="utf-8")
    assert "torch" in imported(checkpoint, at_import=True) & HEAVY


def test_the_reference_shares_no_code_with_the_product() -> None:
    source = (ROOT / "golden" / "reference.py").read_text(encoding="utf-8")
    found = imported(source)
    assert "torch" in found
    third_party = found - set(sys.stdlib_module_names)
    assert third_party == {"torch", "safetensors", "sentencepiece"}


def test_scoring_without_the_extra_says_what_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None; import charrm; charrm.Scorer"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "MissingDependency: torch: not installed." in ended.stderr
    assert "pip install '.[serve]'" in ended.stderr
