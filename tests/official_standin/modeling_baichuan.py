"""Stand-in for a checkpoint's own modeling file, written for the tests from the numerics notes.

Same class name, call and output as the real one: `model(input_ids=ids)[1]` is p.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from .configuration_baichuan import BaichuanConfig


def slopes_of(heads: int) -> list[float]:
    exponent = math.log2(heads)
    if exponent.is_integer():
        base = 2 ** -(2 ** (3 - exponent))
        return [base * base**i for i in range(heads)]
    below = 2 ** int(exponent)
    return slopes_of(below) + slopes_of(2 * below)[::2][: heads - below]


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(self.weight.dtype)


class Attention(nn.Module):
    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.heads, self.size = config.num_attention_heads, size
        self.W_pack = nn.Linear(size, 3 * size, bias=False)
        self.o_proj = nn.Linear(size, size, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        length, width = x.shape[1], self.size // self.heads
        packed = self.W_pack(x).unflatten(-1, (3, self.heads, width))
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)  # (1, heads, L, width) each
        scores = q @ k.transpose(-1, -2) / math.sqrt(width) + mask
        scores = torch.max(scores, torch.tensor(torch.finfo(scores.dtype).min))
        mixed = F.softmax(scores, dim=-1) @ v
        return self.o_proj(mixed.transpose(1, 2).reshape(1, length, self.size))


class FeedForward(nn.Module):
    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__()
        sizes = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(*sizes, bias=False)
        self.up_proj = nn.Linear(*sizes, bias=False)
        self.down_proj = nn.Linear(*reversed(sizes), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class BaichuanCharRM(PreTrainedModel):
    config_class = BaichuanConfig
    base_model_prefix = "model"

    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__(config)
        self.model = Body(config)
        self.score = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Every weight comes from the checkpoint."""

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        length = input_ids.shape[1]
        slopes = torch.tensor(slopes_of(self.config.num_attention_heads))[:, None, None]
        future = torch.full((length, length), -math.inf).triu(1)
        mask = (slopes * torch.arange(length) + future).to(self.score.weight.dtype)
        x = self.model.embed_tokens(input_ids)
        for layer in self.model.layers:
            x = layer(x, mask)
        logits = self.score(self.model.norm(x)[:, -1:])
        return logits, torch.sigmoid(logits)
