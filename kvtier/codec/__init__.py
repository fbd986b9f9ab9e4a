"""Stored forms of a block, by name for configuration and by (id, version) for bytes on a tier."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from kvtier.codec.base import Bytes, Codec
from kvtier.codec.fp8_ds_mla import Fp8DsMla
from kvtier.codec.lossless import Lossless
from kvtier.codec.raw import Raw
from kvtier.codec.scaled_integers import Q4, Q6, Q8
from kvtier.errors import ConfigError, CorruptBlock
from kvtier.types import NamespaceSpec

RAW = Raw()
LOSSLESS = Lossless()
_CODECS: tuple[Codec, ...] = (RAW, LOSSLESS, Fp8DsMla(), Q8(), Q6(), Q4())

CodecChoice = Callable[[NamespaceSpec], Codec]
"""Which codec new blocks of a namespace get."""


def choose_codec(default: str, rules: Iterable[str] = ()) -> CodecChoice:
    """The choice that configuration makes.

    Args:
        default: Name of the codec for namespaces that no rule matches.
        rules: MODEL=CODEC or TENANT:MODEL=CODEC, the first that matches counts. In model and
            tenant * and ? stand for any characters and for one, everything else for itself, case
            included. Without a colon a rule is for every tenant; the first colon ends the tenant,
            so a model with a colon needs one: *:qwen:7b=q6. White space around the parts is not
            theirs.

    Raises:
        ConfigError: no such codec, or a rule of another form.
    """
    parsed = [_rule(rule) for rule in rules]
    otherwise = codec_by_name(default)

    def choose(spec: NamespaceSpec) -> Codec:
        for tenant, model, codec in parsed:
            if fnmatchcase(spec.tenant, tenant) and fnmatchcase(spec.model_id, model):
                return codec
        return otherwise

    return choose


def _rule(rule: str) -> tuple[str, str, Codec]:
    pattern, _, name = rule.rpartition("=")
    tenant, colon, model = (part.strip() for part in pattern.partition(":"))
    if not colon:
        tenant, model = "*", tenant
    if not tenant or not model:
        raise ConfigError(f"{rule!r} is not MODEL=CODEC or TENANT:MODEL=CODEC")
    return _literal(tenant), _literal(model), codec_by_name(name.strip())


def _literal(glob: str) -> str:
    """For fnmatch, in which [ begins a set: model ids have it as a character like others."""
    return glob.replace("[", "[[]")


def codec_by_name(name: str) -> Codec:
    """The codec that configuration calls `name`.

    Raises:
        ConfigError: no such codec; the message lists those there are.
    """
    for codec in _CODECS:
        if codec.name == name:
            return codec
    known = ", ".join(codec.name for codec in _CODECS)
    raise ConfigError(f"unknown codec {name!r} (known: {known})")


def codec_by_id(codec_id: int, version: int) -> Codec:
    """The codec whose stored form bears this id and version.

    Raises:
        CorruptBlock: this build can't read that form: to its reader the bytes are no block.
    """
    for codec in _CODECS:
        if (codec.id, codec.version) == (codec_id, version):
            return codec
    raise CorruptBlock(f"no codec has id {codec_id}, version {version}")


def encode_block(codec: Codec, block: Bytes, spec: NamespaceSpec) -> tuple[Codec, Bytes]:
    """The stored form of `block`, never longer than it: raw where `codec` does not shrink it.

    Returns:
        The codec used, and its (n,) uint8 stored form, n <= spec.block_bytes.
    """
    encoded = codec.encode(block, spec)
    return (codec, encoded) if encoded.size < block.size else (RAW, block)
