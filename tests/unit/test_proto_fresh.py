"""kvtier/v1 is what protoc makes of the wire contract, byte for byte."""

from __future__ import annotations

import importlib.resources
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = ("cache_pb2.py", "cache_pb2.pyi", "cache_pb2_grpc.py")


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What protoc makes now."""
    import grpc_tools

    out = tmp_path_factory.mktemp("generated")
    well_known = importlib.resources.files(grpc_tools) / "_proto"
    command = [sys.executable, "-W", "ignore", "-m", "grpc_tools.protoc", "-I", "proto"]
    command += ["-I", str(well_known), f"--python_out={out}", f"--pyi_out={out}"]
    command += [f"--grpc_python_out={out}", "proto/kvtier/v1/cache.proto"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=100)
    return out / "kvtier" / "v1"


@pytest.mark.parametrize("name", NAMES)
def test_generated_code_is_fresh(generated: Path, name: str) -> None:
    """If it is not: python -m grpc_tools.protoc, as ARCHITECTURE.md says."""
    assert (ROOT / "kvtier" / "v1" / name).read_bytes() == (generated / name).read_bytes()


def test_nothing_else_is_in_the_package(generated: Path) -> None:
    found = {path.name for path in (ROOT / "kvtier" / "v1").iterdir() if path.is_file()}
    assert found == {path.name for path in generated.iterdir()} | {"__init__.py"}
