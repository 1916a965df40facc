"""The slow tokenizer path under transformers 4.36.2, loaded from a checkpoint folder by file name.

The split rule for `<s>`, `</s>` and `<unk>` (declared `single_word`) is part of the protocol and
lives in transformers' `PreTrainedTokenizer.tokenize`; other versions split differently, so the
version is checked and not assumed.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

from charrm.errors import CheckpointCorrupt, CheckpointIncomplete, MissingDependency
from charrm.protocol import EOS_ID

REQUIRED_TRANSFORMERS = "4.36.2"
TOKENIZER_FILES = ("tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")
# transformers would let these change tokens, and no digest of the three files above would show it.
UNWANTED_FILES = ("added_tokens.json", "tokenizer.json")


def _check_transformers() -> None:
    try:
        found = version("transformers")
    except PackageNotFoundError:
        found = "none"
    if found != REQUIRED_TRANSFORMERS:
        raise MissingDependency(
            f"transformers: found {found}, expected {REQUIRED_TRANSFORMERS}; the tokens of the "
            "protocol depend on it. Install the extra '.[serve]', or use charrm.client over HTTP."
        )


_check_transformers()

import sentencepiece  # noqa: E402

with warnings.catch_warnings():
    # transformers 4.36.2 registers its outputs through a name that torch has deprecated.
    warnings.filterwarnings("ignore", ".*_register_pytree_node", FutureWarning)
    from transformers import AddedToken, PreTrainedTokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class BaichuanTokenizer(PreTrainedTokenizer):  # type: ignore[misc]
    """SentencePiece BPE with byte fallback behind transformers' slow split rules."""

    vocab_files_names: ClassVar = {"vocab_file": "tokenizer.model"}
    model_input_names: ClassVar = ["input_ids"]

    def __init__(
        self,
        vocab_file: str,
        unk_token: AddedToken | str = "<unk>",
        bos_token: AddedToken | str = "<s>",
        eos_token: AddedToken | str = "</s>",
        pad_token: AddedToken | str | None = None,
        sp_model_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # transformers asks for the vocabulary inside its constructor, so it is loaded first.
        self.sp_model = sentencepiece.SentencePieceProcessor(**(sp_model_kwargs or {}))
        self.sp_model.Load(vocab_file)
        super().__init__(
            unk_token=unk_token,
            bos_token=bos_token,
            eos_token=eos_token,
            pad_token=pad_token,
            sp_model_kwargs=sp_model_kwargs or {},
            **kwargs,
        )

    @property
    def vocab_size(self) -> int:
        return int(self.sp_model.GetPieceSize())

    def get_vocab(self) -> dict[str, int]:
        vocab = {self.sp_model.IdToPiece(i): i for i in range(self.vocab_size)}
        return {**vocab, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return list(self.sp_model.encode(text, out_type=str))

    def _convert_token_to_id(self, token: str) -> int:
        return int(self.sp_model.PieceToId(token))

    def _convert_id_to_token(self, index: int) -> str:
        return str(self.sp_model.IdToPiece(index))

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a text: nothing in front, nothing behind, nothing cut.

        `verbose=False` keeps the over-length warning off the console: truncation is reported
        in the result instead.
        """
        return list(self.encode(text, add_special_tokens=False, verbose=False))

    def characters(self, ids: Sequence[int]) -> int:
        """Return how many characters of the text these ids stand for.

        Exact because the published normalisation is the identity: a piece is its own surface
        (U+2581 for a space), a byte piece is one UTF-8 byte.
        """
        total = 0
        for piece in (self.sp_model.IdToPiece(i) for i in ids):
            byte = _BYTE_PIECE.fullmatch(piece)
            if byte is None:
                total += len(piece)
            elif int(byte[1], 16) & 0xC0 != 0x80:  # continuation bytes start no character
                total += 1
        return total


def load_tokenizer(folder: Path) -> BaichuanTokenizer:
    """Load the tokenizer of a checkpoint folder, offline, without transformers' Auto classes.

    `tokenizer_config.json` and `special_tokens_map.json` are honoured.
    Raises CheckpointIncomplete, CheckpointCorrupt.
    """
    missing = [name for name in TOKENIZER_FILES if not (folder / name).is_file()]
    if missing:
        raise CheckpointIncomplete(f"{folder}: missing {', '.join(missing)}.")
    for name in UNWANTED_FILES:
        if (folder / name).exists():
            raise CheckpointCorrupt(
                f"{folder}: found {name}, which is not in the published layout and would change "
                "tokens; remove it."
            )
    config, _ = (_json_object(folder / name) for name in TOKENIZER_FILES[1:])
    if config.get("tokenizer_class") != BaichuanTokenizer.__name__:
        raise CheckpointCorrupt(
            f"{folder / TOKENIZER_FILES[1]}: tokenizer_class is {config.get('tokenizer_class')!r}, "
            f"expected {BaichuanTokenizer.__name__!r}."
        )
    try:
        tokenizer = BaichuanTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # sentencepiece raises RuntimeError, transformers several kinds
        raise CheckpointCorrupt(f"{folder}: the tokenizer cannot be loaded: {error}") from error
    if tokenizer.eos_token_id != EOS_ID:
        raise CheckpointCorrupt(
            f"{folder}: </s> has id {tokenizer.eos_token_id}, expected {EOS_ID}; the protocol "
            f"appends id {EOS_ID}."
        )
    return tokenizer  # type: ignore[no-any-return]


def _json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointCorrupt(f"{path}: found {type(content).__name__}, expected an object.")
    return content
