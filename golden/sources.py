"""Sides that compute here or answer over HTTP: the library, the slow reference, a server."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

import golden.reference
from charrm.client import Client
from charrm.errors import (
    CharrmError,
    CheckpointCorrupt,
    CheckpointIncomplete,
    EngineFailed,
    IdentityMismatch,
    NotFinite,
    OutOfMemory,
    Overloaded,
    RowError,
    TextNotEncodable,
    UnexpectedAnswer,
)
from charrm.identity import digest_files
from charrm.protocol import score_from_p
from charrm.results import ScoredRow
from charrm.scorer import Scorer
from golden.reference import MAX_TOKENS, SlowReference
from golden.sides import Side, digest_hidden, digest_ids, input_text
from golden.structure import ReplayRow

# What transformers reads from a checkpoint folder, and nothing that others may lay beside it.
_READ = (
    "config.json", "generation_config.json",
    "tokenizer.model", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json",
    "model*.safetensors", "model.safetensors.index.json",
    "pytorch_model*.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
_PAUSES = (5.0, 10.0, 20.0, 40.0, 60.0)  # seconds; the server asks for 5


@dataclass(frozen=True)
class CheckpointDigests:
    """Name -> sha256 of the files a reference reads, taken before it reads them."""

    by_name: Mapping[str, str]
    _stats: Mapping[Path, tuple[int, int]]  # size, mtime_ns

    @classmethod
    def of(cls, folder: Path) -> CheckpointDigests:
        """Digest a checkpoint's files. Raises CheckpointIncomplete."""
        paths = sorted({path for name in _READ for path in folder.glob(name)})
        if not paths:
            raise CheckpointIncomplete(f"{folder}: found no file of a checkpoint.")
        stats = {path: _stat(path) for path in paths}
        return cls(digest_files(paths), stats)

    def check_unchanged(self) -> None:
        """Raise IdentityMismatch if a file changed since."""
        changed = [str(path) for path, stat in self._stats.items() if _stat(path) != stat]
        if changed:
            raise IdentityMismatch(f"changed while it was read: {', '.join(changed)}. Start again.")


class EngineSource:
    """The candidate: the library's own tokens, engine and score."""

    def __init__(self, scorer: Scorer) -> None:
        self.name = scorer.engine.name
        self._scorer = scorer

    def identity(self) -> dict[str, Any]:
        """Return the scorer's identity, without the place it was read from."""
        return {k: v for k, v in self._scorer.identity.to_json().items() if k != "source"}

    def tokenize(self, row: ReplayRow) -> Side:
        """Return ids, tokens and dropped."""
        tokenized = self._scorer.tokenize(row.row)
        return _side(tokenized.ids, tokenized.tokens_dropped)

    def score(self, row: ReplayRow) -> Side:
        """Return everything; one row alone in one call."""
        tokenized = self._scorer.tokenize(row.row)
        try:
            (outcome,) = self._scorer.engine.score_tokens([tokenized.ids], keep_hidden=True)
        except CharrmError:
            raise
        except Exception as error:  # as in Scorer: whatever it is, it costs this row
            raise EngineFailed(f"the forward failed: {type(error).__name__}: {error}") from error
        if isinstance(outcome, RowError):
            raise outcome
        _check_finite(outcome.logit)
        hidden = None if outcome.hidden is None else digest_hidden(outcome.hidden)
        numbers = {"logit": outcome.logit, "p": outcome.p, "score": score_from_p(outcome.p)}
        return _side(tokenized.ids, tokenized.tokens_dropped, hidden=hidden, **numbers)

    def close(self) -> None:
        """Nothing to release; the scorer is its opener's."""


