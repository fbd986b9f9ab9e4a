"""Reads a Hugging Face DeepSeek-V2 or V3 checkpoint's config.json into frozen values.

Whatever the engine can't compute exactly is refused here, with a message that names the key, so
that no later module needs to doubt a configuration.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from pathlib import Path

from engine_adapter.mla.fields import Fields, read_json_object


class Family(enum.StrEnum):
    """The model families this engine computes; they differ only in their router."""

    V2 = "DeepseekV2ForCausalLM"
    V3 = "DeepseekV3ForCausalLM"


@dataclass(frozen=True, slots=True)
class YarnConfig:
    """Context extension by YaRN, every default resolved.

    Attributes:
        factor: Extended context over original context.
        original_tokens: Context the model was first trained for.
        beta_fast: Rotations over the original context above which a frequency is kept.
        beta_slow: Rotations below which a frequency is divided by `factor`.
        attention_factor: Multiplies cos and sin.
        softmax_factor: Multiplies the softmax scale: mscale(mscale_all_dim) squared.
        truncate: Round the correction range to whole dimensions.
    """

    factor: float
    original_tokens: float
    beta_fast: float
    beta_slow: float
    attention_factor: float
    softmax_factor: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions: base frequency and, for extended contexts, YaRN."""

    theta: float
    yarn: YarnConfig | None


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixture of experts.

    Attributes:
        first_layer: Layers before this one are dense.
        layer_frequency: From there on, every n-th layer (by its index) has experts.
        experts: Routed experts.
        shared_experts: Experts every token takes; stored as one wide expert. 0 for none.
        experts_per_token: Routed experts a token takes.
        intermediate_size: Width of one expert.
        groups: Groups the routed experts are divided into; 1 for no limit.
        groups_per_token: Groups a token may take experts from.
        group_score_experts: A group's score is the sum of its best this many experts.
        sigmoid: Scores are sigmoid(logit) with a learned selection bias (V3), else softmax (V2).
        normalise: Divide the chosen weights by their sum.
        scale: Multiplies the routed weights.
    """

    first_layer: int
    layer_frequency: int
    experts: int
    shared_experts: int
    experts_per_token: int
    intermediate_size: int
    groups: int
    groups_per_token: int
    group_score_experts: int
    sigmoid: bool
    normalise: bool
    scale: float

    def has_experts(self, layer: int) -> bool:
        """Whether this layer's MLP is a mixture of experts."""
        return layer >= self.first_layer and layer % self.layer_frequency == 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """An MLA language model, sizes in elements.

    Attributes:
        name: The model's public name, or its directory's.
        max_tokens: Longest sequence, prompt and answer together.
        q_lora_rank: Width of the query latent; None if queries are projected directly.
        kv_lora_rank: Width of the cached latent.
        rope_width: Width of the rotary part of queries and of the cached key.
        moe: None if every layer is dense.
        bos_token_id: None if the configuration names none.
        eos_token_ids: Any of them ends an answer.
    """

    name: str
    family: Family
    vocab_size: int
    max_tokens: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_width: int
    rope_width: int
    value_width: int
    norm_eps: float
    tied_embeddings: bool
    rope: RopeConfig
    moe: MoeConfig | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def record_width(self) -> int:
        """Elements cached a token and layer: latent, then rotated key."""
        return self.kv_lora_rank + self.rope_width

    @property
    def softmax_scale(self) -> float:
        """What attention scores are multiplied by."""
        yarn = self.rope.yarn
        factor = yarn.softmax_factor if yarn else 1.0
        return factor / math.sqrt(self.nope_width + self.rope_width)

    @property
    def absorbed_below_tokens(self) -> float:
        """Query tokens below which absorbed attention costs less than expanding the latents.

        A head's cost in multiplications a cached token, for n query tokens: expanded
        latent * (nope + value) + n * (nope + rope + value), absorbed n * (2 * latent + rope).
        171 for DeepSeek-V3, 73 for tiny-mla.
        """
        expansion = self.nope_width + self.value_width
        saved = 2 * self.kv_lora_rank - expansion
        return self.kv_lora_rank * expansion / saved if saved > 0 else math.inf

    def has_experts(self, layer: int) -> bool:
        """Whether this layer's MLP is a mixture of experts."""
        return self.moe is not None and self.moe.has_experts(layer)


def load_config(checkpoint_dir: Path) -> ModelConfig:
    """Read `checkpoint_dir`/config.json, old and new rotary keys alike.

    Raises:
        CheckpointError: absent or damaged file, a model without MLA, or a feature that this
            engine does not compute.
    """
    path = checkpoint_dir / "config.json"
    values = read_json_object(path)
    fields = Fields(values, str(path))
    if fields.get("kv_lora_rank") is None:
        raise fields.fail("kv_lora_rank", "is absent: not a multi-head latent attention model")
    family = _family(fields)
    _refuse_unsupported(fields, family)
    bos = fields.get("bos_token_id")
    return ModelConfig(
        name=checkpoint_name(fields, checkpoint_dir),
        family=family,
        vocab_size=fields.size("vocab_size"),
        max_tokens=fields.size("max_position_embeddings"),
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("intermediate_size"),
        layers=fields.size("num_hidden_layers"),
        heads=fields.size("num_attention_heads"),
        q_lora_rank=None if fields.get("q_lora_rank") is None else fields.size("q_lora_rank"),
        kv_lora_rank=fields.size("kv_lora_rank"),
        nope_width=fields.size("qk_nope_head_dim"),
        rope_width=_rope_width(fields),
        value_width=fields.size("v_head_dim"),
        norm_eps=fields.number("rms_norm_eps"),
        tied_embeddings=fields.flag("tie_word_embeddings", default=False),
        rope=rope_config(fields),
        moe=_moe(fields, family),
        bos_token_id=None if bos is None else fields.size("bos_token_id", minimum=0),
        eos_token_ids=_eos_token_ids(fields),
    )


