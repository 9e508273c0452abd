"""What goes between a front and the engine's process, written and read again."""

from __future__ import annotations

import asyncio
import socket
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from quire.engine.outputs.logprobs import FlatLogprobs
from quire.engine.outputs.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.errors import (
    InvalidParameter,
    PinLimitReached,
    PromptTooLong,
    QueueFull,
    RequestFailed,
    UnknownAdapter,
    WorkerError,
)
from quire.memory.results import TokenAccount
from quire.sequences.logprobs import TokenLogprobs
from quire.sequences.params import SamplingParams
from quire.sequences.structured import StructuredOutputs
from quire.sequences.thinking import ThinkingTokens
from quire.server.fronts import channel
from quire.server.fronts.channel import Channel
from quire.server.fronts.messages import DeltaRow, Outputs, TextRow, decode, encode
from quire.server.fronts.output_sender import MAX_UNACKNOWLEDGED, OutputSender, SentStream
from quire.server.fronts.peer import Peer
from quire.server.fronts.wire_errors import decode_error, encode_error
from quire.server.fronts.wire_outputs import delta_row, is_plain, read_delta
from quire.server.fronts.wire_params import decode_params, encode_params
from quire.server.requests.errors import ApiError, api_error

PATIENCE_S = 60


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.25, stop=("a", "\ud800"), logit_bias={7: -1.5}, seed=2**63 - 1, max_tokens=None),
        SamplingParams(structured_outputs=StructuredOutputs(choice=("a", "b")), allowed_token_ids=(1, 2)),
        SamplingParams(thinking=ThinkingTokens(1, (2,), (3, 2), frozenset({9, 4}), True), thinking_token_budget=5),
        SamplingParams(beam_width=4, n=2, length_penalty=0.5, early_stopping="never"),
        SamplingParams(extra_args={"kv_transfer_params": {"do_remote_decode": True, "remote_block_ids": [[1, 2], []]}}),
    ],
)
def test_parameters_come_as_they_were(params: SamplingParams) -> None:
    assert decode_params(encode_params(params)) == params


def test_parameters_are_checked_again_and_functions_are_not_sent() -> None:
    with pytest.raises(InvalidParameter, match="temperature"):
        decode_params('{"temperature": -1}')
    with pytest.raises(ValueError, match="logits_processors"):
        encode_params(SamplingParams(logits_processors=(lambda _prompt, _output, logits: logits,)))


@pytest.mark.parametrize(
    "error",
    [
        InvalidParameter("n", {"a": [1]}, "an integer"),
        PromptTooLong(9, 8, "the context length"),
        QueueFull(5, 7),
        UnknownAdapter("sql"),
        PinLimitReached(9, 3),
        RequestFailed("no token"),
        WorkerError("it died"),
        ApiError(503, "too many", code="too_many_watchers", headers={"Retry-After": "1"}),
    ],
)
def test_errors_answer_as_in_one_process(error: Exception) -> None:
    read = decode_error(encode_error(error))
    assert type(read) is type(error)
    here, there = api_error(error, "id"), api_error(read, "id")
    assert (there.status, there.body(), there.headers) == (here.status, here.body(), here.headers)
    if isinstance(error, InvalidParameter):
        assert isinstance(read, InvalidParameter)
        # A client's name of the field makes a new message of the same value.
        assert str(InvalidParameter("count", read.value, read.allowed)) == "count must be an integer, got {'a': [1]}"


def test_other_errors_are_the_server_s() -> None:
    assert api_error(decode_error(encode_error(KeyError("x"))), "id").status == 500


def output(text: str, token_ids: list[int], **fields: Any) -> RequestOutput:
    return RequestOutput("r", None, [1, 2], [CompletionOutput(0, text, token_ids)], **fields)


def test_a_delta_comes_as_it_was() -> None:
    logprobs = FlatLogprobs()
    logprobs.append(TokenLogprobs(5, -0.5, 1, array("i", (5, 6)), array("d", (-0.5, -1.5))))
    delta = output("a", [5], finished=True, num_cached_tokens=1, prompt_account=TokenAccount(), pooled=(0.5, -2.0))
    delta.metrics = RequestMetrics(1.0, 2.0, 3.0, 4.0, 5)
    delta.outputs[0].logprobs = logprobs
    delta.outputs[0].stop_reason = 7
    message = decode(encode(Outputs([delta_row(3, delta)])))
    assert isinstance(message, Outputs)
    (row,) = message.rows
    assert isinstance(row, DeltaRow)
    assert read_delta(row, "r", None, [1, 2], None) == delta
    assert not is_plain(delta)


