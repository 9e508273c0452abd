"""Adapters in an engine: what shares cached blocks, what loading and unloading do to requests, limits, and refusals."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, LoRARequest, SamplingParams
from quire.engine.exporters.kv_collector import LoraMetrics
from quire.engine.exporters.prometheus import Metrics
from quire.engine.inputs.request_options import RequestOptions
from quire.errors import (
    ConfigError,
    InvalidAdapter,
    InvalidParameter,
    RequestError,
    UnknownAdapter,
    UnsupportedFeature,
)
from tests.conformance.checkpoints import save_checkpoint
from tests.distributed.engines import compare_every_step
from tests.distributed.in_threads import native_library
from tests.models.adapters.folders import random_matrices, write_adapter
from tests.ops.backends import LIBRARIES

WIDTHS = {
    f"model.layers.{layer}.{name}": (out_width, in_width)
    for layer in range(3)
    for name, out_width, in_width in (
        ("self_attn.q_proj", 128, 64),
        ("self_attn.v_proj", 64, 64),
        ("self_attn.o_proj", 64, 128),
        ("mlp.gate_proj", 96, 64),
        ("mlp.up_proj", 96, 64),
        ("mlp.down_proj", 64, 96),
    )
}
PROMPT = [idx * 7 % 190 + 5 for idx in range(40)]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


class World:
    """A model and four adapters, of which "same" is a copy of "one"."""

    def __init__(self, folder: Path) -> None:
        self.model = str(save_checkpoint("llama3", folder / "model"))
        self.paths = {
            name: str(write_adapter(folder / name, random_matrices(WIDTHS, 4, seed)))
            for name, seed in (("one", 1), ("two", 2), ("same", 1), ("three", 3))
        }

    def options(self, *names: str, **options: Any) -> dict[str, Any]:
        modules = {name: self.paths[name] for name in names}
        defaults: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "num_threads": 1, "block_size": 8}
        defaults |= {"max_model_len": 128, "num_kv_blocks": 200, "enable_lora": True, "lora_modules": modules}
        return {"model": self.model, **defaults, **options}

    def load(self, *names: str, **options: Any) -> LLM:
        return LLM(**self.options(*names, **options))

    def request(self, name: str, **options: Any) -> LoRARequest:
        return LoRARequest(name, 1, self.paths[name], **options)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("adapters"))


def run(llm: LLM, adapter: LoRARequest | None, prompt: list[int] = PROMPT) -> tuple[list[int], int]:
    """Return the tokens after a prompt, and how many of the prompt's tokens were cached."""
    (output,) = llm.generate([prompt], GREEDY, lora_request=adapter, use_tqdm=False)
    assert output.num_cached_tokens is not None
    return output.outputs[0].token_ids, output.num_cached_tokens


def test_blocks_are_shared_by_content_not_by_name(world: World) -> None:
    with world.load("one", "two", "same") as llm:
        plain = run(llm, None)
        outputs = {name: run(llm, LoRARequest(name)) for name in ("one", "two")}
        assert [cached for _, cached in (plain, *outputs.values())] == [0, 0, 0]
        assert len({tuple(tokens) for tokens, _ in (plain, *outputs.values())}) == 3
        assert run(llm, LoRARequest("same")) == (outputs["one"][0], len(PROMPT) - 1)
        assert run(llm, None)[1] == run(llm, LoRARequest("two"))[1] == len(PROMPT) - 1


def test_other_content_in_place_never_hits_blocks_of_before(world: World) -> None:
    with world.load("two") as llm:
        one, two = run(llm, world.request("one")), run(llm, LoRARequest("two"))
        name_of_one = LoRARequest("one", lora_path=world.paths["two"], load_inplace=True)
        assert run(llm, name_of_one) == (two[0], len(PROMPT) - 1)
        assert run(llm, LoRARequest("one", lora_path=world.paths["three"], load_inplace=True))[1] == 0
        assert run(llm, LoRARequest("one", lora_path=world.paths["one"], load_inplace=True)) == (one[0], 39)


