"""The backend's extra config: strict, so that a misspelt key stops the start (user report 32)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from kvtier.errors import ConfigError
from kvtier.types import MAX_ACQUIRE_TIMEOUT_MS, Loss

T = TypeVar("T", str, int)

SGLANG_KEYS = (
    # StorageBackendFactory's own, for a dynamic backend.
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    # HiCache's own; it reads them before a backend sees the rest.
    "hicache_storage_pass_prefix_keys",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "tp_lcm_size",
)
OUR_KEYS = (
    "address",
    "tenant",
    "allowed_loss",
    "model_path",
    "weights_revision",
    "acquire_timeout_ms",
)
LOSSES = {"exact": Loss.EXACT, "bounded": Loss.BOUNDED}
ACQUIRE_TIMEOUT_MS = 50
MAX_TENANT_BYTES = 256
"""In UTF-8."""


@dataclass(frozen=True, slots=True)
class HiCacheSettings:
    """What the operator wants.

    Attributes:
        address: Where the daemon listens; None looks in the default places.
        tenant: Pages are shared only within a tenant; part of every namespace, at most
            MAX_TENANT_BYTES.
        allowed_loss: What stored forms of MLA pages may lose; other pages are always exact.
        model_path: The checkpoint, if it is another than the one SGLang was started with.
        weights_revision: Names the weights, in place of the checkpoint's content.
        acquire_timeout_ms: How long a look-up or a lease may take before it is a miss.
        zero_copy: SGLang will call batch_get_v1 and batch_set_v1 (interface_v1).
    """

    address: str | None = None
    tenant: str = ""
    allowed_loss: Loss = Loss.EXACT
    model_path: str | None = None
    weights_revision: str | None = None
    acquire_timeout_ms: int = ACQUIRE_TIMEOUT_MS
    zero_copy: bool = False


def parse_extra_config(extra: Mapping[str, object]) -> HiCacheSettings:
    """The settings in SGLang's --hicache-storage-backend-extra-config.

    Raises:
        ConfigError: an unknown key (the message has the nearest valid one), a value of a wrong
            type, or one out of range.
    """
    known = [*OUR_KEYS, *SGLANG_KEYS]
    for name in extra:
        if name not in known:
            (nearest,) = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ConfigError(
                f"kvtier: unknown key {name!r} in the storage backend's extra config; "
                f"the nearest valid one is {nearest!r}"
            )
    timeout_ms = _typed(extra, "acquire_timeout_ms", int)
    if timeout_ms is not None and not 0 < timeout_ms <= MAX_ACQUIRE_TIMEOUT_MS:
        raise ConfigError(
            f"kvtier: acquire_timeout_ms must be positive, {MAX_ACQUIRE_TIMEOUT_MS} at most"
        )
    loss = _typed(extra, "allowed_loss", str) or "exact"
    if loss not in LOSSES:
        raise ConfigError(f"kvtier: allowed_loss={loss!r} must be one of {', '.join(LOSSES)}")
    tenant = _typed(extra, "tenant", str) or ""
    _check_tenant(tenant)
    return HiCacheSettings(
        address=_typed(extra, "address", str),
        tenant=tenant,
        allowed_loss=LOSSES[loss],
        model_path=_typed(extra, "model_path", str),
        weights_revision=_typed(extra, "weights_revision", str),
        acquire_timeout_ms=ACQUIRE_TIMEOUT_MS if timeout_ms is None else timeout_ms,
        zero_copy=bool(extra.get("interface_v1", 0)),
    )


def _check_tenant(tenant: str) -> None:
    """Refuse at the start what can't travel, or only at length, with every namespace."""
    try:
        encoded = tenant.encode()
    except UnicodeEncodeError as error:  # A lone surrogate, which JSON can write.
        raise ConfigError(f"kvtier: tenant={tenant!r} is no text in UTF-8: {error}") from error
    if len(encoded) > MAX_TENANT_BYTES:
        raise ConfigError(
            f"kvtier: tenant has {len(encoded)} bytes in UTF-8, more than {MAX_TENANT_BYTES}: give "
            "a shorter name, or a digest of it"
        )


def _typed(extra: Mapping[str, object], name: str, kind: type[T]) -> T | None:
    """A value, or None without the key."""
    value = extra.get(name)
    if value is None and name not in extra:
        return None
    # bool is an int to Python, and true is no number of milliseconds.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ConfigError(f"kvtier: {name}={value!r} must be of type {kind.__name__}")
    if value == "" and name != "tenant":
        raise ConfigError(f"kvtier: {name} is empty; leave it out for its default")
    return value
