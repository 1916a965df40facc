"""Protocol charrm/1 without a model: the text of a row, the tokens kept, the meaning of p."""

from __future__ import annotations

import enum
import hashlib
import json
import math
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from helpers import chat_prompt, load_json
from hypothesis import given, settings
from hypothesis import strategies as st

from charrm.errors import (
    InvalidRow,
    NotFinite,
    RowError,
    TextNotEncodable,
    UnknownMetric,
    UnknownRole,
)
from charrm.protocol import (
    DIMENSIONS,
    METRICS,
    Prompt,
    Row,
    compose,
    find_metric,
    keep_last,
    quote,
    render_profile,
    score_from_p,
    sections_lost,
)

ROW: dict[str, Any] = {
    "profile": {"姓名": "阿川"},
    "context": "陆小满：雨停了没？",
    "model_output": "阿川：没有。",
    "metric": "Empathy",
}
HEADERS = ("<RoleInfo>\n\n", "\n\n<Context>\n\n", "\n\n<Response>\n\n", "\n\n<Dimension>\n\n")


def refusal(kind: type[RowError], profiles: Any = None, **changes: Any) -> str:
    with pytest.raises(kind) as caught:
        compose(Row(**(ROW | changes)), profiles)
    return str(caught.value)


def bodies(prompt: Prompt) -> dict[str, str]:
    return {name: prompt.text[start:end] for name, start, end in prompt.sections}


def test_the_template() -> None:
    prompt = compose(Row(**ROW))
    assert prompt.text == (
        "<RoleInfo>\n\n{'姓名': '阿川'}\n\n<Context>\n\n陆小满：雨停了没？"
        "\n\n<Response>\n\n阿川：没有。\n\n<Dimension>\n\n共情度"
    )
    assert prompt.metric == ("Empathy", "共情度")
    assert prompt.flags == ()


def test_nothing_is_stripped_or_normalised() -> None:
    context, answer = " \r\n\u3000Ａ：ｅ\u0301 ", "\ufeff答\u2028案\r "
    prompt = compose(Row(**(ROW | {"context": context, "model_output": answer})))
    assert bodies(prompt)["Context"] == context
    assert bodies(prompt)["Response"] == answer


@pytest.mark.parametrize(
    ("profile", "text"),
    [
        ({"a": 1, "b": [True, None, 1.5]}, "{'a': 1, 'b': [True, None, 1.5]}"),
        ({"q": "it's"}, "{'q': \"it's\"}"),
        ({"外": {"内": "制\t表\n\u3000"}}, "{'外': {'内': '制\\t表\\n\\u3000'}}"),
        ({}, "{}"),
        ("{'finished': 'string'}", "{'finished': 'string'}"),
        ("", ""),
    ],
)
def test_profiles_are_rendered_as_python_does(profile: object, text: str) -> None:
    assert render_profile(profile) == text


def test_all_published_profiles(shared: Path, anchor: Path) -> None:
    profiles = load_json(shared / "charactereval" / "character_profiles.json")
    stored = load_json(anchor / "profiles.sha256.json")["profiles"]
    digest = {role: hashlib.sha256(render_profile(p).encode()).hexdigest() for role, p in
              profiles.items()}  # fmt: skip
    assert digest == stored
    assert len(stored) == 78
    as_json = [json.dumps(profile, ensure_ascii=False) for profile in profiles.values()]
    digests = {hashlib.sha256(text.encode()).hexdigest() for text in as_json}
    assert digests.isdisjoint(stored.values())  # the control


class Text(str, enum.Enum):
    """A string whose repr is not that of a string."""

    A = "a"


@pytest.mark.parametrize(
    ("profile", "found"),
    [
        (["a"], "list"),
        (3, "int"),
        (b"{}", "bytes"),
        (OrderedDict(a=1), "OrderedDict"),  # its repr is another text
        (MappingProxyType({"a": 1}), "mappingproxy"),
        ({"a": OrderedDict(b=1)}, 'profile["a"]: found OrderedDict'),
        ({"a": [{"b": (1, 2)}]}, 'profile["a"][0]["b"]: found tuple'),
        ({"a": {1, 2}}, "found set"),
        ({1: "a"}, "found the key 1"),
        ({Text.A: "a"}, "found the key"),
        ({"a": Text.A}, "found Text"),
        ({"a": math.nan}, "found nan"),
        ({"a": [math.inf]}, 'profile["a"][0]: found inf'),
    ],
)
def test_a_profile_that_json_cannot_hold_is_refused(profile: object, found: str) -> None:
    message = refusal(InvalidRow, profile=profile)
    assert message.startswith("profile")
    assert found in message


