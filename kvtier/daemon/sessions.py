"""Who is connected: sessions and the owner groups they belong to."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from kvtier.errors import CapacityError, SessionError
from kvtier.types import GroupId


@dataclass(slots=True, eq=False)
class Session:
    """One client connection, member of an owner group."""

    id: bytes
    group: GroupId
    client_name: str


class Sessions:
    """Live sessions by id. A group lives as long as one of its sessions."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sessions: dict[bytes, Session] = {}
        self._members: dict[GroupId, int] = {}

    def start(self, group: GroupId, client_name: str) -> Session:
        """A new session of the group.

        Raises:
            CapacityError: the limit is reached.
        """
        if len(self._sessions) >= self._limit:
            raise CapacityError(f"{self._limit} sessions are open: raise max_sessions")
        session = Session(secrets.token_bytes(16), group, client_name)
        self._sessions[session.id] = session
        self._members[group] = self._members.get(group, 0) + 1
        return session

    def end(self, session: Session) -> bool:
        """End a session; True if it was the last of its group."""
        del self._sessions[session.id]
        self._members[session.group] -= 1
        if self._members[session.group]:
            return False
        del self._members[session.group]
        return True

    def group_of(self, session_id: bytes) -> GroupId:
        """The owner group of a live session.

        Raises:
            SessionError: unknown, or over.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionError("unknown or ended session: attach again")
        return session.group

    def __len__(self) -> int:
        return len(self._sessions)