def _family(fields: Fields) -> Family:
    architectures = fields.get("architectures")
    found = architectures[0] if isinstance(architectures, list) and architectures else None
    for family in Family:
        if found == family:
            return family
    raise fields.fail("architectures", f"{found!r} is not supported ({', '.join(Family)})")


def _refuse_unsupported(fields: Fields, family: Family) -> None:
    fields.require("hidden_act", "silu")
    fields.require("attention_bias", False)
    fields.require("mlp_bias", False)
    fields.require("rope_interleave", True)
    if fields.get("quantization_config") is not None:
        raise fields.fail("quantization_config", "is set: quantised weights are not supported")
    if family is Family.V2:
        fields.require("topk_method", "greedy", "group_limited_greedy")
        fields.require("scoring_func", "softmax")
        # The published V2 code and transformers disagree on what this means, so neither is right.
        fields.require("norm_topk_prob", False)
    else:
        fields.require("topk_method", "noaux_tc")
        fields.require("scoring_func", "sigmoid")


def _rope_width(fields: Fields) -> int:
    width = fields.size("qk_rope_head_dim")
    if width % 2:
        raise fields.fail("qk_rope_head_dim", f"must be even, found {width}")
    return width


def _eos_token_ids(fields: Fields) -> tuple[int, ...]:
    value = fields.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
        raise fields.fail("eos_token_id", f"must be an integer or a list of them, found {value!r}")
    return tuple(ids)


def _moe(fields: Fields, family: Family) -> MoeConfig | None:
    first_layer = fields.size("first_k_dense_replace", default=0, minimum=0)
    if fields.get("n_routed_experts") is None or first_layer >= fields.size("num_hidden_layers"):
        return None
    sigmoid = family is Family.V3
    limited = sigmoid or fields.get("topk_method") == "group_limited_greedy"
    moe = MoeConfig(
        first_layer=first_layer,
        layer_frequency=fields.size("moe_layer_freq", default=1),
        experts=fields.size("n_routed_experts"),
        shared_experts=fields.size("n_shared_experts", default=0, minimum=0),
        experts_per_token=fields.size("num_experts_per_tok"),
        intermediate_size=fields.size("moe_intermediate_size"),
        groups=fields.size("n_group") if limited else 1,
        groups_per_token=fields.size("topk_group") if limited else 1,
        group_score_experts=2 if sigmoid else 1,
        sigmoid=sigmoid,
        normalise=sigmoid and fields.flag("norm_topk_prob", default=True),
        scale=fields.number("routed_scaling_factor", default=1.0),
    )
    if moe.experts % moe.groups:
        raise fields.fail("n_group", f"{moe.groups} does not divide {moe.experts} experts")
    group_size = moe.experts // moe.groups
    if moe.groups > 1 and group_size < moe.group_score_experts:
        raise fields.fail("n_group", f"{moe.groups} leaves fewer than 2 experts a group")
    if moe.groups_per_token > moe.groups:
        raise fields.fail("topk_group", f"{moe.groups_per_token} exceeds n_group {moe.groups}")
    if moe.experts_per_token > moe.groups_per_token * group_size:
        raise fields.fail("num_experts_per_tok", f"{moe.experts_per_token} exceeds its experts")
    return moe


def checkpoint_name(fields: Fields, checkpoint_dir: Path) -> str:
    """The model's public name, where its config.json states one; else its directory's."""
    name = fields.get("_name_or_path")
    return name if isinstance(name, str) and name else checkpoint_dir.resolve().name


def rope_config(fields: Fields) -> RopeConfig:
    """The rotary keys of a config.json.

    transformers 5 keeps all of it in rope_parameters; older files have two keys.

    Raises:
        CheckpointError: a scaling other than YaRN, or a value out of range.
    """
    scaling = fields.nested("rope_parameters") or fields.nested("rope_scaling")
    outer = fields.number("rope_theta", default=10_000.0)
    if scaling is None:
        return RopeConfig(theta=outer, yarn=None)
    theta = scaling.number("rope_theta", default=outer)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta=theta, yarn=None)
    if kind != "yarn":
        raise scaling.fail("rope_type", f"{kind!r} is not supported (supported: default, yarn)")
    return RopeConfig(theta=theta, yarn=_yarn(scaling, fields.size("max_position_embeddings")))


def _yarn(scaling: Fields, max_tokens: int) -> YarnConfig:
    """Source: YaRN (arXiv 2309.00071) section 3.4; mscale as in DeepSeek-V3 inference/model.py."""
    original_tokens = scaling.number("original_max_position_embeddings", default=max_tokens)
    factor = scaling.number("factor", default=max_tokens / original_tokens)
    # 0 is a value in real files: "no factor of that kind".
    mscale = scaling.number("mscale") if scaling.get("mscale") else 0.0
    all_dim = scaling.number("mscale_all_dim") if scaling.get("mscale_all_dim") else 0.0
    if mscale and all_dim:
        attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, all_dim)
    else:
        attention_factor = _yarn_mscale(factor, 1.0)
    return YarnConfig(
        factor=factor,
        original_tokens=original_tokens,
        beta_fast=scaling.number("beta_fast", default=32.0),
        beta_slow=scaling.number("beta_slow", default=1.0),
        attention_factor=scaling.number("attention_factor", default=attention_factor),
        softmax_factor=_yarn_mscale(factor, all_dim) ** 2,
        truncate=scaling.flag("truncate", default=True),
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
