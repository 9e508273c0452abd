"""Prefixes from elsewhere beside computing them: hand-over between engines, and a remote store.

`python -m benchmarks.kv_transfer` measures, on one machine over loopback,

- the wire alone: records of 256 KiB from an export table to a connection, in bytes a second;
- a prompt of the bundled model to its first token: computed; with its blocks from another engine of this process; with
  its blocks from a Valkey or Redis server, where its binary is installed.

Each figure is the median of `--rounds`. The prefix cache is emptied before each round.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import monotonic, perf_counter, sleep
from typing import Any

from benchmarks import machine
from quire import LLM, SamplingParams
from quire.config.kv_transfer import KVTransferConfig
from quire.distributed.kvstore.exports import ExportTable
from quire.distributed.kvstore.record import record_bytes, record_key
from quire.distributed.kvstore.transfer.peers import PeerAddress, PeerConnection
from quire.distributed.kvstore.transfer.transfer_server import TransferServer
from quire.memory.results import StoredBlock

RECORD_BYTES = 256 << 10
NUM_RECORDS = 256
IDENTITY = bytes(16)
BINARIES = ("valkey-server", "redis-server")
LIMIT_S = 30.0


def main() -> None:
    """Measure, print a table and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=900, help="tokens of the prompt")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    wire = wire_rate(args.rounds)
    print(f"wire alone: {wire / 1e6:,.0f} MB/s in records of {RECORD_BYTES >> 10} KiB")
    options = {"num_threads": args.threads, "max_model_len": args.tokens + 16, "num_kv_blocks": 4 * args.tokens // 16}
    prompt = {"prompt_token_ids": [300 + number % 1000 for number in range(args.tokens)]}
    computed = computing_s(prompt, args.rounds, options)
    print(f"{args.tokens} tokens to the first output token, computed: {computed * 1e3:,.1f} ms")
    figures: dict[str, Any] = {"tokens": args.tokens, "threads": args.threads, "wire_bytes_s": wire}
    figures["computed_s"] = computed
    figures["handed_over"] = show("from another engine", handed_over(prompt, args.rounds, options), computed)
    with store() as url:
        if url is None:
            print(f"no {' or '.join(BINARIES)} here: the remote store is left out")
        else:
            figures["remote"] = show("from the remote store", remote(prompt, args.rounds, options, url), computed)
    print(machine.save("kv_transfer", figures))


def show(name: str, measured: tuple[float, int, int], computed_s: float) -> dict[str, float]:
    """Print one line, and return it: seconds, bytes and tokens that were loaded."""
    seconds, num_bytes, num_tokens = measured
    rate = num_bytes / seconds / 1e6
    print(
        f"{name}: {seconds * 1e3:,.1f} ms ({computed_s / seconds:.1f} times as fast), {num_tokens} tokens in "
        f"{num_bytes / 1e6:.1f} MB, {rate:,.0f} MB/s all included"
    )
    return {"seconds": seconds, "bytes": num_bytes, "tokens": num_tokens}


def wire_rate(rounds: int) -> float:
    """Return the bytes a second of the hand-over, without an engine."""
    exports = ExportTable(2 * RECORD_BYTES * NUM_RECORDS, LIMIT_S * 100)
    payload = memoryview(bytes(RECORD_BYTES))
    blocks = [StoredBlock(0, number.to_bytes(16, "big"), bytes(64), bytes(16)) for number in range(NUM_RECORDS)]
    keys = [record_key(IDENTITY, block) for block in blocks]
    for key, block in zip(keys, blocks, strict=True):
        exports.put(key, block, payload)
    server = TransferServer(KVTransferConfig(kv_role="kv_both", kv_port=0), IDENTITY, exports)
    address = PeerAddress("127.0.0.1", server.port)
    connection = PeerConnection(address, IDENTITY, None, LIMIT_S, record_bytes(RECORD_BYTES))
    times = []
    for _ in range(rounds):
        found: dict[bytes, bytes] = {}
        started = perf_counter()
        connection.read(keys, found.__setitem__)
        times.append(perf_counter() - started)
        assert len(found) == NUM_RECORDS
    connection.close()
    server.close()
    return RECORD_BYTES * NUM_RECORDS / median(times)


def first_token(extra: dict[str, Any] | None = None) -> SamplingParams:
    """Return the parameters of a request for one token."""
    return SamplingParams(temperature=0.0, max_tokens=1, extra_args=extra)


def timed(llm: LLM, prompt: Any, params: SamplingParams, rounds: int, reset: Callable[[], None]) -> tuple[float, int]:
    """Return the median time to the first token, and the tokens that were loaded each time."""
    times, loaded = [], set()
    for _ in range(rounds):
        reset()
        started = perf_counter()
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        times.append(perf_counter() - started)
        loaded.add(output.num_disk_tokens)
    return median(times), min(loaded)


def computing_s(prompt: Any, rounds: int, options: dict[str, Any]) -> float:
    """Return the seconds of computing a prompt."""
    llm = LLM(**options)
    llm.generate(prompt, first_token(), use_tqdm=False)
    seconds, _ = timed(llm, prompt, first_token(), rounds, llm.reset_prefix_cache)
    llm.close()
    return seconds


def handed_over(prompt: Any, rounds: int, options: dict[str, Any]) -> tuple[float, int, int]:
    """Return seconds, bytes and tokens of a prompt whose blocks come from another engine."""
    config = {"kv_port": 0, "kv_connector_extra_config": {"timeout_s": LIMIT_S}}
    one = LLM(**options, kv_transfer_config={"kv_role": "kv_producer", **config})
    other = LLM(**options, kv_transfer_config={"kv_role": "kv_consumer", **config})
    asked = first_token({"kv_transfer_params": {"do_remote_decode": True}})
    (output,) = one.generate(prompt, asked, use_tqdm=False)
    params = first_token({"kv_transfer_params": output.kv_transfer_params})
    seconds, num_tokens = timed(other, prompt, params, rounds, other.reset_prefix_cache)
    stats = other.stats.transfer
    assert stats is not None
    one.close()
    other.close()
    return seconds, stats.loaded_bytes // rounds, num_tokens


def remote(prompt: Any, rounds: int, options: dict[str, Any], url: str) -> tuple[float, int, int]:
    """Return seconds, bytes and tokens of a prompt whose blocks come from a remote store."""
    given = {**options, "prefix_cache_url": url, "prefix_cache_timeout_s": LIMIT_S}
    one = LLM(**given)
    one.generate(prompt, first_token(), use_tqdm=False)
    one.close()  # once all is written
    other = LLM(**given, prefix_cache_write_policy="write_back")
    # A reset would empty the store as well.
    empty = other.engine.scheduler.memory.reset_prefix_cache
    seconds, num_tokens = timed(other, prompt, first_token(), rounds, empty)
    stats = other.stats.remote
    assert stats is not None
    other.close()
    return seconds, stats.loaded_bytes // rounds, num_tokens


@contextmanager
def store() -> Iterator[str | None]:
    """Run a server on loopback, and yield its address; None where none is installed."""
    binary = next(filter(None, map(shutil.which, BINARIES)), None)
    if binary is None:
        yield None
        return
    port = machine.free_port()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        process = subprocess.Popen([binary, *flags], stdout=subprocess.DEVNULL)
        try:
            started = monotonic()
            while monotonic() < started + LIMIT_S:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                sleep(0.05)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
