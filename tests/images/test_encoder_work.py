"""Work of the encoder between steps: who goes on meanwhile, who waits, what is encoded again, and who fails."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor

from quire import LLM, RequestOutput, SamplingParams
from quire.engine.control.chunk_size import ChunkSizeController
from quire.engine.control.encoder_work import EncoderWork, LayerCost
from quire.engine.engine import Engine
from quire.execution.step.image_features import ImageFeatures, ImageStats
from quire.memory import MediaSpan
from quire.models.modules.vision_encoder import ImagePass, ImagePatches, VisionEncoder
from quire.sequences import Request, Sequence
from quire.sequences.media import Media
from tests.conformance.test_images import END, IDS, IMAGE, SETTINGS, START, TEXT, VISION, picture

DEPTH = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
TALK = [3, 5, 8, 13, 21]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that reads images by an encoder of six layers."""
    path = tmp_path_factory.mktemp("reader")
    vision = VISION | {"depth": DEPTH, "deepstack_visual_indexes": [0, 1]}
    options: dict[str, Any] = {"text_config": TEXT, "vision_config": vision, **IDS}
    config = transformers.Qwen3VLConfig(**options)
    torch.manual_seed(5)
    transformers.Qwen3VLForConditionalGeneration(config).save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return path


def load(folder: Path, **options: Any) -> LLM:
    defaults = {"skip_tokenizer_init": True, "dtype": "float32", "num_threads": 1, "max_model_len": 96}
    return LLM(str(folder), **{"block_size": 4, "num_kv_blocks": 400, **defaults, **options})


def prompt_of(*seeds: int, before: int = 4, first: int = 1) -> dict[str, Any]:
    """Return a prompt of some text, then pictures, each between its markers, then text."""
    token_ids = [first + idx for idx in range(before)]
    token_ids += [token for _ in seeds for token in (START, IMAGE, END)] + [3, 5, 8, 13]
    return {
        "prompt_token_ids": token_ids,
        "multi_modal_data": {"image": [picture(20, 33, seed) for seed in seeds]},
    }


