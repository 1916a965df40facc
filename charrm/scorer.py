"""The main path: a row becomes text, ids, p and score, or a typed error. Read this file first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from charrm.certificate import bound_to, find_certificate
from charrm.checkpoint import find_checkpoint, load_model
from charrm.engines import Engine, Outcome, TreeSettings
from charrm.engines.eager import EagerEngine
from charrm.engines.tree import TreeEngine
from charrm.errors import EngineFailed, InvalidSetting, NotFinite, RowError, TooLongText
from charrm.identity import Identity, audit, code_digest, digest_files
from charrm.placement import check_free
from charrm.protocol import (
    EOS_ID,
    PROTOCOL,
    Prompt,
    Row,
    compose,
    keep_last,
    score_from_p,
    sections_lost,
)
from charrm.results import FailedRow, Result, ScoredRow
from charrm.runtime import (
    PROTOCOL_DTYPE,
    apply_settings,
    describe_device,
    environment,
    library_versions,
    parse_device,
    parse_dtype,
)
from charrm.tokenizer import BaichuanTokenizer, load_tokenizer

MAX_TEXT_CHARS = 1_000_000
ENGINES = ("eager", "tree")


@dataclass(frozen=True)
class TokenizedRow:
    """A row ready for an engine."""

    prompt: Prompt
    ids: list[int]  # at most 4,096, with the appended </s>
    tokens_dropped: int
    sections_lost: dict[str, float]
    flags: list[str]


class Scorer:
    """Scores rows with one model, engine and identity. Not thread-safe: give it one owner."""

    def __init__(
        self,
        tokenizer: BaichuanTokenizer,
        engine: Engine,
        identity: Identity,
        profiles: Mapping[str, Any] | None = None,
        max_text_chars: int = MAX_TEXT_CHARS,
    ) -> None:
        self.tokenizer = tokenizer
        self.engine = engine
        self.identity = identity
        self.profiles = profiles
        self.max_text_chars = max_text_chars

    @classmethod
    def open(
        cls,
        checkpoint: str | Path,
        *,
        revision: str | None = None,
        device: str = "auto",
        dtype: str | None = None,
        profiles: Mapping[str, Any] | None = None,
        max_text_chars: int = MAX_TEXT_CHARS,
        engine: str = "eager",
        settings: TreeSettings | None = None,
        certificate: Path | None = None,
    ) -> Scorer:
        """Open a checkpoint folder or hub id and prove what was loaded.

        `dtype=None` is the protocol's bfloat16 and requires weights stored so; naming a dtype
        casts to it. float32 is possible, and every result then says it is not the protocol.
        `engine="tree"` is `with_tree` at once. Raises CheckpointError kinds, InvalidSetting,
        MissingDependency, NotCertified.
        """
        if engine not in ENGINES:
            raise InvalidSetting(f"engine: found {engine!r}, expected {' or '.join(ENGINES)}.")
        where = parse_device(device)
        torch_dtype = PROTOCOL_DTYPE if dtype is None else parse_dtype(dtype)
        apply_settings()
        files = find_checkpoint(checkpoint, revision)
        tokenizer = load_tokenizer(files.folder)
        loaded = load_model(files, where, torch_dtype, cast=dtype is not None)
        eager = EagerEngine(loaded.model)
        digests = digest_files(files.stats)
        files.check_unchanged()
        is_protocol = torch_dtype == PROTOCOL_DTYPE
        dtype_name = str(torch_dtype).removeprefix("torch.")
        devices = sorted(set(loaded.placement.devices.values()), key=str)
        identity = Identity(
            protocol=PROTOCOL if is_protocol else f"not {PROTOCOL}: {dtype_name}",
            is_protocol=is_protocol,
            engine=eager.name,
            engine_settings={},
            certificate="",
            dtype=dtype_name,
            device=", ".join(describe_device(d) for d in devices),
            source=files.source,
            files=digests,
            weights_sha256=loaded.content_sha256,
            stored_dtype=loaded.stored_dtype,
            audit=audit(digests),
            versions=library_versions(),
            environment=environment(devices[0]),
            code_sha256=code_digest(),
        )
        scorer = cls(tokenizer, eager, identity, profiles, max_text_chars)
        return scorer if engine == eager.name else scorer.with_tree(settings, certificate)

    def with_tree(
        self, settings: TreeSettings | None = None, certificate: Path | None = None
    ) -> Scorer:
        """Return a scorer of the same model whose rows share prefixes.

        Only with a certificate for exactly this model, machine and settings: the file given, or
        the one that `charrm certify` left. Raises NotCertified, NotEnoughMemory, BadFile,
        InvalidSetting.
        """
        if not isinstance(self.engine, EagerEngine):
            raise InvalidSetting(f"a tree engine starts from the eager one, not {self.engine.name}")
        settings = settings or TreeSettings()
        valid = find_certificate(bound_to(self.identity, settings), certificate)
        tree = TreeEngine(self.engine.model, valid.numeric_classes(), settings)
        model = self.engine.model
        device, *others = {weight.device for weight in model.parameters()}
        if others:
            raise InvalidSetting(
                "the tree engine needs the model on one device, here it is spread over "
                f"{1 + len(others)}; use the eager engine."
            )
        check_free(device, tree.workspace_bytes())
        identity = replace(
            self.identity,
            engine=tree.name,
            engine_settings=asdict(settings),
            certificate=valid.digest,
        )
        return Scorer(self.tokenizer, tree, identity, self.profiles, self.max_text_chars)

    def score(self, rows: Iterable[Row | RowError]) -> list[Result]:
        """Score rows; one result per row, in order. No row can fail another."""
        return list(self.stream(rows))

    def stream(self, rows: Iterable[Row | RowError]) -> Iterator[Result]:
        """Score rows as `score` does, yielding each as soon as it is known.

        A row that already failed (it could not be read) comes as its error and keeps its place.
        """
        numbered = enumerate(rows)
        while chunk := list(islice(numbered, self.engine.rows_per_call)):
            ready = [(index, self._tokenize_or_error(row)) for index, row in chunk]
            good = [row for _, row in ready if isinstance(row, TokenizedRow)]
            outcomes = iter(self._compute(good))
            for index, row in ready:
                if isinstance(row, RowError):
                    yield FailedRow(index, row)
                else:
                    yield self._result(index, row, next(outcomes))

    def tokenize(self, row: Row) -> TokenizedRow:
        """Return the ids of a row and what truncation cost it. Raises RowError kinds."""
        prompt = compose(row, self.profiles)
        if len(prompt.text) > self.max_text_chars:
            raise TooLongText(
                f"the input text has {len(prompt.text)} characters, the limit is "
                f"{self.max_text_chars}; only the last 4,096 tokens would be read."
            )
        all_ids = self.tokenizer.encode_text(prompt.text)
        ids, dropped = keep_last(all_ids)
        flags = list(prompt.flags)
        if min(all_ids) <= EOS_ID:
            flags.append("special_token_in_text")
        lost = {}
        if dropped:
            flags.append("truncated")
            lost = sections_lost(prompt, self.tokenizer.characters(all_ids[:dropped]))
        if not self.identity.is_protocol:
            flags.append("not_protocol")
        return TokenizedRow(prompt, ids, dropped, lost, flags)

    def _compute(self, rows: list[TokenizedRow]) -> list[Outcome | RowError]:
        try:
            self._check_threads()
            outcomes = self.engine.score_tokens([row.ids for row in rows]) if rows else []
            if len(outcomes) != len(rows):
                raise RuntimeError(f"{len(outcomes)} outcomes for {len(rows)} rows")
            return outcomes
        except Exception as error:  # whatever it is, it costs these rows and no others
            failure = EngineFailed(f"the forward failed: {type(error).__name__}: {error}")
            return [failure] * len(rows)

    def _check_threads(self) -> None:
        """Another thread count may give other bits than the identity names."""
        named, now = self.identity.environment.get("threads"), torch.get_num_threads()
        if named is not None and named != now:
            raise InvalidSetting(
                f"torch now uses {now} threads, {named} when the model was opened; open it again."
            )

    def _tokenize_or_error(self, row: Row | RowError) -> TokenizedRow | RowError:
        if isinstance(row, RowError):
            return row
        try:
            return self.tokenize(row)
        except RowError as error:
            return error

    def _result(self, index: int, row: TokenizedRow, outcome: Outcome | RowError) -> Result:
        if isinstance(outcome, RowError):
            return FailedRow(index, outcome)
        try:
            score = score_from_p(outcome.p)
            if not math.isfinite(outcome.logit):
                raise NotFinite(f"the model gave the logit {outcome.logit}; p is saturated.")
        except RowError as error:
            return FailedRow(index, error)
        return ScoredRow(
            index=index,
            score=score,
            p=outcome.p,
            logit=outcome.logit,
            protocol=self.identity.protocol,
            engine=self.engine.name,
            identity=self.identity.digest,
            tokens=len(row.ids),
            tokens_dropped=row.tokens_dropped,
            truncated=row.tokens_dropped > 0,
            sections_lost=row.sections_lost,
            metric_en=row.prompt.metric.en,
            metric_zh=row.prompt.metric.zh,
            flags=row.flags,
        )
