"""The engine: admits requests, prefills them in chunks, decodes all running ones together.

The path of a request, top to bottom: add_request -> _admit (pages, cached prefix) -> _prefill
(one chunk a step) -> _decode (one token a step, all requests in one batch) -> _retire.
"""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine_adapter.mla.batch import Batch
from engine_adapter.mla.config import ModelConfig, load_config
from engine_adapter.mla.model import Model
from engine_adapter.mla.paged_cache import PAGE_TOKENS, PagedCache, PageTable
from engine_adapter.mla.prefill_speed import PrefillSpeed
from engine_adapter.mla.prefix_cache import PrefixCache, SequenceBlocks, namespace_spec
from engine_adapter.mla.request import Completion, Request, Residency, Token
from engine_adapter.mla.sampling import FinishReason, SamplingParams
from engine_adapter.mla.tokenizer import Tokenizer
from engine_adapter.mla.weights import checkpoint_files, load_weights
from kvtier.errors import KvtierError
from kvtier.types import NamespaceSpec

Prompt = str | Sequence[int]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class PromptError(KvtierError, ValueError):
    """The prompt can't be served; the message says why. Nothing was computed."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How much the engine does at once.

    Attributes:
        chunk_tokens: Prefill goes on in chunks that end at multiples of this many tokens, counted
            from the prompt's first. A multiple of 64. Equal chunks give equal bits.
        num_pages: Pages of 64 tokens that running requests share.
        max_running: Requests that run at once; others wait.

    Raises:
        ValueError: a value is out of range.
    """

    chunk_tokens: int = 2048
    num_pages: int = 256
    max_running: int = 16

    def __post_init__(self) -> None:
        if self.chunk_tokens < PAGE_TOKENS or self.chunk_tokens % PAGE_TOKENS:
            raise ValueError(f"chunk_tokens {self.chunk_tokens} must be a multiple of 64")
        if self.num_pages < 1:
            raise ValueError(f"num_pages {self.num_pages} must be at least 1")
        if self.max_running < 1:
            raise ValueError(f"max_running {self.max_running} must be at least 1")


