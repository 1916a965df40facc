"""Protocol charrm/1: how a row becomes the text, which tokens are kept, and what p means.

Source of every rule: the official CharacterEval scripts (`transform_format.py`, `run_char_rm.py`)
and the published checkpoint. Nothing here is a matter of taste, and nothing here loads torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from charrm.errors import InvalidRow, NotFinite, TextNotEncodable, UnknownMetric, UnknownRole

PROTOCOL = "charrm/1"
MAX_TOKENS = 4096
EOS_ID = 2

DIMENSIONS: dict[str, tuple[str, ...]] = {
    "conversational_ability": ("Fluency", "Coherence", "Consistency"),
    "character_consistency": ("Exposure", "Accuracy", "Hallucination", "Behavior", "Utterance"),
    "role_playing_attractiveness": (
        "Humanlikeness",
        "Communication_skills",
        "Diversity",
        "Empathy",
    ),
}

METRICS: dict[str, str] = {
    "Fluency": "对话流利度",
    "Coherence": "对话连贯性",
    "Consistency": "对话一致性",
    "Exposure": "知识曝光度",
    "Accuracy": "知识准确率",
    "Hallucination": "知识幻觉性",
    "Behavior": "行为一致性",
    "Utterance": "言语一致性",
    "Humanlikeness": "类人程度",
    "Communication_skills": "交流技巧",
    "Diversity": "表现多样性",
    "Empathy": "共情度",
}
_BY_NAME = {name: (en, zh) for en, zh in METRICS.items() for name in (en, zh)}


class Metric(NamedTuple):
    """One of the twelve metrics; `zh` is what the model reads."""

    en: str
    zh: str


def find_metric(name: object) -> Metric:
    """Return the metric with this English or Chinese name.

    Raises UnknownMetric: any other name would give a plausible, wrong score.
    """
    if isinstance(name, str) and name in _BY_NAME:
        return Metric(*_BY_NAME[name])
    known = ", ".join(f"{en} {zh}" for en, zh in METRICS.items())
    raise UnknownMetric(
        f"metric: found {quote(name)}, expected one of: {known}. "
        "(Personality back-testing, the benchmark's 13th metric, is not scored by this model.)"
    )


@dataclass(frozen=True)
class Row:
    """What is scored: `profile` or `role`, `context`, `model_output`; or a finished `input_text`.

    `profile` is the dict as `json.load` gives it (rendered as the official script renders it) or
    the finished string. `metric` is an English or Chinese name; beside `input_text` it may be
    omitted, since the text ends with it.
    """

    profile: Mapping[str, Any] | str | None = None
    role: str | None = None
    context: str | None = None
    model_output: str | None = None
    metric: str | None = None
    input_text: str | None = None


class Section(NamedTuple):
    """Half-open range of characters of the input text that holds one section's body."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Prompt:
    """The input text of one row, and what is known about it."""

    text: str
    sections: tuple[Section, ...]
    metric: Metric
    flags: tuple[str, ...]


_HEADERS = ("RoleInfo", "Context", "Response", "Dimension")


def compose(row: Row, profiles: Mapping[str, Any] | None = None) -> Prompt:
    """Build the input text of a row.

    `profiles` maps role to profile, for rows that name only a role.
    Raises InvalidRow, UnknownMetric, UnknownRole, TextNotEncodable.
    """
    if row.input_text is not None:
        prompt = _from_finished_text(row)
    else:
        profile = _find_profile(row, profiles)
        metric = find_metric(row.metric)
        context = _text("context", row.context)
        answer = _text("model_output", row.model_output)
        if answer == "ERROR":
            raise InvalidRow(
                'model_output: found "ERROR", the benchmark\'s mark of a failed generation. '
                "The official transform drops such rows; leave it out."
            )
        prompt = _join(render_profile(profile), context, answer, metric, _profile_flags(profile))
    _check_encodable(prompt)
    return prompt


def render_profile(profile: object) -> str:
    """Return `str(profile)` of a JSON-like dict, as the official script does; a string as it is.

    Rendering the dict as JSON would give other tokens for every published profile.
    Raises InvalidRow for values that JSON cannot hold.
    """
    if isinstance(profile, str):
        return profile
    if type(profile) is not dict:  # a subclass or another mapping has another repr
        raise InvalidRow(f"profile: found {_kind(profile)}, expected a dict or a string.")
    try:
        _check_json("profile", profile)
        return str(profile)
    except RecursionError:
        raise InvalidRow("profile: nested too deeply to be rendered.") from None
    except ValueError as error:
        raise InvalidRow(f"profile: cannot be rendered: {error}.") from None


def keep_last(ids: Sequence[int]) -> tuple[list[int], int]:
    """Append `</s>` and keep the last 4,096 ids; also return how many were dropped in front.

    The appended id counts towards the limit, and the truncation side is left, as in the
    official script.
    """
    full = [*ids, EOS_ID]
    dropped = max(0, len(full) - MAX_TOKENS)
    return full[dropped:], dropped


def sections_lost(prompt: Prompt, chars_dropped: int) -> dict[str, float]:
    """Return, for every section that lost text in front, the fraction of its characters lost."""
    lost = {}
    for name, start, end in prompt.sections:
        if end > start and chars_dropped > start:
            lost[name] = (min(end, chars_dropped) - start) / (end - start)
    return lost


