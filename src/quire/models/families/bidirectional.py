"""Encoders with the layers of a decoder, in which a token sees the tokens on both sides of it."""

from __future__ import annotations

from quire.errors import UnsupportedModel
from quire.models.families.gemma3 import gemma3
from quire.models.families.hf_config import HFConfig
from quire.models.families.llama import llama
from quire.models.specs.encoder_spec import BidirectionalAttention, EncoderLayer, EncoderMLP, EncoderSpec
from quire.models.specs.spec import Attention, GatedMLP, LayerSpec, ModelSpec, WeightMap


def embedding_gemma(config: HFConfig) -> tuple[EncoderSpec, WeightMap]:
    """Read a `Gemma3TextModel` whose attention is bidirectional."""
    return bidirectional(*gemma3(config.changed({"use_bidirectional_attention": False})))


def eurobert(config: HFConfig) -> tuple[EncoderSpec, WeightMap]:
    """Read an `EuroBertModel` or `EuroBertForMaskedLM`, without a head."""
    return bidirectional(*llama(config.filled({"rms_norm_eps": 1e-5})))


def bidirectional(spec: ModelSpec, names: WeightMap) -> tuple[EncoderSpec, WeightMap]:
    """Return the encoder with the layers of a decoder; a window of W tokens becomes one of W // 2 on either side.

    Args:
        spec, names: the decoder.

    Raises:
        UnsupportedModel: a layer has a part that encoders do not have.
    """
    encoder = EncoderSpec(
        vocab_size=spec.vocab_size,
        width=spec.width,
        layers=tuple(_layer(layer, idx) for idx, layer in enumerate(spec.layers)),
        embedding_norm=None,
        norm=spec.norm,
        max_position=spec.max_position,
        embedding_scale=spec.embedding_scale,
    )
    renamed: WeightMap = {}
    for name, sources in names.items():
        if name != "head.weight":
            renamed[name.replace(".mixer.", ".").replace(".gate_up.", ".up.")] = sources
    return encoder, renamed


def _layer(layer: LayerSpec, idx: int) -> EncoderLayer:
    heads, mlp = layer.mixer, layer.ffn
    if isinstance(heads, Attention) and isinstance(mlp, GatedMLP) and layer.norm is not None:
        kept = Attention(
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            heads.rope,
            qk_norm=heads.qk_norm,
            qkv_bias=heads.qkv_bias,
            output_bias=heads.output_bias,
            window=heads.window,
            score_scale=heads.score_scale,
        )
        plain = LayerSpec(layer.norm, kept, GatedMLP(mlp.width, mlp.bias, mlp.activation), layer.post_norm)
        if layer == plain and mlp.activation != "swigluoai":
            attention = BidirectionalAttention(
                heads.num_heads,
                heads.num_kv_heads,
                heads.head_dim,
                heads.qkv_bias,
                heads.output_bias,
                heads.rope,
                None if heads.window is None else heads.window // 2,
                heads.qk_norm,
                heads.score_scale,
            )
            return EncoderLayer(
                attention,
                EncoderMLP(mlp.width, mlp.activation, gated=True, bias=mlp.bias),
                layer.norm,
                layer.norm,
                norm_first=True,
                output_norm=layer.post_norm,
            )
    raise UnsupportedModel(f"layer {idx} of the encoder has a part that is implemented for decoders only")
