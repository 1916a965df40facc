"""The reference `official`: the checkpoint folder's own code, checked, in a process of its own.

The harness reads the code's bytes once, compares their digests with the audited ones and hands
these very bytes to `official_worker`; it never imports them.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from charrm.errors import (
    BadFile,
    CharrmError,
    CheckpointError,
    CheckpointIncomplete,
    IdentityMismatch,
    RowError,
    error_from_kind,
)
from golden.sides import Side, digest_ids, input_text
from golden.sources import CheckpointDigests
from golden.structure import ReplayRow

TRUST_FLAG = "--trust-checkpoint-code"
WORKER = Path(__file__).with_name("official_worker.py")

# The audited release, see charrm.identity.AUDITED_REVISION.
AUDITED_CODE = {
    "configuration_baichuan.py": "6ff61d96ca508b2f4f63e8dee3314baedab04a235e86ef352b7db19eff3c7cf4",
    "modeling_baichuan.py": "64c46c28f4ea2d0c97744883a044ec10e0d0d05ed4d53d40c7bb562f47a5c934",
    "tokenization_baichuan.py": "f21aa0414ac59ce8a8368582fb5961884272714723a42428ee405c6882cbb061",
}
_LONGEST_ANSWER = 1 << 20  # bytes; 4,096 ids and the bits of a hidden state are a tenth of it
_TAIL = 2000  # bytes of the worker's stderr in an error


@dataclass(frozen=True)
class CheckpointCode:
    """The code of a checkpoint folder, as read once."""

    files: Mapping[str, bytes]
    digests: Mapping[str, str]

    @property
    def is_audited(self) -> bool:
        """Nothing but the audited files."""
        return self.digests == AUDITED_CODE

    @classmethod
    def read(cls, folder: Path, trust: bool) -> CheckpointCode:
        """Read the three audited files; with `trust`, every .py at the top of the folder.

        Raises CheckpointIncomplete, and IdentityMismatch with both digests of each file that is
        not the audited one, unless trusted.
        """
        missing = [name for name in AUDITED_CODE if not (folder / name).is_file()]
        if missing:
            raise CheckpointIncomplete(
                f"{folder}: missing {', '.join(missing)}; the official reference runs the "
                "checkpoint's own code. Get it from the audited revision."
            )
        names = sorted({p.name for p in folder.glob("*.py")} if trust else AUDITED_CODE)
        try:
            files = {name: (folder / name).read_bytes() for name in names}
        except OSError as error:
            raise CheckpointIncomplete(f"{error.filename}: {error.strerror}.") from error
        code = cls(files, {name: _sha256(content) for name, content in files.items()})
        if not code.is_audited and not trust:
            raise _refused(folder, code.digests.items())
        return code


class OfficialSource:
    """Official tokenizer and model of a checkpoint folder; a second model in memory.

    `log` keeps what the worker writes to stderr. Both times are in seconds, for loading the
    weights and for one row. Raises CheckpointError kinds; CharrmError with the end of the worker's
    stderr when it crashes, hangs or answers anything else than expected.
    """

    name = "official"

    def __init__(
        self,
        folder: Path,
        *,
        trust: bool = False,
        device: str = "cpu",
        log: Path | None = None,
        start_timeout: float = 3600.0,
        row_timeout: float = 3600.0,
    ) -> None:
        self._folder = folder.resolve()
        self._row_timeout = row_timeout
        code = CheckpointCode.read(self._folder, trust)
        files = CheckpointDigests.of(self._folder)
        self._worker = _Worker(log)
        modules = {Path(n).stem: base64.b64encode(c).decode() for n, c in code.files.items()}
        request = {"folder": str(self._folder), "device": device, "modules": modules}
        about = self._ask(request, start_timeout).get("about")
        try:
            if not isinstance(about, dict):
                raise self._worker.failure("sent an unknown first answer")
            files.check_unchanged()
        except CharrmError:
            self.close()
            raise
        self._identity = {
            "name": self.name,
            "code": dict(code.digests),
            "code_status": "audited" if code.is_audited else "trusted by the user, not audited",
            "files": dict(files.by_name),
            "worker_sha256": _sha256(WORKER.read_bytes()),
            **about,
        }

    def identity(self) -> dict[str, Any]:
        """Return code, files, versions and environment of the worker."""
        return dict(self._identity)

    def tokenize(self, row: ReplayRow) -> Side:
        """Return ids, tokens and dropped."""
        return _side(self._ask_for("tokenize", row))

    def score(self, row: ReplayRow) -> Side:
        """Return everything; the hidden state and logit as a hook on the head saw them."""
        return _side(self._ask_for("score", row))

    def close(self) -> None:
        """End the worker."""
        self._worker.close()

    def _ask_for(self, operation: str, row: ReplayRow) -> dict[str, Any]:
        request = {"op": operation, "text": input_text(row)}
        answer = self._ask(request, self._row_timeout)
        wanted = {"ids": list, "dropped": int}
        if operation == "score":
            wanted |= {"hidden": str, "logit": float, "p": float, "score": float}
        found = {name: type(value) for name, value in answer.items() if name != "n"}
        if found != wanted:
            self.close()
            raise self._worker.failure(f"sent {found}, expected {wanted}")
        return answer

    def _ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Return the answer. A row's error leaves the worker at work, any other ends it."""
        try:
            answer = self._worker.ask(request, timeout)
            if "refused" in answer:
                raise _refused(self._folder, [(name, None) for name in answer["refused"]])
            if "error" not in answer:
                return answer
            error = answer["error"]
            if error["kind"] == "not_started":
                raise CheckpointError(self._worker.explain(f"cannot start: {error['message']}"))
            raise error_from_kind(**error)
        except RowError:
            raise
        except BaseException:
            self.close()
            raise


