"""The footprint of a model in numbers and in words; how both are shown is not known here."""

from __future__ import annotations

from kvtier.footprint.geometries import Geometry
from kvtier.footprint.sizes import (
    BLOCK_TOKENS,
    DEEPSEEK_67B_BYTES,
    GQA8_LAYER_BYTES,
    RANK,
    ROPE_WIDTH,
    SOURCE,
    Form,
    indexer_record_bytes,
    load_latents,
)

HEADLINE_BYTES = 60 * (512 + 64) * 6 // 8
"""A token of DeepSeek-V2 as deployed, by its report: 60 layers, 6 bits an element: 25,920."""


def as_dict(geometry: Geometry, forms: list[Form]) -> dict[str, object]:
    """All figures, as numbers; `reduction_vs_deepseek_67b` once more by form."""
    return {
        "model": geometry.name,
        "layers": geometry.layers,
        "heads": geometry.heads,
        "kv_lora_rank": geometry.kv_lora_rank,
        "rope_width": geometry.rope_width,
        "indexer_width": geometry.indexer_width,
        "gqa8_bytes_per_token": geometry.layers * GQA8_LAYER_BYTES,
        "deepseek_67b_bytes_per_token": DEEPSEEK_67B_BYTES,
        "measured_on": SOURCE if geometry.kv_lora_rank else None,
        "notes": [*notes(geometry), *conclusions(forms)],
        "forms": {
            form.name: {
                "meaning": form.meaning,
                "measured": form.measured,
                "bytes_per_token": form.bytes_per_token,
                "bytes_per_token_layer": form.bytes_per_token_layer,
                "indexer_bytes_per_token": form.indexer_bytes_per_token,
                "ratio_to_gqa8": form.ratio_to_gqa8,
                "reduction_vs_deepseek_67b": form.reduction_vs_deepseek_67b,
                "tokens_per_gib": form.tokens_per_gib,
            }
            for form in forms
        },
        "reduction_vs_deepseek_67b": {form.name: form.reduction_vs_deepseek_67b for form in forms},
    }


def title(geometry: Geometry) -> str:
    """The model in one line."""
    text = f"{geometry.name}: {geometry.layers} layers, {geometry.heads} heads"
    if geometry.kv_lora_rank:
        text += f", records of {geometry.kv_lora_rank} + {geometry.rope_width}"
    if geometry.indexer_width:
        text += f", indexer keys of {geometry.indexer_width}"
    return text


def notes(geometry: Geometry) -> list[str]:
    """What the forms and columns are, where the figures come from, and what these are not."""
    conventional = (
        f"By arithmetic: mha, the keys and values of all {geometry.heads} heads; gqa8, those of 8"
        " heads of 128, at as many layers"
    )
    if not geometry.kv_lora_rank:
        return [
            f"{conventional}; kv_bf16, those of this model's {geometry.kv_heads} heads; all bf16.",
            "This model has no latent (no kv_lora_rank), so codecs for latents have nothing to do.",
            "Tokens per GiB: of any tier that keeps this form; whole tokens in 2^30 bytes.",
        ]
    found = [
        f"{conventional}; mla_bf16, latent and rotary key; all bf16.",
        f"Measured: the codecs, by encoding {len(load_latents())} blocks of {BLOCK_TOKENS} tokens"
        f" and {geometry.layers} layers, put together from {SOURCE}. Latents of other models"
        " compress better or worse.",
    ]
    if (geometry.kv_lora_rank, geometry.rope_width) != (RANK, ROPE_WIDTH):
        found.append(
            f"Records of {geometry.kv_lora_rank} + {geometry.rope_width} were put together from"
            f" channels of these {RANK} + {ROPE_WIDTH}; no latents of such a model were measured."
        )
    if geometry.indexer_width:
        found.append(
            "Included: the indexer's keys in each layer,"
            f" {indexer_record_bytes(geometry.indexer_width)} B as engines keep them (fp8 and a"
            f" scale; no codec changes them, and they count in full), {2 * geometry.indexer_width}"
            " B in mla_bf16."
        )
    found.append(
        "Tokens per GiB: blank where a tier does not keep that form. kvtier's RAM holds what the"
        " engine has, and codecs work for the SSD only; fp8_ds_mla under HBM and RAM is for engines"
        " whose records are of this form."
    )
    found.append(
        "q6 and fp8_ds_mla lose about as much: on tiny-mla q6 has less KL, fp8_ds_mla a higher"
        " top-1 and a smaller error of the latent (python -m bench.codecs)."
    )
    return found


def conclusions(forms: list[Form]) -> list[str]:
    """What the figures mean, a line a tier, and what has become of the 93.3 %."""
    by_name = {form.name: form for form in forms}
    if "q6" not in by_name:
        return []
    q6 = by_name["q6"]
    lines = []
    conventional = f"{by_name['gqa8'].tokens_per_gib['ssd']:,} of gqa8"
    for tiers, names in (("HBM or RAM", ("mla_bf16", "fp8_ds_mla")), ("SSD", ("lossless", "q6"))):
        parts = [
            f"{by_name[name].tokens_per_gib['ssd']:,} in {name}"
            f" ({fraction(by_name[name].ratio_to_gqa8)} of the bytes)"
            for name in names
        ]
        lines.append(f"Tokens in a GiB of {tiers}: {conventional}, {', '.join(parts)}.")
    lines.append(
        f"DeepSeek-V2's report: 93.3 % less than DeepSeek 67B's {DEEPSEEK_67B_BYTES:,} B a token,"
        f" that is {HEADLINE_BYTES:,} B. This model in q6: {q6.bytes_per_token:,.0f} B,"
        f" {100 * q6.reduction_vs_deepseek_67b:.1f} % less."
    )
    return lines


def fraction(ratio: float) -> str:
    """For people: "1/6.2", from 1 on "1.5x"."""
    return f"1/{1 / ratio:.1f}" if ratio < 1 else f"{ratio:.1f}x"
