"""Stand-in for a checkpoint's own configuration class, written for the tests."""

from typing import Any

from transformers import PretrainedConfig


class BaichuanConfig(PretrainedConfig):
    model_type = "baichuan"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(
        self,
        vocab_size: int = 125696,
        hidden_size: int = 5120,
        intermediate_size: int = 13696,
        num_hidden_layers: int = 40,
        num_attention_heads: int = 40,
        model_max_length: int = 4096,
        rms_norm_eps: float = 1e-6,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.model_max_length = model_max_length
        self.rms_norm_eps = rms_norm_eps
        super().__init__(**kwargs)