class SentMessages:
    """Stands for the channel to a front: keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


def test_deltas_are_merged_while_a_front_is_behind() -> None:
    peer: Any = SentMessages()
    sender, stream = OutputSender(peer), SentStream(1, 0.0)

    def post(item: RequestOutput | Exception) -> None:
        sent: Any = type("Sent", (), {"deliver": lambda _, each: sender.add(stream, each)})()
        sender.post([(sent, item)], None)

    for number in range(MAX_UNACKNOWLEDGED + 3):
        post(output(str(number), [number]))
    post(WorkerError("the end"))
    assert len(peer.sent) == MAX_UNACKNOWLEDGED
    sender.acknowledge(0.0)
    first, second, last = [message.rows for message in peer.sent]
    assert first[0].outputs[0].text == "0"
    assert second == [TextRow(1, "1", [1])]
    assert last[0] == TextRow(1, "234", [2, 3, 4])
    assert str(decode_error(last[1].error)) == "the end"


def joined(scenario: Callable[[Any, Any], Any]) -> None:
    """Run a scenario over the two ends of a socket."""

    async def run() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await scenario(*socket.socketpair())

    asyncio.run(run())


def test_messages_of_any_size_come_whole_and_in_order() -> None:
    async def scenario(one: socket.socket, two: socket.socket) -> None:
        sizes = [0, 1, 5_000_000, 3, 1_000_000]
        got: list[bytes] = []
        done, over = asyncio.Event(), asyncio.Event()

        def take(message: memoryview) -> None:
            got.append(bytes(message))
            if len(got) == len(sizes):
                done.set()

        reader, writer = Channel(two, take, over.set), Channel(one, lambda _: None, over.set)
        for idx, size in enumerate(sizes):
            await asyncio.to_thread(writer.send, bytes([idx]) * size)
        await done.wait()
        assert got == [bytes([idx]) * size for idx, size in enumerate(sizes)]
        writer.close()
        await over.wait()
        reader.close()

    joined(scenario)


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1"])
def test_what_is_no_message_ends_the_channel(data: bytes) -> None:
    async def scenario(one: socket.socket, two: socket.socket) -> None:
        over = asyncio.Event()

        def read(message: memoryview) -> None:
            decode(message)

        Channel(two, read, over.set)
        one.send(data)
        await over.wait()
        one.close()

    joined(scenario)


def test_a_process_that_reads_nothing_counts_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_UNREAD_BYTES", 1 << 20)

    async def scenario(one: socket.socket, two: socket.socket) -> None:
        over = asyncio.Event()
        writer = Channel(one, lambda _: None, over.set)
        writer.send(bytes(8 << 20))
        await over.wait()
        two.close()

    joined(scenario)


def test_calls_have_results_errors_and_an_end() -> None:
    async def scenario(one: socket.socket, two: socket.socket) -> None:
        async def double(value: int) -> int:
            return 2 * value

        async def refuse() -> None:
            raise QueueFull(3, 4)

        async def hang() -> None:
            await asyncio.Event().wait()

        def nothing(*_: Any) -> None:
            return None

        methods: Any = {"double": double, "refuse": refuse, "hang": hang}
        server = Peer(one, "client", methods, nothing, nothing, nothing)
        client = Peer(two, "server", {}, nothing, nothing, nothing)
        assert await client.call("double", 21) == 42
        with pytest.raises(QueueFull) as caught:
            await client.call("refuse")
        assert caught.value.retry_after_s == 4
        with pytest.raises(WorkerError, match="has not answered"):
            await client.call("hang", timeout_s=0.05)
        waiting = asyncio.create_task(client.call("hang"))
        await client.call("double", 1)
        server.close()
        with pytest.raises(WorkerError, match="has ended"):
            await waiting
        with pytest.raises(WorkerError, match="has ended"):
            await client.call("double", 1)

    joined(scenario)