def test_a_profile_that_cannot_be_rendered_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    assert "nested too deeply" in refusal(InvalidRow, profile=deep)
    assert "cannot be rendered" in refusal(InvalidRow, profile={"a": 10**5000})
    while deep:  # freed level by level: the destructor of the whole would recurse
        deep = deep["a"]


def test_the_twelve_metrics(shared: Path) -> None:
    table = (shared / "upstream" / "published_table.json").read_text(encoding="utf-8")
    assert len(METRICS) == 12
    assert sorted(name for names in DIMENSIONS.values() for name in names) == sorted(METRICS)
    for en, zh in METRICS.items():
        assert find_metric(en) == find_metric(zh) == (en, zh)
        assert f'"{en}"' in table
        assert f'"{zh}"' in table
        assert compose(Row(**(ROW | {"metric": en}))).text.endswith(f"<Dimension>\n\n{zh}")


@pytest.mark.parametrize(
    "metric",
    [
        "",
        "empathy",
        "Empathy ",
        "共情",
        "人格回测",
        "Personality",
        "all",
        None,
        3,
        ["Empathy"],
        True,
    ],
)
def test_any_other_metric_is_refused(metric: object) -> None:
    message = refusal(UnknownMetric, metric=metric)
    assert message.startswith("metric: found")
    assert "Empathy 共情度" in message


@pytest.mark.parametrize(
    ("kind", "changes", "start"),
    [
        (InvalidRow, {"profile": None}, "profile: missing"),
        (InvalidRow, {"context": None}, "context: found nothing"),
        (InvalidRow, {"context": ["a"]}, "context: found list"),
        (InvalidRow, {"context": b"a"}, "context: found bytes"),
        (InvalidRow, {"model_output": None}, "model_output: found nothing"),
        (InvalidRow, {"model_output": 3.0}, "model_output: found float"),
        (InvalidRow, {"model_output": "ERROR"}, 'model_output: found "ERROR"'),
        (InvalidRow, {"profile": None, "role": 3}, "role: found int"),
        (UnknownRole, {"profile": None, "role": "阿川"}, 'role: found "阿川"'),
        (InvalidRow, {"input_text": "x"}, "profile: found beside input_text"),
    ],
)
def test_a_wrong_field_is_named(kind: type[RowError], changes: dict[str, Any], start: str) -> None:
    assert refusal(kind, **changes).startswith(start)


def test_a_role_is_looked_up() -> None:
    profiles = {"阿川": {"姓名": "阿川"}}
    row = Row(**(ROW | {"profile": None, "role": "阿川"}))
    assert compose(row, profiles).text == compose(Row(**ROW)).text
    message = refusal(UnknownRole, profiles, profile=None, role="别人")
    assert "别人" in message
    assert "1 loaded profiles" in message


def test_answers_that_look_failed() -> None:
    assert compose(Row(**(ROW | {"model_output": ""}))).flags == ("answer_empty",)
    assert compose(Row(**(ROW | {"model_output": "a\nb"}))).flags == ("answer_has_newline",)
    for answer in ("error", "ERROR ", "ERROR\n", "a\rb", "a\u2028b"):
        assert "answer_empty" not in compose(Row(**(ROW | {"model_output": answer}))).flags
    assert compose(Row(**(ROW | {"model_output": "a\rb"}))).flags == ()
    as_json = compose(Row(**(ROW | {"profile": json.dumps({"a": 1})})))
    assert as_json.flags == ("profile_is_json_text",)


