"""What an operator may set: kv_connector_extra_config, as a strict value.

An unknown key stops the start: a misspelt one that is ignored is a setting that silently does
nothing.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.addresses import parse_address
from kvtier.errors import ConfigError
from kvtier.types import DEFAULT_BLOCK_TOKENS, MAX_ACQUIRE_TIMEOUT_MS, Loss

MAX_TENANT_BYTES = 256
"""In UTF-8; a tenant is a name, and it travels with every namespace."""

ACQUIRE_TIMEOUT_MS = 200
"""Not less, for vLLM's own threads may keep all cores busy, and computing takes longer."""

_LOSSES = {"exact": Loss.EXACT, "bounded": Loss.BOUNDED}


@dataclass(frozen=True, slots=True)
class Settings:
    """The connector's settings.

    Attributes:
        address: "unix:/path" or "tcp:host:port" of the daemon; None looks in the default places.
        block_tokens: Tokens a kvtier block; a multiple of vLLM's block size.
        store_decode: Store blocks of answers as well, not of prompts only.
        async_load: Load between steps, while other requests go on. Better where loads take long
            and many requests run; on a small machine vLLM spins through empty steps meanwhile.
        tenant: Blocks are shared only within a tenant; at most MAX_TENANT_BYTES.
        allowed_loss: Whether blocks may come back from, and go into, lossy stored forms.
        kv_events: Tell the tokens of every block that kvtier took, among vLLM's own KV events
            (--kv-events-config). The daemon's events name blocks by hash only.
        acquire_timeout_ms: How long a look-up or a lease may take before it is a miss. A daemon
            that hangs costs this now and then (client/calls.py), not once a request.
    """

    address: str | None = None
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    store_decode: bool = True
    async_load: bool = False
    tenant: str = ""
    allowed_loss: Loss = Loss.EXACT
    kv_events: bool = False
    acquire_timeout_ms: int = ACQUIRE_TIMEOUT_MS


def read_settings(values: Mapping[str, object]) -> Settings:
    """kv_connector_extra_config as Settings.

    Raises:
        ConfigError: an unknown key (the message names the nearest valid one), or a value of
            another type or out of range.
    """
    known = [field.name for field in dataclasses.fields(Settings)]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise ConfigError(
                f"kv_connector_extra_config: unknown key {key!r}; did you mean {near[0]!r}?"
                f" (valid: {', '.join(known)})"
            )
    default = Settings()
    settings = Settings(
        address=_optional_text(values, "address"),
        block_tokens=_positive(values, "block_tokens", default.block_tokens),
        store_decode=_flag(values, "store_decode", default.store_decode),
        async_load=_flag(values, "async_load", default.async_load),
        tenant=_tenant(values),
        allowed_loss=_loss(values, "allowed_loss"),
        kv_events=_flag(values, "kv_events", default.kv_events),
        acquire_timeout_ms=_acquire_timeout_ms(values),
    )
    if settings.address is not None:
        parse_address(settings.address)
    return settings


def _fail(key: str, wanted: str, found: object) -> ConfigError:
    return ConfigError(f"kv_connector_extra_config: {key} must be {wanted}, found {found!r}")


def _optional_text(values: Mapping[str, object], key: str) -> str | None:
    value = values.get(key)
    if value is not None and not isinstance(value, str):
        raise _fail(key, "text", value)
    return value


def _tenant(values: Mapping[str, object]) -> str:
    tenant = _optional_text(values, "tenant") or ""
    try:
        size_bytes = len(tenant.encode())
    except UnicodeEncodeError as error:
        raise _fail("tenant", "text that UTF-8 can encode", tenant) from error
    if size_bytes > MAX_TENANT_BYTES:
        found = f"{size_bytes} bytes"
        raise _fail("tenant", f"at most {MAX_TENANT_BYTES} bytes in UTF-8", found)
    return tenant


def _positive(values: Mapping[str, object], key: str, default: int) -> int:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _fail(key, "an integer of at least 1", value)
    return value


def _acquire_timeout_ms(values: Mapping[str, object]) -> int:
    timeout_ms = _positive(values, "acquire_timeout_ms", ACQUIRE_TIMEOUT_MS)
    if timeout_ms > MAX_ACQUIRE_TIMEOUT_MS:
        raise ConfigError(
            f"kv_connector_extra_config: acquire_timeout_ms: {MAX_ACQUIRE_TIMEOUT_MS} at most"
        )
    return timeout_ms


def _flag(values: Mapping[str, object], key: str, default: bool) -> bool:
    value = values.get(key, default)
    if not isinstance(value, bool):
        raise _fail(key, "true or false", value)
    return value


def _loss(values: Mapping[str, object], key: str) -> Loss:
    value = values.get(key, "exact")
    if not isinstance(value, str) or value not in _LOSSES:
        raise _fail(key, " or ".join(map(repr, _LOSSES)), value)
    return _LOSSES[value]
