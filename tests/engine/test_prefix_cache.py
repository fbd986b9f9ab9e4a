"""Cached prefixes: same answers, less work, and nothing lost when kvtier is gone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine_adapter.mla import EngineConfig, MlaEngine, PrefixCache, SamplingParams
from kvtier.hashing import namespace_digest
from kvtier.types import Loss
from tests.engine.fake_kvtier import FakeClient

CHUNKS = EngineConfig(chunk_tokens=128)
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def cached_engine(
    checkpoint: Path,
    client: FakeClient,
    config: EngineConfig = CHUNKS,
    dtype: torch.dtype = torch.float32,
) -> MlaEngine:
    return MlaEngine(checkpoint, dtype=dtype, prefix_cache=PrefixCache(client), config=config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("prompt_tokens", [513, 540, 639])
def test_warm_equals_cold_bit_for_bit_in_equal_chunks(
    tiny_mla: Path, text_ids: list[int], dtype: torch.dtype, prompt_tokens: int
) -> None:
    """The first four chunks are cached, the last is computed by both, by another engine."""
    client = FakeClient()
    prompt = [text_ids[:prompt_tokens]]
    [cold] = cached_engine(tiny_mla, client, dtype=dtype).generate(prompt, GREEDY)
    for spec, key in [*client.blocks]:  # Leave exactly the blocks of the first four chunks.
        if key not in [key for _, hashes in client.puts[:4] for key in hashes]:
            del client.blocks[spec, key]
    [warm] = cached_engine(tiny_mla, client, dtype=dtype).generate(prompt, GREEDY)
    assert cold.cached_tokens == {}
    assert warm.cached_tokens == {"host": 256, "ssd": 256}
    assert torch.equal(cold.first_logits, warm.first_logits)
    assert cold.token_ids == warm.token_ids


@pytest.mark.parametrize("prompt_tokens", [65, 128, 200, 576, 577, 1000])
def test_warm_answers_like_an_engine_without_kvtier(
    tiny_mla: Path, engine: MlaEngine, text_ids: list[int], prompt_tokens: int
) -> None:
    """Whatever the split: the reused blocks end where no chunk of the cold run ended."""
    client = FakeClient()
    prompt = [text_ids[:prompt_tokens]]
    cached = cached_engine(tiny_mla, client)
    [plain] = engine.generate(prompt, GREEDY)
    [cold] = cached.generate(prompt, GREEDY)
    [warm] = cached.generate(prompt, GREEDY)
    assert sum(warm.cached_tokens.values()) == (prompt_tokens - 1) // 64 * 64
    assert plain.token_ids == cold.token_ids == warm.token_ids
    torch.testing.assert_close(warm.first_logits, plain.first_logits, atol=1e-4, rtol=0)


def test_second_turn_hits_the_first_answer(
    tiny_mla: Path, engine: MlaEngine, text_ids: list[int]
) -> None:
    client = FakeClient()
    cached = cached_engine(tiny_mla, client)
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    [first] = cached.generate([text_ids[:100]], params)
    conversation = [*text_ids[:100], *first.token_ids, *text_ids[300:320]]
    [second] = cached.generate([conversation], GREEDY)
    # 249 of the first turn's 250 tokens were computed: the last was drawn and never fed back.
    assert sum(second.cached_tokens.values()) == 249 // 64 * 64
    assert second.token_ids == engine.generate([conversation], GREEDY)[0].token_ids


def test_one_put_a_chunk_and_one_a_block_in_decoding(tiny_mla: Path, text_ids: list[int]) -> None:
    client = FakeClient()
    params = SamplingParams(max_tokens=130, ignore_eos=True)
    cached_engine(tiny_mla, client).generate([text_ids[:300]], params)
    assert client.gets == [4]
    assert [len(hashes) for _, hashes in client.puts] == [2, 2, 1, 1]
    chain = [key for _, hashes in client.puts for key in hashes]
    assert [parent for parent, _ in client.puts] == [None, chain[1], chain[3], chain[4]]
    assert client.finished == [chain[5]]


def test_refused_blocks_are_offered_again_and_finish_names_the_last_held_one(
    tiny_mla: Path, text_ids: list[int]
) -> None:
    """Blocks behind a refused one would be out of reach, so the next put starts with it."""
    client = FakeClient(room=1)
    cached_engine(tiny_mla, client).generate([text_ids[:300]], GREEDY)
    firsts = [hashes[0] for _, hashes in client.puts]
    assert [len(hashes) for _, hashes in client.puts] == [
        2,
        3,
    ]  # Two chunks; the second is partial.
    assert firsts[1] == client.puts[0][1][1]
    assert client.finished == [firsts[1]]


def test_an_abort_before_the_first_chunk_gives_the_room_back(
    tiny_mla: Path, text_ids: list[int]
) -> None:
    """Both requests are admitted in one step, which prefills a chunk of the first only."""
    client = FakeClient()
    engine = cached_engine(tiny_mla, client)
    engine.add_request(text_ids[:300], GREEDY)
    second = engine.add_request(text_ids[300:600], GREEDY)
    engine.step()
    engine.abort(second)
    assert client.aborted == 1
    assert len(client.puts) == 1
    while engine.busy:
        engine.step()
    assert client.aborted == 1


def test_a_short_prompt_asks_nothing(tiny_mla: Path, text_ids: list[int]) -> None:
    """Without a full block before its last token there is nothing to find."""
    client = FakeClient()
    cached_engine(tiny_mla, client).generate([text_ids[:64]], SamplingParams(max_tokens=1))
    assert client.gets == []
    assert len(client.blocks) == 1


def test_dead_daemon_changes_nothing(
    tiny_mla: Path, engine: MlaEngine, text_ids: list[int]
) -> None:
    """Its failed gets leave NaNs in the pages, which nobody may read."""
    client = FakeClient(dead=True)
    config = EngineConfig(chunk_tokens=2048)
    cached = cached_engine(tiny_mla, client, config)
    prompts = [text_ids[:500], text_ids[100:170]]
    params = SamplingParams(max_tokens=70, ignore_eos=True)
    for prompt in prompts:
        [plain], [missed] = engine.generate([prompt], params), cached.generate([prompt], params)
        assert missed.cached_tokens == {}
        assert plain.token_ids == missed.token_ids
        assert torch.equal(plain.first_logits, missed.first_logits)


def test_blocks_are_shared_exactly_where_they_may(tiny_mla: Path, text_ids: list[int]) -> None:
    client = FakeClient()
    prompt = [text_ids[:200]]
    params = SamplingParams(max_tokens=1)
    cached_engine(tiny_mla, client).generate(prompt, params)

    def hit(cache: PrefixCache, dtype: torch.dtype = torch.float32) -> bool:
        [answer] = MlaEngine(tiny_mla, dtype=dtype, prefix_cache=cache).generate(prompt, params)
        return bool(answer.cached_tokens)

    assert not hit(PrefixCache(client, tenant="other"))
    assert not hit(PrefixCache(client, lora_digest=b"adapter"))
    assert not hit(PrefixCache(client, cache_salt=b"salt"))
    assert not hit(PrefixCache(client), torch.bfloat16)
    assert hit(PrefixCache(client))
    assert hit(PrefixCache(client, tenant="other"))


def test_namespace_says_what_the_bytes_are(tiny_mla: Path) -> None:
    spec = cached_engine(tiny_mla, FakeClient(), dtype=torch.bfloat16).namespace
    assert spec is not None
    assert spec.model_id == "tiny-mla"
    assert [(c.name, c.dtype, c.shape) for c in spec.components] == [
        ("latent_rope", "bfloat16", (4, 64, 576))
    ]
    assert (spec.rope.layout, spec.rope.width) == ("interleaved", 64)
    assert dict(spec.rope.parameters) == {"rope_type": '"default"', "theta": "10000.0"}
    again = cached_engine(tiny_mla, FakeClient(), dtype=torch.bfloat16).namespace
    assert again is not None
    assert namespace_digest(spec) == namespace_digest(again)


def test_stored_records_are_latent_and_interleaved_key(tiny_mla: Path, text_ids: list[int]) -> None:
    """The first record of the first layer, by hand; position 0 is not rotated."""
    client = FakeClient()
    cached = cached_engine(tiny_mla, client)
    cached.generate([text_ids[:64]], SamplingParams(max_tokens=1))
    [block] = client.blocks.values()
    record = block.view(np.float32).reshape(4, 64, 576)[0, 0]
    weights = {
        name: tensor.float() for name, tensor in load_file(tiny_mla / "model.safetensors").items()
    }
    prefix = "model.layers.0"
    hidden = weights["model.embed_tokens.weight"][text_ids[0]]
    hidden = torch.nn.functional.rms_norm(
        hidden, (320,), weights[f"{prefix}.input_layernorm.weight"], 1e-6
    )
    expected = weights[f"{prefix}.self_attn.kv_a_proj_with_mqa.weight"] @ hidden
    latent = torch.nn.functional.rms_norm(
        expected[:512], (512,), weights[f"{prefix}.self_attn.kv_a_layernorm.weight"], 1e-6
    )
    torch.testing.assert_close(torch.from_numpy(record[:512].copy()), latent)
    torch.testing.assert_close(torch.from_numpy(record[512:].copy()), expected[512:])


def test_kvtier_learns_how_fast_the_engine_prefills(tiny_mla: Path, text_ids: list[int]) -> None:
    """It declines loads that are slower; before the first chunk the engine does not know."""
    client = FakeClient()
    cached = cached_engine(tiny_mla, client)
    for start in (0, 300):
        cached.generate([text_ids[start : start + 200]], GREEDY)
    assert client.speeds[0] == 0.0
    assert client.speeds[1] > 0.0


def test_what_is_computed_behind_lossy_blocks_is_stored_as_lossy(
    tiny_mla: Path, text_ids: list[int]
) -> None:
    client = FakeClient()
    cached_engine(tiny_mla, client).generate([text_ids[:200]], GREEDY)
    (first, *_) = client.puts[0][1]
    client.lossy.add(first)
    before = len(client.puts)
    exact = cached_engine(tiny_mla, client)
    [missed] = exact.generate([text_ids[:300]], GREEDY)
    assert missed.cached_tokens == {}, "an engine that wants exact bytes"
    assert {first} == client.lossy
    cache = PrefixCache(client, allowed_loss=Loss.BOUNDED)
    lossy = MlaEngine(tiny_mla, dtype=torch.float32, prefix_cache=cache, config=CHUNKS)
    del client.puts[before:]
    [hit] = lossy.generate([[*text_ids[:300], *text_ids[:100]]], GREEDY)
    assert sum(hit.cached_tokens.values()) == 256
    stored = [key for _, hashes in client.puts[before:] for key in hashes]
    assert len(stored) == 2
    assert {first, *stored} == client.lossy
