"""The published files at their pinned commits, and how they get here: download or local folder.

The repositories state no licence: their files are fetched by whoever runs the harness and are never
part of it. A file counts only when the digest of all its bytes is the pinned one; until then it has
another name (`.part` while it grows, `.rejected` when its digest is wrong).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import httpx
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from charrm.errors import BadFile, CharrmError, Unreachable

HOST = "https://raw.githubusercontent.com"
STAND_IN = "STAND-IN.json"
"""Marker file at the root of a set whose answers no model wrote (see `golden.synth`)."""

_CHUNK = 1 << 20
_PAUSES = (1.0, 4.0)  # seconds before the second and third attempt at a file
_TIMEOUT = httpx.Timeout(30.0, connect=10.0)
_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class FileDigest:
    """Digests over all bytes of one file."""

    sha256: str
    git_blob_sha1: str
    bytes: int

    @classmethod
    def of(cls, path: Path) -> FileDigest:
        """Read a file once, without holding it in memory. Raises BadFile."""
        sha256 = hashlib.sha256()
        try:
            with path.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                blob = hashlib.sha1(b"blob %d\0" % size)
                while chunk := stream.read(_CHUNK):
                    sha256.update(chunk)
                    blob.update(chunk)
                if stream.tell() != size:
                    raise BadFile(f"{path}: changed while it was read; let it settle, then retry.")
        except OSError as error:
            raise BadFile(f"{path}: cannot be read: {error.strerror or error}.") from error
        return cls(sha256.hexdigest(), blob.hexdigest(), size)


@dataclass(frozen=True)
class Pin:
    """One published file: where it lies in the set and in its repository, and what it must be.

    `sha256` and `bytes` are None where only the git blob id has been recorded.
    """

    target: str
    repository: str
    commit: str
    path: str
    git_blob_sha1: str
    sha256: str | None = None
    bytes: int | None = None

    @property
    def url(self) -> str:
        return f"{HOST}/{self.repository}/{self.commit}/{self.path}"

    @property
    def expected(self) -> str:
        """Every recorded fact, for messages."""
        facts = [f"git blob {self.git_blob_sha1}"]
        if self.sha256 is not None:
            facts.append(f"sha256 {self.sha256}")
        if self.bytes is not None:
            facts.append(f"{self.bytes} bytes")
        return ", ".join(facts)

    def differences(self, digest: FileDigest) -> list[str]:
        """Return each recorded fact that a file does not have; none when it is this file."""
        facts = (
            ("git blob", digest.git_blob_sha1, self.git_blob_sha1),
            ("sha256", digest.sha256, self.sha256),
            ("bytes", digest.bytes, self.bytes),
        )
        return [f"{n} {f}, expected {e}" for n, f, e in facts if e is not None and f != e]

    def mismatch(self, path: Path) -> str | None:
        """Return what is wrong with a file that should be this one; None if nothing. BadFile."""
        wrong = self.differences(FileDigest.of(path))
        if not wrong:
            return None
        with path.open("rb") as stream:
            pointer = stream.read(len(_POINTER)) == _POINTER
        note = "a Git-LFS pointer, not the file itself (`git lfs pull`): " if pointer else ""
        return f"found {note}{'; '.join(wrong)}"


def _dataset(path: str, blob: str, sha256: str | None = None, size: int | None = None) -> Pin:
    commit = "fa232e6a9c3ec5d074240333fbffdf015b79533f"
    return Pin(path, "morecry/CharacterEval", commit, path, blob, sha256, size)


RESULT_FILES: dict[str, Pin] = {
    model: _dataset(f"results/generation_trans_{model}.jsonl", blob)
    for model, blob in {
        "baichuan_7b": "418abb45acc56804d84e523f69c1e12b0885fdd5",
        "chatglm3_6b": "7b4cc607daa2d7d7064406b596d3f5080a07045a",
        "internlm_7b": "fed9f05cc0ec999fddcc3253a55f6275081d0364",
        "qwen_7b": "ca63196bdeb7671c4df71c11d6058f4b5ccb3f63",
        "xverse_7b": "506b1570dbdd9177d143b9824642c99bfc062de5",
    }.items()
}
"""Model name as in the file name -> its published, already transformed generations."""

PAPER_NAMES: dict[str, str] = {
    "baichuan_7b": "Baichuan2-7B",
    "chatglm3_6b": "ChatGLM3-6B",
    "internlm_7b": "InternLM-7B",
    "qwen_7b": "Qwen-7B",
    "xverse_7b": "XVERSE-7B",
}
"""Model name as in the file name -> line of the paper's table."""

