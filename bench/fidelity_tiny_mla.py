"""tiny-mla over standard-library modules that it was not trained on, named in its README."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench.fidelity import PAGE_TOKENS, ReferenceModel, Through, windows
from engine_adapter.mla.batch import Batch, Span
from engine_adapter.mla.config import load_config
from engine_adapter.mla.model import Model
from engine_adapter.mla.paged_cache import PagedCache, PageTable
from engine_adapter.mla.tokenizer import Tokenizer
from engine_adapter.mla.weights import load_weights

CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "tiny-mla"
HELD_OUT = ("socket.py", "queue.py", "multiprocessing/util.py", "email/contentmanager.py")


class PassingCache(PagedCache):
    """Records go through a codec before they are stored, a layer's all at once."""

    through: Through

    def write(self, layer: int, pages: Tensor, offsets: Tensor, records: Tensor) -> None:
        super().write(layer, pages, offsets, self.through(layer, records))


class TinyMla(ReferenceModel):
    """DeepSeek-V2 architecture, 4 layers, records of 512 + 64, computed in float32.

    Args:
        sequences: How many windows of text.
        tokens: Of each, bos included; a multiple of 64.
    """

    name = "tiny_mla"

    def __init__(self, sequences: int = 8, tokens: int = 512) -> None:
        config = load_config(CHECKPOINT)
        self._model = Model(config, load_weights(CHECKPOINT, config, torch.float32))
        self.layers, self.width = config.layers, config.record_width
        self.rope_width = config.rope_width
        tokenizer = Tokenizer(CHECKPOINT, None)
        bos = config.bos_token_id
        assert bos is not None, "tiny-mla has a bos token"
        library = Path(sysconfig.get_path("stdlib"))
        texts = {
            name: [id for id in tokenizer.encode((library / name).read_text("utf-8")) if id != bos]
            for name in HELD_OUT
        }
        self.sequences = [[bos, *window] for window in windows(texts, sequences, tokens - 1)]

    @torch.inference_mode()
    def log_probabilities(self, token_ids: Sequence[int], through: Through) -> Tensor:
        """A span for each token: the engine computes logits for the last token of each."""
        pages = len(token_ids) // PAGE_TOKENS
        cache = PassingCache(pages, self.layers, self.width, torch.float32)
        cache.through = through
        table = PageTable.of(range(pages))
        spans = [Span(table.up_to(at + 1), at, 1) for at in range(len(token_ids))]
        logits = self._model.forward(torch.tensor(token_ids), Batch.of(spans), cache)
        return torch.log_softmax(logits, dim=-1)
