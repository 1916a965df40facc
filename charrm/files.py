"""Files that come in and go out: one JSON document read strictly, text written all or nothing.

`json.load` accepts more than JSON (NaN, repeated keys) and explains less than a person needs; here
every refusal is a BadFile that names the file, what was found, what was expected and what to do.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator
from typing import Any, NoReturn

from charrm.errors import BadFile

StrPath = str | os.PathLike[str]

MAX_DEPTH = 100
"""Deepest nesting read: what is read must also be rendered and written without recursion errors."""

_ENCODING_MARKS = (
    (codecs.BOM_UTF8, "a UTF-8 byte order mark (json.load refuses it as well)", "UTF-8"),
    (codecs.BOM_UTF32_LE, "UTF-32", "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16", "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16", "UTF-16"),
)
_JSON_NAMES = {list: "array", dict: "object"}


class Problems:
    """What is wrong with one file: everything is gathered, the first 20 are printed."""

    _PRINTED = 20

    def __init__(self, path: StrPath) -> None:
        self._path = path
        self._count = 0
        self._lines: list[str] = []

    def add(self, where: str, text: str) -> None:
        """Note one problem; `where` names the row and field."""
        self._count += 1
        if self._count <= self._PRINTED:
            self._lines.append(f"\n  {where}: {text}")

    def add_strays(self, where: str, value: object) -> None:
        """Note what `json.loads` lets through inside `value` although JSON or sense forbids it."""
        for path, text in _strays(value):
            self.add(f"{where}, {path}" if path else where, text)

    def raise_any(self) -> None:
        """Raise BadFile with the problems noted so far, if there are any."""
        if self._count:
            noun = "problem" if self._count == 1 else "problems"
            rest = self._count - len(self._lines)
            raise BadFile(
                f"{shown(self._path)}: {self._count} {noun}; nothing was taken from the file. "
                "Correct it, or write it again from its source."
                + "".join(self._lines)
                + (f"\n  and {rest} more" if rest else "")
            )


class _RepeatedKeys(dict[str, Any]):
    """An object that named a key more than once; it is refused, so it never reaches a caller."""

    repeated: tuple[str, ...] = ()


def read_array(path: StrPath) -> list[Any]:
    """Return the elements of a file that is one JSON array; raises BadFile.

    Repeated keys and non-finite numbers inside are left to `Problems.add_strays`.
    """
    document = _read(path, list)
    assert isinstance(document, list)
    return document


def read_object(path: StrPath) -> dict[str, Any]:
    """Return the content of a file that is one JSON object; raises BadFile.

    Repeated keys and non-finite numbers inside are left to `Problems.add_strays`.
    """
    document = _read(path, dict)
    assert isinstance(document, dict)
    return document


def write_atomically(path: StrPath, text: str) -> None:
    """Write `text` as UTF-8 so that the file holds either its old content or all of the new.

    A temporary file beside it is written, synced and renamed. Raises BadFile (disk full, no
    permission, a lone surrogate in `text`); then the old file is as it was.
    """
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        _refuse(
            path,
            f"not written: found the lone surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start} of the new text, which has no UTF-8 form. Write it as a JSON escape.",
        )
    target = os.path.realpath(path)  # of a symbolic link the target is replaced, not the link
    folder = os.path.dirname(target)
    temporary = os.path.join(folder, f".charrm-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        try:
            with open(temporary, "xb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            if os.path.exists(target):
                shutil.copymode(target, temporary)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise BadFile(
            f"{shown(path)}: not written: {error.strerror or error} ({len(data)} bytes); the file "
            "is as it was before. Free some space or choose another place, then write again."
        ) from error
    with contextlib.suppress(OSError):  # the rename is done; some file systems cannot sync a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def found(value: object) -> str:
    """Name a JSON value for a message, in one short line that can be printed whatever it holds."""
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return shown(json.dumps(value, ensure_ascii=False))


def shown(text: StrPath) -> str:
    """Cut a text short and escape what has no UTF-8 form or would break the line."""
    text = os.fspath(text).encode("utf-8", "backslashreplace").decode("utf-8")
    text = text.replace("\n", "\\n").replace("\r", "\\r")
    return text if len(text) <= 200 else text[:80] + "..." + text[-80:]


def _read(path: StrPath, kind: type[list[Any]] | type[dict[str, Any]]) -> object:
    try:
        with open(path, "rb") as stream:
            raw = stream.read()
    except OSError as error:
        _refuse(path, f"cannot be read: {error.strerror or error}. Check the path.", error)
    text = _decode(path, raw)
    name = _JSON_NAMES[kind]
    try:
        document = json.loads(text, object_pairs_hook=_build_object)
    except json.JSONDecodeError as error:
        _refuse(path, _explain(text, error, name), error)
    except RecursionError as error:
        _refuse(path, f"nested deeper than {MAX_DEPTH} levels; no benchmark file is.", error)
    except ValueError as error:  # an integer of thousands of digits
        _refuse(path, f"found a number that cannot be read: {error}. Correct it.", error)
    if not isinstance(document, kind):
        hint = "; a single JSON line has to be wrapped in [ ]" if kind is list else ""
        _refuse(path, f"found {found(document)}, expected one JSON {name}{hint}. Check the path.")
    if not document:
        _refuse(path, f"found an empty {name}, expected at least one entry. Check what wrote it.")
    return document


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) == len(pairs):
        return result
    marked = _RepeatedKeys(result)
    names = [name for name, _ in pairs]
    marked.repeated = tuple(name for name in result if names.count(name) > 1)
    return marked


def _decode(path: StrPath, raw: bytes) -> str:
    if not raw.strip():
        _refuse(path, "found an empty file, expected JSON. Copy or download it again.")
    if raw.startswith(b"version https://git-lfs"):
        _refuse(path, "found a Git-LFS pointer, expected the file itself. Run `git lfs pull`.")
    for mark, name, encoding in _ENCODING_MARKS:
        if raw.startswith(mark):
            _refuse(path, f"found {name}, expected UTF-8 without a mark. {_convert(encoding)}")
    if b"\x00" in raw[:4]:
        _refuse(path, f"found NUL bytes, as in UTF-16, expected UTF-8. {_convert('UTF-16')}")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            _refuse(
                path, "found a file cut off inside a character. Copy or download it again.", error
            )
        at = f"byte 0x{raw[error.start]:02x} at offset {error.start}"
        with contextlib.suppress(UnicodeDecodeError):
            raw.decode("gb18030")
            _refuse(
                path,
                f"found {at}, which is not UTF-8 but fits GBK/GB18030. {_convert('GB18030')}",
                error,
            )
        _refuse(path, f"found {at}, expected UTF-8. Copy or download the file again.", error)


def _convert(encoding: str) -> str:
    if encoding == "UTF-8":
        return "Remove the first three bytes."
    return f"Convert it: iconv -f {encoding} -t UTF-8."


def _explain(text: str, error: json.JSONDecodeError, name: str) -> str:
    at = f"line {error.lineno} column {error.colno}"
    before, after = text[: error.pos], text[error.pos :]
    if (
        error.msg == "Extra data"
        and after[0] in "[{"
        and before[len(before.rstrip()) :].count("\n")
    ):
        join = "jq -s ." if name == "array" else "jq -s add"
        return (
            f"found JSON lines (a second document begins at {at}), expected one JSON {name}, as in "
            f"the benchmark's files despite their .jsonl names. Join them: {join}"
        )
    stripped = text.strip()
    closing = {"[": "]", "{": "}"}.get(stripped[0])
    if not after.strip() or (closing is not None and stripped[-1] != closing):
        return (
            f"found a file cut off: {error.msg} at {at}, and the text ends in "
            f"{found(stripped[-20:])}. Copy, download or write it again."
        )
    return (
        f"not JSON: {error.msg} at {at}, found {found(after[:20])}, expected one JSON {name}. "
        "Correct it there."
    )


def _strays(value: object) -> Iterator[tuple[str, str]]:
    """Yield (path, problem): repeated keys, non-finite numbers, nesting beyond MAX_DEPTH."""
    todo: list[tuple[str, object, int]] = [("", value, 1)]
    while todo:
        path, item, depth = todo.pop()
        if isinstance(item, float) and not math.isfinite(item):
            yield path, f"found {item}, expected a finite number"
        elif isinstance(item, dict | list) and depth > MAX_DEPTH:
            yield path, f"nested deeper than {MAX_DEPTH} levels"
        elif isinstance(item, dict):
            for name in getattr(item, "repeated", ()):
                yield path, f"found the key {found(name)} more than once, expected it once"
            dot = "." if path else ""
            todo += [(f"{path}{dot}{shown(k)}", v, depth + 1) for k, v in reversed(item.items())]
        elif isinstance(item, list):
            todo += [(f"{path}[{i}]", v, depth + 1) for i, v in reversed([*enumerate(item)])]


def _refuse(path: StrPath, text: str, cause: Exception | None = None) -> NoReturn:
    raise BadFile(f"{shown(path)}: {text}") from cause
