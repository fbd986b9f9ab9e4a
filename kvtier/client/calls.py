"""Calls that fail open: every failure is a miss with a counted reason.

After a deadline passed, a breaker answers miss at once, for BREAKER_FIRST_S and then twice as long
each time, until a call succeeds: a slow daemon costs the engine one deadline, not one a request.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from kvtier.client.attachment import Attachment
from kvtier.errors import KvtierError
from kvtier.types import MissReason

BREAKER_FIRST_S = 1.0
BREAKER_LONGEST_S = 30.0

Response = TypeVar("Response")


class Missed(KvtierError):
    """A call gave nothing; raised only by clients made with raise_errors=True."""

    def __init__(self, reason: MissReason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason


class FailingOpen:
    """Counts a Missed inside, and swallows it unless errors are asked for. Context manager."""

    def __init__(self, calls: Calls, raise_errors: bool) -> None:
        self._calls = calls
        self._raise_errors = raise_errors

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, Missed):
            return False
        self._calls.count_miss(error.reason)
        return not self._raise_errors


class Calls:
    """The rpcs of one client, with their breaker and their counters. Thread-safe.

    Attributes:
        misses: Calls that gave nothing, by reason.
    """

    def __init__(self, *, raise_errors: bool) -> None:
        self.misses: Counter[MissReason] = Counter()
        self._raise_errors = raise_errors
        self._breaker_until_s = 0.0
        self._breaker_s = BREAKER_FIRST_S

    def count_miss(self, reason: MissReason) -> None:
        """Note that a call gave nothing."""
        self.misses[reason] += 1

    def failing_open(self) -> FailingOpen:
        """Wraps what may raise Missed."""
        return FailingOpen(self, self._raise_errors)

    def close_breaker(self) -> None:
        """A new session deserves a new try."""
        self._breaker_until_s, self._breaker_s = 0.0, BREAKER_FIRST_S

    def call(
        self,
        attachment: Attachment,
        method: Callable[..., Response],
        request: Any,
        timeout_s: float,
    ) -> Response:
        """One rpc.

        Raises:
            Missed: it failed, or the breaker is open.
        """
        self._check(attachment)
        try:
            answer = method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise self._missed(attachment, error) from error
        except ValueError as error:  # The channel was closed meanwhile.
            raise Missed(MissReason.NO_SESSION, str(error)) from error
        self._breaker_s = BREAKER_FIRST_S
        return answer

    def send(self, attachment: Attachment, method: Any, request: Any, timeout_s: float) -> None:
        """One rpc whose answer nobody waits for; its failure is counted when it is known.

        Raises:
            Missed: it could not be sent, or the breaker is open.
        """
        self._check(attachment)
        try:
            answer = method.future(request, timeout=timeout_s)
        except ValueError as error:  # The channel was closed meanwhile.
            raise Missed(MissReason.NO_SESSION, str(error)) from error
        answer.add_done_callback(lambda done: self._note(attachment, done))

    def _note(self, attachment: Attachment, done: grpc.Future[Any]) -> None:
        if done.cancelled():
            self.count_miss(MissReason.NO_SESSION)
        elif isinstance(error := done.exception(), grpc.RpcError):
            self.count_miss(self._missed(attachment, error).reason)

    def _check(self, attachment: Attachment) -> None:
        if attachment.lost.is_set():
            raise Missed(MissReason.NO_SESSION)
        if time.monotonic() < self._breaker_until_s:
            raise Missed(MissReason.BREAKER_OPEN)

    def _missed(self, attachment: Attachment, error: grpc.RpcError) -> Missed:
        code, detail = error.code(), error.details() or ""
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._breaker_until_s = time.monotonic() + self._breaker_s
            self._breaker_s = min(2 * self._breaker_s, BREAKER_LONGEST_S)
            return Missed(MissReason.TIMEOUT, detail)
        if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE):
            attachment.close()  # Another boot, or gone: the session thread attaches again.
            return Missed(MissReason.NO_SESSION, detail)
        if code is grpc.StatusCode.NOT_FOUND:
            return Missed(MissReason.LEASE_LOST, detail)
        return Missed(MissReason.RPC_ERROR, f"{code.name}: {detail}")