@pytest.mark.parametrize("code", [0xD800, 0xDFFF])
def test_a_lone_surrogate_is_an_error_where_it_reaches_the_text(code: int) -> None:
    bad = f"好{chr(code)}"
    for field, section in (("context", "Context"), ("model_output", "Response")):
        message = refusal(TextNotEncodable, **{field: bad})
        assert message.startswith(section)
        assert f"U+{code:04X}" in message
        message.encode()  # the message itself can be sent
    assert refusal(TextNotEncodable, profile=bad).startswith("RoleInfo")
    refusal(UnknownMetric, metric=bad).encode()
    refusal(UnknownRole, {}, profile=None, role=bad).encode()
    text = compose(Row(**(ROW | {"profile": {"名": bad}}))).text  # repr escapes it
    assert f"\\u{code:04x}" in text.encode().decode()


def test_a_finished_text_is_taken_apart_and_left_as_it_is() -> None:
    original = compose(Row(**ROW))
    for metric in (None, "Empathy", "共情度"):
        prompt = compose(Row(input_text=original.text, metric=metric))
        assert (prompt.text, prompt.metric) == (original.text, original.metric)
        assert prompt.sections == original.sections
        assert prompt.flags == ("finished_input_text",)


@pytest.mark.parametrize("section", ["profile", "context"])
def test_headers_inside_a_section_do_not_confuse_it(section: str) -> None:
    inner = "a\n\n<Response>\n\nb\n\n<Dimension>\n\n类人程度"
    original = compose(Row(**(ROW | {section: inner})))
    prompt = compose(Row(input_text=original.text))
    assert (prompt.text, prompt.metric) == (original.text, original.metric)
    assert prompt.sections == original.sections


@pytest.mark.parametrize("profile", ["", "\n\n", "\n"])
@pytest.mark.parametrize("context", ["", "\n\n"])
def test_empty_sections_keep_their_place(profile: str, context: str) -> None:
    original = compose(Row(profile=profile, context=context, model_output="", metric="Empathy"))
    prompt = compose(Row(input_text=original.text))
    assert (prompt.text, prompt.sections) == (original.text, original.sections)
    assert "answer_empty" in prompt.flags


def joined(order: str, separators: tuple[str, ...] = HEADERS) -> str:
    parts = dict(zip("RCAD", separators, strict=True))
    return "x".join(parts[letter] for letter in order) + "共情度"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        *(joined(order) for order in ("RACD", "CRAD", "RCDA", "RCA", "RCD", "RAD", "CAD", "R")),
        " " + joined("RCAD"),
        joined("RCAD").replace("\n\n", "\n"),
        joined("RCAD").replace("\n\n", "\r\n\r\n"),
        "<RoleInfo>\n\n<Context>\n\nx\n\n<Response>\n\nx\n\n<Dimension>\n\n共情度",
        "<RoleInfo>\n\nx\n\n<Context>\n\n<Response>\n\nx\n\n<Dimension>\n\n共情度",
        "<RoleInfo>\n\nx\n\n<Context>\n\nx\n\n<Response>\n\n<Dimension>\n\n共情度",
    ],
)
def test_a_finished_text_of_another_form_is_refused(text: str) -> None:
    assert compose(Row(input_text=joined("RCAD"))).metric.en == "Empathy"  # the control
    with pytest.raises(InvalidRow, match=r"^input_text: expected"):
        compose(Row(input_text=text))


@pytest.mark.parametrize("end", ["共情", "共情度\n", "共情度 ", "Empathy", "", "人格回测"])
def test_a_finished_text_must_end_with_a_metric(end: str) -> None:
    with pytest.raises(UnknownMetric, match=r"^input_text: ends with"):
        compose(Row(input_text=joined("RCAD").removesuffix("共情度") + end))


@pytest.mark.parametrize("field", ["profile", "role", "context", "model_output"])
def test_a_finished_text_tolerates_no_other_field(field: str) -> None:
    with pytest.raises(InvalidRow, match=f"^{field}: found beside input_text"):
        compose(Row(input_text=joined("RCAD"), **{field: ""}))