def tokens_of(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def alone(folder: Path, *prompts: Any, params: SamplingParams = GREEDY, **options: Any) -> list[list[int]]:
    """Return the tokens of prompts, each in an engine of its own."""
    found = []
    for prompt in prompts:
        with load(folder, **options) as llm:
            found.append(tokens_of(llm.generate([prompt], params, use_tqdm=False)[0]))
    return found


def stats_of(llm: LLM) -> ImageStats:
    assert llm.stats.images is not None
    return llm.stats.images


def engine_of(llm: LLM) -> Engine:
    assert isinstance(llm.engine, Engine)
    return llm.engine


class Talk:
    """The tokens of requests of an engine, step by step.

    Attributes:
        tokens: tokens so far, by request.
        errors: errors, by request.
        per_step: requests that got tokens, for each step.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.errors: dict[str, str] = {}
        self.per_step: list[set[str]] = []

    def step(self) -> None:
        """Run one step."""
        outputs = self.engine.step()
        self.per_step.append({output.request_id for output in outputs})
        for output in outputs:
            if output.error is not None:
                self.errors[output.request_id] = output.error
            self.tokens.setdefault(output.request_id, []).extend(*[each.token_ids for each in output.outputs])

    def finish(self) -> None:
        """Run all steps."""
        while self.engine.has_unfinished:
            self.step()


@pytest.mark.parametrize("options", [{}, {"max_inter_token_ms": 0.01}, {"async_scheduling": True}])
def test_others_go_on_while_an_image_is_encoded(folder: Path, options: dict[str, Any]) -> None:
    prompt = prompt_of(1)
    expected, (company,) = alone(folder, prompt), alone(folder, TALK, params=LONG)
    with load(folder, **options) as llm:
        talk = Talk(engine_of(llm))
        talk.engine.add_request("company", TALK, LONG)
        for _ in range(4):
            talk.step()
        talk.engine.add_request("image", prompt, GREEDY)
        num_before = len(talk.per_step)
        while "image" not in talk.tokens:
            assert stats_of(llm).num_waiting <= 1
            talk.step()
        # A layer in each gap.
        meanwhile = [names for names in talk.per_step[num_before:-1] if "company" in names]
        assert len(meanwhile) >= DEPTH
        talk.finish()
        assert talk.tokens == {"company": company, "image": expected[0]}
        assert stats_of(llm)[0::2] == (1, 0, 0)
        assert stats_of(llm).encoder_s > 0


def test_an_image_is_encoded_once_for_requests_of_the_same_time_and_of_later(folder: Path) -> None:
    prompts = [prompt_of(1), prompt_of(1, first=40, before=7), prompt_of(1), prompt_of(1, 2, 1)]
    expected = alone(folder, *prompts)
    with load(folder, enable_prefix_caching=False) as llm:
        assert [tokens_of(each) for each in llm.generate(prompts, GREEDY, use_tqdm=False)] == expected
        assert stats_of(llm).num_encoded == 2
        # Six images were read.
        assert stats_of(llm).num_hits == 4
        assert tokens_of(llm.generate(prompt_of(2, first=30), GREEDY, use_tqdm=False)[0])
        assert stats_of(llm).num_encoded == 2


def test_the_next_turn_and_preempted_requests_encode_nothing(folder: Path) -> None:
    prompts = [prompt_of(seed, first=seed) for seed in range(5)]
    expected = alone(folder, *prompts, params=LONG)
    for options in ({}, {"swap_space": 8 << 20, "preemption_mode": "swap"}):
        with load(folder, num_kv_blocks=24, **options) as llm:
            outputs = llm.generate(prompts, LONG, use_tqdm=False)
            assert list(map(tokens_of, outputs)) == expected
            assert llm.stats.num_preemptions > 0
            assert stats_of(llm).num_encoded == 5
    with load(folder) as llm:
        (output,) = llm.generate(prompts[0], GREEDY, use_tqdm=False)
        turn = {**prompts[0], "prompt_token_ids": [*prompts[0]["prompt_token_ids"], *tokens_of(output), 7, 9]}
        (output,) = llm.generate(turn, GREEDY, use_tqdm=False)
        assert output.num_cached_tokens is not None
        assert output.num_cached_tokens > 20
        assert stats_of(llm)[0::2] == (1, 0, 0)


def test_features_survive_a_restart_on_disk(folder: Path, tmp_path: Path) -> None:
    options = {"prefix_cache_dir": str(tmp_path / "cache"), "swap_space": 8 << 20}
    other = prompt_of(1, 2, first=50, before=6)
    (expected,) = alone(folder, other)
    with load(folder, **options) as llm:
        llm.generate(prompt_of(1, 2), GREEDY, use_tqdm=False)
        assert stats_of(llm).num_encoded == 2
    with load(folder, **options) as llm:
        # Another conversation, which hits no block.
        (output,) = llm.generate(other, GREEDY, use_tqdm=False)
        assert (tokens_of(output), output.num_cached_tokens) == (expected, 0)
        assert (stats_of(llm).num_encoded, stats_of(llm).num_disk_hits) == (0, 2)
    damage(tmp_path / "cache" / "blocks.mdb")
    with load(folder, **options) as llm:
        (output,) = llm.generate(prompt_of(1, 2, first=70, before=6), GREEDY, use_tqdm=False)
        assert stats_of(llm).num_encoded > 0
        assert tokens_of(output) == alone(folder, prompt_of(1, 2, first=70, before=6))[0]
    # Digests are keyed with the secret of the folder.
    (tmp_path / "cache" / "key").write_bytes(bytes(32))
    with load(folder, **options) as llm:
        llm.generate(other, GREEDY, use_tqdm=False)
        assert stats_of(llm).num_encoded == 2


def damage(path: Path) -> None:
    """Change bytes in each page that is neither of LMDB's own structures nor of zeros."""
    data = bytearray(path.read_bytes())
    features = b"\xff\xff" + (0).to_bytes(4, "little")
    place = data.find(b"QKVB\x01\x00" + features)
    assert place > 0, "no features are on disk"
    while place > 0:
        data[place + 200] ^= 0xFF
        place = data.find(b"QKVB\x01\x00" + features, place + 1)
    path.write_bytes(data)


def test_an_image_that_cannot_be_encoded_fails_those_that_need_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = [TALK, prompt_of(2)]
    (talk_tokens,), (image_tokens,) = alone(folder, TALK, params=LONG), alone(folder, good[1])
    advance = VisionEncoder.advance
    with load(folder) as llm:
        talk = Talk(engine_of(llm))
        talk.engine.add_request("company", TALK, LONG)
        talk.step()
        broken: list[ImagePass] = []

        def fail(self: VisionEncoder, image: ImagePass) -> Tensor | None:
            if not broken and image.num_layers == 2:
                broken.append(image)
            if broken and broken[0] is image:
                raise RuntimeError("not enough memory: you tried to allocate 9 bytes")
            return advance(self, image)

        monkeypatch.setattr(VisionEncoder, "advance", fail)
        talk.engine.add_request("one", prompt_of(1), GREEDY)
        talk.engine.add_request("two", prompt_of(1, first=60), GREEDY)
        talk.engine.add_request("other", prompt_of(2), GREEDY)
        talk.finish()
        assert {name: "not enough memory" in error for name, error in talk.errors.items()} == {"one": True, "two": True}
        assert talk.tokens["company"] == talk_tokens
        assert talk.tokens["other"] == image_tokens
        assert llm.usage().used == 0
        # The image is tried again for another request.
        talk.engine.add_request("again", prompt_of(1), GREEDY)
        talk.finish()
        assert talk.tokens["again"] == alone(folder, prompt_of(1))[0]


def test_an_aborted_request_leaves_no_work_but_for_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[int] = []
    advance = VisionEncoder.advance

    def count(self: VisionEncoder, image: ImagePass) -> Tensor | None:
        passed.append(image.num_layers)
        return advance(self, image)

    monkeypatch.setattr(VisionEncoder, "advance", count)
    (expected,) = alone(folder, prompt_of(1, first=60))
    passed.clear()
    with load(folder) as llm:
        talk = Talk(engine_of(llm))
        talk.engine.add_request("company", TALK, LONG)
        talk.step()
        talk.engine.add_request("first", prompt_of(1), GREEDY)
        while not passed:
            talk.step()
        assert talk.engine.abort_request("first") is not None
        for _ in range(5):
            talk.step()
        assert (passed, stats_of(llm).num_waiting) == ([0], 0)
        talk.engine.add_request("second", prompt_of(1), GREEDY)
        talk.engine.add_request("third", prompt_of(1, first=60), GREEDY)
        while len(passed) < 4:
            talk.step()
        assert talk.engine.abort_request("second") is not None
        talk.finish()
        assert talk.tokens["third"] == expected
        assert stats_of(llm).num_encoded == 1
        # The pass of the second request was taken over.
        assert passed == [0, *range(DEPTH)]


def test_memory_for_one_image_and_few_blocks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFeatures.__init__, "__defaults__", (None, 1))
    prompts = [prompt_of(*seeds, first=seeds[0]) for seeds in ((1, 2), (2, 3), (3,), (1,), (4, 2))]
    expected = alone(folder, *prompts)
    for options in ({"num_kv_blocks": 30}, {"num_kv_blocks": 30, "max_num_batched_tokens": 6, "max_num_seqs": 3}):
        with load(folder, **options) as llm:
            everybody: list[Any] = [TALK, *prompts]
            outputs = llm.generate(everybody, GREEDY, use_tqdm=False)
            assert list(map(tokens_of, outputs[1:])) == expected
            assert llm.usage().used == 0


