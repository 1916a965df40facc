"""The one worker that owns the model, and the queue in front of it.

Jobs take turns row by row, so a large batch does not hold back a single row. Every row of every
job is answered: with its result, or with the reason why there is none.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from charrm.errors import (
    CharrmError,
    EngineFailed,
    IdentityMismatch,
    Overloaded,
    RowError,
    ShuttingDown,
    Starting,
)
from charrm.protocol import Row
from charrm.results import FailedRow, Result, ScoredRow
from charrm.scorer import Scorer

log = logging.getLogger("uvicorn.error")

WARM_UP = Row(
    profile={"姓名": "阿岚", "性格": "话少"},
    context="阿岚：船几时开？\n老舵手：等潮水。",
    model_output="阿岚：那就等。",
    metric="Fluency",
)


class Job:
    """Rows of one request on their way through the worker; iterate it for results in order."""

    def __init__(self, rows: Sequence[Row | RowError]) -> None:
        self.rows = rows
        self.cancelled = False
        self.answered = 0
        self.results: Iterator[Result] | None = None  # the worker's
        self._loop = asyncio.get_running_loop()
        self._answers: asyncio.Queue[Result | CharrmError | None] = asyncio.Queue()

    def cancel(self) -> None:
        """Tell the worker that nobody waits any more."""
        self.cancelled = True

    async def __aiter__(self) -> AsyncIterator[Result]:
        """Yield results as they come; raises the error that ended the job early."""
        try:
            while (answer := await self._answers.get()) is not None:
                if isinstance(answer, CharrmError):
                    raise answer
                yield answer
        finally:
            self.cancel()

    def post(self, answer: Result | CharrmError | None) -> None:
        """Hand an answer over from the worker's thread; None ends the job."""
        try:
            self._loop.call_soon_threadsafe(self._answers.put_nowait, answer)
        except RuntimeError:
            self.cancelled = True  # the loop is closed: the process is ending


class Dispatch:
    """Opens the scorer in its own thread, proves a warm-up score, then serves jobs."""

    def __init__(self, open_scorer: Callable[[], Scorer], max_waiting_rows: int) -> None:
        self._open_scorer = open_scorer
        self._max_waiting_rows = max_waiting_rows
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.RLock()  # a signal handler may interrupt a submit
        self._waiting_rows = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self.scorer: Scorer | None = None  # set once it is ready
        self.failure: BaseException | None = None  # why it will never be ready
        self.on_failure: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Start to open the model; returns at once."""
        self._thread.start()

    def begin_stop(self) -> None:
        """Refuse new rows and answer what waits with ShuttingDown after the row in flight."""
        with self._lock:
            if not self._stopping:
                self._stopping = True
                self._jobs.put(None)

    def stop(self) -> None:
        """Begin to stop, and wait until every row is answered."""
        self.begin_stop()
        if self.scorer is not None:
            self._thread.join()

    def submit(self, rows: Sequence[Row | RowError]) -> Job:
        """Queue rows. Raises Starting, ShuttingDown, Overloaded."""
        with self._lock:
            if self._stopping:
                raise ShuttingDown("the server is stopping; send the request to another or later.")
            self.ready_scorer()
            if self._waiting_rows + len(rows) > self._max_waiting_rows:
                raise Overloaded(
                    f"{self._waiting_rows} rows are waiting, {len(rows)} more would be over the "
                    f"limit of {self._max_waiting_rows}; send them again later."
                )
            self._waiting_rows += len(rows)
            job = Job(rows)
            self._jobs.put(job)  # under the lock: never behind the end mark
            return job

    def ready_scorer(self) -> Scorer:
        """Return the scorer once its warm-up matched. Raises Starting."""
        if self.scorer is None:
            raise Starting("the model is loading; /health/ready tells when it can score.")
        return self.scorer

    def _run(self) -> None:
        try:
            scorer = self._open_scorer()
            check_warm_up(scorer)
        except BaseException as error:  # also MemoryError: the process must say why and end
            self.failure = error
            self.on_failure()
            return
        self.scorer = scorer
        log.info("ready, warm-up matched; identity %s", scorer.identity.digest)
        while (job := self._jobs.get()) is not None:
            self._one_turn(scorer, job)
        while not self._jobs.empty():
            waiting = self._jobs.get()
            if waiting is not None:
                waiting.post(ShuttingDown("the server stopped before this row's turn."))

    def _one_turn(self, scorer: Scorer, job: Job) -> None:
        """Score one row of the job and put the job back, or end it."""
        if job.cancelled:
            self._release(len(job.rows) - job.answered)
            job.post(None)
            return
        try:
            job.results = job.results or scorer.stream(job.rows)
            result: Result | None = next(job.results, None)
        except Exception as error:
            failure = EngineFailed(f"the worker failed: {type(error).__name__}: {error}")
            for index in range(job.answered, len(job.rows)):
                self._answer(job, FailedRow(index, failure))
            result = None
        if result is None:
            job.post(None)
        else:
            self._answer(job, result)
            self._jobs.put(job)

    def _answer(self, job: Job, result: Result) -> None:
        job.answered += 1
        self._release(1)
        job.post(result)

    def _release(self, rows: int) -> None:
        with self._lock:
            self._waiting_rows -= rows


def check_warm_up(scorer: Scorer) -> None:
    """Score a fixed row alone and in company; all bits must match. Raises IdentityMismatch."""

    def bits(result: Result) -> Any:
        if isinstance(result, FailedRow):
            raise result.error
        return result.p, result.logit, result.score

    alone = [bits(r) for r in scorer.score([WARM_UP])]
    company = [bits(r) for r in scorer.score([WARM_UP, WARM_UP])]
    if company != alone * 2:
        raise IdentityMismatch(
            f"the warm-up row gave {alone} alone and {company} in company; this machine does not "
            "compute the same row twice alike, so its scores prove nothing."
        )


def first(results: Sequence[Result]) -> ScoredRow:
    """Return the only result of a one-row job, or raise its error."""
    (result,) = results
    if isinstance(result, FailedRow):
        raise result.error
    return result
