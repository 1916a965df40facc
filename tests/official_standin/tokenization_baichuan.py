"""Stand-in for a checkpoint's own slow tokenizer, written for the tests."""

from typing import Any

from sentencepiece import SentencePieceProcessor
from transformers import PreTrainedTokenizer


class BaichuanTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tokenizer.model"}  # noqa: RUF012

    def __init__(self, vocab_file: str, **kwargs: Any) -> None:
        kwargs.pop("add_bos_token", None)
        kwargs.pop("add_eos_token", None)
        self.pieces = SentencePieceProcessor(model_file=vocab_file)
        super().__init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        return self.pieces.vocab_size()

    def get_vocab(self) -> dict[str, int]:
        return {self.pieces.id_to_piece(i): i for i in range(self.vocab_size)}

    def _tokenize(self, text: str) -> list[str]:
        return self.pieces.encode(text, out_type=str)

    def _convert_token_to_id(self, token: str) -> int:
        return self.pieces.piece_to_id(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self.pieces.id_to_piece(index)
