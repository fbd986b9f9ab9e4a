"""One prompt on its way through the engine, and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from engine_adapter.mla.batch import Span
from engine_adapter.mla.paged_cache import PAGE_TOKENS, PageTable
from engine_adapter.mla.prefix_cache import SequenceBlocks
from engine_adapter.mla.sampling import FinishReason, Sampler, SamplingParams
from engine_adapter.mla.tokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Attributes:
        text: What became certain with it; empty while a character is incomplete.
        finish_reason: Set on an answer's last token.
    """

    id: int
    text: str
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer.

    Attributes:
        token_ids: The answer's, an end-of-sequence token included.
        text: Its text without special tokens; empty if the checkpoint has no tokenizer.
        prompt_tokens: Length of the prompt.
        cached_tokens: Of these, how many came from each tier ("hbm", "host", "ssd", "remote").
        ttft_s: From add_request to the first token, waiting included.
        decode_tokens_per_s: Rate behind the first token; 0 for a single token.
        finish_reason: Why it ended.
        first_logits: (vocabulary,) float32, from which the first token was chosen.
    """

    token_ids: tuple[int, ...]
    text: str
    prompt_tokens: int
    cached_tokens: Mapping[str, int]
    ttft_s: float
    decode_tokens_per_s: float
    finish_reason: FinishReason
    first_logits: Tensor


@dataclass(frozen=True, slots=True)
class Residency:
    """What a request holds while it runs: its pages and, with kvtier, its blocks."""

    pages: Sequence[int]
    table: PageTable
    blocks: SequenceBlocks | None


class Request:
    """A prompt, its answer so far and its place in the cache. Only MlaEngine changes it.

    Attributes:
        token_ids: Prompt and answer so far.
        prompt_tokens: Length of the prompt.
        max_tokens: Longest answer the parameters and the context allow.
        computed: Leading tokens whose records are in the cache.
        residency: None until the engine admits the request, and again when it is over.
        finish_reason: None while it runs.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        context_tokens: int,
        detokenizer: Detokenizer | None,
        arrived_s: float,
    ) -> None:
        self.token_ids = list(prompt)
        self.prompt_tokens = len(prompt)
        self.params = params
        self.max_tokens = min(params.max_tokens, context_tokens - len(prompt))
        self.computed = 0
        self.cached_tokens: Mapping[str, int] = {}
        self.residency: Residency | None = None
        self.finish_reason: FinishReason | None = None
        self._sampler = Sampler(params)
        self._detokenizer = detokenizer
        self._text: list[str] = []
        self._arrived_s = arrived_s
        self._times_s: list[float] = []
        self._first_logits: Tensor | None = None

    @property
    def pages_needed(self) -> int:
        """Pages for the prompt and the longest answer."""
        return -(-(self.prompt_tokens + self.max_tokens) // PAGE_TOKENS)

    @property
    def prefilled(self) -> bool:
        """Whether the prompt is computed, so that the next step is a decode step."""
        return self.computed >= self.prompt_tokens

    def span(self, length: int) -> Span:
        """The next `length` tokens to compute."""
        assert self.residency is not None, "the request holds no pages"
        table = self.residency.table.up_to(self.computed + length)
        return Span(table, self.computed, length)

    def advance(self, length: int) -> None:
        """The next `length` tokens are computed: offer the blocks that became full."""
        assert self.residency is not None, "the request holds no pages"
        self.computed += length
        if self.residency.blocks is not None:
            self.residency.blocks.store(self.token_ids, self.computed)

    def choose(self, logits: Tensor, eos_token_ids: Sequence[int], now_s: float) -> Token:
        """Draw the next token from (vocabulary,) logits and note whether it is the last."""
        if self._first_logits is None:
            self._first_logits = logits
        token_id = self._sampler.sample(logits)
        self.token_ids.append(token_id)
        self._times_s.append(now_s)
        if token_id in eos_token_ids and not self.params.ignore_eos:
            self.finish_reason = FinishReason.STOP
        elif len(self.token_ids) - self.prompt_tokens == self.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        text = ""
        if self._detokenizer is not None:
            text = self._detokenizer.push(token_id, last=self.finish_reason is not None)
        self._text.append(text)
        return Token(token_id, text, self.finish_reason)

    def completion(self) -> Completion:
        """The finished answer."""
        assert self.finish_reason is not None, "the request still runs"
        assert self._first_logits is not None, "the request has no token"
        decode_s = self._times_s[-1] - self._times_s[0]
        return Completion(
            token_ids=tuple(self.token_ids[self.prompt_tokens :]),
            text="".join(self._text),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            ttft_s=self._times_s[0] - self._arrived_s,
            decode_tokens_per_s=(len(self._times_s) - 1) / decode_s if decode_s > 0 else 0.0,
            finish_reason=self.finish_reason,
            first_logits=self._first_logits,
        )
