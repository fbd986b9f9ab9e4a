"""What a fork does to a client, and what it must not.

gRPC works in a forked child only if its fork support was on when the process first imported it,
and if no thread was inside it at the fork. So importing this module switches the support on, unless
the environment says otherwise, and `gate` keeps our own threads out of gRPC while a fork is made:
those inside are waited for, the others wait until it is done. A fork of an attached process then
takes about a second, gRPC's own quiescing.

A process that imported gRPC first has half of it (1.80: the C library's, not the Python part's),
and with an open channel one child in four crashed, without kvtier, too. All we can do is warn.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "1")

from grpc._cython import cygrpc  # type: ignore[attr-defined]

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 1.0
"""A fork waits no longer for calls that are under way."""


def supported() -> bool:
    """False if the environment forbids it, or if this process imported gRPC before us."""
    return bool(cygrpc.is_fork_support_enabled())


def warn_if_unsupported() -> None:
    """Before a fork of a process with a client."""
    if not supported():
        log.warning(
            "a process with a kvtier client forks, and gRPC is not prepared for it: import "
            "kvtier.client before grpc, or start with GRPC_ENABLE_FORK_SUPPORT=1 (or 0, if no "
            "child needs a client)"
        )


class ForkGate:
    """Context manager for every use of gRPC in this process."""

    def __init__(self) -> None:
        self.reset()

    def __enter__(self) -> None:
        with self._changed:
            while self._forks:
                self._changed.wait()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            if not self._inside:
                self._changed.notify_all()

    def close(self) -> None:
        """Before a fork."""
        with self._changed:
            self._forks += 1
            self._changed.wait_for(lambda: not self._inside, LONGEST_WAIT_S)

    def open(self) -> None:
        """After it, in the parent."""
        with self._changed:
            self._forks -= 1
            self._changed.notify_all()

    def reset(self) -> None:
        """After it, in the child: the threads that were inside, or held the lock, are not here."""
        self._changed = threading.Condition()
        self._inside = 0
        self._forks = 0


def keep_forever(parents: object) -> None:
    """In a child: never free what is made of the parent's channels and maps, not even at exit.

    Freeing a channel would end the parent's session, or crash; freeing a map that the child did
    not inherit would unmap whatever is at its address by now.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(parents))


gate = ForkGate()
os.register_at_fork(before=gate.close, after_in_parent=gate.open, after_in_child=gate.reset)
