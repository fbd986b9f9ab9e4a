"""Who may import whom. The tables below are the rule; a new module needs a line in the first.

Names are patterns of modules; those of kvtier are written without the package's name.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BASE = "types errors"
CORE = (
    "hashing extents arena admission events index leases jobs residency endurance speed"
    " shards tiers reads writes restore metrics sizes addresses process"
)

MAY_IMPORT = [
    # module (the first line that fits counts), what of ours it may import
    ("types", ""),
    ("errors", ""),
    ("metrics", ""),
    ("extents", ""),
    ("sizes", "errors"),
    ("addresses", BASE),
    ("process", f"{BASE} addresses"),
    ("hashing", BASE),
    ("arena", f"{BASE} extents"),
    ("config", f"{BASE} sizes addresses"),
    ("config_docs", "config"),
    ("policy", ""),
    ("policy.base", ""),
    ("policy.*", f"{BASE} policy.base"),
    ("codec.base", BASE),
    ("codec.*", f"{BASE} codec.*"),
    ("codec", f"{BASE} codec.*"),
    ("tier", ""),
    ("tier.base", f"{BASE} codec.base"),
    ("tier.ssd*", f"{BASE} hashing extents codec codec.* tier.base tier.ssd*"),
    ("tier.huge_pages", ""),
    ("tier.host", f"{BASE} extents addresses arena codec.base tier.huge_pages"),
    ("index", f"{BASE} extents"),
    ("events", f"{BASE} index metrics"),
    ("leases", f"{BASE} extents index"),
    ("jobs", f"{BASE} index tier.base"),
    ("admission", BASE),
    ("endurance", ""),
    ("speed", ""),
    ("residency", f"{BASE} extents index metrics policy.base"),
    (
        "shards",
        f"{BASE} admission endurance extents index jobs metrics policy.base residency speed"
        " tier.base",
    ),
    ("tiers", f"{BASE} index jobs metrics residency shards tier.base"),
    ("reads", f"{BASE} extents arena index jobs leases metrics speed tier.base tiers"),
    ("restore", f"{BASE} index shards tier.base tiers"),
    ("writes", f"{BASE} extents arena index leases metrics tiers"),
    ("store", f"{BASE} {CORE} policy.base tier.base"),
    ("mover.progress", ""),
    ("mover.busy", ""),
    ("mover.quiet_log", ""),
    ("mover", ""),
    ("mover.*", f"{BASE} {CORE} store tier.base tier.host mover.*"),
    (
        "daemon*",
        f"{BASE} {CORE} config codec* policy.* tier.* store mover.mover mover.context"
        " mover.progress v1* daemon*",
    ),
    ("client*", f"{BASE} hashing extents arena addresses codec.base v1* client*"),
    ("footprint", ""),
    ("footprint.*", f"{BASE} codec codec.base footprint.*"),
    ("cli.demo", f"{BASE} {CORE} config* codec* client* cli* engine_adapter*"),
    ("cli*", f"{BASE} {CORE} config* tier.* v1* daemon* client* cli* footprint*"),
    ("__main__", "cli*"),
    ("engine_adapter*", f"{BASE} hashing addresses codec.base client* engine_adapter*"),
    ("bench*", "* engine_adapter* bench*"),
]

HOME_OF = {
    # foreign package, the modules that may import it
    "grpc": "daemon* client* v1* cli*",
    "grpc_health": "daemon* client* v1* cli*",
    "grpc_reflection": "daemon*",
    "google": "v1*",
    "lmdb": "tier.ssd*",
    "msgspec": "daemon.kv_event_format",
    "zmq": "daemon.kv_events",
    "cupy": "tier.hbm codec.*",
    "torch": "engine_adapter* bench* cli.demo",
    "safetensors": "engine_adapter* bench*",
    "tokenizers": "engine_adapter* bench*",
    "transformers": "bench.fidelity* bench.random_checkpoints",
    "vllm": "engine_adapter.vllm* bench.vllm_engine",
    "sglang": "engine_adapter.sglang*",
    "pytest": "",
    "hypothesis": "",
}

STANDARD_LIBRARY_ONLY = (
    "types errors admission endurance speed extents metrics events index leases jobs residency"
    " shards tiers reads writes store policy.*"
)


def short(module: str) -> str:
    return module.removeprefix("kvtier.")


def fits(module: str, patterns: str) -> bool:
    return any(fnmatchcase(short(module), pattern) for pattern in patterns.split())


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    module_of(path): path
    for package in ("kvtier", "engine_adapter", "bench")
    for path in sorted((ROOT / package).rglob("*.py"))
    if "v1" not in path.parts
}
OURS = {*FILES, *(f"kvtier.v1{name}" for name in ("", ".cache_pb2", ".cache_pb2_grpc"))}


def imports_of(module: str) -> Iterator[str]:
    """Modules that this one imports, also inside functions and for type checkers only."""
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in OURS else str(node.module)


def is_ours(name: str) -> bool:
    return name.split(".")[0] in ("kvtier", "engine_adapter", "bench", "tests")


@pytest.mark.parametrize("module", [name for name in FILES if name != "kvtier"])
def test_imports_go_downwards_only(module: str) -> None:
    allowed = next((may for pattern, may in MAY_IMPORT if fits(module, pattern)), None)
    assert allowed is not None, f"{module} has no line in MAY_IMPORT"
    for name in imports_of(module):
        if is_ours(name) and name != "kvtier":
            assert fits(name, allowed), f"{module} imports {name}"


@pytest.mark.parametrize("module", FILES)
def test_foreign_packages_have_one_home(module: str) -> None:
    for name in imports_of(module):
        home = HOME_OF.get(name.split(".")[0])
        assert home is None or fits(module, home), f"{module} imports {name}"
        if fits(module, STANDARD_LIBRARY_ONLY) and not is_ours(name):
            assert name.split(".")[0] in sys.stdlib_module_names, f"{module} imports {name}"


def test_every_line_of_the_table_is_of_use() -> None:
    """No pattern that fits nothing, and none that hides behind an earlier one."""
    used = {
        next(pattern for pattern, _ in MAY_IMPORT if fits(module, pattern))
        for module in FILES
        if module != "kvtier"
    }
    assert used == {pattern for pattern, _ in MAY_IMPORT}


@pytest.mark.parametrize(
    ("module", "never"),
    [
        ("kvtier", "torch cupy lmdb grpc numpy pydantic"),
        ("kvtier.client", "torch cupy lmdb pydantic aiohttp typer vllm sglang engine_adapter"),
        ("kvtier.client", "kvtier.store kvtier.daemon kvtier.mover kvtier.config"),
        ("kvtier.daemon.server", "torch cupy vllm sglang engine_adapter kvtier.client"),
        ("kvtier.store", "lmdb grpc torch asyncio"),
    ],
)
def test_an_import_brings_no_stranger_along(module: str, never: str) -> None:
    """User report 34: in a fresh interpreter."""
    code = f"""
import sys
import {module}
strangers = set({never.split()!r}) & set(sys.modules)
assert not strangers, strangers
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=100)