# ---- decisions, over features that take given times ----


class StandIn:
    """Features that take a time for each layer, by the size of the image."""

    def __init__(self, max_bytes: int = 100) -> None:
        self.now_s = 0.0
        self.max_bytes = max_bytes
        self.num_encoded = self.num_loaded = self.num_hits = 0
        self.present: dict[bytes, int] = {}
        self.layers: Counter[bytes] = Counter()

    def holds(self, image: ImagePatches) -> bool:
        return image.digest in self.present

    def next_kind(self, _: ImagePatches) -> str:
        return "layer"

    def advance(self, image: ImagePatches) -> bool:
        self.now_s += len(image.values) / 1000
        self.layers[image.digest] += 1
        if self.layers[image.digest] == DEPTH:
            self.present[image.digest] = len(image.values)
        return image.digest in self.present

    def drop_pass(self) -> None:
        self.layers.clear()


@dataclass
class Steps:
    """The part of `StepRecorder` that the work reads."""

    decoding_step_s: float | None
    chunk_size: ChunkSizeController | None = None


class Asked(NamedTuple):
    """A gate over a stand-in, and sequences with one image each."""

    features: StandIn
    work: EncoderWork
    sequences: list[Sequence]


def asked(*sizes: int, limit_ms: float | None, max_bytes: int = 100) -> Asked:
    features = StandIn(max_bytes)
    work = EncoderWork(features, limit_ms, lambda: features.now_s)  # type: ignore[arg-type]
    sequences = []
    for idx, size in enumerate(sizes):
        digest = b"%d" % idx
        image = ImagePatches(digest, torch.empty(size, 1), 1, size, size)
        media = (Media(MediaSpan(3, size, digest), image),)
        request = Request(f"{idx}", [1] * 200, GREEDY, 210, frozenset(), idx, 0, media=media)
        sequences.append(Sequence(idx, request, 0, [1] * 200, None, (0, idx, 0), None))  # type: ignore[arg-type]
    return Asked(features, work, sequences)


