"""Typed access to a checkpoint's JSON files, with complaints that name the file and the key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kvtier.errors import KvtierError


class CheckpointError(KvtierError, ValueError):
    """The checkpoint directory can't be served; the message names the file, key or tensor."""


class Fields:
    """A JSON object's values.

    Args:
        values: The object.
        origin: Where it is from; opens every complaint.
    """

    def __init__(self, values: Mapping[str, object], origin: str) -> None:
        self._values = values
        self._origin = origin

    def fail(self, key: str, complaint: str) -> CheckpointError:
        """The error to raise about a key."""
        return CheckpointError(f"{self._origin}: {key} {complaint}")

    def get(self, key: str) -> object:
        """The value as it is; None if absent."""
        return self._values.get(key)

    def size(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """An integer; absent and null mean the default, without one they are an error."""
        value = self._values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.fail(key, f"must be an integer of at least {minimum}, found {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0; absent and null as in size()."""
        value = self._values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.fail(key, f"must be a number above 0, found {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false; absent and null mean the default."""
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.fail(key, f"must be true or false, found {value!r}")
        return value

    def nested(self, key: str) -> Fields | None:
        """An object's fields; None if absent or null."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.fail(key, f"must be an object, found {value!r}")
        return Fields(value, f"{self._origin}: {key}")

    def require(self, key: str, *accepted: object) -> None:
        """Accept an absent key, null, or one of the values the engine can compute."""
        value = self._values.get(key)
        if value is not None and value not in accepted:
            known = ", ".join(str(item) for item in accepted)
            raise self.fail(key, f"{value!r} is not supported (supported: {known})")


def read_json_object(path: Path) -> dict[str, object]:
    """A JSON file's object.

    Raises:
        CheckpointError: the file is absent, unreadable or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: can't be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value