class SlowSource:
    """The independent forward: `slow` in bfloat16; `fp32` in float32, whose hidden bits are other.

    Raises CheckpointIncomplete, CheckpointCorrupt, IdentityMismatch.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
    ) -> None:
        self.name = {torch.bfloat16: "slow", torch.float32: "fp32"}[dtype]
        files = CheckpointDigests.of(folder)
        try:
            self._reference = SlowReference.open(folder, dtype, device)
        except FileNotFoundError as error:
            raise CheckpointIncomplete(str(error)) from error
        except Exception as error:  # of safetensors, torch, sentencepiece or json
            raise CheckpointCorrupt(f"{folder}: {type(error).__name__}: {error}") from error
        if self._reference.pieces is None:
            raise CheckpointIncomplete(f"{folder}: missing tokenizer.model.")
        self._pieces = self._reference.pieces
        files.check_unchanged()
        code = Path(golden.reference.__file__).read_bytes()
        where = torch.device(device)
        self._identity = {
            "name": self.name,
            "dtype": str(dtype).removeprefix("torch."),
            "reference_sha256": hashlib.sha256(code).hexdigest(),
            "files": dict(files.by_name),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(where) if where.type == "cuda" else device,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        }

    def identity(self) -> dict[str, Any]:
        """Return dtype, code, files and environment."""
        return dict(self._identity)

    def tokenize(self, row: ReplayRow) -> Side:
        """Return ids, tokens and dropped."""
        return _side(*self._ids(row))

    def score(self, row: ReplayRow) -> Side:
        """Return everything; ids outside the vocabulary are an error of the row."""
        ids, dropped = self._ids(row)
        vocabulary = self._reference.config.vocab_size
        if max(ids) >= vocabulary:
            raise EngineFailed(f"id {max(ids)} is outside the vocabulary of {vocabulary}.")
        try:
            outcome = self._reference.forward(ids)
        except ValueError as error:  # the ids are a row, so it is the result
            raise NotFinite(str(error)) from error
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"{len(ids)} tokens did not fit: {error}") from error
        except RuntimeError as error:
            raise EngineFailed(f"the forward failed: {error}") from error
        _check_finite(outcome.logit)
        numbers = {"logit": outcome.logit, "p": outcome.p, "score": outcome.score}
        return _side(ids, dropped, hidden=digest_hidden(outcome.hidden), **numbers)

    def close(self) -> None:
        """Nothing to release."""

    def _ids(self, row: ReplayRow) -> tuple[list[int], int]:
        text = input_text(row)
        try:
            ids = self._reference.ids(text)
        except ValueError as error:
            raise TextNotEncodable(str(error)) from error
        if len(ids) < MAX_TOKENS:
            return ids, 0
        return ids, len(golden.reference.encode(self._pieces, text)) + 1 - len(ids)


class ServerSource:
    """A running server, asked row by row; it tells neither ids nor hidden states.

    `candidate` is the identity to which the server's weights and tokenizer must be equal;
    `any_model` drops that. An overloaded server is asked again after each of `pauses` (seconds).
    Raises IdentityMismatch, ServiceError kinds, UnexpectedAnswer.
    """

    name = "server"

    def __init__(
        self,
        url: str,
        candidate: Mapping[str, Any],
        *,
        any_model: bool = False,
        pauses: Sequence[float] = _PAUSES,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._url = url
        self._pauses = pauses
        self._client = Client(url, transport=transport)
        try:
            self._identity = self._client.identity()
            if not any_model:
                self._compare(candidate)
        except BaseException:
            self.close()
            raise

    def identity(self) -> dict[str, Any]:
        """Return the server's identity, without the place its model was read from."""
        return {k: v for k, v in self._identity.items() if k != "source"}

    def tokenize(self, row: ReplayRow) -> Side:
        """Return nothing: the server tells token counts only beside a score."""
        return Side()

    def score(self, row: ReplayRow) -> Side:
        """Return tokens, dropped, logit, p and score of the answer."""
        answer = self._ask(row)
        if answer.identity != self._identity.get("digest"):
            raise IdentityMismatch(
                f"{self._url}: slot {row.slot} was scored by {answer.identity}, expected "
                f"{self._identity.get('digest')}: the server is another one than at the start."
            )
        numbers = (answer.logit, answer.p, answer.score)
        counts = (answer.tokens, answer.tokens_dropped)
        if (
            not all(type(n) is float and math.isfinite(n) for n in numbers)
            or not all(type(n) is int for n in counts)
            or answer.metric_en != row.metric_en
        ):
            raise UnexpectedAnswer(
                f"{self._url}: slot {row.slot}: found {numbers}, {counts} and "
                f"{answer.metric_en!r}, expected logit, p, score, two counts and {row.metric_en!r}."
            )
        return Side(
            tokens=answer.tokens,
            dropped=answer.tokens_dropped,
            logit=answer.logit,
            p=answer.p,
            score=answer.score,
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _ask(self, row: ReplayRow) -> ScoredRow:
        for pause in self._pauses:
            try:
                return self._client.score(row.row)
            except Overloaded:
                time.sleep(pause)
        return self._client.score(row.row)

    def _compare(self, candidate: Mapping[str, Any]) -> None:
        found, expected = _model(self._identity), _model(candidate)
        wrong = [
            f"\n  {name}: found {found[name]}, expected {expected[name]}"
            for name in found
            if found[name] != expected[name] or found[name] is None
        ]
        if wrong:
            raise IdentityMismatch(
                f"{self._url}: serves another model than the candidate's:{''.join(wrong)}"
            )


def _side(ids: Sequence[int], dropped: int, **values: Any) -> Side:
    return Side(ids=digest_ids(ids), tokens=len(ids), dropped=dropped, **values)


def _check_finite(logit: float) -> None:
    if not math.isfinite(logit):
        raise NotFinite(f"the model gave the logit {logit}; no score exists for this row.")


def _model(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the digests that say which model an identity is of; None for one that is absent."""
    files = identity.get("files")
    small = files if isinstance(files, dict) else {}
    names = ("tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")
    weights = identity.get("weights_sha256")
    return {"weights_sha256": weights, **{name: small.get(name) for name in names}}


def _stat(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return -1, -1
    return stat.st_size, stat.st_mtime_ns