@pytest.mark.slow
def test_ranks_load_and_unload_adapters_as_one_process_does(world: World, tmp_path: Path) -> None:
    def serve(llm: LLM) -> list[Any]:
        found: list[Any] = [run(llm, adapter) for adapter in (None, LoRARequest("one"), world.request("two"))]
        assert llm.engine.adapters is not None
        llm.engine.adapters.unload("one")
        in_place = LoRARequest("two", lora_path=world.paths["three"], load_inplace=True)
        found += [run(llm, in_place), run(llm, world.request("same")), run(llm, None)]
        for path in (str(tmp_path), "/nowhere", "~no_such_user/a", "x" * 300):
            with pytest.raises(InvalidAdapter):
                run(llm, LoRARequest("bad", lora_path=path))
        found += [run(llm, LoRARequest(name)) for name in ("same", "two")]
        embedded = llm.embed([{"prompt_token_ids": PROMPT}], lora_request=LoRARequest("two"), use_tqdm=False)
        found.append([round(value, 3) for value in embedded[0].outputs.embedding])
        return found

    native_library()
    options: dict[str, Any] = {"max_cpu_loras": 3, "pin_limit": 0.2}
    with world.load("one", **options) as one, world.load("one", **options, tensor_parallel_size=2) as two:
        compare_every_step(two)
        assert serve(two) == serve(one)
        assert two.pin_prefix("p", {"prompt_token_ids": PROMPT}, lora_request=LoRARequest("two")) == 40


@pytest.mark.slow
def test_ranks_serve_the_sum_of_a_model_and_an_adapter(world: World) -> None:
    native_library()
    options: dict[str, Any] = {"enable_lora": False, "merge_lora": True}
    with world.load("one", **options) as one, world.load("one", **options, tensor_parallel_size=2) as two:
        assert run(two, None) == run(one, None)


def test_blocks_outlive_an_adapter_only_for_its_content(world: World) -> None:
    with world.load("one") as llm:
        expected, _ = run(llm, LoRARequest("one"))
        assert llm.engine.adapters is not None
        llm.engine.adapters.unload("one")
        with pytest.raises(UnknownAdapter, match="'one' is not loaded"):
            run(llm, LoRARequest("one"))
        assert run(llm, LoRARequest("new", lora_path=world.paths["same"])) == (expected, len(PROMPT) - 1)


def test_requests_that_run_go_on_with_what_they_began_with(world: World) -> None:
    with world.load("one", max_cpu_loras=2) as llm:
        expected, _ = run(llm, LoRARequest("one"))
        engine = llm.engine
        assert engine.adapters is not None
        outputs: dict[str, list[int]] = {}

        def step() -> None:
            for output in engine.step():
                outputs.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)

        engine.add_request(
            "first", {"prompt_token_ids": PROMPT}, GREEDY, RequestOptions(lora_request=LoRARequest("one"))
        )
        step()
        in_place = LoRARequest("one", lora_path=world.paths["two"], load_inplace=True)
        engine.adapters.load(in_place, engine.adapters.read(world.paths["two"]))
        engine.add_request(
            "second", {"prompt_token_ids": PROMPT}, GREEDY, RequestOptions(lora_request=LoRARequest("one"))
        )
        step()
        engine.adapters.unload("one")
        with pytest.raises(InvalidAdapter, match="2 adapters are loaded, and max_cpu_loras is 2"):
            engine.adapters.acquire(world.request("three"))
        while engine.has_unfinished:
            step()
        assert outputs["first"] == expected
        assert outputs["second"] == run(llm, world.request("two"))[0]
        engine.adapters.acquire(world.request("three"))


def test_adapters_of_requests_give_way_and_those_of_the_operator_stay(world: World) -> None:
    with world.load("one", max_cpu_loras=2) as llm:
        assert llm.engine.adapters is not None
        for name in ("two", "three", "two"):
            run(llm, world.request(name))
            assert [each.name for each in llm.engine.adapters.loaded] == ["one", name]
    with (
        world.load("one", "two", max_cpu_loras=2) as llm,
        pytest.raises(InvalidAdapter, match="max_cpu_loras is 2: unload one"),
    ):
        run(llm, world.request("three"))


def test_a_pin_is_of_one_adapter(world: World) -> None:
    with world.load("one", pin_limit=0.2) as llm:
        assert llm.pin_prefix("p", PROMPT, lora_request=LoRARequest("one")) == 40
        assert run(llm, LoRARequest("one"))[1] == len(PROMPT) - 1
        assert run(llm, None)[1] == 0