class _Worker:
    """The process: one JSON line to it, one back, each with the same number."""

    def __init__(self, log: Path | None) -> None:
        self._log = _open_log(log)
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-u", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **offline},
            start_new_session=True,  # an interrupt is for the harness, which then closes it
        )
        self._count = 0
        self._tail = ""
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send one request and return its answer, which is an object with the request's number."""
        assert self._process.stdin is not None
        self._count += 1
        try:
            self._process.stdin.write(json.dumps({"n": self._count, **request}).encode() + b"\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise self.failure(f"gave no answer within {timeout:g} s") from None
        except (OSError, ValueError):  # it ended, or was closed before
            line = b""
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            raise self.failure("ended")
        try:
            answer = json.loads(line, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or answer.get("n") != self._count:
            raise self.failure(f"sent {line[:80]!r}, which is no answer")
        return answer

    def failure(self, what: str) -> CharrmError:
        """Return the error for what the worker did."""
        return CharrmError(self.explain(what))

    def explain(self, what: str) -> str:
        """Return what happened, the exit status and the end of stderr."""
        if not self._log.closed:
            # Not seek: the worker shares the position and would write over its own lines.
            size = os.fstat(self._log.fileno()).st_size
            tail = os.pread(self._log.fileno(), _TAIL, max(0, size - _TAIL))
            self._tail = tail.decode("utf-8", "replace").strip()
        status = self._process.poll()
        ended = "" if status is None else f" (exit status {status})"
        return f"the official worker {what}{ended}; the end of its stderr:\n{self._tail or '-'}"

    def close(self) -> None:
        """Kill the process and release everything; may be called again."""
        if self._log.closed:
            return
        self.explain("")
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            assert stream is not None
            with contextlib.suppress(OSError):  # what was not sent has no reader any more
                stream.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline(_LONGEST_ANSWER):
            self._lines.put(line)
        self._lines.put(b"")


def _open_log(path: Path | None) -> IO[bytes]:
    try:
        if path is None:
            return tempfile.TemporaryFile()
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a+b")
    except OSError as error:
        raise BadFile(f"{path}: the worker's log cannot be opened: {error.strerror}.") from error


def _side(answer: Mapping[str, Any]) -> Side:
    numbers = {name: answer.get(name) for name in ("logit", "p", "score")}
    hidden = answer.get("hidden")
    return Side(
        ids=digest_ids(answer["ids"]),
        tokens=len(answer["ids"]),
        dropped=answer["dropped"],
        hidden=None if hidden is None else _sha256(bytes.fromhex(hidden)),
        **numbers,
    )


def _refused(folder: Path, files: Iterable[tuple[str, str | None]]) -> IdentityMismatch:
    lines = ""
    for name, digest in files:
        path = folder / name
        found = digest or (_sha256(path.read_bytes()) if path.is_file() else "no file")
        expected = AUDITED_CODE.get(name, "none of this name")
        if digest is None or found != expected:
            lines += f"\n  {name}: found {found}, expected {expected}"
    return IdentityMismatch(
        f"{folder}: refused to run code that is not the audited one (sha256):{lines}\n"
        f"Read the code; {TRUST_FLAG} runs it with your rights, in its own process."
    )


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
