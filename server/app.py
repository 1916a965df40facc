"""Routes. A request becomes rows, the worker scores them, and every row is answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

import charrm
from charrm.errors import (
    BadRequest,
    CharrmError,
    EngineFailed,
    InvalidRequest,
    NotFinite,
    OutOfMemory,
    Overloaded,
    RowError,
    ServiceError,
    TooLargeRequest,
    TooLongText,
)
from charrm.protocol import Row
from charrm.results import FailedRow, Result
from server.dispatch import Dispatch, Job, first
from server.schemas import (
    BatchIn,
    BatchOut,
    ErrorOut,
    Evidence,
    RowIn,
    batch_rows,
    expand,
    parse_json,
    parse_row,
    single_row,
)
from server.settings import Settings

RETRY_AFTER_SECONDS = 5

# The most specific class wins; what is not listed is a fault of the server.
STATUS: dict[type[CharrmError], int] = {
    BadRequest: 400,
    InvalidRequest: 422,
    TooLargeRequest: 413,
    TooLongText: 413,
    RowError: 422,
    EngineFailed: 500,
    NotFinite: 500,
    OutOfMemory: 500,
    Overloaded: 429,
    ServiceError: 503,
}

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorOut, "description": text}
    for status, text in {
        400: "The body is not JSON.",
        413: "The body, the batch or the text is over a limit.",
        422: "The body or the row has the wrong form.",
        429: "Too many rows are waiting; see Retry-After.",
        500: "The row could not be computed.",
        503: "Starting or stopping; see Retry-After.",
    }.items()
}


def status_of(error: CharrmError) -> int:
    """Return the HTTP status of an error's class, or of its nearest listed base."""
    return next((STATUS[cls] for cls in type(error).__mro__ if cls in STATUS), 500)


def create_app(settings: Settings, dispatch: Dispatch) -> FastAPI:
    """Build the application around a dispatch, which it starts and stops."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        dispatch.start()
        yield
        await asyncio.to_thread(dispatch.stop)

    app = FastAPI(
        title="charrm",
        version=charrm.__version__,
        summary="The exact score of a CharacterEval row by BaichuanCharRM",
        lifespan=lifespan,
        redoc_url=None,
    )

    @app.exception_handler(CharrmError)
    async def on_charrm_error(_: Request, error: CharrmError) -> Response:
        retry = {"Retry-After": str(RETRY_AFTER_SECONDS)} if isinstance(error, ServiceError) else {}
        return _json(_error(error.kind, error.message), status_of(error), retry)

    @app.exception_handler(HTTPException)
    async def on_http_error(_: Request, error: HTTPException) -> Response:
        kind = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        return _json(_error(kind, str(error.detail)), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def on_bug(_: Request, error: Exception) -> Response:
        return _json(_error("internal_error", "the server failed; its log says how."), 500)

    @app.post(
        "/v1/score",
        response_model=Evidence,
        responses=_ERRORS,
        openapi_extra=_body(RowIn),
        summary="Score one row",
    )
    async def score(request: Request) -> Response:
        row = single_row(parse_row(parse_json(await _read_body(request, settings))))
        result = first(await _collect(request, dispatch.submit([row]))).to_json()
        del result["index"], result["ok"]
        return _json(result)

    @app.post(
        "/v1/score/batch",
        response_model=BatchOut,
        responses=_ERRORS,
        openapi_extra=_body(BatchIn),
        summary="Score rows; a bad row fails alone",
        description="With `Accept: application/x-ndjson` one line per row, as it finishes.",
    )
    async def score_batch(request: Request) -> Response:
        values = batch_rows(parse_json(await _read_body(request, settings)))
        places: list[tuple[int, str | None]] = []
        rows: list[Row | RowError] = []
        for index, value in enumerate(values):
            for metric, row in expand(value):
                places.append((index, metric))
                rows.append(row)
        if len(rows) > settings.max_rows:
            raise TooLargeRequest(
                f"rows: {len(rows)} scores are asked for, the limit is {settings.max_rows} a "
                "request; send several requests."
            )
        job = dispatch.submit(rows)
        if "application/x-ndjson" in request.headers.get("accept", ""):
            return StreamingResponse(_lines(job, places), media_type="application/x-ndjson")
        results = await _collect(request, job)
        answers = [_in_batch(result, places) for result in results]
        digest = dispatch.ready_scorer().identity.digest
        return _json({"results": answers, "identity": digest})

    @app.get("/v1/identity", responses={503: _ERRORS[503]}, summary="What every score is made of")
    async def identity() -> Response:
        return _json(dispatch.ready_scorer().identity.to_json())

    @app.get("/health/live", summary="The process answers")
    async def live() -> Response:
        return _json({"status": "live"})

    @app.get(
        "/health/ready",
        responses={503: _ERRORS[503]},
        summary="The model is loaded and its warm-up score matched",
    )
    async def ready() -> Response:
        return _json({"status": "ready", "identity": dispatch.ready_scorer().identity.digest})

    _document_bodies(app)
    return app


async def _read_body(request: Request, settings: Settings) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > settings.max_body_bytes:
            raise TooLargeRequest(
                f"the body is over the limit of {settings.max_body_bytes} bytes; send fewer rows."
            )
    return bytes(body)


async def _collect(request: Request, job: Job) -> list[Result]:
    """Wait for all results; a client that leaves takes its waiting rows with it."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        job.cancel()

    watcher = asyncio.create_task(watch())
    try:
        results = [result async for result in job]
    finally:
        watcher.cancel()
    if len(results) != len(job.rows):
        raise ServiceError("the client left before its rows were scored.")
    return results


async def _lines(job: Job, places: list[tuple[int, str | None]]) -> AsyncIterator[bytes]:
    """Yield one JSON line per result; an early end becomes a last line, never a silent stop."""
    try:
        async for result in job:
            yield _dump(_in_batch(result, places)) + b"\n"
    except CharrmError as error:
        yield _dump(_error(error.kind, error.message)) + b"\n"


def _in_batch(result: Result, places: list[tuple[int, str | None]]) -> dict[str, Any]:
    index, metric = places[result.index]
    content = result.to_json() | {"index": index}
    if isinstance(result, FailedRow) and metric is not None:
        content["metric"] = metric
    return content


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"kind": kind, "message": message}}


def _json(content: Any, status: int = 200, headers: Any = None) -> Response:
    return Response(_dump(content), status, headers, media_type="application/json")


def _dump(content: Any) -> bytes:
    """Numbers round-trip the double exactly; NaN and infinity never leave the process."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False).encode("utf-8")


def _body(model: type[BaseModel]) -> dict[str, Any]:
    """Document a body that the route reads itself, row by row."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _document_bodies(app: FastAPI) -> None:
    """Add the body schemas, which no route declares as a parameter, to the generated document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        for model in (RowIn, BatchIn):
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schema.pop("$defs", None)
            document["components"]["schemas"][model.__name__] = schema
        return document

    app.openapi = openapi  # type: ignore[method-assign]
