"""Every error kvtier raises on purpose.

    KvtierError
    |- InvalidRequest        the caller's arguments break the contract
    |  |- NamespaceMismatch  a digest is known with another spec
    |  `- UnknownNamespace   OpenNamespace was not called on this daemon
    |- LeaseError
    |  |- UnknownLease       never granted, expired, released, or another group's
    |  `- LeaseState         the call does not fit the lease (double commit, commit of a read)
    |- SessionError          no such session: the client must attach again
    |- WireVersionError      client and daemon share no wire version
    |- CapacityError         a configured capacity does not fit the machine
    |- ConfigError           a setting is unknown, misspelt or out of range
    |- AddressInUse          a live daemon owns the socket, the arena or the SSD directory
    |- FormatError           a file was written by a newer or foreign format
    `- TierError             trouble with a medium; only the mover catches it
       |- TierUnavailable    the medium failed (EIO, read-only, gone)
       |- TierFull           no room now
       |- SegmentDamaged     the tables of a part of it are broken: that part must go
       `- CorruptBlock       checksum, length or codec says the bytes are not what was stored

A miss, a full tier and a block not ready yet are values, not errors.
Only kvtier/daemon/service.py turns these into gRPC status codes.
"""

from __future__ import annotations


class KvtierError(Exception):
    """Root of all errors raised on purpose."""


class InvalidRequest(KvtierError, ValueError):
    """The caller's arguments break the contract; the message names the argument."""


class NamespaceMismatch(InvalidRequest):
    """The digest is already known with another spec, or is not the digest of this spec."""


class UnknownNamespace(InvalidRequest):
    """No namespace of this digest is open; call OpenNamespace first."""


class LeaseError(KvtierError):
    """A lease can't be used as asked."""


class UnknownLease(LeaseError):
    """Never granted, already over, or owned by another group (the three look alike on purpose)."""


class LeaseState(LeaseError):
    """The call does not fit the state or the kind of this lease."""


class SessionError(KvtierError):
    """The session is unknown or over; attach again."""


class WireVersionError(KvtierError):
    """Client and daemon share no wire version."""


class CapacityError(KvtierError):
    """A configured capacity does not fit the machine."""


class ConfigError(KvtierError, ValueError):
    """A setting is unknown, misspelt or out of range."""


class AddressInUse(KvtierError):
    """A live daemon owns this socket, arena or directory."""


class FormatError(KvtierError):
    """A file was written by a newer version, or is not ours."""


class TierError(KvtierError):
    """Trouble with a medium."""


class TierUnavailable(TierError):
    """The medium failed: EIO, read-only, disconnected."""


class TierFull(TierError):
    """The medium has no room for this now."""


class NotDurable(TierError):
    """It took effect, and a restart may undo it: a medium has not stored it yet."""


class SegmentDamaged(TierError):
    """The tables of one segment are broken (tier/base.py); the others work."""

    def __init__(self, message: str, segment: int) -> None:
        super().__init__(message)
        self.segment = segment


class CorruptBlock(TierError):
    """The stored bytes are not those that were written.

    Attributes:
        reason: What is wrong, in one word for counters: "absent", "row", "layout" (not a block of
            this namespace), "short", "checksum" or "undecodable".
    """

    def __init__(self, message: str, reason: str = "undecodable") -> None:
        super().__init__(message)
        self.reason = reason
