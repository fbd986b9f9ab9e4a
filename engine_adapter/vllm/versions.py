"""Which vLLM this adapter is tested with, decided once, at import.

vLLM says that its connector interface may change in any release. So a version that the tests have
not seen is refused: half a contract kept would be wrong bytes or lost requests, not an error. What
differs between supported versions is decided here, and nowhere along the path.
"""

from __future__ import annotations

import re

from kvtier.errors import KvtierError

OLDEST = (0, 32)
BELOW = (0, 33)


class UntestedVersion(KvtierError, ImportError):
    """This vLLM is outside the tested range; the message names both."""


def check(version: str) -> None:
    """Accept a version of vLLM, or raise.

    Args:
        version: vllm.__version__, as "0.32.0" or "0.32.1+cpu".

    Raises:
        UntestedVersion: it is outside the tested range, or no release at all.
    """
    match = re.match(r"(\d+)\.(\d+)(?!\d)", version)
    if match is None or not OLDEST <= (int(match[1]), int(match[2])) < BELOW:
        tested = f"{_text(OLDEST)} to below {_text(BELOW)}"
        raise UntestedVersion(
            f"kvtier's connector is tested with vLLM {tested}, and this is vLLM {version}: install"
            f" vllm>={_text(OLDEST)},<{_text(BELOW)}, or a kvtier whose README names this version"
        )


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