@pytest.mark.parametrize(("limit_ms", "step_s", "expected"), [(100, 0.05, 5), (100, 0.095, 1), (100, 0.2, 1)])
def test_layers_fill_what_a_step_leaves_of_the_target(limit_ms: float, step_s: float, expected: int) -> None:
    features, work, sequences = asked(10, limit_ms=limit_ms)
    assert work.limits(sequences) == {sequences[0]: 3}
    assert work.is_closed
    steps = Steps(step_s, ChunkSizeController(0.1))
    assert work.run(steps) == []  # type: ignore[arg-type]
    assert steps.decoding_step_s is None
    assert sum(features.layers.values()) == expected
    assert steps.chunk_size is not None
    assert steps.chunk_size.reserve_s == pytest.approx(0.01)


def test_a_layer_runs_between_steps_without_a_target_and_many_alone() -> None:
    features, work, sequences = asked(10, limit_ms=None)
    work.limits(sequences)
    work.run(Steps(0.001))  # type: ignore[arg-type]
    assert sum(features.layers.values()) == 1
    work.run(Steps(None))  # type: ignore[arg-type]
    assert sum(features.layers.values()) == DEPTH
    assert work.stats.num_waiting == 0
    assert work.limits(sequences)[sequences[0]] > 200
    assert not work.is_closed


def test_the_first_layer_of_a_larger_image_is_estimated_from_above() -> None:
    cost = LayerCost()
    assert cost.seconds("layer", 100) == 0.0
    cost.record("layer", 100, 1.0)
    assert [cost.seconds("layer", count) for count in (50, 100, 200)] == [0.5, 1.0, 4.0]
    cost.record("layer", 100, 2.0)
    assert 1.0 < cost.seconds("layer", 100) < 2.0
    cost.record("layer", 200, 3.0)
    assert cost.seconds("layer", 200) == 3.0
    assert cost.seconds("rest", 200) == 0.0


def test_images_begin_while_their_features_fit_beside_those_that_are_to_be_read() -> None:
    features, work, sequences = asked(60, 60, 30, limit_ms=None)
    work.limits(sequences)
    assert work.stats.num_waiting == 2  # the first, and the third beside it
    while work.stats.num_waiting:
        work.run(Steps(None))  # type: ignore[arg-type]
    assert features.present == {b"0": 60, b"2": 30}
    assert [limit > 200 for limit in work.limits(sequences).values()] == [True, False, True]
    assert work.stats.num_waiting == 0
    sequences[0].num_computed = 63
    work.limits(sequences)
    assert work.stats.num_waiting == 1
