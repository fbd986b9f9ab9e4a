"""Sizes as people write them: "4GiB", "1.5GB", "4096". Standard library only."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}iB": 1 << 10 * power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
}
# Kubernetes writes Gi and G.
_UNITS |= {unit[:-1]: factor for unit, factor in _UNITS.items() if len(unit) > 1}
_BY_LOWER_CASE = {unit.lower(): factor for unit, factor in _UNITS.items()}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)


def parse_size(value: int | str) -> int:
    """Bytes of a size: an integer, or a number and a unit (KiB is 1024 bytes, kB is 1000).

    Raises:
        ValueError: not a size, negative, or not a whole number of bytes.
    """
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"{value} is negative")
        return value
    match = _SIZE.fullmatch(value)
    factor = _BY_LOWER_CASE.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{value!r} is not a size: write bytes or a unit, as in 4GiB or 512MiB")
    size = Fraction(match[1]) * factor
    if size.denominator != 1:
        raise ValueError(f"{value!r} is not a whole number of bytes")
    return int(size)


def exact_size(size_bytes: int) -> str:
    """The shortest text that parse_size() reads as exactly this: 1073741824 is "1GiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes and size_bytes % _UNITS[unit] == 0:
            return f"{size_bytes // _UNITS[unit]}{unit}"
    return str(size_bytes)


def rounded_size(size_bytes: float) -> str:
    """For people: three digits and a binary unit, as in "1.46 GiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(size_bytes) >= _UNITS[unit]:
            return f"{size_bytes / _UNITS[unit]:.3g} {unit}"
    return f"{size_bytes:.0f} B"
