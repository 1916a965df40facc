"""The bundle of a run: complete or refused, the same bytes for the same ledger, an honest page."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from golden_runs import CODE, edit_ledger, no_plots, write_run, write_selftest, write_times
from helpers import edit_json, load_json

from charrm.errors import BadFile
from charrm.ledger import read_ledger
from charrm.protocol import DIMENSIONS, METRICS
from charrm.published import PUBLISHED
from golden import plots
from golden.compare import compare
from golden.criteria import judge, read_criteria
from golden.report import write_report
from golden.verify import verify_bundle

FILES = {
    "SHA256SUMS",
    "comparison.json",
    "criteria.toml",
    "ledger.jsonl",
    "manifest.json",
    "report.html",
    "times.json",
}
VOID = {"meta", "link", "br", "hr", "img", "input", "col"}
TIME = re.compile(r"<time .*?</time>", re.DOTALL)
TAG = re.compile(r"<[^>]*>")
CJK = re.compile("[\u3000-\u30ff\u3400-\u9fff\uff00-\uffef]")


@pytest.fixture
def undrawn() -> Iterator[None]:
    with no_plots():
        yield


def page_of(tmp_path: Path, *, drawn: bool = False, **run: Any) -> str:
    """The page of a new run, as text; its plots only where a test looks at them."""
    write_run(tmp_path / "run", **run)
    with nullcontext() if drawn else no_plots():
        report = write_report(tmp_path / "run", tmp_path / "bundle")
    return report.read_text(encoding="utf-8")


def words(page: str) -> str:
    """What a reader sees of a page, in one line."""
    text = TAG.sub(" ", re.sub(r"<(style|svg).*?</\1>", "", page, flags=re.DOTALL))
    return " ".join(text.split())


def section(page: str, heading: str) -> str:
    (found,) = [part for part in page.split("<section>") if f"<h2>{heading}</h2>" in part]
    return found


class Balance(HTMLParser):
    """Notes every end tag that does not close the innermost open element."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def balance(page: str) -> Balance:
    parser = Balance()
    parser.feed(page)
    parser.close()
    return parser


def outside(page: str) -> list[str]:
    """Everything that would make a browser fetch something."""
    fetched = (
        r'(?:src|href|data|action|poster)="(?!#)[^"]*"|url\((?!#)[^)]*\)|@import|<script|<link'
    )
    return re.findall(fetched, page)


def test_a_bundle_holds_the_evidence_and_what_follows_from_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", failing=3, differing=5)
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    bundle = write_report(run, tmp_path / "some" / "where" / "bundle").parent
    assert {path.name for path in bundle.iterdir()} == FILES
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    for name in ("criteria.toml", "ledger.jsonl", "manifest.json", "times.json"):
        assert (bundle / name).read_bytes() == before[name]
    comparison = compare(read_ledger(run / "ledger.jsonl"))
    verdicts = judge(read_criteria(), ["slow"], comparison)
    content = load_json(bundle / "comparison.json")
    assert content["comparison"] == comparison.to_json()
    assert content["verdicts"] == {"slow": [verdict.to_json() for verdict in verdicts]}
    assert content["outcome"] == "FAIL"
    assert verify_bundle(bundle) == []


@pytest.mark.usefixtures("undrawn")
def test_sums_are_those_of_sha256sum(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows=12, selftest=True)
    bundle = write_report(run, tmp_path / "bundle").parent
    lines = (bundle / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    assert [line.split("  ")[1] for line in lines] == sorted(
        FILES - {"SHA256SUMS"} | {"selftest.json"}
    )
    checked = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=bundle, capture_output=True)
    assert checked.returncode == 0, checked.stderr


def test_equal_ledgers_give_equal_bytes_apart_from_times(tmp_path: Path) -> None:
    """The second bundle is written by another process with other hashes of strings."""
    first = write_run(tmp_path / "first", failing=2, differing=9, selftest=True)
    second = Path(shutil.copytree(first, tmp_path / "second"))
    write_times(second, "2024-05-05T05:05:05+00:00", 12.5)
    one = write_report(first, tmp_path / "one").parent
    two = tmp_path / "two"
    code = "import sys, pathlib; from golden.report import write_report; "
    code += "write_report(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))"
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "TZ": "Asia/Tokyo"}
    root = Path(__file__).resolve().parents[1]
    subprocess.run(
        [sys.executable, "-c", code, str(second), str(two)], check=True, env=environment, cwd=root
    )
    assert verify_bundle(two) == []

    def differing(pattern: re.Pattern[str]) -> set[str]:
        texts = [
            {p.name: pattern.sub("", p.read_text(encoding="utf-8")) for p in bundle.iterdir()}
            for bundle in (one, two)
        ]
        assert texts[0].keys() == texts[1].keys()
        return {name for name in texts[0] if texts[0][name] != texts[1][name]}

    assert differing(re.compile("$^")) == {"times.json", "report.html", "SHA256SUMS"}
    sums = r"[0-9a-f]{64}  (?:times\.json|report\.html)\n"
    assert differing(re.compile(f"{TIME.pattern}|{sums}", re.DOTALL)) == {"times.json"}