class MlaEngine:
    """Serves one DeepSeek-V2 or V3 checkpoint on the CPU. Not thread-safe.

    Args:
        checkpoint_dir: A Hugging Face checkpoint: config.json, safetensors, tokenizer.json. Without
            the last only token ids are accepted as prompts.
        dtype: What everything is computed and cached in: float32, bfloat16 or float16.
        prefix_cache: Where cached prefixes come from and go to; None runs without kvtier.
        config: Chunk size, pages, concurrency.

    Raises:
        CheckpointError: the checkpoint can't be served.
        ValueError: another dtype.

    Attributes:
        model_config: The checkpoint's configuration.
        namespace: Under which blocks are shared; None without a prefix cache.
    """

    def __init__(
        self,
        checkpoint_dir: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        prefix_cache: PrefixCache | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"dtype {dtype} is not one of {', '.join(map(str, _DTYPES))}")
        checkpoint_dir = Path(checkpoint_dir)
        self._config = config or EngineConfig()
        self.model_config: ModelConfig = load_config(checkpoint_dir)
        self._model = Model(
            self.model_config, load_weights(checkpoint_dir, self.model_config, dtype)
        )
        has_tokenizer = (checkpoint_dir / "tokenizer.json").exists()
        bos = self.model_config.bos_token_id
        self.tokenizer = Tokenizer(checkpoint_dir, bos) if has_tokenizer else None
        self._cache = PagedCache(
            self._config.num_pages, self.model_config.layers, self.model_config.record_width, dtype
        )
        self.namespace: NamespaceSpec | None = None
        self._prefixes = None
        if prefix_cache is not None:
            files = checkpoint_files(checkpoint_dir)
            self.namespace = namespace_spec(self.model_config, files, dtype, prefix_cache.tenant)
            self._prefixes = prefix_cache.open(self.namespace)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._prefill_speed = PrefillSpeed()

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Answer all prompts, together; blocks until the last answer is finished.

        Raises:
            PromptError: one of the prompts can't be served; then none is.
        """
        if isinstance(prompts, str):
            raise PromptError("prompts is a list of prompts, not one text")
        params = params or SamplingParams()
        requests = [self._new_request(prompt, params) for prompt in prompts]
        self._waiting.extend(requests)
        try:
            while any(request.finish_reason is None for request in requests):
                self.step()
        finally:  # Interrupted: nobody is left who would want the answers.
            for request in requests:
                self.abort(request)
        return [request.completion() for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Token]:
        """Answer one prompt, token by token. Closing the iterator early aborts the request.

        Raises:
            PromptError: the prompt can't be served.
        """
        request = self.add_request(prompt, params)
        return self._tokens_of(request)

    def _tokens_of(self, request: Request) -> Iterator[Token]:
        try:
            while request.finish_reason is None:
                yield from [token for owner, token in self.step() if owner is request]
        finally:
            self.abort(request)

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None) -> Request:
        """Queue a prompt for step(). Its completion() is there once its finish_reason is set.

        Raises:
            PromptError: the prompt can't be served.
        """
        request = self._new_request(prompt, params or SamplingParams())
        self._waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        """Stop a request and free its pages; harmless if it is over."""
        if request.finish_reason is None:
            request.finish_reason = FinishReason.ABORT
            if request in self._waiting:
                self._waiting.remove(request)
        if request.residency is not None:
            self._retire(request)

    @property
    def busy(self) -> bool:
        """Whether step() has anything to do."""
        return bool(self._waiting or self._running)

    @torch.inference_mode()
    def step(self) -> list[tuple[Request, Token]]:
        """Decode one token of every running request, then prefill one chunk of the oldest other.

        Returns:
            The new tokens and whose they are.
        """
        self._admit()
        decoding = [request for request in self._running if request.prefilled]
        prefilling = [request for request in self._running if not request.prefilled]
        tokens = self._decode(decoding) if decoding else []
        if prefilling:
            tokens += self._prefill(prefilling[0])
        return tokens

    def _new_request(self, prompt: Prompt, params: SamplingParams) -> Request:
        arrived_s = time.perf_counter()
        token_ids = self._token_ids(prompt)
        context = self.model_config.max_tokens
        if not token_ids:
            raise PromptError("the prompt is empty")
        if len(token_ids) >= context:
            raise PromptError(
                f"the prompt has {len(token_ids)} tokens; the model's context of {context} leaves "
                f"room for at most {context - 1}"
            )
        vocabulary = self.model_config.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= vocabulary:
            raise PromptError(
                f"token ids are in [0, {vocabulary}), the prompt's in "
                f"[{min(token_ids)}, {max(token_ids)}]"
            )
        detokenizer = self.tokenizer.detokenizer() if self.tokenizer else None
        request = Request(token_ids, params, context, detokenizer, arrived_s)
        if request.pages_needed > self._cache.num_pages:
            raise PromptError(
                f"prompt and answer need {request.pages_needed} pages, the engine has "
                f"{self._cache.num_pages} (EngineConfig.num_pages)"
            )
        return request

    def _token_ids(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            try:
                return [operator.index(token_id) for token_id in prompt]
            except TypeError as error:
                raise PromptError(f"token ids must be integers: {error}") from error
        if self.tokenizer is None:
            raise PromptError("the checkpoint has no tokenizer.json: give token ids, not text")
        if not prompt:
            raise PromptError("the prompt is empty")
        return self.tokenizer.encode(prompt)

    def _admit(self) -> None:
        """Start waiting requests, in order, while their whole answers are sure to find pages."""
        while self._waiting and len(self._running) < self._config.max_running:
            request = self._waiting[0]
            if request.pages_needed > self._cache.free_pages:
                return
            self._waiting.popleft()
            pages = self._cache.allocate(request.pages_needed)
            blocks = None
            if self._prefixes is not None:
                blocks = SequenceBlocks(self._prefixes, self._cache, pages, request.token_ids)
                request.cached_tokens = blocks.load(
                    request.prompt_tokens, self._prefill_speed.tokens_per_s
                )
                request.computed = blocks.present_tokens
                blocks.expect(self._chunk_end(request))
            request.residency = Residency(pages, PageTable.of(pages), blocks)
            self._running.append(request)

    def _prefill(self, request: Request) -> list[tuple[Request, Token]]:
        """Compute the request's next chunk, and its first token if that was the last chunk."""
        span = request.span(self._chunk_end(request) - request.computed)
        token_ids = torch.tensor(request.token_ids[span.start : span.end])
        started_s = time.perf_counter()
        logits = self._model.forward(token_ids, Batch.of([span]), self._cache)
        self._prefill_speed.measured(span.length, time.perf_counter() - started_s)
        request.advance(span.length)
        return [(request, self._choose(request, logits[0]))] if request.prefilled else []

    def _chunk_end(self, request: Request) -> int:
        """Tokens of the prompt that are computed once its next chunk is."""
        chunk = self._config.chunk_tokens
        return min((request.computed // chunk + 1) * chunk, request.prompt_tokens)

    def _decode(self, requests: Sequence[Request]) -> list[tuple[Request, Token]]:
        """Compute the last token of every request and draw the next."""
        token_ids = torch.tensor([request.token_ids[-1] for request in requests])
        batch = Batch.of([request.span(1) for request in requests])
        logits = self._model.forward(token_ids, batch, self._cache)
        tokens = []
        for request, row in zip(requests, logits, strict=True):
            request.advance(1)
            tokens.append((request, self._choose(request, row)))
        return tokens

    def _choose(self, request: Request, logits: torch.Tensor) -> Token:
        token = request.choose(logits, self.model_config.eos_token_ids, time.perf_counter())
        if token.finish_reason is not None:
            self._retire(request)
        return token

    def _retire(self, request: Request) -> None:
        assert request.residency is not None, "a request that is over holds no pages"
        if request.residency.blocks is not None:
            request.residency.blocks.finish()
        self._cache.release(request.residency.pages)
        request.residency = None
        self._running.remove(request)