def test_a_finished_text_must_agree_with_its_metric() -> None:
    with pytest.raises(InvalidRow, match=r"^metric: found"):
        compose(Row(input_text=joined("RCAD"), metric="Fluency"))
    with pytest.raises(UnknownMetric, match=r"^metric: found"):
        compose(Row(input_text=joined("RCAD"), metric="?"))
    with pytest.raises(InvalidRow, match=r"^input_text: found bytes"):
        compose(Row(input_text=joined("RCAD").encode()))  # type: ignore[arg-type]


ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(HEADERS)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(deadline=None, derandomize=True, database=None)
@given(
    profile=ANY_TEXT | st.dictionaries(ANY_TEXT, JSON, max_size=4),
    context=ANY_TEXT,
    answer=ANY_TEXT,
    metric=st.sampled_from([*METRICS.items()]),
)
def test_any_row_is_the_exact_template(
    profile: Any, context: str, answer: str, metric: tuple[str, str]
) -> None:
    row = Row(profile=profile, context=context, model_output=answer, metric=metric[0])
    prompt = compose(row)
    assert prompt.text == chat_prompt(profile, context, answer, metric[1])
    assert [*bodies(prompt).values()] == [str(profile), context, answer, metric[1]]
    at, pieces = 0, []
    for header, (_, start, end) in zip(HEADERS, prompt.sections, strict=True):
        pieces += [prompt.text[at:start], prompt.text[start:end]]
        assert prompt.text[at:start] == header
        at = end
    assert "".join(pieces) == prompt.text
    assert compose(Row(input_text=prompt.text)).text == prompt.text


@pytest.mark.parametrize(("count", "dropped"), [(0, 0), (1, 0), (4095, 0), (4096, 1), (4097, 2)])
def test_the_last_4096_tokens_are_kept(count: int, dropped: int) -> None:
    ids = list(range(10, 10 + count))
    kept, lost = keep_last(ids)
    assert lost == dropped
    assert kept == [*ids, 2][-4096:] == [*ids[dropped:], 2]
    assert ids == list(range(10, 10 + count))  # the caller's list is untouched
    right_truncated = [*ids, 2][:4096]
    assert (kept == right_truncated) == (dropped == 0)  # the control


def test_what_truncation_cost() -> None:
    prompt = compose(Row(profile="0123456789", context="0123", model_output="", metric="Empathy"))
    start = len("<RoleInfo>\n\n")
    context = prompt.sections[1].start
    assert sections_lost(prompt, 0) == {}
    assert sections_lost(prompt, start) == {}
    assert sections_lost(prompt, start + 3) == {"RoleInfo": 0.3}
    assert sections_lost(prompt, context) == {"RoleInfo": 1.0}
    assert sections_lost(prompt, context + 1) == {"RoleInfo": 1.0, "Context": 0.25}
    everything = sections_lost(prompt, len(prompt.text))
    assert everything == {"RoleInfo": 1.0, "Context": 1.0, "Dimension": 1.0}  # no empty answer


@pytest.mark.parametrize("p", [0.0, 1.0, 0.5, 0.103515625, 1 / 3, 5e-324, 0.6875])
def test_the_score_is_never_rounded(p: float) -> None:
    assert score_from_p(p) == p * 4 + 1
    assert 1 <= score_from_p(p) <= 5
    assert score_from_p(1 / 3) != round(score_from_p(1 / 3), 6)


@pytest.mark.parametrize("p", [math.nan, math.inf, -math.inf, -1e-9, math.nextafter(1, 2), 3.0])
def test_what_no_sigmoid_gives_is_no_score(p: float) -> None:
    with pytest.raises(NotFinite, match="no score exists"):
        score_from_p(p)


@pytest.mark.parametrize(
    ("first", "found"), [("", "set()"), ("sys.modules['torch'] = sys", "{'torch'}")]
)
def test_the_protocol_loads_no_torch(first: str, found: str) -> None:
    """In a fresh interpreter; the second case is the control."""
    modules = "charrm, charrm.protocol, charrm.errors, charrm.results, charrm.engines"
    heavy = "{'torch', 'transformers', 'sentencepiece', 'accelerate'}"
    code = f"import sys\n{first}\nimport {modules}\nprint({heavy} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == found


def test_messages_show_no_control_characters() -> None:
    shown = quote("a\r\n\x1b[31m\ud800\u2028" + "长" * 100)
    assert shown.isprintable()
    assert shown.startswith('"a\\r\\n\\x1b[31m\\ud800\\u2028长')
    assert len(shown) <= 82
