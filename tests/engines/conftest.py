"""Chooses the tests of the engine that this virtual environment has (make test-engines)."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [
    *([] if find_spec("sglang") else ["test_sglang*.py"]),
    *([] if find_spec("vllm") else ["test_vllm*.py", "test_kv_events*.py"]),
]
