"""Calls that fail open: every failure is a miss with a counted reason.

After a deadline passed, a breaker answers miss at once, for BREAKER_FIRST_S and then twice as long
each time, until a call succeeds: a slow daemon costs the engine one deadline, not one a request.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from kvtier.client.attachment import Attachment
from kvtier.client.fork import gate
from kvtier.errors import KvtierError
from kvtier.types import MissReason

CALL_TIMEOUT_S = 1.0
SEND_TIMEOUT_S = 10.0
"""Of calls nobody waits for: a daemon that gets no core meanwhile still has to hear of them."""

BREAKER_FIRST_S = 1.0
BREAKER_LONGEST_S = 30.0
LATE_S = 10.0
"""How much longer than its caller an answer is waited for that gives us something to give back."""

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
        timeout_s: Of what is rare, or not waited for by a first token.
        misses: Calls that gave nothing, by reason.
    """

    def __init__(self, *, raise_errors: bool, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self.misses: Counter[MissReason] = Counter()
        self._raise_errors = raise_errors
        self._guard = threading.Lock()
        self._breaker_until_s = 0.0
        self._breaker_s = BREAKER_FIRST_S

    def count_miss(self, reason: MissReason) -> None:
        """Note that a call gave nothing."""
        with self._guard:
            self.misses[reason] += 1

    def failing_open(self) -> FailingOpen:
        """Wraps what may raise Missed."""
        return FailingOpen(self, self._raise_errors)

    def close_breaker(self) -> None:
        """A new session deserves a new try."""
        with self._guard:
            self._breaker_until_s, self._breaker_s = 0.0, BREAKER_FIRST_S

    def forget_in_child(self) -> None:
        """After a fork: a thread that is not here may have held the lock."""
        self._guard = threading.Lock()

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
        return self._call(attachment, lambda: method(request, timeout=timeout_s))

    def call_for_lease(
        self,
        attachment: Attachment,
        method: Any,
        request: Any,
        timeout_s: float,
        *,
        on_late: Callable[[Any], None],
    ) -> Any:
        """One rpc whose answer must not get lost: `on_late` gets one that comes after timeout_s.

        Raises:
            Missed: it failed, or the breaker is open.
        """

        def late(future: Any) -> None:
            if not future.cancelled() and future.exception() is None:
                on_late(future.result())

        def send() -> Any:
            future = method.future(request, timeout=timeout_s + LATE_S)
            try:
                return future.result(timeout_s)
            except grpc.FutureTimeoutError:
                future.add_done_callback(late)
                raise

        return self._call(attachment, send)

    def send(self, attachment: Attachment, method: Any, request: Any) -> None:
        """One rpc whose answer nobody waits for.

        A failure is counted when it is known, and the call sent again once the daemon answers.

        Raises:
            Missed: the breaker is open, or the session is over.
        """

        def note(done: Any) -> None:
            if done.cancelled():
                self.count_miss(MissReason.NO_SESSION)
            elif isinstance(error := done.exception(), grpc.RpcError):
                self.count_miss(self._missed(attachment, error).reason)
                attachment.settle_later(method, request)

        try:
            self._check(attachment)
        except Missed:
            attachment.settle_later(method, request)
            raise
        try:
            with gate:
                answer = method.future(request, timeout=SEND_TIMEOUT_S)
        except ValueError as error:  # The channel was closed meanwhile.
            raise Missed(MissReason.NO_SESSION, str(error)) from error
        answer.add_done_callback(note)

    def tell(self, attachment: Attachment, method: Any, request: Any) -> None:
        """One rpc that may get lost: nobody waits for it, and it is not sent again.

        Raises:
            Missed: the breaker is open, or the session is over.
        """
        self._check(attachment)
        try:
            with gate:
                answer = method.future(request, timeout=SEND_TIMEOUT_S)
        except ValueError as error:  # The channel was closed meanwhile.
            raise Missed(MissReason.NO_SESSION, str(error)) from error
        # Keeps it: gRPC cancels a call whose future is forgotten.
        answer.add_done_callback(lambda _done: None)

    def _call(self, attachment: Attachment, send: Callable[[], Response]) -> Response:
        self._check(attachment)
        try:
            with gate:
                answer = send()
        except grpc.FutureTimeoutError as error:
            raise self._timed_out("") from error
        except grpc.RpcError as error:
            missed = self._missed(attachment, error)
            if missed.reason is MissReason.NO_SESSION:
                attachment.close()  # Another boot, or gone: the session thread attaches again.
            raise missed from error
        except (
            ValueError,
            grpc.FutureCancelledError,
        ) as error:  # The channel was closed meanwhile.
            raise Missed(MissReason.NO_SESSION, str(error)) from error
        self.close_breaker()
        return answer

    def _check(self, attachment: Attachment) -> None:
        if attachment.lost.is_set():
            raise Missed(MissReason.NO_SESSION)
        if time.monotonic() < self._breaker_until_s:
            raise Missed(MissReason.BREAKER_OPEN)

    def _missed(self, attachment: Attachment, error: grpc.RpcError) -> Missed:
        code, detail = error.code(), error.details() or ""
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return self._timed_out(detail)
        gone = code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE)
        if gone or attachment.lost.is_set():
            return Missed(MissReason.NO_SESSION, detail)
        if code is grpc.StatusCode.NOT_FOUND:
            return Missed(MissReason.LEASE_LOST, detail)
        return Missed(MissReason.RPC_ERROR, f"{code.name}: {detail}")

    def _timed_out(self, detail: str) -> Missed:
        now_s = time.monotonic()
        with self._guard:
            if now_s >= self._breaker_until_s:  # Calls that ran side by side open it once.
                self._breaker_until_s = now_s + self._breaker_s
                self._breaker_s = min(2 * self._breaker_s, BREAKER_LONGEST_S)
        return Missed(MissReason.TIMEOUT, detail)
