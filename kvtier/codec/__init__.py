"""Stored forms of a block, by name for configuration and by (id, version) for bytes on a tier."""

from __future__ import annotations

from kvtier.codec.base import Bytes, Codec
from kvtier.codec.fp8_ds_mla import Fp8DsMla
from kvtier.codec.lossless import Lossless
from kvtier.codec.raw import Raw
from kvtier.codec.scaled_integers import Q4, Q6, Q8
from kvtier.errors import ConfigError, CorruptBlock
from kvtier.types import NamespaceSpec

RAW = Raw()
_CODECS: tuple[Codec, ...] = (RAW, Lossless(), Fp8DsMla(), Q8(), Q6(), Q4())


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
