"""A Llama forward pass with few calls: on small models the calls of the module tree cost more than the arithmetic.

Tests compare it with the forward of transformers. Axes: N rows, T tokens, H query heads, K key-value heads, D head
size, E hidden size, L columns attended to.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from flexmarl.rollout.backends.kv_cache import DecodeView
from flexmarl.rollout.backends.passes import ForwardPass

BLOCK_TOKENS = 32
"""Block size of the cache: smaller ones cost more calls, larger ones read more columns that nobody sees."""

MAX_PARAMETERS = 50_000_000
"""Above this the arithmetic dominates, and the copies of the fused weights would cost memory for nothing."""

_FIXED_ROPE_TYPES = ("default", "linear", "llama3")
"""Rotary embeddings that do not depend on the length of the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Weights of a layer; projections of equal input are one matrix.

    The axes of a query or key head are reordered so that the two that rotate together are neighbours, which leaves
    their products as they are and makes a rotation one complex multiplication.
    """

    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    attention_norm: Tensor
    mlp_norm: Tensor


class LlamaForward:
    """A Forward over a LlamaForCausalLM; `refresh` must be called after its parameters change."""

    @staticmethod
    def serves(model: Any) -> bool:
        """Return whether this forward computes what the model's own does, and is worth it."""
        if type(model) is not LlamaForCausalLM or model.num_parameters() > MAX_PARAMETERS:
            return False
        config = model.config
        return config.hidden_act == "silu" and config.rope_parameters["rope_type"] in _FIXED_ROPE_TYPES

    def __init__(self, model: Any) -> None:
        """Use `model`, for which `serves` is true."""
        config = model.config
        self._model = model
        self._head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self._num_heads = int(config.num_attention_heads)
        self._num_kv_heads = int(config.num_key_value_heads)
        self._eps = float(config.rms_norm_eps)
        self._scale = self._head_dim**-0.5
        self._hidden_size = int(config.hidden_size)
        self._layers: list[_Layer] = []
        positions = torch.arange(config.max_position_embeddings)[None]
        with torch.no_grad():
            cos, sin = model.model.rotary_emb(model.lm_head.weight, position_ids=positions)
        # The rotary embedding repeats the angles of the first half in the second.
        half = self._head_dim // 2
        self._rotations = torch.complex(cos[0, :, :half], sin[0, :, :half])
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """See Forward: fuse the weights anew."""
        self._layers = [_fused(layer, self._head_dim) for layer in self._model.model.layers]

    def __call__(self, inputs: ForwardPass) -> Tensor:
        """See Forward."""
        model = self._model
        hidden_NTE = F.embedding(inputs.tokens_NT, model.model.embed_tokens.weight)
        rotations = self._rotations[inputs.positions_NT][:, :, None]
        masks = self._block_masks(inputs) if isinstance(inputs.cache, DecodeView) else []
        for index, layer in enumerate(self._layers):
            normed = self._norm(hidden_NTE, layer.attention_norm)
            heads = F.linear(normed, layer.qkv, layer.qkv_bias).view(*hidden_NTE.shape[:2], -1, self._head_dim)
            rotated = heads[:, :, : self._num_heads + self._num_kv_heads]
            torch.view_as_complex(rotated.view(*rotated.shape[:3], -1, 2)).mul_(rotations)
            if isinstance(inputs.cache, DecodeView):
                attended = self._attend_blocks(heads, inputs.cache, masks, index)
            else:
                attended = self._attend_prompts(heads, inputs, index)
            hidden_NTE = hidden_NTE + F.linear(attended, layer.out, layer.out_bias)
            normed = self._norm(hidden_NTE, layer.mlp_norm)
            gate, up = F.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            hidden_NTE = hidden_NTE + F.linear(F.silu(gate).mul_(up), layer.down, layer.down_bias)
        last_NE = self._norm(hidden_NTE[:, -1], model.model.norm.weight)
        return F.linear(last_NE, model.lm_head.weight)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, (self._hidden_size,), weight, self._eps)

    def _split(self, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        end = self._num_heads + self._num_kv_heads
        return heads[:, :, : self._num_heads], heads[:, :, self._num_heads : end], heads[:, :, end:]

    def _attend_prompts(self, heads: Tensor, inputs: ForwardPass, layer: int) -> Tensor:
        """Store and attend within the pass; returns [N, T, H * D]."""
        queries, keys, values = (each.transpose(1, 2) for each in self._split(heads))
        keys, values = inputs.cache.update(keys, values, layer)
        group = self._num_heads // self._num_kv_heads
        if group > 1:
            keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=inputs.mask_N1TL)
        return attended.transpose(1, 2).flatten(2)

    def _block_masks(self, inputs: ForwardPass) -> list[Tensor]:
        """Return the additive mask of each block for all heads, [N * K, H / K, C]."""
        mask_NL = inputs.mask_N1TL[:, 0, 0]
        mask_NL = F.pad(mask_NL, (0, -mask_NL.shape[1] % BLOCK_TOKENS), value=-torch.inf)
        group = self._num_heads // self._num_kv_heads
        return [
            block_NC[:, None, None].expand(-1, self._num_kv_heads, group, -1).flatten(0, 1)
            for block_NC in mask_NL.chunk(mask_NL.shape[1] // BLOCK_TOKENS, dim=1)
        ]

    def _attend_blocks(self, heads: Tensor, cache: DecodeView, masks: list[Tensor], layer: int) -> Tensor:
        """Store the new token and attend over the blocks of the cache; returns [N, 1, H * D].

        The query heads that share a key-value head stand where the tokens of a longer pass would: no copies.
        """
        queries, keys, values = self._split(heads)
        cache.store(keys, values, layer)
        queries = queries.reshape(len(queries) * self._num_kv_heads, -1, self._head_dim)
        blocks = cache.blocks(layer)
        scores = [
            torch.baddbmm(mask, queries, block_keys.transpose(1, 2), alpha=self._scale)
            for mask, (block_keys, _) in zip(masks, blocks, strict=True)
        ]
        shares = torch.softmax(torch.cat(scores, dim=-1), dim=-1).chunk(len(blocks), dim=-1)
        attended = torch.bmm(shares[0], blocks[0][1])
        for share, (_, block_values) in zip(shares[1:], blocks[1:], strict=True):
            attended.baddbmm_(share, block_values)
        return attended.view(len(heads), 1, -1)


def _fused(layer: Any, head_dim: int) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, qkv_bias = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
    num_rotated = attention.q_proj.out_features + attention.k_proj.out_features
    for each in (qkv, qkv_bias):
        if each is not None:
            halves = each[:num_rotated].view(-1, 2, head_dim // 2, *each.shape[1:])
            each[:num_rotated] = halves.transpose(1, 2).flatten(0, 2)
    gate_up, gate_up_bias = _joined(mlp.gate_proj, mlp.up_proj)
    return _Layer(
        qkv=qkv,
        qkv_bias=qkv_bias,
        out=attention.o_proj.weight,
        out_bias=attention.o_proj.bias,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=mlp.down_proj.weight,
        down_bias=mlp.down_proj.bias,
        attention_norm=layer.input_layernorm.weight,
        mlp_norm=layer.post_attention_layernorm.weight,
    )


def _joined(*projections: Any) -> tuple[Tensor, Tensor | None]:
    weight = torch.cat([projection.weight for projection in projections])
    has_bias = projections[0].bias is not None
    return weight, torch.cat([projection.bias for projection in projections]) if has_bias else None
