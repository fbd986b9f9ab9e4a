"""FAULT INJECTION: a daemon whose SSD reads are slow.

    python -m bench.throttled_daemon BYTES_PER_S serve ...

Everything else is kvtier's own command line.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence

from kvtier.cli.main import app
from kvtier.tier.ssd_file import BlockIo

_real_preadv = BlockIo.preadv
_disk = threading.Lock()


def throttle(bytes_per_s: float) -> None:
    """From now on all payload reads together get no more than this."""

    def preadv(self: BlockIo, descriptor: int, views: Sequence[memoryview], offset: int, /) -> int:
        with _disk:
            done = _real_preadv(self, descriptor, views, offset)
            time.sleep(done / bytes_per_s)
        return done

    BlockIo.preadv = preadv  # type: ignore[method-assign]


if __name__ == "__main__":
    throttle(float(sys.argv.pop(1)))
    app()
