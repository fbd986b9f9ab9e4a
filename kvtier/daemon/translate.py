"""Protobuf <-> kvtier values, errors <-> status codes. Nowhere else."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, TypeVar

import grpc
import structlog

from kvtier import errors
from kvtier.hashing import namespace_digest, parse_spec, scoped, split_hashes
from kvtier.index import Namespace
from kvtier.types import (
    HASH_BYTES,
    MAX_BLOCKS_PER_CALL,
    BlockHash,
    Loss,
    NamespaceDigest,
    NamespaceSpec,
    Refusal,
    Tier,
)
from kvtier.v1 import cache_pb2 as pb

log = structlog.get_logger(__name__)

WIRE_VERSION = 1
MAX_BLOCK_BYTES = 1 << 40
"""Far beyond any model; bounds the arithmetic, not the memory."""

LOSSES = {Loss.EXACT: pb.LOSS_EXACT, Loss.BOUNDED: pb.LOSS_BOUNDED}
REASONS = {
    Refusal.NONE: pb.REASON_NONE,
    Refusal.FULL: pb.REASON_FULL,
    Refusal.ORPHAN: pb.REASON_ORPHAN,
    Refusal.LEASES: pb.REASON_LEASES,
    Refusal.TOO_LARGE: pb.REASON_TOO_LARGE,
    Refusal.DRAINING: pb.REASON_DRAINING,
    Refusal.SLOW: pb.REASON_SLOW,
}
TIERS = {
    Tier.HBM: pb.TIER_HBM,
    Tier.HOST: pb.TIER_HOST,
    Tier.SSD: pb.TIER_SSD,
    Tier.REMOTE: pb.TIER_REMOTE,
}

_STATUS: list[tuple[type[errors.KvtierError], grpc.StatusCode]] = [
    (errors.NamespaceMismatch, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.UnknownNamespace, grpc.StatusCode.NOT_FOUND),
    (errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.UnknownLease, grpc.StatusCode.NOT_FOUND),
    (errors.LeaseState, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.SessionError, grpc.StatusCode.UNAUTHENTICATED),
    (errors.WireVersionError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.CapacityError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.TierUnavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.NotDurable, grpc.StatusCode.ABORTED),
]

Context = grpc.aio.ServicerContext[Any, Any]
Service = TypeVar("Service")
Request = TypeVar("Request")
Response = TypeVar("Response")


def status_of(error: errors.KvtierError) -> grpc.StatusCode:
    """The status code that stands for an error on the wire."""
    for kind, code in _STATUS:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL


def typed_errors(
    method: Callable[[Service, Request, Context], Awaitable[Response]],
) -> Callable[[Service, Request, Context], Awaitable[Response]]:
    """Turn kvtier's errors into statuses; a bug becomes INTERNAL, with its traceback in the log."""

    @wraps(method)
    async def call(self: Service, request: Request, context: Context) -> Response:
        try:
            return await method(self, request, context)
        except errors.KvtierError as error:
            await context.abort(status_of(error), str(error))
        except Exception:  # The top of a call: logged, told, and the daemon lives.
            log.exception("a bug", rpc=method.__name__)
            await context.abort(grpc.StatusCode.INTERNAL, "internal error; see the daemon's log")
        raise AssertionError("abort raises")

    return call


def hashes_of(namespace: Namespace, packed: bytes) -> list[BlockHash]:
    """The hashes of a request's field, as the store knows them (hashing.scoped).

    Raises:
        InvalidRequest: none, too many, or a wrong length.
    """
    if not packed:
        raise errors.InvalidRequest("hashes: at least one is needed")
    if len(packed) > MAX_BLOCKS_PER_CALL * HASH_BYTES:
        raise errors.InvalidRequest(f"hashes: more than {MAX_BLOCKS_PER_CALL} in one call")
    if len(packed) % HASH_BYTES:
        raise errors.InvalidRequest(
            f"hashes: {len(packed)} bytes is not a multiple of {HASH_BYTES} (sha256)"
        )
    return split_hashes(scoped(namespace.digest, packed))


def hash_of(namespace: Namespace, field: str, value: bytes) -> BlockHash:
    """One hash, as the store knows it; raises InvalidRequest for a wrong length."""
    check_length(field, value)
    return BlockHash(scoped(namespace.digest, value))


def check_length(field: str, value: bytes) -> None:
    """Raise InvalidRequest unless a value has the length of a hash."""
    if len(value) != HASH_BYTES:
        raise errors.InvalidRequest(f"{field}: {len(value)} bytes, a hash has {HASH_BYTES}")


def loss_of(field: str, value: int) -> Loss:
    """A request's loss; raises InvalidRequest for one we don't know."""
    try:
        return Loss(value)
    except ValueError as error:
        raise errors.InvalidRequest(f"{field}: unknown value {value}") from error


def speed_of(tokens_per_s: float) -> float:
    """A request's prefill speed; raises InvalidRequest unless it is finite and not negative."""
    if not 0.0 <= tokens_per_s < math.inf:
        raise errors.InvalidRequest(f"prefill_tokens_per_s: {tokens_per_s} is no speed")
    return tokens_per_s


def spec_of(digest: bytes, encoded: bytes) -> tuple[NamespaceDigest, NamespaceSpec]:
    """A namespace as OpenNamespace gives it.

    Raises:
        InvalidRequest: the spec does not parse.
        NamespaceMismatch: it is another namespace's.
    """
    spec = parse_spec(encoded)
    if spec.block_bytes > MAX_BLOCK_BYTES:
        raise errors.InvalidRequest(f"spec: a block of {spec.block_bytes} bytes is too large")
    if namespace_digest(spec) != digest:
        raise errors.NamespaceMismatch("the digest is not that of the spec")
    return NamespaceDigest(digest), spec
