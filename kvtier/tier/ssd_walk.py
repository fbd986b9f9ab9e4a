"""Is an environment's tree sound? Asked of a child process, because reading a torn one may kill it.

    python kvtier/tier/ssd_walk.py ENV_PATH       prints the problems as a JSON list

The walk reads the file itself, without LMDB: every page that the tree reaches, each once, and
whether the free ones are the others.
"""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
from pathlib import Path

import lmdb.verify

_LEAST_S = 60.0
_BYTES_PER_S = 100 << 20
"""The walk steps through every page of the file, in Python: slowest seen 400 MB/s."""

_SHOWN = 300
_MEDIUM_FAILED = 74
"""Exit code of the child, as sysexits.h has it."""


def tree_problems(env_path: Path) -> list[str]:
    """What is wrong with the tree in `env_path`; blocks until a child has walked it.

    Raises:
        OSError: the medium failed, or no child could be started.
    """
    data = env_path / "data.mdb"
    if not data.exists():
        return ["its data.mdb is gone"]
    size_bytes = data.stat().st_size
    try:
        child = subprocess.run(
            [sys.executable, "-P", __file__, str(env_path)],
            capture_output=True,
            text=True,
            timeout=_LEAST_S + size_bytes / _BYTES_PER_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return [f"the walk took more than {error.timeout:.0f} s"]
    if child.returncode < 0:
        return [f"the walk died of {signal.Signals(-child.returncode).name}"]
    if child.returncode == _MEDIUM_FAILED:
        raise OSError(errno.EIO, child.stderr.strip()[-_SHOWN:])
    if child.returncode:
        return [f"the walk failed: {child.stderr.strip()[-_SHOWN:]}"]
    problems: list[str] = json.loads(child.stdout)
    return problems


def _main(env_path: str) -> None:
    try:
        problems = lmdb.verify.verify(env_path)  # type: ignore[no-untyped-call]
    except lmdb.verify.VerifyError as error:
        problems = [str(error)]
    except OSError as error:  # A medium that fails says nothing of the tree.
        sys.stderr.write(str(error))
        sys.exit(_MEDIUM_FAILED)
    json.dump(problems, sys.stdout)


if __name__ == "__main__":
    _main(sys.argv[1])
