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

from flexmarl.rollout.backends.passes import ForwardPass

MAX_PARAMETERS = 50_000_000
"""Above this the arithmetic dominates, and the copies of the fused weights would cost memory for nothing."""

_FIXED_ROPE_TYPES = ("default", "linear", "llama3")
"""Rotary embeddings that do not depend on the length of the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Weights of a layer; projections of equal input are one matrix."""

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
        self._hidden_size = int(config.hidden_size)
        self._layers: list[_Layer] = []
        positions = torch.arange(config.max_position_embeddings)[None]
        with torch.no_grad():
            cos, sin = model.model.rotary_emb(model.lm_head.weight, position_ids=positions)
        # The rotary embedding repeats the angles of the first half in the second.
        half = self._head_dim // 2
        self._cos, self._sin = cos[0, :, :half].clone(), sin[0, :, :half].clone()
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """See Forward: fuse the weights anew."""
        self._layers = [_fused(layer) for layer in self._model.model.layers]

    def __call__(self, inputs: ForwardPass) -> Tensor:
        """See Forward."""
        model = self._model
        hidden_NTE = F.embedding(inputs.tokens_NT, model.model.embed_tokens.weight)
        cos, sin = self._cos[inputs.positions_NT][:, :, None], self._sin[inputs.positions_NT][:, :, None]
        for index, layer in enumerate(self._layers):
            normed = self._norm(hidden_NTE, layer.attention_norm)
            attended = self._attend(F.linear(normed, layer.qkv, layer.qkv_bias), cos, sin, inputs, index)
            hidden_NTE = hidden_NTE + F.linear(attended, layer.out, layer.out_bias)
            normed = self._norm(hidden_NTE, layer.mlp_norm)
            gate, up = F.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            hidden_NTE = hidden_NTE + F.linear(F.silu(gate) * up, layer.down, layer.down_bias)
        last_NE = self._norm(hidden_NTE[:, -1], model.model.norm.weight)
        return F.linear(last_NE, model.lm_head.weight)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, (self._hidden_size,), weight, self._eps)

    def _attend(self, qkv: Tensor, cos: Tensor, sin: Tensor, inputs: ForwardPass, layer: int) -> Tensor:
        """Rotate, store and attend; returns [N, T, H * D]."""
        num_rows, num_tokens = qkv.shape[:2]
        num_rotated = self._num_heads + self._num_kv_heads
        heads = qkv.view(num_rows, num_tokens, num_rotated + self._num_kv_heads, self._head_dim)
        first, second = heads[:, :, :num_rotated].chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        keys_NKLD, values_NKLD = inputs.cache.update(
            rotated[:, :, self._num_heads :].transpose(1, 2), heads[:, :, num_rotated:].transpose(1, 2), layer
        )
        queries = rotated[:, :, : self._num_heads]
        group = self._num_heads // self._num_kv_heads
        if num_tokens == 1:
            # The query heads that share a key-value head stand where the tokens of a longer pass would: no copies.
            queries = queries.reshape(num_rows, self._num_kv_heads, group, self._head_dim)
            attended = F.scaled_dot_product_attention(queries, keys_NKLD, values_NKLD, attn_mask=inputs.mask_N1TL)
            return attended.reshape(num_rows, 1, -1)
        if group > 1:
            keys_NKLD, values_NKLD = (each.repeat_interleave(group, dim=1) for each in (keys_NKLD, values_NKLD))
        attended = F.scaled_dot_product_attention(
            queries.transpose(1, 2), keys_NKLD, values_NKLD, attn_mask=inputs.mask_N1TL
        )
        return attended.transpose(1, 2).reshape(num_rows, num_tokens, -1)


def _fused(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, qkv_bias = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
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
