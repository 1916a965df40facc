"""The slow reference: BaichuanCharRM written out literally, sharing no code with ``charrm``.

Written from the protocol and the numerics notes alone. It recomputes everything for every row,
builds the full (heads, L, L) mask, keeps every position to the end and caches nothing, so that a
fast engine can be compared with something that has no reason to be wrong in the same place.
`Fault` plants one known mistake at a time: a comparison that does not notice it proves nothing.
"""

from __future__ import annotations

import enum
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor
from torch import Tensor

EOS = 2
MAX_TOKENS = 4096
SPECIAL = {"<unk>": 0, "<s>": 1, "</s>": 2}


class Fault(enum.Enum):
    """One planted mistake. The first two act in `SlowReference.ids`, the others in `forward`.

    Each of the two functions ignores the faults of the other, so that
    ``reference.forward(reference.ids(text, fault), fault)`` plants any of them.
    """

    MISSING_EOS = "the final </s> (id 2) is not appended"
    RIGHT_TRUNCATION = "a long row keeps its first 4,096 tokens, not its last"
    RELATIVE_BIAS = "ALiBi of the distance, slope * (j - i), not of the absolute key position"
    FLOAT32_BIAS = "bias added, and softmax taken, in float32; only the softmax result is rounded"
    LEFT_PADDING = "16 masked pad tokens on the left: every position j becomes j + 16"
    NORM_WEIGHT_BEFORE_CAST = "RMSNorm multiplies by the weight in float32, then rounds"
    FLOAT32_HEAD = "head and sigmoid in float32 (the hidden state stays right)"
    MISSING_CAUSAL_MASK = "every position attends to the later ones too"


