"""Text to token ids and back, by the checkpoint's own tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers.decoders import DecodeStream

from engine_adapter.mla.fields import CheckpointError, read_json_object


class Tokenizer:
    """A thin wrapper of `tokenizers.Tokenizer` that puts the bos token in front.

    Args:
        checkpoint_dir: Holds tokenizer.json and, often, tokenizer_config.json.
        bos_token_id: config.json's; tokenizer_config.json's bos_token goes before it.

    Raises:
        CheckpointError: tokenizer.json is absent or damaged.
    """

    def __init__(self, checkpoint_dir: Path, bos_token_id: int | None) -> None:
        path = checkpoint_dir / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # The library raises nothing narrower.
            raise CheckpointError(f"{path}: can't be read: {error}") from error
        self._bos = _bos_token_id(checkpoint_dir, self._tokenizer, bos_token_id)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt: bos, if the model has one, then the text's."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids if self._bos is None else [self._bos, *ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def detokenizer(self) -> Detokenizer:
        """A fresh stream of one answer's text."""
        return Detokenizer(self._tokenizer)


class Detokenizer:
    """Text of an answer as it grows; never a part of a character."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._emitted = 0

    def push(self, token_id: int, *, last: bool) -> str:
        """Text that became certain with this token; empty while a character is incomplete.

        With `last`, whatever is left comes out, an incomplete character as U+FFFD.
        """
        self._ids.append(token_id)
        if last:
            return self._tokenizer.decode(self._ids, skip_special_tokens=True)[self._emitted :]
        piece = self._stream.step(self._tokenizer, token_id) or ""
        self._emitted += len(piece)
        return piece


def _bos_token_id(
    checkpoint_dir: Path, tokenizer: tokenizers.Tokenizer, default: int | None
) -> int | None:
    path = checkpoint_dir / "tokenizer_config.json"
    if not path.is_file():
        return default
    settings = read_json_object(path)
    if settings.get("add_bos_token") is False:
        return None
    token = settings.get("bos_token")
    if isinstance(token, dict):  # Older files describe the token instead of naming it.
        token = token.get("content")
    found: int | None = tokenizer.token_to_id(token) if isinstance(token, str) else None
    return default if found is None else found
