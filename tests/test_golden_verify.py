"""Every change of a bundle is found, each by itself, also when its digests were written again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from golden_runs import edit_ledger, no_plots, write_run
from helpers import edit_json, load_json

from charrm.protocol import METRICS
from golden.criteria import read_criteria
from golden.report import sums, write_report
from golden.row_anchor import blank_set
from golden.structure import ReplaySet, load_set
from golden.verify import verify_bundle

Lines = list[dict[str, Any]]
Tamper = Callable[[Path], object]
MODEL = "qwen_7b"
RESULTS = f"results/generation_trans_{MODEL}.jsonl"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle without plots of a run with everything in it."""
    folder = tmp_path_factory.mktemp("written")
    run = write_run(folder / "run", rows=20, failing=2, differing=3, selftest=True)
    with no_plots():
        return write_report(run, folder / "bundle").parent


@pytest.fixture
def bundle(written: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of it to tamper with; verified without plots too."""
    with no_plots():
        yield Path(shutil.copytree(written, tmp_path / "bundle"))


def write_sums(bundle: Path) -> None:
    (bundle / "SHA256SUMS").write_text(sums(bundle), encoding="utf-8")


def replace(name: str, before: str, after: str) -> Tamper:
    """Replace the first of some text of a file."""

    def tamper(bundle: Path) -> None:
        text = (bundle / name).read_text(encoding="utf-8")
        assert before in text
        (bundle / name).write_text(text.replace(before, after, 1), encoding="utf-8")

    return tamper


def ledger(edit: Callable[[Lines], object]) -> Tamper:
    return lambda bundle: edit_ledger(bundle, edit)


def line(**changes: Any) -> Tamper:
    """Set fields of one line."""
    return ledger(lambda lines: lines[9].update(changes))


def inside(field: str, **changes: Any) -> Tamper:
    """Set what is inside a field of one line."""
    return ledger(lambda lines: lines[9][field].update(changes))


def content(name: str, **changes: Any) -> Tamper:
    """Set fields of a JSON file."""
    return lambda bundle: edit_json(bundle / name, **changes)


def cut_off(bundle: Path) -> None:
    path = bundle / "ledger.jsonl"
    path.write_bytes(path.read_bytes()[:-9])


def end_lines_otherwise(bundle: Path) -> None:
    path = bundle / "criteria.toml"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


def move_p(lines: Lines) -> None:
    """Another score of one side, consistent in itself."""
    p = lines[30]["candidate"]["p"] - 1 / 128
    lines[30]["candidate"] |= {"p": p, "score": p * 4 + 1}


def forget_an_error(lines: Lines) -> None:
    """The failed row becomes a good one, consistent in itself."""
    lines[0] |= {name: lines[5][name] for name in ("ids", "tokens", "dropped", "candidate")}
    lines[0] |= {"reference": lines[5]["reference"], "error": None}


def loosen_criteria(bundle: Path) -> None:
    """The criteria file and what the manifest says of it are changed together."""
    replace("criteria.toml", "score_unequal = 0", "score_unequal = 9")(bundle)
    digest = read_criteria(bundle / "criteria.toml").digest
    edit_json(bundle / "manifest.json", criteria_sha256=digest)


OTHER_RESULT = "comparison.json: not what follows"
OTHER_PAGE = "report.html: not what follows"
SLOTS = "ledger.jsonl: sha256 of its slots"
BOTH = ("candidate", "reference")
FAILED = {"side": "candidate", "kind": "not_finite", "message": "logit: found nan."}
TAMPERED: dict[str, tuple[Tamper, str]] = {
    # values that are consistent in themselves
    "one side's score": (ledger(move_p), OTHER_RESULT),
    "the same ids on both sides": (line(ids=dict.fromkeys(BOTH, "0" * 64)), OTHER_RESULT),
    "a token count": (inside("tokens", candidate=7), OTHER_RESULT),
    "an error that went away": (ledger(forget_an_error), OTHER_RESULT),
    "an error's message": (replace("ledger.jsonl", "found nan", "found inf"), OTHER_RESULT),
    "spaces in a line": (replace("ledger.jsonl", '": ', '":  '), OTHER_RESULT),
    # lines that contradict themselves
    "not p * 4 + 1": (inside("reference", score=2.0), '00009"): reference: score: found 2.0'),
    "no probability": (inside("candidate", p=1.25, score=5.0), "p: found 1.25"),
    "no number": (inside("candidate", p=float("nan")), "p: found nan"),
    "a text as score": (inside("candidate", score="3.5"), 'score: found "3.5"'),
    "too many tokens": (inside("tokens", reference=4097), "found 4097, expected 1 to 4096"),
    "an error beside values": (line(error=FAILED), "found an error and values of the"),
    "neither error nor values": (line(candidate=None), "found no error and 1 sides"),
    "another metric": (line(metric="Charm"), 'metric: found "Charm"'),
    "a text as id": (line(id="7"), 'id: found "7"'),
    "a digest that is none": (inside("ids", candidate="abc"), 'ids: candidate: found "abc"'),
    "one more field": (line(text="x"), "found the fields "),
    "a slot without position": (line(slot="x"), "slot: expected model/position"),
    # lines that are not those of the run
    "a line that went away": (ledger(lambda lines: lines.pop(9)), "1 of 40 rows are missing"),
    "a line twice": (ledger(lambda lines: lines.insert(9, lines[8])), '00008" appears twice'),
    "two lines swapped": (ledger(lambda lines: lines.insert(9, lines.pop(8))), SLOTS),
    "another slot": (line(slot="qwen_7b/00090"), SLOTS),
    "a line cut off": (cut_off, "the last line is cut off"),
    "a line that is no JSON": (replace("ledger.jsonl", '"id"', "id"), "line 1 is not JSON"),
    # the manifest and the criteria
    "the engine": (replace("manifest.json", ': "eager"', ': "other"'), OTHER_RESULT),
    "the set's digest": (replace("manifest.json", "e" * 64, "f" * 64), OTHER_RESULT),
    "the number of rows": (content("manifest.json", rows=41), "1 of 41 rows are missing"),
    "another level": (content("manifest.json", level="tokens"), "in a run of level tokens"),
    "another type": (content("manifest.json", sample="all"), 'sample: found "all"'),
    "another table": (content("manifest.json", criteria_tables=["a"]), "found no table [a]"),
    "a limit": (replace("criteria.toml", "= 0.0", "= 9.0"), "criteria.toml: sha256: found"),
    "a limit and its digest": (loosen_criteria, OTHER_RESULT),
    "a comment": (replace("criteria.toml", "# L", "# l"), "criteria.toml: sha256: found"),
    "ends of lines": (end_lines_otherwise, OTHER_RESULT),
    # what follows from them
    "an outcome": (replace("comparison.json", "FAIL", "PASS"), "first difference is in line 2"),
    "a mean": (replace("comparison.json", '"steps_mean": 0', '"steps_mean": 1'), OTHER_RESULT),
    "the page's outcome": (replace("report.html", "✗</span> FAIL", "✓</span> PASS"), OTHER_PAGE),
    "a plot": (replace("report.html", "<svg >", "<svg > "), OTHER_PAGE),
    "a time": (content("times.json", seconds=1.5), OTHER_PAGE),
    "a time on the page": (replace("report.html", "10:00 UTC", "10:01 UTC"), OTHER_PAGE),
    "a time that is none": (content("times.json", seconds="1"), 'seconds: found "1"'),
    "a fault": (replace("selftest.json", "LEFT_", "RIGHT_"), "selftest.json: digest: found"),
    "the selftest's date": (content("selftest.json", date="2030-01-01"), OTHER_PAGE),
    "no selftest": (lambda bundle: (bundle / "selftest.json").unlink(), OTHER_PAGE),
    "no page": (lambda bundle: (bundle / "report.html").unlink(), "report.html: missing"),
    "one more file": (lambda bundle: (bundle / "a").write_text("x"), '"a": belongs to no bundle'),
}


@pytest.mark.parametrize("rewritten", [False, True], ids=["sums left", "sums rewritten"])
@pytest.mark.parametrize("what", TAMPERED)
def test_tampering_is_found(bundle: Path, what: str, rewritten: bool) -> None:
    tamper, expected = TAMPERED[what]
    tamper(bundle)
    if rewritten:
        write_sums(bundle)
    problems = verify_bundle(bundle)
    assert [problem for problem in problems if expected in problem], problems
    assert any("SHA256SUMS" in problem for problem in problems) is not rewritten


def test_an_untouched_bundle_holds(bundle: Path) -> None:
    """The control of the test above, also with its digests written again."""
    assert verify_bundle(bundle) == []
    before = (bundle / "SHA256SUMS").read_bytes()
    write_sums(bundle)
    assert (bundle / "SHA256SUMS").read_bytes() == before
    assert verify_bundle(bundle) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (lambda lines: lines[1:], "expected one line each for"),
        (lambda lines: [*lines, lines[0]], "expected one line each for"),
        (lambda lines: lines[::-1], "expected one line each for"),
        (lambda lines: ["0" * 64 + lines[0][64:], *lines[1:]], "comparison.json: sha256: found"),
        (lambda lines: [*lines, "0" * 64 + "  ../run/manifest.json"], "expected a sha256 and a"),
        (lambda lines: [*lines, "0" * 64 + "  gone.json"], '"gone.json" is not there'),
        (lambda lines: ["hello"], 'line 1: found "hello"'),
        (lambda lines: [], "expected one line each for"),
    ],
)
def test_digests_themselves_are_checked(
    bundle: Path, text: Callable[[list[str]], list[str]], expected: str
) -> None:
    lines = (bundle / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    content = "".join(f"{line}\n" for line in text(lines))
    (bundle / "SHA256SUMS").write_text(content, encoding="utf-8")
    problems = verify_bundle(bundle)
    assert any(expected in problem for problem in problems), problems


def test_a_link_is_no_file_of_a_bundle(bundle: Path, tmp_path: Path) -> None:
    shutil.move(bundle / "ledger.jsonl", tmp_path / "elsewhere")
    (bundle / "ledger.jsonl").symlink_to(tmp_path / "elsewhere")
    assert verify_bundle(bundle) == ["ledger.jsonl: not a plain file"]


def test_a_folder_is_no_file_of_a_bundle(bundle: Path) -> None:
    (bundle / "more").mkdir()
    problems = verify_bundle(bundle)
    assert problems[0] == '"more": belongs to no bundle'


def test_no_bundle_at_all(tmp_path: Path) -> None:
    assert verify_bundle(tmp_path / "none") == [f"{tmp_path / 'none'}: no folder"]
    assert "ledger.jsonl: missing" in verify_bundle(tmp_path)


def test_several_problems_are_all_found(bundle: Path) -> None:
    edit_ledger(bundle, lambda lines: lines[9]["candidate"].update(score=2.0))
    edit_json(bundle / "times.json", sessions=None)
    (bundle / "notes.txt").write_text("x", encoding="utf-8")
    found = "\n".join(verify_bundle(bundle))
    for expected in ("score: found 2.0", "times.json: sessions", "notes.txt", "SHA256SUMS says"):
        assert expected in found


def test_many_wrong_lines_are_counted(bundle: Path) -> None:
    edit_ledger(bundle, lambda lines: [line.update(id=None) for line in lines])
    problems = verify_bundle(bundle)
    assert sum("id: found null" in problem for problem in problems) == 20
    assert "ledger.jsonl: 20 more problems in its lines" in problems


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b"null",
        b"\n",
        b"[" * 100_000,
        b'{"slot": "\\ud800/00001"}\n',
    ],
)
def test_garbage_is_a_problem_not_a_crash(bundle: Path, content: bytes) -> None:
    for path in sorted(bundle.iterdir()):
        before = path.read_bytes()
        path.write_bytes(content)
        assert verify_bundle(bundle) != [], path.name
        path.write_bytes(before)
    assert verify_bundle(bundle) == []


@pytest.mark.parametrize(
    "value", [None, True, -1, 1e300, 2**70, "x", [], {}, [[]], {"a": None}], ids=repr
)
def test_values_of_any_type_are_a_problem_not_a_crash(bundle: Path, value: Any) -> None:
    for name in ("slot", "id", "metric", "ids", "tokens", "dropped", "candidate", "error"):
        before = (bundle / "ledger.jsonl").read_bytes()
        edit_ledger(bundle, lambda lines, name=name: lines[9].update({name: value}))
        changed = (bundle / "ledger.jsonl").read_bytes() != before
        assert (verify_bundle(bundle) != []) is changed, name
        (bundle / "ledger.jsonl").write_bytes(before)
    for name in load_json(bundle / "manifest.json"):
        before = (bundle / "manifest.json").read_bytes()
        edit_json(bundle / "manifest.json", **{name: value})
        assert verify_bundle(bundle) != [], name
        (bundle / "manifest.json").write_bytes(before)


def test_a_page_of_other_versions_is_named_as_such(bundle: Path) -> None:
    replace("report.html", "charrm golden report ", "charrm golden report 0")(bundle)
    problems = verify_bundle(bundle)
    assert any("it was made by charrm golden report 0" in problem for problem in problems)
    assert any("compare with the same versions: here" in problem for problem in problems)


def test_a_drawn_bundle_holds_and_its_plots_are_compared(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", models=("qwen_7b",), rows=24, differing=3)
    bundle = write_report(run, tmp_path / "bundle").parent
    assert verify_bundle(bundle) == []
    replace("report.html", 'transform="rotate(-90', 'transform="rotate(-80')(bundle)
    write_sums(bundle)
    (problem,) = verify_bundle(bundle)
    assert problem == "report.html: not what follows from the ledger; only plots differ"


def test_what_verify_cannot_find(bundle: Path, tmp_path: Path) -> None:
    """A ledger invented as a whole makes a bundle that holds: it is not signed."""
    run = Path(shutil.copytree(bundle, tmp_path / "run"))
    edit_ledger(run, forget_an_error)
    assert verify_bundle(write_report(run, tmp_path / "invented").parent) == []


@pytest.fixture
def set_folder(tmp_path: Path) -> Path:
    """A set of one model and four rows, and the three data files."""
    tests = [
        {"id": id_, "role": "阮砚秋", "novel_name": "盐灯镇纪事", "context": f"第{id_}句。"}
        for id_ in (1000, 1001)
    ]
    names = list(METRICS)[:2]
    asked = {str(test["id"]): [[en, METRICS[en]] for en in names] for test in tests}
    rows = [
        {**test, "model_output": "就等。", "metric_en": en, "metric_zh": METRICS[en]}
        for test in tests
        for en in names
    ]
    content = {
        "data/character_profiles.json": {"阮砚秋": {"姓名": "阮砚秋"}},
        "data/test_data.jsonl": tests,
        "data/id2metric.jsonl": asked,
        RESULTS: rows,
    }
    folder = tmp_path / "set"
    for name, document in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    return folder


def bundle_of(replay_set: ReplaySet, tmp_path: Path, **run: Any) -> Path:
    """A bundle over the rows of a set."""
    facts = {
        "digest": replay_set.digest,
        "files": dict(replay_set.files),
        "is_standin": replay_set.is_standin,
        "is_published": replay_set.is_published,
    }
    count = len(replay_set.rows)
    models = (replay_set.rows[0].model,)
    folder = write_run(tmp_path / "run", models=models, rows=count, set=facts, **run)

    def name_rows(lines: Lines) -> None:
        for line, row in zip(lines, replay_set.rows, strict=True):
            line |= {"slot": row.slot, "id": row.id, "metric": row.metric_en}

    edit_ledger(folder, name_rows)
    return write_report(folder, tmp_path / "bundle").parent


@pytest.fixture
def undrawn() -> Iterator[None]:
    with no_plots():
        yield


@pytest.mark.usefixtures("undrawn")
def test_a_set_belongs_to_its_bundle(set_folder: Path, tmp_path: Path) -> None:
    bundle = bundle_of(load_set(set_folder), tmp_path)
    assert verify_bundle(bundle, set_folder) == []
    text = (set_folder / RESULTS).read_text(encoding="utf-8")
    (set_folder / RESULTS).write_text(text.replace("就等。", "就走。", 1), encoding="utf-8")
    problems = verify_bundle(bundle, set_folder)
    assert len(problems) == 2
    assert problems[0].startswith(f"{set_folder / RESULTS}: sha256: found ")
    assert problems[1].startswith(f"{set_folder}: digest: found ")
    assert verify_bundle(bundle) == []


@pytest.mark.usefixtures("undrawn")
def test_rows_of_a_bundle_are_those_of_its_set(set_folder: Path, tmp_path: Path) -> None:
    """Found even in a bundle that was made from the changed ledger."""
    bundle_of(load_set(set_folder), tmp_path)
    edit_ledger(tmp_path / "run", lambda lines: lines[1].update(id=77))
    other = write_report(tmp_path / "run", tmp_path / "other").parent
    assert verify_bundle(other) == []
    (problem,) = verify_bundle(other, set_folder)
    assert problem.startswith("ledger.jsonl: qwen_7b/00001: found id 77 Coherence, expected")


@pytest.mark.usefixtures("undrawn")
def test_a_broken_or_marked_set_is_another_one(set_folder: Path, tmp_path: Path) -> None:
    bundle = bundle_of(load_set(set_folder), tmp_path)
    (set_folder / "STAND-IN.json").write_text('{"files": {}}', encoding="utf-8")
    found = "\n".join(verify_bundle(bundle, set_folder))
    assert "STAND-IN.json: sha256: found" in found
    assert "is_standin: found True, expected False" in found
    (set_folder / RESULTS).write_text("[", encoding="utf-8")
    (problem,) = verify_bundle(bundle, set_folder)
    assert "cannot be read as a set" in problem


@pytest.mark.usefixtures("undrawn")
def test_the_row_anchor_has_a_set_of_its_own(set_folder: Path, tmp_path: Path) -> None:
    replay_set = blank_set(set_folder / "data")
    tables = {"reference": "row-anchor", "tables": ("row-anchor",)}
    bundle = bundle_of(replay_set, tmp_path, **tables)
    assert verify_bundle(bundle, set_folder) == []
    (set_folder / RESULTS).unlink()  # the answers play no part
    assert verify_bundle(bundle, set_folder) == []
    path = set_folder / "data/test_data.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace("句", "话"), encoding="utf-8")
    assert len(verify_bundle(bundle, set_folder)) == 2