@dataclass(frozen=True)
class ReferenceConfig:
    """The numbers of ``config.json`` that decide the forward."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    rms_norm_eps: float

    @classmethod
    def read(cls, file: Path) -> ReferenceConfig:
        """Read ``config.json``; `ValueError` for anything this forward does not describe."""
        found = json.loads(file.read_text(encoding="utf-8"))
        fixed = {
            "model_type": "baichuan",
            "hidden_act": "silu",
            "model_max_length": MAX_TOKENS,
            "tie_word_embeddings": False,
        }
        for field, expected in fixed.items():
            if found.get(field) != expected:
                raise ValueError(f"{file}: {field} is {found.get(field)!r}, expected {expected!r}")
        sizes = {
            field: found.get(field)
            for field in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
            )
        }
        for field, size in sizes.items():
            if type(size) is not int or size < 1:
                raise ValueError(f"{file}: {field} is {size!r}, expected a positive integer")
        eps = found.get("rms_norm_eps")
        if type(eps) is not float or not 0 < eps < 1:
            raise ValueError(f"{file}: rms_norm_eps is {eps!r}, expected a float between 0 and 1")
        config = cls(**sizes, rms_norm_eps=eps)
        if config.hidden_size % config.num_attention_heads:
            raise ValueError(
                f"{file}: hidden_size {config.hidden_size} is not a multiple of "
                f"num_attention_heads {config.num_attention_heads}"
            )
        return config

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of the checkpoint."""
        hidden, inner = self.hidden_size, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden)
        }
        for layer in range(self.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            shapes |= {
                f"{prefix}.input_layernorm.weight": (hidden,),
                f"{prefix}.self_attn.W_pack.weight": (3 * hidden, hidden),
                f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
                f"{prefix}.post_attention_layernorm.weight": (hidden,),
                f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
                f"{prefix}.mlp.up_proj.weight": (inner, hidden),
                f"{prefix}.mlp.down_proj.weight": (hidden, inner),
            }
        return shapes | {
            "model.norm.weight": (hidden,),
            "score.weight": (1, hidden),
            "score.bias": (1,),
        }


@dataclass(frozen=True, eq=False)
class ReferenceOutcome:
    """One row's result: compare ``hidden``, ``logit`` and ``p``; the score's grid is too coarse."""

    hidden: Tensor  # (hidden_size,), model dtype: last position after the final norm
    logit: float
    p: float
    score: float


def read_weights(folder: Path, config: ReferenceConfig) -> dict[str, Tensor]:
    """All tensors of the checkpoint in ``folder``, in their stored dtype, on the CPU.

    Layouts in transformers' order of preference: safetensors before pickles (read with
    ``weights_only=True``). `ValueError` names every missing, unexpected and misshapen tensor.
    """
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            shards = [name]
            break
        if index.is_file():
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            shards = sorted(set(weight_map.values()))
            break
    else:
        raise FileNotFoundError(f"{folder}: no model.safetensors, pytorch_model.bin, or index")
    weights: dict[str, Tensor] = {}
    problems: list[str] = []
    for shard in shards:
        path = folder / shard
        if path.suffix == ".safetensors":
            tensors = load_file(path)
        else:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
        problems += [f"twice: {name}" for name in tensors.keys() & weights.keys()]
        weights |= tensors
    shapes = config.shapes()
    problems += [f"missing: {name}" for name in shapes.keys() - weights.keys()]
    problems += [f"unexpected: {name}" for name in weights.keys() - shapes.keys()]
    problems += [
        f"shape {tuple(weights[name].shape)}, expected {shape}: {name}"
        for name, shape in shapes.items()
        if name in weights and tuple(weights[name].shape) != shape
    ]
    if problems:
        raise ValueError(
            f"{folder}: weights do not fit config.json; " + "; ".join(sorted(problems))
        )
    return weights


def encode(pieces: SentencePieceProcessor, text: str) -> list[int]:
    """Ids of ``text`` as transformers 4.36.2's slow tokenizer gives them, nothing appended.

    The three special literals are cut out, then each, from left to right, is glued back to a
    neighbour that does not put a space beside it (they are declared ``single_word``): first to the
    text on its left, else to the text on its right. Only what stays alone becomes a special id.
    A literal that was glued away leaves an empty text behind, which shields the next literal from
    its left neighbour: ``a</s></s>`` holds one ordinary ``</s>`` and one id 2.
    """
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError("text holds a lone surrogate, which no tokenizer can encode")
    parts = [part for part in re.split("(<unk>|<s>|</s>)", text) if part]
    for i, part in enumerate(parts):
        if part not in SPECIAL:
            continue
        left = parts[i - 1] if i > 0 else ""
        right = parts[i + 1] if i + 1 < len(parts) else ""
        if left and not left.endswith(" "):
            parts[i - 1], parts[i] = left + part, ""
        elif right and not right.startswith(" "):
            parts[i], parts[i + 1] = "", part + right
    ids: list[int] = []
    for part in parts:
        if part in SPECIAL:
            ids.append(SPECIAL[part])
        elif part:
            ids.extend(pieces.encode(part, out_type=int))
    return ids


def alibi_slopes(heads: int) -> list[float]:
    """One slope per head, in Python floats."""
    power = 2 ** math.floor(math.log2(heads))
    if power == heads:
        first = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [first * first**i for i in range(heads)]
    return alibi_slopes(power) + alibi_slopes(2 * power)[0::2][: heads - power]


def additive_mask(heads: int, length: int, padding: int, fault: Fault | None) -> Tensor:
    """(heads, length, length) float32: slope * absolute key position j, -inf where j > i.

    The first ``padding`` keys are -inf for every query (0 unless a fault pads).
    """
    slope = torch.tensor(alibi_slopes(heads), dtype=torch.float32).view(heads, 1, 1)
    position = torch.arange(length).expand(1, length, length)  # [.., i, j] = j
    if fault is Fault.RELATIVE_BIAS:
        position = position - torch.arange(length).view(1, length, 1)  # j - i
    causal = torch.triu(torch.full((length, length), float("-inf")), diagonal=1)
    if fault is Fault.MISSING_CAUSAL_MASK:
        causal = torch.zeros(length, length)
    mask = causal + slope * position
    mask[:, :, :padding] = float("-inf")
    return mask


def rms_norm(x: Tensor, weight: Tensor, eps: float, fault: Fault | None) -> Tensor:
    """(.., hidden) -> (.., hidden); float32 inside, rounded *before* the weight."""
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    y = x * torch.rsqrt(variance + eps)  # float32
    if fault is Fault.NORM_WEIGHT_BEFORE_CAST:
        return (weight.to(torch.float32) * y).to(weight.dtype)
    return weight * y.to(weight.dtype)


def attention(x: Tensor, w_pack: Tensor, o_proj: Tensor, mask: Tensor, heads: int) -> Tensor:
    """(1, L, hidden) -> (1, L, hidden); ``mask`` is (heads, L, L)."""
    batch, length, hidden = x.shape
    dim = hidden // heads
    q, k, v = (
        third.view(batch, length, heads, dim).transpose(1, 2)  # (1, heads, L, dim)
        for third in F.linear(x, w_pack).chunk(3, dim=-1)
    )
    scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(dim)  # (1, heads, L, L)
    scores = scores + mask  # float32 if the mask is (FLOAT32_BIAS), else the model dtype
    scores = torch.max(scores, scores.new_tensor(torch.finfo(scores.dtype).min))
    probabilities = F.softmax(scores, dim=-1).to(x.dtype)
    mixed = torch.matmul(probabilities, v)  # (1, heads, L, dim)
    return F.linear(mixed.transpose(1, 2).reshape(batch, length, hidden), o_proj)


def feed_forward(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """(1, L, hidden) -> (1, L, hidden)."""
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def body(
    weights: Mapping[str, Tensor],
    config: ReferenceConfig,
    ids: Tensor,
    mask: Tensor,
    fault: Fault | None,
) -> Tensor:
    """Ids (1, L), mask (heads, L, L) -> all hidden states (1, L, hidden), final norm applied."""
    eps, heads = config.rms_norm_eps, config.num_attention_heads
    x = F.embedding(ids, weights["model.embed_tokens.weight"])
    for layer in range(config.num_hidden_layers):
        w = {
            name: weights[f"model.layers.{layer}.{name}.weight"]
            for name in (
                "input_layernorm",
                "self_attn.W_pack",
                "self_attn.o_proj",
                "post_attention_layernorm",
                "mlp.gate_proj",
                "mlp.up_proj",
                "mlp.down_proj",
            )
        }
        y = rms_norm(x, w["input_layernorm"], eps, fault)
        x = x + attention(y, w["self_attn.W_pack"], w["self_attn.o_proj"], mask, heads)
        y = rms_norm(x, w["post_attention_layernorm"], eps, fault)
        x = x + feed_forward(y, w["mlp.gate_proj"], w["mlp.up_proj"], w["mlp.down_proj"])
    return rms_norm(x, weights["model.norm.weight"], eps, fault)


@dataclass(frozen=True, eq=False)
class SlowReference:
    """A checkpoint, its tokenizer and the literal forward."""

    config: ReferenceConfig
    weights: Mapping[str, Tensor]  # all of one dtype, on one device
    pieces: SentencePieceProcessor | None  # None where the folder has no tokenizer.model

    @classmethod
    def open(
        cls, folder: Path, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
    ) -> SlowReference:
        """Read ``config.json``, the weights and, where there is one, ``tokenizer.model``.

        ``torch.bfloat16`` is the official dtype; ``torch.float32`` is for comparing machines.
        Raises `FileNotFoundError` and `ValueError`.
        """
        config = ReferenceConfig.read(folder / "config.json")
        weights = read_weights(folder, config)
        for name in weights:
            weights[name] = weights[name].to(device, dtype)
        model = folder / "tokenizer.model"
        pieces = SentencePieceProcessor(model_file=str(model)) if model.is_file() else None
        return cls(config, weights, pieces)

    def ids(self, text: str, fault: Fault | None = None) -> list[int]:
        """Ids of a finished input text: encoded, id 2 appended, the last 4,096 kept.

        `ValueError` for a text with a lone surrogate, `FileNotFoundError` without a tokenizer.
        """
        if self.pieces is None:
            raise FileNotFoundError("the checkpoint folder has no tokenizer.model")
        ids = encode(self.pieces, text)
        if fault is not Fault.MISSING_EOS:
            ids.append(EOS)
        if fault is Fault.RIGHT_TRUNCATION:
            return ids[:MAX_TOKENS]
        return ids[-MAX_TOKENS:]

    def forward(self, ids: Sequence[int], fault: Fault | None = None) -> ReferenceOutcome:
        """One row, batch 1. `ValueError` for ids that are not a row or a result not finite."""
        if not 1 <= len(ids) <= MAX_TOKENS:
            raise ValueError(f"{len(ids)} ids, expected 1 to {MAX_TOKENS}")
        if not all(0 <= i < self.config.vocab_size for i in ids):
            raise ValueError(f"an id is outside the vocabulary of {self.config.vocab_size}")
        padding = 16 if fault is Fault.LEFT_PADDING else 0
        head, bias = self.weights["score.weight"], self.weights["score.bias"]
        with torch.inference_mode():
            tokens = torch.tensor([[EOS] * padding + list(ids)], device=head.device)
            mask = additive_mask(
                self.config.num_attention_heads, tokens.shape[1], padding, fault
            ).to(head.device)
            if fault is not Fault.FLOAT32_BIAS:
                mask = mask.to(head.dtype)
            hidden = body(self.weights, self.config, tokens, mask, fault)[:, -1]  # (1, hidden)
            x = hidden
            if fault is Fault.FLOAT32_HEAD:
                x, head, bias = x.float(), head.float(), bias.float()
            logit = F.linear(x, head, bias)  # (1, 1)
            p = float(torch.sigmoid(logit))
        if not math.isfinite(p):
            raise ValueError(f"p is {p} for a row of {len(ids)} tokens")
        return ReferenceOutcome(hidden[0].clone(), float(logit), p, p * 4 + 1)