TEST_DATA = _dataset(
    "data/test_data.jsonl",
    "90d3f6d2710d3dceea3b770783385a04c1b7f5ab",
    "6d9723a1484f1d2739bcf388c7960abe1933b7a5a1fddae0170cc9ea7c66dcd8",
    3458303,
)
PROFILES = _dataset(
    "data/character_profiles.json",
    "095c9bab3fdd25ea5508b0010b6c46645617f4fc",
    "d9b4c9f7ab63b89b3c348ae88b43c87872f0f6a5cb06d7f31cbe64a630e6434e",
    191240,
)
ID_TO_METRIC = _dataset(
    "data/id2metric.jsonl",
    "c1f75a34f81196f5639f4e7289f7ad6eb9e47322",
    "df80ee716124a7deacc6f24ee372a4600b719cdaa79f01cefcdfb286359f1801",
    702289,
)
DATA_FILES = (TEST_DATA, PROFILES, ID_TO_METRIC)

ROW_LEVEL_ANCHOR = Pin(
    "anchor/blank_count.xlsx",
    "wang-zr12/LLM-MAS",
    "368c0aff689e28bd0aa90fd13de1ac2ffb40ff01",
    "middle_results/blank_count.xlsx",
    "8ca0016f4fa003e0ce02370a6f46610a109626b4",
    "953449b48a0160d3f94fca1597f1f1767e808e9347e3c623334418b575d65671",
)

PINS: tuple[Pin, ...] = (*DATA_FILES, *RESULT_FILES.values(), ROW_LEVEL_ANCHOR)


@dataclass(frozen=True)
class Fetched:
    """One verified file of the set, and how it came there."""

    pin: Pin
    path: Path
    how: Literal["present", "copied", "downloaded"]

    def __str__(self) -> str:
        return f"{self.how} and verified: {self.path}"


def fetch(
    target: Path,
    source: Path | None = None,
    *,
    pins: Sequence[Pin] = PINS,
    client: httpx.Client | None = None,
    console: Console | None = None,
) -> tuple[Fetched, ...]:
    """Bring the pinned files to `<target>/{data,results,anchor}/`, each verified, in pin order.

    A verified file is left as it is. With `source` (a flat folder, a clone of the repository or
    another set) files are copied and nothing is downloaded; otherwise they come by https and an
    interrupted download is continued by the next call. `client` replaces the HTTP client, `console`
    the terminal on stderr that shows progress.

    Every file is tried before an error is raised, and the error lists each file that is missing:
    BadFile for a wrong digest, a full disk, a file that `source` lacks, or a stand-in set at
    `target`; Unreachable when nothing worse happened than that the server did not answer.
    """
    if (target / STAND_IN).exists():
        raise BadFile(f"{target}: holds a stand-in set ({STAND_IN}); fetch into another folder.")
    if source is not None and not source.is_dir():
        raise BadFile(f"{source}: found no such folder; name the one that holds the files.")
    done: list[Fetched] = []
    failed: list[tuple[Pin, CharrmError]] = []
    unreachable = False
    console = console or Console(stderr=True)
    with contextlib.ExitStack() as stack:
        if client is None and source is None:
            client = stack.enter_context(httpx.Client(timeout=_TIMEOUT, follow_redirects=True))
        progress = stack.enter_context(_progress(console))
        for pin in pins:
            final = target / pin.target
            try:
                if final.exists():
                    done.append(_accept_present(pin, final))
                elif source is not None:
                    done.append(_copy(pin, source, final))
                elif unreachable:
                    raise Unreachable("not tried: the server did not answer for an earlier file.")
                else:
                    assert client is not None
                    done.append(_download(pin, client, final, progress))
            except CharrmError as error:
                unreachable = unreachable or isinstance(error, Unreachable)
                failed.append((pin, error))
    if failed:
        raise _missing(target, len(pins), failed)
    return tuple(done)


def _missing(target: Path, total: int, failed: list[tuple[Pin, CharrmError]]) -> CharrmError:
    lines = [
        f"{len(failed)} of {total} files are not there. Get each from its address on a machine "
        "that can, copy it to the path below (or all of them into one folder, named with --from), "
        "then fetch again:"
    ]
    for pin, error in failed:
        lines += [
            f"  {target / pin.target}",
            f"    why:      {error.message}",
            f"    expected: {pin.expected}",
            f"    address:  {pin.url}",
        ]
    worse = any(not isinstance(error, Unreachable) for _, error in failed)
    return (BadFile if worse else Unreachable)("\n".join(lines))


