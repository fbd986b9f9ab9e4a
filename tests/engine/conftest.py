"""What every engine test shares: the checkpoint, real text, and a quiet machine."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine_adapter.mla import MlaEngine
from engine_adapter.mla.tokenizer import Tokenizer

TINY_MLA = Path(__file__).parents[2] / "checkpoints" / "tiny-mla"


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> None:
    """More threads than cores make small matrix products wait for each other."""
    torch.set_num_threads(2)


@pytest.fixture(scope="session", autouse=True)
def _own_digest_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Weight digests are remembered under the user's home; tests leave no trace there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tiny_mla() -> Path:
    """The checkpoint directory of tiny-mla."""
    return TINY_MLA


@pytest.fixture(scope="session")
def text_ids(tiny_mla: Path) -> list[int]:
    """Token ids of real text that tiny-mla was not trained on, bos first; over 4,000."""
    source = Path(sysconfig.get_path("stdlib")) / "socket.py"
    ids = Tokenizer(tiny_mla, None).encode(source.read_text(encoding="utf-8"))
    assert len(ids) > 4_000
    return ids


@pytest.fixture(scope="session")
def engine(tiny_mla: Path) -> MlaEngine:
    """tiny-mla in float32 without kvtier. Shared: it keeps nothing between requests."""
    return MlaEngine(tiny_mla)
