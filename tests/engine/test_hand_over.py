"""The hand-over of a prompt's blocks: computed by one engine, continued by another, with the tokens of one engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from quire import LLM, SamplingParams
from quire.distributed.kvstore.counters import TransferStats
from quire.distributed.kvstore.record import seal
from quire.engine.outputs.outputs import RequestOutput
from quire.errors import ConfigError, InvalidParameter, UnsupportedFeature
from quire.memory import check
from tests.conformance.conftest import Reference, make_reference
from tests.engine.test_disk_cache import have_blocks_arrive_late
from tests.kvstore.servers import Answer, free_port, relay
from tests.waiting import wait_for

STORY = "Once upon a time, a small fox found a red kite in the forest. The fox was happy, and wanted to fly it. "
PROMPT = STORY * 3 + "Then"
WAIT_S = 60.0
EXTRA: dict[str, Any] = {"timeout_s": WAIT_S, "token": "secret", "allowed_hosts": ["127.0.0.1"]}
DEFAULTS: dict[str, Any] = {"num_kv_blocks": 100, "max_model_len": 256, "block_size": 8, "num_threads": 1}


@pytest.fixture(autouse=True, params=[False, True], ids=["step-by-step", "asynchronous"])
def scheduling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEFAULTS, "async_scheduling", request.param)


@pytest.fixture(autouse=True)
def much_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for an engine that works, however slow this machine is."""
    monkeypatch.setattr("quire.config.cache.STAGING_BYTES", 8 << 20)
    monkeypatch.setattr("quire.engine.kv.source_loads.LEAST_PATIENCE_S", WAIT_S)


def start(role: str | None, *, extra: dict[str, Any] | None = None, **options: Any) -> LLM:
    """Start an engine with a role in the hand-over; without one for None."""
    config = {key: options.pop(key) for key in tuple(options) if key.startswith("kv_") and key != "kv_transfer_config"}
    if role is not None:
        config = {"kv_role": role, "kv_port": 0, "kv_connector_extra_config": EXTRA | (extra or {})}
        config |= {"kv_load_failure_policy": options.pop("policy", "recompute")}
        options["kv_transfer_config"] = config
    return LLM(**(DEFAULTS | options))


def params(max_tokens: int = 12, **fields: Any) -> SamplingParams:
    extra = {"kv_transfer_params": fields} if fields else None
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, extra_args=extra)


def prefill(llm: LLM, prompt: Any = PROMPT, **options: Any) -> dict[str, Any]:
    """Compute a prompt for another engine; return where that finds it."""
    (output,) = llm.generate(prompt, params(1, do_remote_decode=True), use_tqdm=False, **options)
    check(llm.engine.scheduler.memory)
    assert output.kv_transfer_params is not None
    return output.kv_transfer_params


def decode(llm: LLM, handed: dict[str, Any], prompt: Any = PROMPT, **options: Any) -> RequestOutput:
    """Continue a prompt that another engine has computed."""
    (output,) = llm.generate(prompt, params(**handed), use_tqdm=False, **options)
    check(llm.engine.scheduler.memory)
    return output


def transfer_stats(llm: LLM) -> TransferStats:
    stats = llm.stats.transfer
    assert stats is not None
    return stats


@pytest.fixture(scope="module")
def expected() -> str:
    llm = start(None)
    (output,) = llm.generate(PROMPT, params(), use_tqdm=False)
    llm.close()
    return output.outputs[0].text


@pytest.fixture
def producer() -> Iterator[LLM]:
    llm = start("kv_producer")
    yield llm
    llm.close()


@pytest.fixture
def consumer() -> Iterator[LLM]:
    llm = start("kv_consumer")
    yield llm
    llm.close()


def num_whole(output: RequestOutput) -> int:
    return (len(output.prompt_token_ids) - 1) // 8 * 8


def test_one_computes_and_another_continues(producer: LLM, consumer: LLM, expected: str) -> None:
    handed = prefill(producer)
    assert handed["do_remote_prefill"] is True
    assert (handed["do_remote_decode"], handed["remote_host"], handed["tp_size"]) == (False, "127.0.0.1", 1)
    output = decode(consumer, handed)
    assert output.outputs[0].text == expected
    assert output.num_disk_tokens == output.num_cached_tokens == num_whole(output)
    stats = transfer_stats(consumer)
    assert stats.num_hits * 8 == output.num_cached_tokens
    assert (stats.num_failures, stats.num_damaged, stats.num_late) == (0, 0, 0)
    # Its thread counts a record when it has sent it.
    wait_for(lambda: transfer_stats(producer).num_sent >= stats.num_hits)
    assert transfer_stats(producer).num_sent == stats.num_hits
    # It is in this engine's own cache now.
    assert decode(consumer, handed).num_disk_tokens == 0
    assert transfer_stats(producer).num_sent == stats.num_hits


