"""Every failure charrm reports, as one tree. `kind` is stable and is what goes over the wire.

    CharrmError
    ├── RowError                      one row has no score; the other rows are unaffected
    │   ├── InvalidRow                invalid_row
    │   ├── UnknownMetric             unknown_metric
    │   ├── UnknownRole               unknown_role
    │   ├── TextNotEncodable          text_not_encodable
    │   ├── TooLongText               too_long_text
    │   ├── NotFinite                 not_finite
    │   ├── OutOfMemory               out_of_memory
    │   └── EngineFailed              engine_failed
    ├── CheckpointError               the model cannot be opened
    │   ├── CheckpointIncomplete      checkpoint_incomplete
    │   ├── CheckpointCorrupt         checkpoint_corrupt
    │   ├── IdentityMismatch          identity_mismatch
    │   └── NotEnoughMemory           not_enough_memory
    ├── BadFile                       bad_file
    ├── BadRequest                    bad_request
    ├── InvalidRequest                invalid_request
    ├── TooLargeRequest               too_large_request
    ├── InvalidSetting                invalid_setting
    ├── MissingDependency             missing_dependency
    ├── NotCertified                  not_certified
    ├── UnexpectedAnswer              unexpected_answer
    └── ServiceError                  the server cannot answer now; the request may be sent again
        ├── Overloaded                overloaded
        ├── Starting                  starting
        ├── ShuttingDown              shutting_down
        └── Unreachable               unreachable

Messages say what was found, what was expected and what to do.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "BadFile",
    "BadRequest",
    "CharrmError",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointIncomplete",
    "EngineFailed",
    "IdentityMismatch",
    "InvalidRequest",
    "InvalidRow",
    "InvalidSetting",
    "MissingDependency",
    "NotCertified",
    "NotEnoughMemory",
    "NotFinite",
    "OutOfMemory",
    "Overloaded",
    "RowError",
    "ServiceError",
    "ShuttingDown",
    "Starting",
    "TextNotEncodable",
    "TooLargeRequest",
    "TooLongText",
    "UnexpectedAnswer",
    "UnknownMetric",
    "UnknownRole",
    "Unreachable",
    "error_from_kind",
]


class CharrmError(Exception):
    """Base of every error; `message` is for people, `kind` for programs."""

    kind: ClassVar[str] = "error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RowError(CharrmError):
    """One row has no score."""

    kind = "row_error"


class InvalidRow(RowError):
    """A field is missing, unknown, of the wrong type, or contradicts another."""

    kind = "invalid_row"


class UnknownMetric(RowError):
    """The metric is not one of the twelve the model was trained on."""

    kind = "unknown_metric"


class UnknownRole(RowError):
    """The row names a role that the loaded profiles do not hold."""

    kind = "unknown_role"


class TextNotEncodable(RowError):
    """The text has no UTF-8 form (a lone surrogate)."""

    kind = "text_not_encodable"


class TooLongText(RowError):
    """The text is longer than the configured limit in characters."""

    kind = "too_long_text"


class NotFinite(RowError):
    """The model produced NaN or infinity."""

    kind = "not_finite"


class OutOfMemory(RowError):
    """The device ran out of memory while computing the row."""

    kind = "out_of_memory"


class EngineFailed(RowError):
    """The forward of the row raised something unexpected."""

    kind = "engine_failed"


class CheckpointError(CharrmError):
    """The checkpoint cannot be opened."""

    kind = "checkpoint_error"


class CheckpointIncomplete(CheckpointError):
    """Files or tensors are missing, unexpected or wrongly shaped."""

    kind = "checkpoint_incomplete"


class CheckpointCorrupt(CheckpointError):
    """A file is not what its name says: truncated, a Git-LFS pointer, foreign pickled objects."""

    kind = "checkpoint_corrupt"


class IdentityMismatch(CheckpointError):
    """A file changed while it was read, or is not the one that was asked for."""

    kind = "identity_mismatch"


class NotEnoughMemory(CheckpointError):
    """The preflight found less free memory than the model needs."""

    kind = "not_enough_memory"


class BadFile(CharrmError):
    """An input file cannot be read as what it should be."""

    kind = "bad_file"


class BadRequest(CharrmError):
    """The body of a request is not JSON."""

    kind = "bad_request"


class InvalidRequest(CharrmError):
    """The body is JSON, but not of the form of its route."""

    kind = "invalid_request"


class TooLargeRequest(CharrmError):
    """A request body or batch is over the server's limit."""

    kind = "too_large_request"


class InvalidSetting(CharrmError):
    """A device, dtype or other setting that does not exist here."""

    kind = "invalid_setting"


class MissingDependency(CharrmError):
    """A package of an optional extra is not installed, or has another version than required."""

    kind = "missing_dependency"


class NotCertified(CharrmError):
    """An engine that shares work is not proved equal to the official order on this machine."""

    kind = "not_certified"


class UnexpectedAnswer(CharrmError):
    """What answered is not a charrm server, or one of another version."""

    kind = "unexpected_answer"


class ServiceError(CharrmError):
    """The server cannot answer now."""

    kind = "service_error"


class Overloaded(ServiceError):
    """Too many rows are waiting."""

    kind = "overloaded"


class Starting(ServiceError):
    """The model is still loading or its warm-up has not matched yet."""

    kind = "starting"


class ShuttingDown(ServiceError):
    """The server is stopping."""

    kind = "shutting_down"


class Unreachable(ServiceError):
    """No server answered at the address."""

    kind = "unreachable"


def error_from_kind(kind: str, message: str) -> CharrmError:
    """Return the error a server reported; an unknown kind becomes a plain `CharrmError`."""
    todo: list[type[CharrmError]] = [CharrmError]
    while todo:
        cls = todo.pop()
        if cls.kind == kind:
            return cls(message)
        todo.extend(cls.__subclasses__())
    return CharrmError(f"{kind}: {message}")
