"""What room the host tier believes there is. The arena itself is tested end to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.errors import FormatError
from kvtier.tier.host import cgroup_available_bytes, memory_available_bytes

MIB = 1 << 20


def group(directory: Path, *, limit: str, used: int, inactive: int = 0, version: int = 2) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    (directory / names[0]).write_text(f"{limit}\n")
    (directory / names[1]).write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 1\n{names[2]} {inactive}\n")


def room(tmp_path: Path, line: str) -> int | None:
    (tmp_path / "self").write_text(line)
    return cgroup_available_bytes(tmp_path / "cg", tmp_path / "self")


def test_version_2_counts_the_tightest_ancestor_and_reclaimable_cache(tmp_path: Path) -> None:
    group(tmp_path / "cg/pod", limit=str(100 * MIB), used=80 * MIB, inactive=30 * MIB)
    group(tmp_path / "cg/pod/box", limit=str(90 * MIB), used=10 * MIB)
    assert room(tmp_path, "0::/pod/box\n") == 50 * MIB


def test_version_1_uses_the_memory_controller(tmp_path: Path) -> None:
    group(tmp_path / "cg/memory/box", limit=str(64 * MIB), used=14 * MIB, version=1)
    assert room(tmp_path, "5:cpu:/box\n4:memory:/box\n") == 50 * MIB


@pytest.mark.parametrize("limit", ["max", str(1 << 62), "garbage"])
def test_no_limit_is_no_limit(tmp_path: Path, limit: str) -> None:
    group(tmp_path / "cg/box", limit=limit, used=MIB)
    assert room(tmp_path, "0::/box\n") is None


def test_a_machine_without_cgroups(tmp_path: Path) -> None:
    assert cgroup_available_bytes(tmp_path / "cg", tmp_path / "absent") is None


def test_mem_available_is_read_in_bytes(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:   2048 kB\n")
    assert memory_available_bytes(meminfo) == 2 * MIB
    meminfo.write_text("MemTotal: 9 kB\n")
    with pytest.raises(FormatError):
        memory_available_bytes(meminfo)