def test_blocks_that_arrive_late_are_those_of_their_turn(
    consumer: LLM, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a GPU: the engine goes on, and gives the blocks to others, before their bytes are on the host."""
    has_arrived = threading.Event()

    class LateCopy:
        is_ready = False

        def __init__(self, tensor: Tensor) -> None:
            self._tensor = tensor.clone()

        def wait(self) -> Tensor:
            assert has_arrived.wait(WAIT_S)
            return self._tensor

    have_blocks_arrive_late(monkeypatch, LateCopy)
    producer = start("kv_producer", num_kv_blocks=40)
    handed = prefill(producer)
    for name in ("Tom", "Anna"):
        producer.generate(f"{name}: {PROMPT}", params(), use_tqdm=False)
    stats = transfer_stats(producer)
    assert stats.num_kept > 5
    threading.Timer(0.2, has_arrived.set).start()
    output = decode(consumer, handed)
    assert output.outputs[0].text == expected
    assert output.num_disk_tokens == num_whole(output)
    producer.close()


def test_another_prompt_salt_or_tenant_gets_nothing(producer: LLM, consumer: LLM) -> None:
    handed = prefill(producer, cache_salt="mine", tenant="acme")
    for options in ({}, {"cache_salt": "mine"}, {"tenant": "acme"}, {"cache_salt": "other", "tenant": "acme"}):
        assert decode(consumer, handed, **options).num_disk_tokens == 0
    assert decode(consumer, handed, "A fox " + PROMPT, cache_salt="mine", tenant="acme").num_disk_tokens == 0
    assert decode(consumer, handed, cache_salt="mine", tenant="acme").num_disk_tokens > 40


def test_another_layout_gets_nothing(producer: LLM, expected: str) -> None:
    handed = prefill(producer)
    other = start("kv_consumer", block_size=16)
    output = decode(other, handed)
    assert (output.num_disk_tokens, output.outputs[0].text) == (0, expected)
    assert transfer_stats(other).num_failures > 0
    # The other one has left when it has said who it is, before it is turned away.
    wait_for(lambda: transfer_stats(producer).num_turned_away > 0)
    other.close()


def test_an_engine_that_is_gone_is_recomputed_or_fails_as_asked(consumer: LLM, expected: str) -> None:
    handed = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": free_port()}
    output = decode(consumer, handed)
    assert (output.num_disk_tokens, output.outputs[0].text) == (0, expected)
    strict = start("kv_consumer", policy="fail")
    failed = decode(strict, handed)
    assert failed.outputs == [] or failed.outputs[0].finish_reason == "error"
    assert failed.error is not None
    assert "kv_load_failure_policy is 'fail'" in failed.error
    # It costs nobody else anything, and a prompt that needs no blocks does not fail.
    (other,) = strict.generate(PROMPT, params(), use_tqdm=False)
    assert other.outputs[0].text == expected
    assert decode(strict, handed).outputs[0].text == expected
    strict.close()


def test_a_connection_cut_at_any_block_is_recomputed(producer: LLM, expected: str) -> None:
    handed = prefill(producer)
    record = transfer_stats(producer).kept_bytes // transfer_stats(producer).num_kept
    for number in (0, 1, 2, 5, 9):
        left = [300 + number * record]

        def change(_: int, left: list[int] = left) -> Answer:
            def answer(data: bytes) -> bytes | None:
                part = data[: max(0, left[0])]
                left[0] -= len(data)
                return part or None

            return answer

        with relay(handed["remote_port"], change) as port:
            llm = start("kv_consumer")
            output = decode(llm, handed | {"remote_port": port})
            assert output.outputs[0].text == expected
            assert output.num_disk_tokens < num_whole(output)
            llm.close()


def test_a_peer_that_gives_other_bytes_changes_no_token(producer: LLM, expected: str) -> None:
    handed = prefill(producer)
    exports = producer.engine._hand_over._exports  # type: ignore[union-attr]
    assert exports is not None
    for idx, key in enumerate(list(exports._exports)):
        record = exports.get(key)
        assert record is not None
        record[-(idx % 200) - 1] ^= 1 << idx % 8
    llm = start("kv_consumer")
    output = decode(llm, handed)
    assert (output.num_disk_tokens, output.outputs[0].text) == (0, expected)
    assert transfer_stats(llm).num_damaged > 0
    llm.close()


def short(records: list[bytearray]) -> None:
    """Cut off a record."""
    del records[3][-1:]


def flipped(records: list[bytearray]) -> None:
    """Change a bit of a record's keys and values."""
    records[3][len(records[3]) // 2] ^= 4


def exchanged(records: list[bytearray]) -> None:
    """Send a record in another one's place."""
    records[3][:], records[4][:] = records[4][:], records[3][:]


@pytest.mark.parametrize("damage", [short, flipped, exchanged])
def test_what_does_not_arrive_whole_fails_the_request_if_so_configured(
    damage: Callable[[list[bytearray]], None], producer: LLM, expected: str
) -> None:
    handed = prefill(producer)
    assert producer.engine._hand_over is not None
    exports = producer.engine._hand_over._exports
    assert exports is not None
    records = [exports.get(key) for key in list(exports._exports)]
    damage([record for record in records if record is not None])
    strict = start("kv_consumer", policy="fail")
    failed = decode(strict, handed)
    assert failed.error_code == "kv_load_failed"
    assert failed.outputs == [] or failed.outputs[0].token_ids == []
    assert transfer_stats(strict).num_damaged > 0
    (other,) = strict.generate(PROMPT, params(), use_tqdm=False)
    assert other.outputs[0].text == expected
    strict.close()
    lenient = start("kv_consumer")
    assert decode(lenient, handed).outputs[0].text == expected
    lenient.close()


def forge(producer: LLM) -> None:
    """Replace the keys and values of all exported blocks by zeros, with right checksums."""
    assert producer.engine._hand_over is not None
    exports = producer.engine._hand_over._exports
    assert exports is not None
    for key, export in exports._exports.items():
        record = exports.get(key)
        assert record is not None
        start = len(record) - 4 - producer.engine.scheduler.memory.groups[0].spec.bytes_per_block
        record[start:-4] = bytes(len(record) - 4 - start)
        seal(export.key, record)


@pytest.mark.parametrize("token", [None, "secret"])
def test_blocks_of_an_engine_without_a_token_serve_only_the_request_that_named_it(
    token: str | None, expected: str
) -> None:
    """Whoever listens at a port of this host may forge records; one that knows the token is trusted."""
    extra = {"token": token}
    producer, consumer = start("kv_producer", extra=extra), start("kv_consumer", extra=extra)
    handed = prefill(producer)
    forge(producer)
    first = decode(consumer, handed)
    assert first.num_disk_tokens == num_whole(first)
    assert first.outputs[0].text != expected, "the forged blocks change nothing"
    (other,) = consumer.generate(PROMPT, params(), use_tqdm=False)
    if token is None:
        assert (other.outputs[0].text, other.num_cached_tokens) == (expected, 0)
        assert decode(consumer, handed).num_disk_tokens == num_whole(first), "its own blocks are in its own scope, too"
        (again,) = consumer.generate(PROMPT, params(), use_tqdm=False)
        assert again.outputs[0].text == expected
    else:
        assert (other.num_cached_tokens or 0) >= num_whole(first)
    for llm in (producer, consumer):
        llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama3", "gemma4", "llama4", "qwen3.5", "falcon-h1"])
def test_every_kind_of_cache(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Windows, chunks and states: the blocks that the longest hit needs arrive, snapshots among them."""
    reference: Reference = make_reference(family, tmp_path_factory)
    options: dict[str, Any] = {
        "model": str(reference.folder),
        "dtype": "float32",
        "num_kv_blocks": 400,
        "block_size": 4,
    }
    options |= {"max_model_len": None, "swap_space": 16 << 20, "skip_tokenizer_init": True}
    one, other = start("kv_producer", **options), start("kv_consumer", **options)
    num_loaded = 0
    for prompt, tokens in zip(reference.prompts, reference.outputs, strict=True):
        handed = prefill(one, {"prompt_token_ids": prompt})
        output = decode(other, handed, {"prompt_token_ids": prompt})
        assert output.outputs[0].token_ids == tokens[:12]
        num_loaded += output.num_disk_tokens
    assert num_loaded > 0
    one.close()
    other.close()


def refused(llm: LLM, **fields: Any) -> str | None:
    with pytest.raises((InvalidParameter, UnsupportedFeature)) as error:
        llm.generate(PROMPT, params(**fields), use_tqdm=False)
    return error.value.field


def test_requests_that_cannot_be_honoured(producer: LLM, consumer: LLM) -> None:
    handed: dict[str, Any] = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1}
    plain = start(None)
    assert refused(plain, **handed) == "kv_transfer_params"
    plain.close()
    assert refused(producer, **handed) == "kv_transfer_params.do_remote_prefill"
    assert refused(consumer, do_remote_decode=True) == "kv_transfer_params.do_remote_decode"
    for change, name in (
        ({"remote_host": "192.0.2.1"}, "remote_host"),
        ({"remote_host": "unix:/run/any.sock", "remote_port": 0}, "remote_host"),
        ({"remote_host": "localhost"}, "remote_host"),
        ({"remote_host": None}, "remote_host"),
        ({"remote_port": None}, "remote_port"),
        ({"remote_port": 70000}, "remote_port"),
        ({"remote_port": True}, "remote_port"),
        ({"tp_size": 2}, "tp_size"),
        ({"remote_block_ids": "1"}, "remote_block_ids"),
        ({"remote_block_ids": [[1, "2"]]}, "remote_block_ids"),
        ({"do_remote_decode": True}, "do_remote_prefill"),
        ({"do_remote_prefill": 1}, "do_remote_prefill"),
        ({"other": 1}, "other"),
    ):
        assert refused(consumer, **(handed | change)) == f"kv_transfer_params.{name}"
    narrow = start("kv_consumer", extra={"allowed_hosts": ["127.0.0.1:14579"]})
    assert refused(narrow, **handed) == "kv_transfer_params.remote_port"
    narrow.close()
    with pytest.raises(InvalidParameter) as error:
        SamplingParams(extra_args={"x": 1})
    assert error.value.field == "extra_args"
    with pytest.raises(ConfigError, match="kv_transfer_config needs enable_prefix_caching"):
        start("kv_both", enable_prefix_caching=False)


PRODUCER = """
import json, sys
from quire import LLM, SamplingParams
llm = LLM(num_kv_blocks=100, max_model_len=256, block_size=8, num_threads=1,
          kv_transfer_config={"kv_role": "kv_producer", "kv_ip": sys.argv[1], "kv_port": 0,
                              "kv_connector_extra_config": {"token": "secret"}})
params = SamplingParams(temperature=0.0, max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
for line in sys.stdin:
    (output,) = llm.generate(json.loads(line), params, use_tqdm=False)
    print(json.dumps(output.kv_transfer_params), flush=True)
"""


@pytest.fixture
def other_process() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Return a function that starts a producer in another process."""
    started: list[subprocess.Popen[str]] = []

    def start_at(address: str) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", PRODUCER, address]
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start_at
    for process in started:
        process.kill()
        process.communicate()


def ask(process: subprocess.Popen[str], prompt: str) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(prompt) + "\n")
    process.stdin.flush()
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("address", ["127.0.0.1", "unix"])
def test_two_processes(
    tmp_path: Path,
    expected: str,
    address: str,
    other_process: Callable[[str], subprocess.Popen[str]],
) -> None:
    address = address if address != "unix" else f"unix:{tmp_path}/blocks.sock"
    process, consumer = other_process(address), start("kv_consumer", extra={"allowed_hosts": [address]})
    handed = ask(process, PROMPT)
    output = decode(consumer, handed)
    assert (output.outputs[0].text, output.num_disk_tokens) == (expected, num_whole(output))
    # Killed before its blocks are fetched: they are computed here.
    longer = STORY * 4 + "But"
    handed = ask(process, longer)
    process.kill()
    process.wait(WAIT_S)
    own = start(None)
    (alone,) = own.generate(longer, params(), use_tqdm=False)
    own.close()
    output = decode(consumer, handed, longer)
    assert (output.outputs[0].text, output.num_disk_tokens) == (alone.outputs[0].text, 0)
    consumer.close()
