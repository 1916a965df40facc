"""Wire types. Unknown fields are refused; types are not converted."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from charrm.errors import BadRequest, InvalidRequest, InvalidRow, RowError
from charrm.protocol import METRICS, Row, quote

MetricName = str | list[str] | None


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class RowIn(Strict):
    """Profile (or role), context, model_output and metric; or a finished input_text."""

    profile: dict[str, Any] | str | None = Field(
        default=None,
        description="An object, rendered as the official script does, or the finished string.",
    )
    role: str | None = Field(default=None, description="Works with a loaded profiles file.")
    context: str | None = Field(default=None, description="The dialogue so far, raw.")
    model_output: str | None = Field(default=None, description="The answer to score; may be empty.")
    metric: MetricName = Field(
        default=None,
        description="English or Chinese name; in a batch also a list of names, or 'all'.",
    )
    input_text: str | None = Field(
        default=None, description="The complete input text, instead of the fields above."
    )


class BatchIn(Strict):
    """Rows of a batch. They are checked one by one: a bad row fails alone."""

    rows: list[RowIn]


class Evidence(Strict):
    """A score, and how it was made."""

    score: float = Field(description="p * 4 + 1, unrounded; 1 is worst, 5 is best.")
    p: float = Field(description="sigmoid(logit) in the model's dtype.")
    logit: float
    protocol: str
    engine: str
    identity: str = Field(description="Digest; GET /v1/identity tells what is behind it.")
    tokens: int
    tokens_dropped: int
    truncated: bool
    sections_lost: dict[str, float]
    metric_en: str
    metric_zh: str
    flags: list[str]


class ErrorBody(Strict):
    kind: str
    message: str


class ErrorOut(Strict):
    """Every answer that is not 2xx."""

    error: ErrorBody


class BatchScore(Evidence):
    index: int = Field(description="Position of the row in the request.")
    ok: Literal[True]


class BatchFailure(Strict):
    index: int
    ok: Literal[False]
    error: ErrorBody
    metric: str | None = Field(default=None, description="When the row asked for several metrics.")


class BatchOut(Strict):
    """Results in input order; a row with several metrics has one result for each."""

    results: list[BatchScore | BatchFailure]
    identity: str


def parse_json(body: bytes) -> Any:
    """Decode a body as JSON in UTF-8, as strictly as the standard says. Raises BadRequest."""
    try:
        return json.loads(
            body.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_no_duplicates
        )
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8: byte {error.start} is {error.reason}.") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply.") from None
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None


def parse_row(value: object) -> RowIn:
    """Read one row; raises InvalidRow naming every field at fault."""
    try:
        return RowIn.model_validate(value)
    except ValidationError as error:
        raise InvalidRow(_explain(error, value)) from None


def single_row(row: RowIn) -> Row:
    """Return the row of a request that asks for one score."""
    if isinstance(row.metric, list) or row.metric == "all":
        raise InvalidRow(
            f"metric: found {quote(row.metric)}, expected one name; several metrics of a row go "
            "through /v1/score/batch."
        )
    return _to_row(row, row.metric)


def expand(value: object) -> list[tuple[str | None, Row | RowError]]:
    """Return a batch row once per metric asked for; a row that cannot be read, as its error."""
    try:
        row = parse_row(value)
    except RowError as error:
        return [(None, error)]
    if row.metric == "all":
        return [(name, _to_row(row, name)) for name in METRICS]
    if not isinstance(row.metric, list):
        return [(None, _to_row(row, row.metric))]
    if not row.metric or len(set(row.metric)) != len(row.metric):
        message = f"metric: found {quote(row.metric)}, expected at least one name, each once."
        return [(None, InvalidRow(message))]
    return [(name, _to_row(row, name)) for name in row.metric]


def batch_rows(value: object) -> list[object]:
    """Return the rows of a batch body, not yet checked. Raises InvalidRequest."""
    if not isinstance(value, dict) or value.keys() != {"rows"}:
        found = quote(sorted(value)) if isinstance(value, dict) else type(value).__name__
        raise InvalidRequest(f'found {found}, expected an object with the one field "rows".')
    if not isinstance(value["rows"], list):
        raise InvalidRequest(f"rows: found {type(value['rows']).__name__}, expected an array.")
    return value["rows"]


def _to_row(row: RowIn, metric: str | None) -> Row:
    return Row(row.profile, row.role, row.context, row.model_output, metric, row.input_text)


def _explain(error: ValidationError, value: object) -> str:
    if not isinstance(value, dict):
        return f"row: found {type(value).__name__}, expected an object."
    unknown = [quote(name) for name in value if name not in RowIn.model_fields]
    known = ", ".join(RowIn.model_fields)
    parts = [f"unknown field {name}, known are: {known}" for name in unknown]
    wrong = {str(e["loc"][0]) for e in error.errors() if e["loc"]} & set(RowIn.model_fields)
    for name in sorted(wrong):
        messages = {e["msg"] for e in error.errors() if e["loc"] and e["loc"][0] == name}
        parts.append(f"{name}: found {type(value[name]).__name__}: {' or '.join(sorted(messages))}")
    return "; ".join(parts) + "."


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {quote(twice)} appears twice in one object")
    return content
