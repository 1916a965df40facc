"""BaichuanCharRM's forward in the official order of operations, dtype and rounding.

Read top to bottom; there is no other file behind it. Shapes use L for the tokens of the one row
(batch is always 1: no padding, no attention mask argument), H hidden, A heads, D = H / A, F
feed-forward. Every operation returns the model's dtype unless a comment says otherwise; changing
any order, dtype or rounding here changes published scores.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from charrm.errors import CheckpointCorrupt, CheckpointIncomplete
from charrm.protocol import MAX_TOKENS


@dataclass(frozen=True)
class ModelConfig:
    """The fields of `config.json` that decide the forward."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    rms_norm_eps: float
    hidden_act: str
    model_max_length: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_file(cls, path: Path) -> ModelConfig:
        """Read and check a checkpoint's `config.json`; raises CheckpointIncomplete or -Corrupt."""
        try:
            content: Any = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointIncomplete(f"{path}: missing.") from None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointCorrupt(f"{path}: cannot be read as JSON: {error}") from None
        if not isinstance(content, dict):
            raise CheckpointCorrupt(f"{path}: found {type(content).__name__}, expected an object.")
        config = cls(**{f.name: _field(path, content, f.name, f.type) for f in fields(cls)})
        config._check(path, content)
        return config

    def _check(self, path: Path, content: dict[str, Any]) -> None:
        sizes = (self.vocab_size, self.hidden_size, self.num_hidden_layers)
        if min(*sizes, self.num_attention_heads, self.intermediate_size) < 1:
            raise CheckpointCorrupt(f"{path}: every size must be at least 1, found {self}.")
        expected = {
            "model_type": ("baichuan", content.get("model_type")),
            "hidden_act": ("silu", self.hidden_act),
            "model_max_length": (MAX_TOKENS, self.model_max_length),
            "rms_norm_eps is a small positive number": (True, 0 < self.rms_norm_eps < 1),
            "hidden_size % num_attention_heads": (0, self.hidden_size % self.num_attention_heads),
        }
        wrong = [f"{k} is {found!r}, expected {want!r}" for k, (want, found) in expected.items()
                 if found != want]  # fmt: skip
        if wrong:
            raise CheckpointCorrupt(f"{path}: not a BaichuanCharRM: {'; '.join(wrong)}.")


def _field(path: Path, content: dict[str, Any], name: str, type_name: Any) -> Any:
    if name not in content:
        raise CheckpointIncomplete(f"{path}: the field {name} is missing.")
    value = content[name]
    if type_name == "float" and type(value) is int:
        value = float(value)
    if type(value).__name__ != type_name:
        raise CheckpointCorrupt(f"{path}: {name} is {value!r}, expected a value of {type_name}.")
    return value


class Output(NamedTuple):
    """Result of one row."""

    hidden: Tensor  # (H,) last position after the final norm, model dtype
    logit: Tensor  # () model dtype
    p: Tensor  # () model dtype


def alibi_slopes(heads: int) -> list[float]:
    """Return the ALiBi slope of every head, in double precision.

    For a power of two a geometric series; otherwise that of the next lower power of two, then
    every second slope of the next higher one.
    """
    lower = 2 ** math.floor(math.log2(heads))
    start = 2 ** (-(2 ** -(math.log2(lower) - 3)))
    slopes = [start * start**i for i in range(lower)]
    if lower == heads:
        return slopes
    return slopes + alibi_slopes(2 * lower)[0::2][: heads - lower]


def alibi_bias(heads: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the additive bias (A, L) of each head and absolute key position.

    The official code keeps a (A, 4096, 4096) tensor; its finite part does not depend on the
    query, so the vector holds the same bits. float32 product, one rounding to the model dtype.
    """
    slopes = torch.tensor(alibi_slopes(heads), dtype=torch.float32, device=device)
    positions = torch.arange(length, dtype=torch.float32, device=device)
    return (slopes[:, None] * positions).to(dtype)


class RMSNorm(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.hidden_size))
        self.eps = config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        y = x * torch.rsqrt(variance + self.eps)  # float32
        return self.weight * y.to(self.weight.dtype)  # cast first, then the weight


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.W_pack = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        # (1, L, 3H) -> three of (1, A, L, D): first third q, then k, then v
        q, k, v = (
            part.view(1, length, self.heads, self.head_dim).transpose(1, 2)
            for part in self.W_pack(x).chunk(3, dim=-1)
        )
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.head_dim)  # (1, A, L, L)
        scores += alibi_bias(self.heads, length, x.dtype, x.device)[:, None, :]
        lowest = torch.finfo(x.dtype).min
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores.clamp_(min=lowest).masked_fill_(future, lowest)
        weights = F.softmax(scores, dim=-1)  # float32 inside, normalised result rounded
        attended = torch.matmul(weights, v)  # (1, A, L, D)
        out: Tensor = self.o_proj(attended.transpose(1, 2).reshape(1, length, -1))
        return out


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class Body(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(ids)  # (1, L, H)
        for layer in self.layers:
            x = layer(x)
        # All positions: a reduction over few rows may take another kernel on CUDA.
        normed: Tensor = self.norm(x)
        return normed


class CharRM(nn.Module):
    """The reward model; module names are the tensor names of the published checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.score = nn.Linear(config.hidden_size, 1, bias=True)

    def forward(self, ids: Tensor) -> Output:
        """Score one row: `ids` (1, L) int64 with the appended `</s>`, 1 <= L <= 4096."""
        hidden = self.model(ids)[:, -1]  # (1, H)
        logit = self.score(hidden)  # (1, 1)
        return Output(hidden[0], logit[0, 0], torch.sigmoid(logit)[0, 0])