def _accept_present(pin: Pin, final: Path) -> Fetched:
    problem = pin.mismatch(final)
    if problem is not None:
        raise BadFile(f"{problem}; it was left alone: move or delete it, then fetch again.")
    return Fetched(pin, final, "present")


def _copy(pin: Pin, source: Path, final: Path) -> Fetched:
    """Copy the first candidate that verifies; what is checked is the copy, not the original."""
    names = dict.fromkeys((pin.target, pin.path, Path(pin.path).name))
    candidates = [path for name in names if (path := source / name).is_file()]
    if not candidates:
        raise BadFile(f"{source} holds none of {', '.join(names)}.")
    problems = []
    part = _beside(final, ".part")
    for path in candidates:
        with _writing(part), path.open("rb") as original, part.open("wb") as copy:
            shutil.copyfileobj(original, copy, _CHUNK)
            _sync(copy)
        problem = pin.mismatch(part)
        if problem is None:
            os.replace(part, final)
            return Fetched(pin, final, "copied")
        part.unlink()
        problems.append(f"{path}: {problem}")
    raise BadFile("; ".join(problems) + "; nothing was copied.")


def _download(pin: Pin, client: httpx.Client, final: Path, progress: Progress) -> Fetched:
    part = _beside(final, ".part")
    resumed = _receive(pin, client, part, progress)
    problem = pin.mismatch(part)
    if problem is not None and resumed:  # what an earlier call left may be at fault
        part.unlink()
        _receive(pin, client, part, progress)
        problem = pin.mismatch(part)
    if problem is not None:
        rejected = _beside(final, ".rejected")
        os.replace(part, rejected)
        raise BadFile(f"the download {problem}; it was kept as {rejected.name}.")
    os.replace(part, final)
    return Fetched(pin, final, "downloaded")


class _Interrupted(Exception):
    """The server failed in a way that another attempt may mend."""


def _receive(pin: Pin, client: httpx.Client, part: Path, progress: Progress) -> bool:
    """Fill `part` in up to three attempts; return whether some of it was there before."""
    resumed = False
    for pause in (*_PAUSES, None):
        try:
            return _stream(pin, client, part, progress) or resumed
        except (httpx.TransportError, _Interrupted) as error:
            resumed = resumed or part.exists()
            if pause is None:
                kept = f"; {part.stat().st_size} bytes are kept" if part.exists() else ""
                raise Unreachable(
                    f"no complete answer in {len(_PAUSES) + 1} attempts: "
                    f"{error or type(error).__name__}{kept}."
                ) from error
            time.sleep(pause)
        except httpx.HTTPError as error:
            raise Unreachable(f"{error or type(error).__name__}.") from error
    raise AssertionError("the last attempt returns or raises")


def _stream(pin: Pin, client: httpx.Client, part: Path, progress: Progress) -> bool:
    """Append to `part`, or write it anew when the server sends the whole; return which it was."""
    start = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"}  # byte ranges count what is stored
    if start:
        headers["Range"] = f"bytes={start}-"
    with client.stream("GET", pin.url, headers=headers) as answer:
        if start and answer.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            return True  # nothing is left to send; the digest decides
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise BadFile("the server answered 404: the file is no longer at its address.")
        if answer.status_code not in (httpx.codes.OK, httpx.codes.PARTIAL_CONTENT):
            raise _Interrupted(f"the server answered {answer.status_code}")
        partial = answer.status_code == httpx.codes.PARTIAL_CONTENT
        if partial and not answer.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            part.unlink(missing_ok=True)
            raise _Interrupted("the server sent another range than asked for")
        begin = start if partial else 0
        length = answer.headers.get("Content-Length", "")
        total = begin + int(length) if length.isdecimal() else pin.bytes
        task = progress.add_task(pin.target, total=total, completed=begin)
        with _writing(part), part.open("ab" if partial else "wb") as stream:
            try:
                for chunk in answer.iter_bytes():
                    stream.write(chunk)
                    progress.advance(task, len(chunk))
            finally:
                _sync(stream)  # also what came before an interruption
        received = part.stat().st_size
    if total is not None and received < total:
        raise _Interrupted(f"the answer ended at byte {received} of {total}")
    return partial


def _beside(final: Path, suffix: str) -> Path:
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadFile(f"{final.parent}: cannot be made: {error.strerror or error}.") from error
    return final.with_name(final.name + suffix)


@contextlib.contextmanager
def _writing(part: Path) -> Iterator[None]:
    """Turn a disk error into BadFile, and give back the space when there is too little of it."""
    try:
        yield
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        where = error.filename or part
        raise BadFile(f"{where}: {error.strerror or error}; {part.name} was removed.") from error


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)