def test_a_prefix_cache_on_disk_keeps_adapters_apart(world: World, tmp_path: Path) -> None:
    pytest.importorskip("lmdb")
    for cached in (0, len(PROMPT) // 8 * 8 - 8):
        with world.load("one", prefix_cache_dir=str(tmp_path), num_kv_blocks=60) as llm:
            found = run(llm, LoRARequest("one"))
            assert found[1] >= cached
            assert (found[1] == 0) == (cached == 0)
            assert run(llm, LoRARequest("two", lora_path=world.paths["two"]))[0] != found[0]


@pytest.mark.skipif("avx2" not in LIBRARIES, reason="fused layers need native kernels")
def test_fused_steps_give_the_bits_of_the_layers_one_by_one(world: World) -> None:
    """Also in a deterministic engine, where a request alone gets the bits that it gets beside others."""
    adapters = [LoRARequest("one"), None, LoRARequest("two"), LoRARequest("one")]
    prompts = [PROMPT[idx * 3 :] for idx in range(4)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=2)

    def bits(llm: LLM, *which: int) -> list[Any]:
        chosen = [prompts[idx] for idx in which], params
        outputs = llm.generate(*chosen, lora_request=[adapters[idx] for idx in which], use_tqdm=False)
        return [[*map(repr, output.outputs[0].logprobs or ())] for output in outputs]

    with world.load("one", "two", dtype="bfloat16", deterministic=True, enable_prefix_caching=False) as llm:
        whole = bits(llm, 0, 1, 2, 3)
        assert len({repr(each) for each in whole}) == 4
        assert [bits(llm, idx)[0] for idx in range(4)] == whole
        runner: Any = llm.engine.executor
        decoder = runner._runner._decoder
        assert decoder._fused_adapted is not None
        decoder._fused_adapted = None
        assert bits(llm, 0, 1, 2, 3) == whole


def test_the_metric_names_running_and_waiting_adapters(world: World) -> None:
    def labels() -> dict[str, str]:
        (family,) = LoraMetrics(llm.engine, "vllm", lambda: 7.0).collect()
        (sample,) = family.samples
        assert (sample.name, sample.value) == ("vllm:lora_requests_info", 7.0)
        return {name: sample.labels[name] for name in ("running_lora_adapters", "waiting_lora_adapters", "max_lora")}

    with world.load("two", "one", "same", max_num_seqs=3, max_cpu_loras=5) as llm:
        assert [*labels().values()] == ["", "", "5"]
        for idx, name in enumerate(("two", "", "one", "same", "three")):
            adapter = world.request(name) if name else None
            llm.engine.add_request(str(idx), {"prompt_token_ids": PROMPT}, GREEDY, RequestOptions(lora_request=adapter))
        assert [*labels().values()] == ["", "one,three,two", "5"]
        llm.engine.step()
        assert [*labels().values()] == ["one,two", "one,three", "5"]
        metrics = Metrics("m")
        metrics.set_engine(llm.engine)
        shown = b'vllm:lora_requests_info{engine="0",max_lora="5",running_lora_adapters="one,two",'
        assert metrics.render().count(b"\nvllm:lora_requests_info") == metrics.render().count(shown) == 1
        while llm.engine.has_unfinished:
            llm.engine.step()
        assert [*labels().values()] == ["", "", "5"]
    with world.load(enable_lora=False) as llm:
        assert not [*LoraMetrics(llm.engine, "vllm").collect()]


def test_what_is_refused_names_why(world: World, tmp_path: Path) -> None:
    with world.load("one") as llm:
        for bad, message in (
            (LoRARequest("none"), "'none' is not loaded"),
            (LoRARequest("x", lora_path=str(tmp_path / "x")), "is no folder"),
            (LoRARequest(llm.model_name, lora_path=world.paths["two"]), "must differ from the model's name"),
            (LoRARequest("one", lora_path=world.paths["two"]), "must be .* which it was loaded from"),
        ):
            with pytest.raises(InvalidAdapter, match=message):
                run(llm, bad)
        for wrong in ("one", [None], 5):
            with pytest.raises(InvalidParameter, match="lora_request must be"):
                llm.generate([PROMPT, PROMPT], GREEDY, lora_request=wrong, use_tqdm=False)  # type: ignore[arg-type]
        assert not llm.engine.has_unfinished
    with world.load(enable_lora=False) as llm, pytest.raises(UnsupportedFeature, match="start with enable_lora"):
        run(llm, LoRARequest("one"))
    for arguments, field in ((("",), "lora_name"), (("x" * 257,), "lora_name"), (("x", 0), "lora_int_id")):
        with pytest.raises(InvalidParameter, match=field):
            LoRARequest(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_modules": ["a=/b"], "enable_lora": False}, "lora_modules needs enable_lora"),
        ({"lora_modules": ["a"]}, "lora_modules must be"),
        ({"lora_modules": ["=b"]}, "lora_modules must be"),
        ({"lora_modules": ['{"name": "a"']}, "lora_modules must be"),
        ({"lora_modules": 5}, "lora_modules must be"),
        ({"lora_modules": ["a=b", "a=c"]}, "each name once"),
        ({"lora_modules": {"a": "b", "c": "d"}, "max_cpu_loras": 1}, "max_cpu_loras is 1"),
        ({"max_lora_rank": 1024}, "max_lora_rank must be"),
        ({"lora_modules": ["a=/nowhere"]}, "lora_modules: the adapter '/nowhere' is no folder"),
    ],
)
def test_options_that_are_refused(world: World, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        world.load(**options)


def test_modules_are_named_in_every_spelling(world: World) -> None:
    path = world.paths["one"]
    module = {"name": "a", "path": path}
    for modules in (f"a={path}", [json.dumps(module)], json.dumps([module]), module, {"a": Path(path)}):
        with world.load(lora_modules=modules) as llm:
            assert llm.engine.adapters is not None
            assert [(each.name, each.path) for each in llm.engine.adapters.loaded] == [("a", path)]


def test_adapters_come_and_go_while_requests_stream(world: World) -> None:
    async def tokens(llm: AsyncLLM, adapter: LoRARequest | None) -> list[int]:
        found: list[int] = []
        async for output in llm.generate({"prompt_token_ids": PROMPT}, GREEDY, lora_request=adapter):
            found += output.outputs[0].token_ids
        return found

    async def main() -> None:
        async with AsyncLLM.from_options(**world.options()) as llm:
            requests = [None, world.request("one"), world.request("two"), world.request("one")]
            plain, one, two, again = await asyncio.gather(*(tokens(llm, each) for each in requests))
            assert one == again
            assert len({*map(tuple, (plain, one, two))}) == 3
            await llm.adapters.unload("one")
            with pytest.raises(RequestError, match="'one' is not loaded"):
                await tokens(llm, LoRARequest("one"))
            await llm.adapters.load(LoRARequest("kept", lora_path=world.paths["same"]))
            assert [each.name for each in llm.adapters.loaded] == ["two", "kept"]
            assert await tokens(llm, LoRARequest("kept")) == one
            with pytest.raises(InvalidAdapter, match="not in use"):
                await llm.adapters.load(LoRARequest("kept", lora_path=world.paths["same"]))

    asyncio.run(main())


def test_steps_that_are_launched_ahead_go_through_their_adapters(world: World) -> None:
    """Each in a request that ends unforeseen, while another one runs; the only slot is taken by one after the other."""
    in_order, ahead = world.load("one"), world.load(max_cpu_loras=1, async_scheduling=True)
    for name in ("one", "two", "three"):
        adapter = world.request(name)
        tokens, _ = run(in_order, adapter)
        stop = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, stop_token_ids=(tokens[4],))
        ahead.engine.add_request("short", {"prompt_token_ids": PROMPT}, stop, RequestOptions(lora_request=adapter))
        ahead.engine.add_request("long", {"prompt_token_ids": PROMPT[:9]}, GREEDY, RequestOptions(lora_request=adapter))
        found: dict[str, list[int]] = {"short": [], "long": []}
        while ahead.engine.has_unfinished:
            for output in ahead.engine.step():
                found[output.request_id] += output.outputs[0].token_ids
        assert found["short"] == tokens[: tokens.index(tokens[4]) + 1]
        assert found["long"] == run(in_order, adapter, PROMPT[:9])[0]
