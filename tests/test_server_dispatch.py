"""The worker: turns, limits, and an answer for every row whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine, fake_outcome, fake_scorer, row

from charrm import Row
from charrm.engines import Outcome
from charrm.errors import (
    CheckpointIncomplete,
    IdentityMismatch,
    InvalidRow,
    Overloaded,
    ShuttingDown,
    Starting,
)
from charrm.results import FailedRow
from server.dispatch import Dispatch, Job

ROW = Row(**row())
WARM_UP_ROWS = 3


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("never happened")


def run(
    checkpoint: Path,
    engine: FakeEngine,
    body: Callable[[Dispatch], Coroutine[Any, Any, None]],
    max_waiting_rows: int = 100,
) -> None:
    async def whole() -> None:
        dispatch = Dispatch(lambda: fake_scorer(checkpoint, engine), max_waiting_rows)
        dispatch.start()
        await until(lambda: dispatch.scorer is not None)
        try:
            await body(dispatch)
        finally:
            engine.gate.set()
            await asyncio.to_thread(dispatch.stop)

    asyncio.run(whole())


def test_a_single_row_does_not_wait_for_a_large_batch(demo_checkpoint: Path) -> None:
    engine = FakeEngine()

    async def body(dispatch: Dispatch) -> None:
        engine.gate.clear()
        batch = dispatch.submit([ROW] * 50)
        single = dispatch.submit([ROW])
        engine.gate.set()
        assert [r.ok async for r in single] == [True]
        assert batch.answered < 50
        assert [r.index async for r in batch] == list(range(50))

    run(demo_checkpoint, engine, body)


def test_a_cancelled_job_frees_the_worker_and_the_queue(demo_checkpoint: Path) -> None:
    engine = FakeEngine()

    async def body(dispatch: Dispatch) -> None:
        engine.gate.clear()
        job = dispatch.submit([ROW] * 100)
        with pytest.raises(Overloaded, match="100 rows are waiting"):
            dispatch.submit([ROW])
        job.cancel()
        engine.gate.set()
        assert len([r async for r in job]) <= 1
        assert [r.ok async for r in dispatch.submit([ROW] * 100)] == [True] * 100
        assert engine.rows <= WARM_UP_ROWS + 101

    run(demo_checkpoint, engine, body)


def test_stopping_answers_what_waits(demo_checkpoint: Path) -> None:
    engine = FakeEngine()

    async def body(dispatch: Dispatch) -> None:
        engine.gate.clear()
        first, second = dispatch.submit([ROW] * 5), dispatch.submit([ROW])
        stop = asyncio.create_task(asyncio.to_thread(dispatch.stop))
        await until(lambda: dispatch._stopping)
        with pytest.raises(ShuttingDown):
            dispatch.submit([ROW])
        engine.gate.set()
        await stop
        for job in (first, second):
            with pytest.raises(ShuttingDown):
                [r async for r in job]

    run(demo_checkpoint, engine, body)


def test_rows_that_came_as_errors_keep_their_place(demo_checkpoint: Path) -> None:
    async def body(dispatch: Dispatch) -> None:
        job = dispatch.submit([ROW, InvalidRow("planted"), ROW])
        results = [r async for r in job]
        assert [r.ok for r in results] == [True, False, True]
        assert isinstance(results[1], FailedRow)
        assert results[1].error.message == "planted"

    run(demo_checkpoint, FakeEngine(), body)


def test_a_scorer_that_breaks_answers_the_rows_that_are_left(demo_checkpoint: Path) -> None:
    async def body(dispatch: Dispatch) -> None:
        scorer = dispatch.ready_scorer()
        original = scorer.stream

        def breaking(rows: Any) -> Any:
            yield next(original(rows))
            raise ZeroDivisionError("planted")

        scorer.stream = breaking  # type: ignore[method-assign]
        results = [r async for r in dispatch.submit([ROW] * 3)]
        assert [r.ok for r in results] == [True, False, False]
        assert [r.index for r in results] == [0, 1, 2]
        scorer.stream = original  # type: ignore[method-assign]
        assert [r.ok async for r in dispatch.submit([ROW])] == [True]

    run(demo_checkpoint, FakeEngine(), body)


def test_nothing_is_scored_before_the_warm_up(demo_checkpoint: Path) -> None:
    engine = FakeEngine()
    engine.gate.clear()
    dispatch = Dispatch(lambda: fake_scorer(demo_checkpoint, engine), 10)
    dispatch.start()
    with pytest.raises(Starting):
        dispatch.submit([ROW])
    engine.gate.set()
    dispatch.stop()


def _failure(open_scorer: Callable[[], Any]) -> BaseException | None:
    async def whole() -> BaseException | None:
        dispatch = Dispatch(open_scorer, 10)
        told = asyncio.Event()
        loop = asyncio.get_running_loop()
        dispatch.on_failure = lambda: loop.call_soon_threadsafe(told.set) and None
        dispatch.start()
        await asyncio.wait_for(told.wait(), 30)
        with pytest.raises(Starting):
            dispatch.submit([ROW])
        return dispatch.failure

    return asyncio.run(whole())


def test_a_model_that_cannot_be_opened_is_told(demo_checkpoint: Path) -> None:
    def broken() -> Any:
        raise CheckpointIncomplete("planted")

    assert isinstance(_failure(broken), CheckpointIncomplete)


def test_a_warm_up_that_does_not_match_is_never_ready(demo_checkpoint: Path) -> None:
    calls = iter(range(100))

    def drifting(ids: Any) -> Outcome:
        outcome = fake_outcome(ids)
        return Outcome(outcome.p, outcome.logit + next(calls))

    failure = _failure(lambda: fake_scorer(demo_checkpoint, FakeEngine(drifting)))
    assert isinstance(failure, IdentityMismatch)
    assert "warm-up" in failure.message


def test_a_job_outlives_a_closed_loop(demo_checkpoint: Path) -> None:
    async def make() -> Job:
        return Job([ROW])

    job = asyncio.run(make())
    job.post(None)
    assert job.cancelled