def test_one_other_row_gives_other_bytes(tmp_path: Path) -> None:
    """The control of the test above."""
    one = write_report(write_run(tmp_path / "first", rows=24), tmp_path / "one").parent
    run = write_run(tmp_path / "second", rows=24, differing=1)
    two = write_report(run, tmp_path / "two").parent
    for name in ("ledger.jsonl", "comparison.json", "report.html"):
        assert (one / name).read_bytes() != (two / name).read_bytes()


def test_an_incomplete_run_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows=30)
    edit_ledger(run, lambda lines: lines.__delitem__(slice(40, None)))
    with pytest.raises(BadFile, match=r"ledger\.jsonl: 20 of 60 rows are missing"):
        write_report(run, tmp_path / "bundle")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_row_in_flight_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows=30)
    ledger = run / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes()[:-20])
    with pytest.raises(BadFile, match="the last line is cut off"):
        write_report(run, tmp_path / "bundle")


@pytest.mark.parametrize("name", ["manifest.json", "criteria.toml", "ledger.jsonl", "times.json"])
def test_a_run_without_one_of_its_files_is_refused(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run", rows=12)
    (run / name).unlink()
    with pytest.raises(BadFile, match=name):
        write_report(run, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_a_ledger_with_more_than_its_fields_is_refused(tmp_path: Path) -> None:
    """So that no text of the dataset can come along."""
    run = write_run(tmp_path / "run", rows=12)
    edit_ledger(run, lambda lines: lines[3].update(role="阮砚秋"))
    with pytest.raises(BadFile, match=r"line 4 .*found the fields .*role"):
        write_report(run, tmp_path / "bundle")


def test_a_changed_criteria_file_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows=12)
    text = (run / "criteria.toml").read_text(encoding="utf-8")
    (run / "criteria.toml").write_text(text.replace("ids_unequal = 0", "ids_unequal = 9"), "utf-8")
    with pytest.raises(BadFile, match=r"criteria\.toml: sha256"):
        write_report(run, tmp_path / "bundle")


@pytest.mark.usefixtures("undrawn")
def test_nothing_is_overwritten(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows=12)
    (tmp_path / "bundle").mkdir()
    page = write_report(run, tmp_path / "bundle")  # an empty folder is as good as none
    before = page.read_bytes()
    with pytest.raises(BadFile, match="exists already"):
        write_report(run, tmp_path / "bundle")
    assert page.read_bytes() == before


@pytest.mark.usefixtures("undrawn")
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", rows=12)

    def full(self: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(BadFile, match="No space left"):
        write_report(run, tmp_path / "bundle")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("outcome", "sentence", "run"),
    [
        ("PASS", "on 24 rows of a set of one’s own: 10 limits, all hold.", {}),
        ("FAIL", "on 24 rows of a stand-in set: 7 of 10 limits exceeded.",
         {"differing": 4, "standin": True}),
        ("UNKNOWN", "of the published set: no limit is exceeded, but 8 of 10 limits could not be "
         "judged on every row.", {"level": "tokens", "published": True}),
        ("PASS", "with the same model in float32 (fp32) on 24 rows of a set of one’s own: 2 "
         "limits, all hold; 8 values measured without a limit.",
         {"reference": "fp32", "tables": ("fp32",), "differing": 4}),
    ],
)  # fmt: skip
def test_the_first_sentence(
    tmp_path: Path, outcome: str, sentence: str, run: dict[str, Any]
) -> None:
    page = page_of(tmp_path, rows=12, **run)
    mark = {"PASS": "✓", "FAIL": "✗", "UNKNOWN": "?"}[outcome]
    head = words(page.split("<main>")[0])
    assert f"charrm golden report {mark} {outcome} charrm (eager, bfloat16, cpu) compared" in head
    assert sentence in head
    assert load_json(tmp_path / "bundle" / "comparison.json")["outcome"] == outcome


@pytest.mark.parametrize(
    ("label", "run"),
    [
        ("STAND-IN", {"standin": True}),
        ("TOKENS ONLY", {"level": "tokens", "published": True}),
        ("SAMPLE", {"sample": 24, "published": True}),
        ("NOT THE AUDITED RELEASE", {"audited": False, "published": True}),
        ("NOT FULLY AUDITED", {"candidate": {"audit": {"a": "absent", "b": "matches"}},
                               "published": True}),
        ("NOT AUDITED", {"candidate": {"engine": "eager"}, "published": True}),
        ("NOT THE PROTOCOL", {"candidate": {"is_protocol": False, "audit": {"a": "matches"}},
                              "published": True}),
        ("OWN SET", {}),
        ("UNRESOLVED", {"failing": 2, "published": True}),
    ],
)  # fmt: skip
def test_what_must_be_known_before_the_numbers(
    tmp_path: Path, label: str, run: dict[str, Any]
) -> None:
    page = page_of(tmp_path, rows=12, **run)
    assert re.findall("<li><strong>(.*?)</strong>", page) == [label]


def test_a_published_set_and_the_audited_release_need_no_notes(tmp_path: Path) -> None:
    page = page_of(tmp_path, rows=12, published=True)
    assert "<strong>" not in page
    assert "published, every file has its pinned digest" in page


def test_every_verdict_is_on_the_page(tmp_path: Path) -> None:
    page = page_of(tmp_path, rows=12, differing=4, published=True, tables=("slow", "paper"))
    content = load_json(tmp_path / "bundle" / "comparison.json")
    shown = re.findall(
        r"<small><code>(\w+)</code>.*?</span> (\w+)</span></td>\n<td>(.*?)</td>",
        section(page, "Verdicts"),
        re.DOTALL,
    )
    assert shown == [
        (verdict["criterion"], verdict["outcome"], verdict["reason"])
        for table in ("slow", "paper")
        for verdict in content["verdicts"][table]
    ]
    assert {outcome for _, outcome, _ in shown} == {"PASS", "FAIL"}


def test_the_paper_stands_beside_a_published_set(tmp_path: Path) -> None:
    page = page_of(tmp_path, published=True)
    rows = re.findall(r"<tr.*?</tr>", section(page, "Beside the paper"), re.DOTALL)
    assert words(rows[0]) == "InternLM-7B Qwen-7B"
    cells = {
        words(row).split(" ")[0]: re.findall(r">([\d.]+|[−+][\d.]+|0)<", row) for row in rows[2:]
    }
    names = [name.replace("_", " ").capitalize() for name in (*METRICS, *DIMENSIONS)]
    assert len(rows[2:]) == len(names) == 15
    assert {name.split(" ")[0] for name in names} == cells.keys()
    ours = compare(read_ledger(tmp_path / "bundle" / "ledger.jsonl")).models["qwen_7b"]
    paper = PUBLISHED["Qwen-7B"].metrics["Empathy"]
    mean = ours["Empathy"].candidate
    assert mean is not None
    difference = f"{mean - paper:+.3f}".replace("-", "−")
    assert cells["Empathy"][3:] == [f"{paper:.3f}", f"{mean:.3f}", difference]
    assert page.count("the paper.</figcaption>") == 2


def test_models_that_the_paper_lacks_have_no_paper(tmp_path: Path) -> None:
    """The control of the test above; bars then stand beside the reference."""
    page = page_of(tmp_path, models=("mine",), rows=24)
    assert "Beside the paper" not in page
    assert "the paper.</figcaption>" not in page
    assert page.count("reference.</figcaption>") == 1


def test_a_stand_in_says_so_beside_the_paper(tmp_path: Path) -> None:
    page = page_of(tmp_path, standin=True, rows=24)
    assert "the differences say nothing" in section(page, "Beside the paper")


def test_unresolved_rows_are_named_and_give_bounds(tmp_path: Path) -> None:
    page = page_of(tmp_path, failing=13)
    verdicts = section(page, "Verdicts")
    assert verdicts.count("UNKNOWN</span>") == 9
    assert verdicts.count("measured on 227 of 240 rows, 13 are unresolved") == 9
    fluency = compare(read_ledger(tmp_path / "bundle" / "ledger.jsonl")).models["internlm_7b"][
        "Fluency"
    ]
    assert fluency.unresolved == 2
    bounds = f"{fluency.low:.3f} to {fluency.high:.3f}"
    (table,) = re.findall(r"<h3>internlm_7b</h3>.*?</table>", page, re.DOTALL)
    (row,) = [row for row in table.split("<tr>") if ">Fluency<" in row]
    assert words(row).endswith(f"2 {bounds}")
    (other,) = re.findall(r"<h3>qwen_7b</h3>.*?</table>", page, re.DOTALL)
    assert "Bounds" not in other
    unresolved = section(page, "Unresolved rows")
    assert "13 rows with <code>not_finite</code> of the candidate." in unresolved
    slots = re.findall(r'class="slot">(.*?)</th>', unresolved)
    assert slots == [f"internlm_7b/{position:05d}" for position in range(13)]
    assert unresolved.count("logit: found nan.") == 13


def test_many_unresolved_rows_are_counted_not_listed(tmp_path: Path) -> None:
    page = page_of(tmp_path, failing=240)
    unresolved = section(page, "Unresolved rows")
    assert "240 rows with" in unresolved
    assert "The first 100 are listed" in unresolved
    assert unresolved.count('class="slot"') == 100
    assert (
        len(load_json(tmp_path / "bundle" / "comparison.json")["comparison"]["unresolved"]) == 240
    )
    assert "nothing to plot" in page


def test_a_token_run_claims_no_score(tmp_path: Path) -> None:
    page = page_of(tmp_path, level="tokens", published=True)
    assert "<svg" not in page
    assert "Beside the paper" not in page
    assert words(section(page, "Equality")).count("not measured") == 4
    assert "No row was scored on both sides." in section(page, "Means per metric")


def test_worst_rows_come_by_slot_and_id(tmp_path: Path) -> None:
    page = page_of(tmp_path, differing=2)
    rows = section(page, "Worst rows").split("<tr>")[2:]
    assert len(rows) == 2
    assert words(rows[0]).startswith("qwen_7b/00118 1238 Diversity")
    assert "+0.015625" in rows[0]


def test_a_reference_without_p_is_compared_by_scores(tmp_path: Path) -> None:
    run = {"reference": "row-anchor", "tables": ("row-anchor",), "models": ("blank",)}
    page = page_of(tmp_path, drawn=True, differing=30, **run)
    assert "the official prompts with an empty answer" in page
    assert "Rows by difference in score, up to the named value." in page
    svg = section(page, "Plots").split("</svg>")[0]
    assert re.findall(r">(30|90)</text>", svg) == ["90", "30"]


def test_the_identities_stand_side_by_side(tmp_path: Path) -> None:
    page = page_of(tmp_path, audited=False)
    identity = section(page, "What was compared")
    rows = [words(row) for row in identity.split("<tr")]
    assert 'th scope="row">' not in rows
    assert any(row.endswith("tokenizer.model matches –") for row in rows)
    assert any(row.endswith("config.json differs –") for row in rows)
    assert any(row.endswith("name – slow") for row in rows)
    assert any("weights_sha256 7777777777777777… –" in row for row in rows)
    assert f'title="{"7" * 64}"' in identity


@pytest.mark.usefixtures("undrawn")
def test_the_last_selftest_is_stated(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows=12, selftest=True)
    page = write_report(run, tmp_path / "bundle").read_text(encoding="utf-8")
    text = section(page, "Last selftest")
    assert "All 1 planted fault ended red with this code: LEFT_PADDING ." in words(text)
    assert "2024-02-29 09:00 UTC" in text
    assert load_json(run / "selftest.json")["digest"] in text


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("code", [None, CODE | {"golden": "0" * 64}])
def test_a_selftest_of_other_code_is_none(tmp_path: Path, code: dict[str, str] | None) -> None:
    run = write_run(tmp_path / "run", rows=12)
    if code is not None:
        write_selftest(run, code=code)
    page = write_report(run, tmp_path / "bundle").read_text(encoding="utf-8")
    assert "No selftest of this code is known." in section(page, "Last selftest")


@pytest.mark.usefixtures("undrawn")
def test_a_selftest_that_missed_a_fault_is_red(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows=12)
    write_selftest(run, outcome="green")
    page = write_report(run, tmp_path / "bundle").read_text(encoding="utf-8")
    assert "✗ FAIL Not noticed: LEFT_PADDING." in words(section(page, "Last selftest"))


@pytest.mark.parametrize(
    "run",
    [
        {"failing": 5, "differing": 9, "selftest": True, "audited": False},
        {"level": "tokens", "standin": True},
        {"models": ("blank",), "reference": "row-anchor", "tables": ("row-anchor",)},
        {"models": ("one",), "rows": 1},
    ],
)
def test_the_page_is_well_formed_and_stands_alone(tmp_path: Path, run: dict[str, Any]) -> None:
    page = page_of(tmp_path, drawn=True, **run)
    parsed = balance(page)
    assert (parsed.wrong, parsed.open) == ([], [])
    assert len(parsed.ids) == len(set(parsed.ids))
    assert outside(page) == []
    assert "http" not in page
    assert {"script", "link", "img", "iframe"} & parsed.tags == set()
    targets = set(re.findall(r'(?:href="|url\()#([^")]+)', page))
    assert targets <= set(parsed.ids)


def test_the_reader_of_pages_sees_what_is_wrong() -> None:
    """The control of the test above."""
    parsed = balance('<p><b id="a">x</p></b><div id="a">')
    assert parsed.wrong
    assert parsed.open
    assert parsed.ids == ["a", "a"]
    assert outside('<a href="#x"><img src="y.png"><style>@import "z"; a { b: url(c) }') == [
        'src="y.png"',
        "@import",
        "url(c)",
    ]


def test_the_plots_take_every_colour_from_the_page(tmp_path: Path) -> None:
    page = page_of(tmp_path, drawn=True, failing=5, differing=30)
    svgs = "".join(re.findall("<svg .*?</svg>", page, re.DOTALL))
    assert svgs.count("<svg") == 5
    colours = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", svgs))
    assert colours == {f"var(--{n})" for n in ("ink", "muted", "rule", "equal", "differs")} | {
        "none"
    }
    assert "#0" not in re.sub(r"(?:href=\"|url\()#\w+", "", svgs)
    assert "font-family" not in svgs
    for name in ("ink", "muted", "rule", "equal", "differs"):
        assert len(re.findall(rf"--{name}: #", page)) == 2  # light and dark


def test_forty_thousand_scattered_rows_stay_small() -> None:
    numbers = random.Random(1)

    def side(p: float) -> dict[str, Any]:
        return {"hidden": None, "logit": None, "p": p, "score": p * 4 + 1}

    lines = [
        {
            "tokens": {"candidate": numbers.randint(1, 4096), "reference": None},
            "candidate": side(numbers.random()),
            "reference": side(numbers.random()),
        }
        for _ in range(40_160)
    ]
    scatter, step = plots.score_scatter(lines)
    drawn = scatter.count("<use") - 20
    assert 1000 < drawn <= 1200
    assert float(step) == 1 / 8
    assert len(scatter) + len(plots.length_plot(lines)) < 300_000


def test_names_of_models_are_text_not_markup(tmp_path: Path) -> None:
    page = page_of(tmp_path, drawn=True, models=("<b>&$x^2$",), rows=24)
    assert "<b>" not in page
    assert "Means of &lt;b&gt;&amp;$x^2$" in page


def test_no_text_of_the_dataset_is_in_a_bundle(tmp_path: Path) -> None:
    """The dataset is Chinese throughout; the metrics' Chinese names are not needed either."""
    run = write_run(tmp_path / "run", failing=3, differing=3, published=True, selftest=True)
    bundle = write_report(run, tmp_path / "bundle").parent
    for path in bundle.iterdir():
        assert CJK.findall(path.read_text(encoding="utf-8")) == [], path.name
    edit_json(run / "manifest.json", reference="参考")
    other = write_report(run, tmp_path / "other")
    assert CJK.findall(other.read_text(encoding="utf-8"))  # the control


@pytest.mark.usefixtures("undrawn")
def test_times_that_were_never_finished_are_told(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows=12)
    edit_json(run / "times.json", finished=None, rows_per_second=None)
    page = write_report(run, tmp_path / "bundle").read_text(encoding="utf-8")
    assert "not noted as finished: 13 min, 2 sessions." in page


def test_json_of_the_bundle_is_strict(tmp_path: Path) -> None:
    page_of(tmp_path, failing=24, rows=12)
    text = (tmp_path / "bundle" / "comparison.json").read_text(encoding="utf-8")

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert json.loads(text, parse_constant=refuse)["comparison"]["steps_max"] is None
