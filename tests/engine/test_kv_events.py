"""KV events of a running engine: on all tiers, in one stream, in step with its memory; and of a reset."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.distributed.kv_events.publisher import KVEventPublisher
from quire.engine.inputs.request_options import RequestOptions
from quire.errors import ConfigError
from quire.fleet.routing.shadow_tree import Scope, ShadowTree
from quire.memory.kv_events import AllBlocksCleared, BlockStored, encode
from tests.kvevents.test_publisher import TIMEOUT_S, Client
from tests.memory.test_kv_events import Consumer, published

EVENTS = {
    "enable_kv_cache_events": True,
    "endpoint": "tcp://127.0.0.1:*",
    "replay_endpoint": "tcp://127.0.0.1:*",
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
STORY = "Once upon a time, a small fox found a red kite in the forest. The fox was happy, and wanted to fly it. "


def publisher_of(llm: LLM) -> KVEventPublisher:
    source = llm.engine.kv_events
    assert source is not None
    return source._publisher


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LLM]:
    """The bundled model with few blocks on the device, few on the host, and a disk."""
    options: dict[str, Any] = {"num_kv_blocks": 40, "max_model_len": 256, "block_size": 8, "num_threads": 1}
    llm = LLM(prefix_cache_dir=str(tmp_path), swap_space=1 << 20, kv_events_config=EVENTS, **options)
    yield llm
    llm.close()


def test_a_subscriber_knows_what_every_tier_holds(engine: LLM) -> None:
    publisher, consumer, tree = publisher_of(engine), Consumer(), ShadowTree()
    tree.add_replica(0)
    client = Client(publisher)
    try:
        expected = client.subscribe() + 1
        prompts = [f"{number} {STORY * 2}" for number in range(12)]
        for prompt in prompts:
            engine.generate(prompt, GREEDY, use_tqdm=False)
        assert engine.engine._disk_prefetch is not None
        assert engine.engine._disk_prefetch._disk.disk is not None
        engine.engine._disk_prefetch._disk.disk.flush()
        while expected < publisher.next_seq:
            seq, events = client.receive()
            assert seq == expected
            expected += 1
            consumer.apply(events)
            tree.apply(0, events)
        media = {medium for _, _, medium in consumer.blocks}
        assert media == {"GPU", "CPU", "STORAGE"}
        memory = engine.engine.scheduler.memory
        assert {block for block in consumer.blocks if block[2] != "STORAGE"} == set(published(memory))
        stats = engine.stats.disk
        assert stats is not None
        assert sum(medium == "STORAGE" for _, _, medium in consumer.blocks) == stats.num_blocks
        # What the router expects is what the engine then finds, generated tokens included.
        output = engine.generate(prompts[-1], GREEDY, use_tqdm=False)[0]
        longer = [*(output.prompt_token_ids or ()), *output.outputs[0].token_ids, 5]
        encoded = encode(longer)
        hit = tree.hit(0, tree.path(encoded, Scope(), 8), encoded, Scope())
        again = engine.generate({"prompt_token_ids": longer}, GREEDY, use_tqdm=False)[0]
        assert again.num_cached_tokens == hit.num_tokens >= len(longer) - 8
    finally:
        client.close()


def test_a_reset_and_a_request_for_all_blocks_are_batches_of_their_own(engine: LLM) -> None:
    publisher = publisher_of(engine)
    client = Client(publisher)
    try:
        client.subscribe()
        engine.generate(STORY, GREEDY, use_tqdm=False)
        assert client.ask(-1) == []
        deadline = time.monotonic() + TIMEOUT_S
        while not engine.engine.kv_events._wants_all and time.monotonic() < deadline:
            time.sleep(0.01)
        engine.generate("Then", GREEDY, use_tqdm=False)
        batches = [client.receive()[1]]
        while not isinstance(batches[-1][:1][0], AllBlocksCleared):
            batches.append(client.receive()[1])
        consumer = Consumer()
        consumer.apply(batches[-1])
        while client.batches.poll(200):
            consumer.apply(client.receive()[1])
        assert consumer.blocks == set(published(engine.engine.scheduler.memory))
        engine.reset_prefix_cache()
        assert client.receive()[1] == [AllBlocksCleared()]
    finally:
        client.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_events_config": 3}, "kv_events_config must be a JSON object or None, got 3"),
        ({"kv_events_config": {"enable": True}}, "unknown key 'enable'; known keys are enable_kv_cache_events, "),
        ({"kv_events_config": EVENTS | {"publisher": "nats"}}, "publisher must be one of zmq, null, got 'nats'"),
        ({"kv_events_config": EVENTS | {"endpoint": "5557"}}, "an address like tcp://127.0.0.1:5557, got '5557'"),
        (
            {"kv_events_config": EVENTS | {"max_queue_size": 0}},
            "max_queue_size must be an integer of at least 1",
        ),
        ({"kv_events_config": EVENTS, "kv_events_format": "xml"}, "kv_events_format must be one of map, array"),
        ({"kv_events_config": EVENTS, "enable_prefix_caching": False}, "needs enable_prefix_caching, which is off"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**options)


def test_a_disabled_publisher_publishes_nothing() -> None:
    llm = LLM(kv_events_config={"enable_kv_cache_events": False}, num_kv_blocks=40, max_model_len=256, num_threads=1)
    assert llm.engine.kv_events is None
    llm.close()


def test_a_block_of_another_salt_is_in_a_scope_of_its_own(engine: LLM) -> None:
    source = engine.engine.kv_events
    assert source is not None
    engine.engine.add_request("a", STORY, GREEDY, RequestOptions(cache_salt="mine", tenant="blue"))
    while engine.engine.has_unfinished:
        engine.engine.step()
    first = next(event for event in source._collector.snapshot() if isinstance(event, BlockStored))
    assert first.extra_keys is not None
    keys = first.extra_keys[0]
    assert keys is not None
    assert keys[1] == ("tenant", "blue")
    assert "mine" not in repr(first), "memory keeps a digest of the salt"
