"""HTTP client of the scoring server. Needs no torch and no pinned transformers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import httpx

from charrm.errors import (
    CharrmError,
    InvalidRow,
    Starting,
    UnexpectedAnswer,
    Unreachable,
    error_from_kind,
)
from charrm.protocol import Row
from charrm.results import FailedRow, Result, ScoredRow, result_from_json


class Client:
    """Scores rows on a running server; every failure is raised or returned as charrm's own error.

    `timeout` in seconds bounds each wait for the next bytes; None waits for as long as it takes.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        timeout: float | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._http = httpx.Client(
            base_url=base_url,
            timeout=httpx.Timeout(timeout, connect=10.0),
            transport=transport or httpx.HTTPTransport(retries=2),  # connecting only
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def score(self, row: Row | Mapping[str, Any]) -> ScoredRow:
        """Score one row. Raises RowError kinds, ServiceError kinds, UnexpectedAnswer."""
        answer = self._send("POST", "/v1/score", _row_json(row))
        result = _result(answer | {"index": 0, "ok": True})
        if isinstance(result, FailedRow):
            raise result.error
        return result

    def score_batch(self, rows: Iterable[Row | Mapping[str, Any]]) -> list[Result]:
        """Score rows in one request; results in input order, failed rows as `FailedRow`."""
        body = {"rows": [_row_json(row) for row in rows]}
        answer = self._send("POST", "/v1/score/batch", body)
        results = answer.get("results")
        if not isinstance(results, list):
            raise UnexpectedAnswer(f"expected results, found an object with {sorted(answer)}.")
        return [_result(result) for result in results]

    def stream_batch(self, rows: Iterable[Row | Mapping[str, Any]]) -> Iterator[Result]:
        """Score rows in one request and yield each result as the server finishes it."""
        body = {"rows": [_row_json(row) for row in rows]}
        path, headers = "/v1/score/batch", {"Accept": "application/x-ndjson"}
        try:
            with self._http.stream("POST", path, content=_dump(body), headers=headers) as got:
                if got.status_code != 200:
                    got.read()
                    raise _error(got)
                for line in got.iter_lines():
                    answer = _object(httpx.Response(200, content=line))
                    if answer.keys() == {"error"}:
                        raise error_from_kind(**answer["error"])
                    yield _result(answer)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def identity(self) -> dict[str, Any]:
        """Return what every score of this server is made of."""
        return self._send("GET", "/v1/identity")

    def wait_until_ready(self, seconds: float = 600.0) -> None:
        """Return once the warm-up score matched. Raises the last Starting or Unreachable."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self._send("GET", "/health/ready")
                return
            except (Starting, Unreachable):
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.2)

    def _send(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        try:
            content = None if body is None else _dump(body)
            response = self._http.request(method, path, content=content)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.status_code != 200:
            raise _error(response)
        return _object(response)

    def _unreachable(self, error: httpx.HTTPError) -> Unreachable:
        return Unreachable(
            f"{self._http.base_url}: {type(error).__name__}: {error}. Is the server running "
            "(python -m server --model ...) and the address right?"
        )


def _row_json(row: Row | Mapping[str, Any]) -> dict[str, Any]:
    content = asdict(row) if isinstance(row, Row) else row
    return {name: value for name, value in content.items() if value is not None}


def _dump(body: object) -> bytes:
    """Return ASCII JSON, which also carries lone surrogates to the server's verdict on them."""
    try:
        return json.dumps(body, allow_nan=False).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRow(f"rows: cannot be sent as JSON: {error}.") from None


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        content = response.json()
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise UnexpectedAnswer(
            f"status {response.status_code}: expected a JSON object, found "
            f"{response.text[:80]!r}. Is this a charrm server?"
        )
    return content


def _error(response: httpx.Response) -> CharrmError:
    try:
        error = _object(response).get("error")
    except UnexpectedAnswer as unexpected:
        return unexpected
    if isinstance(error, dict) and error.keys() == {"kind", "message"}:
        return error_from_kind(error["kind"], error["message"])
    return UnexpectedAnswer(f"status {response.status_code} without charrm's error object.")


def _result(answer: dict[str, Any]) -> Result:
    """Read one result; a server may name the metric of a failed row beside it."""
    if answer.get("ok") is False:
        answer.pop("metric", None)
    return result_from_json(answer)
