"""What a family is: how its config.json maps to a DecoderConfig, and a table of tensor names.

The pieces that families share are here; each family's own module puts them together and adds what sets it apart.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from upjax.hf.families.rope import read_rope, write_rope
from upjax.hf.families.settings import REQUIRED, Settings
from upjax.model.config import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a tensor table; it applies to each layer whose parameters have `path`.

    `{prefix}`, `{layer}` and `{expert}` in `name` are filled in. `part` is set where the tensor holds two of our
    parameters one after the other along the outputs: 0 for the first, 1 for the second.
    """

    name: str
    path: str
    transposed: bool = False
    part: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zeros:
    """A tensor that a format wants and our model has not; zeros of `shape` leave what it computes as it was."""

    name: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One model_type of transformers.

    `layouts` are the tables that can be read; the first is the one written. `read` returns DecoderConfig fields, and
    `write` config.json keys. `lacks` names what a DecoderConfig has and the format cannot say, and `differs` what
    transformers v5 reads rightly and another loader does not. `ignored` matches the names of tensors that may be in a
    checkpoint and change nothing.
    """

    model_type: str
    architecture: str
    layouts: tuple[tuple[Row, ...], ...]
    read: Callable[[Settings], dict[str, Any]]
    write: Callable[[DecoderConfig], dict[str, Any]]
    lacks: Callable[[DecoderConfig], list[str]]
    differs: Callable[[DecoderConfig], list[str]] = lambda config: []
    zeros: Callable[[DecoderConfig], Iterable[Zeros]] = lambda config: ()
    ignored: str = r".*\.rotary_emb\.inv_freq"


def linear(name: str, path: str) -> Row:
    """Returns the row of a layer's torch Linear, stored [outputs, inputs]."""
    return Row(name=f"{{prefix}}layers.{{layer}}.{name}.weight", path=path, transposed=True)


def vector(name: str, path: str) -> Row:
    """Returns the row of a layer's vector."""
    return Row(name=f"{{prefix}}layers.{{layer}}.{name}", path=path)


DENSE = (
    Row(name="{prefix}embed_tokens.weight", path="embedding"),
    vector("input_layernorm.weight", "attention_norm"),
    linear("self_attn.q_proj", "attention/query"),
    linear("self_attn.k_proj", "attention/key"),
    linear("self_attn.v_proj", "attention/value"),
    linear("self_attn.o_proj", "attention/out"),
    vector("self_attn.q_proj.bias", "attention/query_bias"),
    vector("self_attn.k_proj.bias", "attention/key_bias"),
    vector("self_attn.v_proj.bias", "attention/value_bias"),
    vector("self_attn.o_proj.bias", "attention/out_bias"),
    vector("self_attn.q_norm.weight", "attention/query_norm"),
    vector("self_attn.k_norm.weight", "attention/key_norm"),
    vector("post_attention_layernorm.weight", "mlp_norm"),
    linear("mlp.gate_proj", "mlp/gate"),
    linear("mlp.up_proj", "mlp/up"),
    linear("mlp.down_proj", "mlp/down"),
    vector("mlp.gate_proj.bias", "mlp/gate_bias"),
    vector("mlp.up_proj.bias", "mlp/up_bias"),
    vector("mlp.down_proj.bias", "mlp/down_bias"),
    Row(name="{prefix}norm.weight", path="final_norm"),
    Row(name="lm_head.weight", path="head", transposed=True),
)
"""The names outside of experts; a row whose parameter the model has not (no bias, a tied head) does not apply."""


def read_base(
    settings: Settings,
    *,
    norm_epsilon: float = 1e-6,
    rope_theta: float = 10_000.0,
    kv_heads_default_to_heads: bool = False,
    head_dim: int | None = None,
) -> dict[str, Any]:
    """Returns the DecoderConfig fields that every family has; the arguments are what an absent key means."""
    settings.choice("hidden_act", ("silu", "swish"), "silu")
    embed_dim = settings.whole("hidden_size")
    num_heads = settings.whole("num_attention_heads")
    max_sequence_length = settings.whole("max_position_embeddings")
    head_dim = settings.whole("head_dim", head_dim)
    known = not settings.faulty & {"hidden_size", "num_attention_heads"}
    if known and head_dim is None and embed_dim % num_heads:
        settings.problem("hidden_size", f"a multiple of num_attention_heads {num_heads}, or a head_dim of its own")
    return dict(
        vocab_size=settings.whole("vocab_size"),
        embed_dim=embed_dim,
        hidden_dim=settings.whole("intermediate_size"),
        num_layers=settings.whole("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=settings.whole("num_key_value_heads", num_heads if kv_heads_default_to_heads else REQUIRED),
        head_dim=head_dim or embed_dim // num_heads,
        max_sequence_length=max_sequence_length,
        rope=read_rope(settings, rope_theta, max_sequence_length),
        norm_epsilon=settings.real("rms_norm_eps", norm_epsilon),
        tied_embeddings=settings.flag("tie_word_embeddings", False),
    )


def write_base(config: DecoderConfig) -> dict[str, Any]:
    """Returns the config.json keys that every family has."""
    return dict(
        vocab_size=config.vocab_size,
        hidden_size=config.embed_dim,
        intermediate_size=config.hidden_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_act="silu",
        max_position_embeddings=config.max_sequence_length,
        rms_norm_eps=config.norm_epsilon,
        tie_word_embeddings=config.tied_embeddings,
        attention_dropout=0.0,
        initializer_range=0.02,
        use_cache=True,
        **write_rope(config.rope),
    )


def lacking(config: DecoderConfig, *fields: str) -> list[str]:
    """Returns those of the named fields that are set, each with its value."""
    return [f"{field} {getattr(config, field)}" for field in fields if getattr(config, field)]


def head_dim_of_its_own(config: DecoderConfig) -> list[str]:
    """Returns the head size as a thing lacking, where it is not the embedding over the heads."""
    even = config.embed_dim // config.num_heads
    return [] if config.head_dim == even else [f"head_dim {config.head_dim} (only embed_dim / num_heads, here {even})"]
