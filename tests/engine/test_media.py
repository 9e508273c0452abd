"""Media through the Python interface, on the bundled model: refusals, and options that combine with them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.engine.inputs.embeddings import EmbeddingsReader
from quire.engine.inputs.prompts import Prompt, PromptReader
from quire.engine.kv.block_map import describe_block, scan_blocks, stop_recording
from quire.errors import InvalidParameter, UnsupportedFeature
from quire.memory import Namespace, check
from tests.engine.test_async_llm import load as load_async
from tests.engine.test_llm import greedy, load
from tests.engine.test_record_memory import replayed

IDS = [5 + i % 90 for i in range(70)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = load(pin_limit=0.2)
    yield llm
    check(llm.engine.scheduler.memory)  # type: ignore[arg-type]
    assert llm.usage().used == 0
    llm.close()


@pytest.fixture(scope="module")
def width(llm: LLM) -> int:
    reader = llm.engine.requests._prompts.media_reader
    assert reader is not None
    return reader._width


def rows(width: int, count: int = 10, seed: int = 0) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def prompt_of(*media: tuple[int, Tensor], ids: list[int] = IDS) -> dict[str, object]:
    return {"prompt_token_ids": ids, "media": [{"offset": offset, "embeddings": each} for offset, each in media]}


def ask(llm: LLM, prompt: Any, **options: Any) -> tuple[list[int], int]:
    (output,) = llm.generate([prompt], greedy(), use_tqdm=False, **options)
    return output.outputs[0].token_ids, output.num_cached_tokens


def with_row(embeddings: Tensor, row: int, value: float) -> Tensor:
    changed = embeddings.clone()
    changed[row, 3] = value
    return changed


@pytest.mark.parametrize(
    ("media", "words"),
    [
        (5, "media must be a list of mappings with offset and embeddings, got 5"),
        ("ab", "media must be a list of mappings"),
        ([5], r"media\[0\] must be a mapping with offset and embeddings, and nothing else, got 5"),
        ([{"offset": 1}], r"media\[0\] must be a mapping .*, got \['offset'\]"),
        (lambda e: [{"offset": 1, "embeddings": e, "kind": "image"}], r"media\[0\] must be .*'kind'"),
        (lambda _: [{"offset": 1, "embeddings": [[0.5]]}], r"media\[0\].embeddings must be a dense tensor"),
        (lambda e: [{"offset": 1, "embeddings": e.to_sparse()}], r"media\[0\].embeddings must be a dense tensor"),
        (lambda e: [{"offset": 1, "embeddings": e.to("meta")}], r"media\[0\].embeddings must be a dense tensor"),
        (lambda e: [{"offset": 1, "embeddings": e[:, :-1]}], r"of shape \[tokens, (\d+)\].*, got \[10, (?!\1)\d+\]"),
        (lambda e: [{"offset": 1, "embeddings": e[0]}], r"media\[0\].embeddings must be of shape"),
        (lambda e: [{"offset": 1, "embeddings": e[:0]}], r"at least one token, got \[0, \d+\]"),
        (lambda e: [{"offset": 1, "embeddings": e.float()}], r"must be of torch.bfloat16, got torch.float32"),
        (lambda e: [{"offset": 1, "embeddings": with_row(e, 4, float("nan"))}], "finite numbers, got 'nan in row 4'"),
        (lambda e: [{"offset": 1, "embeddings": with_row(e, 9, -float("inf"))}], "finite numbers, got '-inf in row 9'"),
        (lambda e: [{"offset": -1, "embeddings": e}], r"media\[0\].offset must be an integer from 0 to 60, .*got -1"),
        (lambda e: [{"offset": True, "embeddings": e}], r"media\[0\].offset must be an integer"),
        (lambda e: [{"offset": 1.0, "embeddings": e}], r"media\[0\].offset must be an integer"),
        (
            lambda e: [{"offset": 61, "embeddings": e}],
            "to 60, as the prompt has 70 tokens and this stands for 10",
        ),
        (lambda e: [{"offset": 0, "embeddings": e.repeat(8, 1)}], "at most the prompt's 70, got '80 tokens'"),
        (
            lambda e: [{"offset": 20, "embeddings": e}, {"offset": 11, "embeddings": e}],
            r"media\[0\].offset must be at least 21, where the media before it end, got 20",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(llm: LLM, width: int, media: Any, words: str) -> None:
    given = media(rows(width)) if callable(media) else media
    prompts: list[Prompt] = [IDS, {"prompt_token_ids": IDS, "media": given}]
    before = llm.stats.num_steps
    with pytest.raises(InvalidParameter, match=words):
        llm.generate(prompts, greedy(), use_tqdm=False)
    assert llm.stats.num_steps == before
    assert not llm.engine.has_unfinished


def test_media_need_token_ids_and_an_engine_that_computes_them(llm: LLM, width: int) -> None:
    media = [{"offset": 0, "embeddings": rows(width)}]
    with pytest.raises(InvalidParameter, match=re.escape("got ['media', 'prompt']")):
        ask(llm, {"prompt": "Once upon a time", "media": media})
    with pytest.raises(InvalidParameter, match=re.escape("got ['media']")):
        ask(llm, {"media": media})
    with pytest.raises(UnsupportedFeature, match="media is not supported: this engine computes no embeddings"):
        PromptReader(None, 100, 128).read({"prompt_token_ids": IDS, "media": media})
    plain = PromptReader(None, 100, 128).read({"prompt_token_ids": IDS, "media": None})
    assert plain == (IDS, None, ())


def test_media_touch_nobody_else_and_are_not_kept(llm: LLM, width: int) -> None:
    llm.reset_prefix_cache()
    plain = ask(llm, IDS)[0]
    fox, kite = rows(width), rows(width, 12, 1)
    alone = ask(llm, prompt_of((30, fox), (50, kite)))
    assert alone[0] != plain
    assert alone[1] == 16, "whole blocks before the media, and no part of theirs"
    # In whichever order they are given, beside one without.
    prompts: list[Prompt] = [prompt_of((50, kite), (30, fox)), IDS, prompt_of()]
    both = llm.generate(prompts, greedy(), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in both] == [alone[0], plain, plain]
    assert [output.num_cached_tokens for output in both] == [69, 69, 69]
    runner = llm.engine.executor._runner  # type: ignore[attr-defined]
    ask(llm, IDS)
    assert runner._embeddings.by_sequence == {}, "closed sequences' media are let go of"


def test_what_was_given_may_change_afterwards(llm: LLM, width: int) -> None:
    llm.reset_prefix_cache()
    fox = rows(width).requires_grad_()
    expected = ask(llm, prompt_of((3, fox.clone())))[0]
    llm.reset_prefix_cache()
    llm.engine.add_request("fox", prompt_of((3, fox)), greedy())
    with torch.no_grad():
        fox.zero_()
    tokens = [t for _ in range(20) for out in llm.engine.step() for t in out.outputs[0].token_ids]
    assert tokens == expected
    assert ask(llm, prompt_of((3, fox)))[1] == 0
    assert ask(llm, prompt_of((3, rows(width).t().contiguous().t())))[1] == 69, "strides are no part of them"


def test_a_digest_depends_on_all_that_embeddings_are_and_on_the_key() -> None:
    def digest(embeddings: Tensor, key: bytes = b"key") -> bytes:
        reader = EmbeddingsReader(embeddings.shape[1], embeddings.dtype, key)
        (media,) = reader.read([{"offset": 0, "embeddings": embeddings}], 100)
        return media.span.digest

    base = torch.arange(12, dtype=torch.float16).reshape(3, 4)
    others = [base.reshape(4, 3), base.reshape(2, 6), base.view(torch.bfloat16), base + 1, base[:2], base.flip(0)]
    digests = [digest(base), digest(base, b"other"), *map(digest, others)]
    assert len(set(digests)) == len(digests)
    assert digest(base.clone()) == digests[0]


def test_pins_hold_media(llm: LLM, width: int) -> None:
    llm.reset_prefix_cache()
    fox, kite = rows(width), rows(width, seed=1)
    assert llm.pin_prefix("fox", prompt_of((12, fox)), tenant="acme") == 64
    assert llm.pin_prefix("straddling", prompt_of((60, fox)), tenant="acme") == 64
    for start in range(3):
        llm.generate([[100 + 10 * start + i] * 200 for i in range(10)], greedy(1), use_tqdm=False)
    assert ask(llm, prompt_of((12, fox)), tenant="acme")[1] == 64
    assert ask(llm, prompt_of((60, fox)), tenant="acme")[1] == 64
    assert ask(llm, prompt_of((12, fox)), tenant="zeta")[1] == 0
    assert ask(llm, prompt_of((12, kite)), tenant="acme")[1] == 0
    for name in ("fox", "straddling"):
        llm.unpin_prefix(name, "acme")


def test_a_recording_with_media_is_replayed(tmp_path: Path, width: int) -> None:
    path = tmp_path / "memory.log"
    llm = load(record_memory=str(path), num_kv_blocks=60, block_size=4, max_model_len=160, max_num_seqs=8)
    media = [
        prompt_of((offset, rows(width, count, seed))) for offset, count, seed in ((3, 9, 0), (3, 9, 1), (20, 30, 0))
    ]
    for n in (1, 2):
        params = SamplingParams(n=n, max_tokens=30, seed=3, ignore_eos=True)
        prompts: list[Prompt] = [*media, IDS, *media]
        llm.generate(prompts, params, use_tqdm=False)
    stats, usage = llm.stats, llm.usage()
    llm.close()
    report = replayed(path)
    assert report.usage == usage
    assert report.hit_tokens == stats.prefix_hits + stats.resumed_hits > 200
    assert stats.num_preemptions > 0


def test_the_asynchronous_door_takes_media(llm: LLM, width: int) -> None:
    expected = ask(llm, prompt_of((3, rows(width))))[0]
    server = load_async()

    async def run() -> list[int]:
        stream = server.generate(prompt_of((3, rows(width))), greedy())
        tokens = [token async for delta in stream for token in delta.outputs[0].token_ids]
        with pytest.raises(InvalidParameter, match="offset"):
            async for _ in server.generate(prompt_of((99, rows(width))), greedy()):
                pass
        return tokens

    assert asyncio.run(run()) == expected
    server.shutdown()


def test_the_block_map_knows_blocks_with_rows_of_media(llm: LLM, width: int) -> None:
    engine, size = llm.engine, llm.engine.scheduler.memory.block_size
    assert size == 16
    llm.reset_prefix_cache()
    # 10 rows in block 1, and 20 in blocks 2 and 3.
    engine.add_request("a", prompt_of((20, rows(width)), (40, rows(width, 20, 1))), greedy(40, ignore_eos=True))  # type: ignore[arg-type]
    engine.step()
    engine.step()
    scan = scan_blocks(engine.scheduler)
    (table,) = [held.block_ids for held in scan.tables]
    own, salted = Namespace(engine.cache_name), Namespace(engine.cache_name, cache_salt="x")

    def media_tokens(block: int, viewer: Namespace = own) -> Any:
        return describe_block(engine.scheduler, 0, block, viewer)["media_tokens"]

    assert scan.pools[0].media == {*table[1:4]}
    assert list(map(media_tokens, table[:5])) == [0, 10, 8, 12, 0]
    while engine.has_unfinished:
        engine.step()
    idle = scan_blocks(engine.scheduler).pools[0]
    assert (idle.media, sum(idle.holders[1:])) == ({*table[1:4]}, 0)
    assert list(map(media_tokens, table[:5])) == [0, 10, 8, 12, 0]
    # Who may not see a block's tokens is told nothing of its media either.
    assert media_tokens(table[1], salted) is None
    llm.reset_prefix_cache()
    assert scan_blocks(engine.scheduler).pools[0].media == set()
    stop_recording(engine.scheduler)