def score_from_p(p: float) -> float:
    """Return `p * 4 + 1` in double precision, never rounded; 1 is worst, 5 is best.

    Raises NotFinite when p is NaN or infinite, or outside [0, 1], which no sigmoid gives.
    """
    if not math.isfinite(p) or not 0.0 <= p <= 1.0:
        raise NotFinite(
            f"the model gave p = {p}, expected a number from 0 to 1. Weights, precision or device "
            "are at fault; no score exists for this row."
        )
    return p * 4 + 1


def _join(
    profile: str, context: str, answer: str, metric: Metric, flags: tuple[str, ...]
) -> Prompt:
    parts: list[str] = []
    sections = []
    length = 0
    bodies = zip(_HEADERS, (profile, context, answer, metric.zh), strict=True)
    for index, (name, body) in enumerate(bodies):
        header = f"<{name}>\n\n" if index == 0 else f"\n\n<{name}>\n\n"
        sections.append(Section(name, length + len(header), length + len(header) + len(body)))
        length += len(header) + len(body)
        parts += [header, body]
    return Prompt("".join(parts), tuple(sections), metric, flags + _answer_flags(answer))


def _from_finished_text(row: Row) -> Prompt:
    """Take the sections of a finished input text apart, to check its form and name its metric."""
    for field in ("profile", "role", "context", "model_output"):
        if getattr(row, field) is not None:
            raise InvalidRow(f"{field}: found beside input_text, which already holds it; drop one.")
    text = _text("input_text", row.input_text)
    first, context, answer, dimension = (
        f"<{name}>\n\n" if index == 0 else f"\n\n<{name}>\n\n"
        for index, name in enumerate(_HEADERS)
    )
    dimension_at = text.rfind(dimension)
    answer_at = text.rfind(answer, 0, max(dimension_at, 0))
    context_at = text.find(context, len(first), max(answer_at, 0))
    if not text.startswith(first) or min(dimension_at, answer_at, context_at) < 0:
        raise InvalidRow(
            "input_text: expected '<RoleInfo>\\n\\n', '\\n\\n<Context>\\n\\n', "
            "'\\n\\n<Response>\\n\\n' and '\\n\\n<Dimension>\\n\\n' in this order, "
            f"found a text that begins {quote(text[:60])}."
        )
    name = text[dimension_at + len(dimension) :]
    if name not in METRICS.values():
        raise UnknownMetric(
            f"input_text: ends with the dimension {quote(name[:60])}, expected one of "
            f"{', '.join(METRICS.values())}, with nothing after it."
        )
    metric = find_metric(name)
    if row.metric is not None and find_metric(row.metric) != metric:
        raise InvalidRow(f"metric: found {quote(row.metric)}, but input_text ends with {name}.")
    prompt = _join(
        text[len(first) : context_at],
        text[context_at + len(context) : answer_at],
        text[answer_at + len(answer) : dimension_at],
        metric,
        ("finished_input_text",),
    )
    assert prompt.text == text  # the sections tile the text
    return prompt


def _find_profile(row: Row, profiles: Mapping[str, Any] | None) -> object:
    if row.profile is not None:
        return row.profile
    if row.role is None:
        raise InvalidRow("profile: missing; send profile, or role with a loaded profiles file.")
    role = _text("role", row.role)
    if profiles is None:
        raise UnknownRole(
            f"role: found {quote(role)}, but no profiles file is loaded; send the profile itself."
        )
    if role not in profiles:
        raise UnknownRole(
            f"role: found {quote(role)}, which is not among the {len(profiles)} loaded profiles."
        )
    return profiles[role]


def _profile_flags(profile: object) -> tuple[str, ...]:
    """Flag a string that is the JSON of an object: the official text is the Python repr."""
    if isinstance(profile, str) and profile.lstrip().startswith('{"'):
        try:
            json.loads(profile)
        except (ValueError, RecursionError):
            return ()
        return ("profile_is_json_text",)
    return ()


def _answer_flags(answer: str) -> tuple[str, ...]:
    flags = []
    if not answer:
        flags.append("answer_empty")
    if "\n" in answer:
        # The official transform keeps only the text before the first newline.
        flags.append("answer_has_newline")
    return tuple(flags)


def _check_encodable(prompt: Prompt) -> None:
    try:
        prompt.text.encode("utf-8")
    except UnicodeEncodeError as error:
        name = next((s.name for s in prompt.sections if s.start <= error.start < s.end), "text")
        found = f"U+{ord(prompt.text[error.start]):04X}"
        raise TextNotEncodable(
            f"{name}: found the lone surrogate {found} at character {error.start} of the input "
            "text; it has no UTF-8 form and no token. Send text that was decoded correctly."
        ) from None


def _check_json(path: str, value: object) -> None:
    """Refuse what `json.load` cannot have made; its repr is not a protocol text."""
    if type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise InvalidRow(f"{path}: found the key {quote(key)}, expected a string.")
            _check_json(f"{path}[{quote(key)}]", item)
    elif type(value) is list:
        for index, item in enumerate(value):
            _check_json(f"{path}[{index}]", item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidRow(f"{path}: found {value}, which is not JSON.")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise InvalidRow(f"{path}: found {_kind(value)}, expected a JSON value.")


def _text(field: str, value: object) -> str:
    if isinstance(value, str):
        return value
    found = "nothing" if value is None else _kind(value)
    raise InvalidRow(f"{field}: found {found}, expected a string.")


def _kind(value: object) -> str:
    return type(value).__name__


def quote(value: object) -> str:
    """Return a value for an error message: cut short, and encodable whatever it holds."""
    text = value if isinstance(value, str) else repr(value)
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:100])
    text = text if len(text) <= 80 else text[:77] + "..."
    return f'"{text}"' if isinstance(value, str) else text
