"""The runner, on tiny random models: plans made by hand, and transformers as the judge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from quire.errors import WorkerError
from quire.execution.runners.build import build_runner
from quire.execution.runners.runner import InProcessExecutor, ModelRunner
from quire.execution.sampling.logprobs import TILE_BYTES, rows_per_tile
from quire.memory.results import NO_OPS, BlockCopy, MemoryOps
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.loading.loading import load_decoder
from quire.scheduling.plan import ItemResult, NewSequence, ScheduledSequence, StepPlan, TableDelta
from quire.sequences.logprobs import TokenLogprobs
from quire.sequences.params import SamplingParams

N = 4
VOCAB = 97
GREEDY = SamplingParams(temperature=0.0)
PROMPT = (5, 17, 3, 88, 41, 9, 60, 2, 33, 71, 12)
OTHER = (90, 4, 4, 51)


def tiny_qwen3() -> PreTrainedModel:
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def tiny_llama() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


class Tiny:
    """A random model twice: as transformers has it, and as we load it from its checkpoint."""

    def __init__(self, make: Callable[[], PreTrainedModel], folder: Path) -> None:
        torch.manual_seed(7)
        self.model = make().eval()
        # Initial weights are so small that the logits hardly differ.
        for parameter in self.model.parameters():
            parameter.data.mul_(4.0)
        self.model.save_pretrained(folder)
        self.decoder = load_decoder(Checkpoint.open(str(folder)), device="cpu", dtype=torch.float32)

    def runner(self) -> ModelRunner:
        return build_runner(self.decoder, num_blocks=[40], block_size=N, device="cpu", dtype=torch.float32)

    def greedy(self, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens


@pytest.fixture(scope="module", params=[tiny_qwen3, tiny_llama])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(request.param, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tiny_qwen3, tmp_path_factory.mktemp("qwen"))


class Lane:
    """One sequence of a hand-made schedule, with fixed blocks of its own.

    Args:
        first_block: its blocks are this one and the 7 that follow.
    """

    def __init__(
        self,
        seq_id: int,
        prompt: tuple[int, ...],
        params: SamplingParams = GREEDY,
        first_block: int | None = None,
        seed: int = 11,
    ) -> None:
        self.seq_id = seq_id
        self.params = params
        self.seed = seed
        self.tokens = list(prompt)
        self.num_prompt = len(prompt)
        self.num_computed = 0
        first = 1 + 8 * seq_id if first_block is None else first_block
        self.blocks = tuple(range(first, first + 8))
        self.is_open = False

    def item(self, count: int | None = None) -> ScheduledSequence:
        """Plan the next `count` pending tokens, all of them by default; draw when none is left."""
        start = self.num_computed
        pending = self.tokens[start : None if count is None else start + count]
        is_last = start + len(pending) == len(self.tokens)
        new_sequence = None
        if not self.is_open:
            new_sequence = NewSequence(self.params, self.seed, 0, self.num_prompt, tuple(self.tokens), ())
        item = ScheduledSequence(
            self.seq_id,
            start,
            tuple(pending),
            () if self.is_open else (TableDelta(0, 0, self.blocks),),
            int(is_last),
            new_sequence,
        )
        self.is_open = True
        self.num_computed += len(pending)
        return item

    def take(self, result: ItemResult) -> None:
        assert result.seq_id == self.seq_id
        assert result.error is None
        self.tokens += result.token_ids

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


def run(runner: ModelRunner, lanes: list[Lane], counts: list[int | None] | None = None) -> list[ItemResult]:
    """Run one step of some lanes."""
    items = tuple(lane.item(count) for lane, count in zip(lanes, counts or [None] * len(lanes), strict=True))
    result = runner.execute(StepPlan(3, items, NO_OPS, ()))
    assert result.tick == 3
    for lane, item_result in zip(lanes, result.items, strict=True):
        lane.take(item_result)
    return list(result.items)


def test_greedy_tokens_are_those_of_transformers(tiny: Tiny) -> None:
    runner, lane = tiny.runner(), Lane(0, PROMPT)
    for _ in range(12):
        run(runner, [lane])
    assert lane.output == tiny.greedy(PROMPT, 12)


def test_chunks_and_company_change_nothing(tiny: Tiny) -> None:
    """One prompt in chunks while another decodes, in both orders of the batch."""
    runner, first, second = tiny.runner(), Lane(0, OTHER), Lane(1, PROMPT)
    run(runner, [first])
    run(runner, [first, second], [None, 3])
    run(runner, [second, first], [5, None])
    run(runner, [first, second], [None, None])
    for _ in range(8):
        run(runner, [second, first])
    assert first.output == tiny.greedy(OTHER, 12)
    assert second.output == tiny.greedy(PROMPT, 9)


def test_a_fork_copies_the_block_it_writes(qwen: Tiny) -> None:
    """Two children of one prompt share its full blocks; the last, partial one is copied before it is written."""
    runner, parent = qwen.runner(), Lane(0, PROMPT)
    run(runner, [parent])
    child = Lane(1, tuple(parent.tokens))
    child.num_prompt, child.num_computed = parent.num_prompt, parent.num_computed
    child.blocks = (*parent.blocks[:2], *child.blocks[2:])
    copies = MemoryOps((BlockCopy(0, parent.blocks[2], child.blocks[2]),))
    child.tokens[-1] = (parent.tokens[-1] + 1) % VOCAB  # the branches part here
    result = runner.execute(StepPlan(1, (parent.item(), child.item()), copies, ()))
    parent.take(result.items[0])
    child.take(result.items[1])
    for _ in range(6):
        run(runner, [parent, child])
    assert parent.output == qwen.greedy(PROMPT, 8)
    assert child.output[1:] == qwen.greedy((*PROMPT, child.output[0]), 7)


def test_a_preempted_sequence_draws_the_same_tokens(qwen: Tiny) -> None:
    """Closed in the middle, opened again on other blocks: sampling goes on as if nothing had happened."""
    params = SamplingParams(temperature=1.3, top_p=0.95, presence_penalty=0.7, repetition_penalty=1.2)
    calm, lane = Lane(0, PROMPT, params), Lane(1, PROMPT, params)
    runner = qwen.runner()
    for _ in range(10):
        run(runner, [calm])
    for _ in range(4):
        run(runner, [lane])
    runner.execute(StepPlan(9, (Lane(3, OTHER).item(),), NO_OPS, (1,)))
    lane.is_open, lane.num_computed, lane.blocks = False, 0, tuple(range(20, 28))
    run(runner, [lane], [7])
    for _ in range(6):
        run(runner, [lane])
    assert lane.output == calm.output


def test_recycled_ids_and_blocks_leak_nothing(qwen: Tiny) -> None:
    runner = qwen.runner()
    first = Lane(0, PROMPT, SamplingParams(temperature=0.0, logit_bias={7: 100.0}, prompt_logprobs=1))
    for _ in range(3):
        run(runner, [first])
    assert first.output == [7, 7, 7]
    second = Lane(0, OTHER)
    result = runner.execute(StepPlan(3, (second.item(),), NO_OPS, (0,)))
    second.take(result.items[0])
    assert result.items[0].prompt_logprobs == ()
    for _ in range(5):
        run(runner, [second])
    assert second.output == qwen.greedy(OTHER, 6)


@pytest.mark.parametrize("chunks", [[None], [1, 4, None], [10, None], [3, 7, None]])
def test_prompt_logprobs_cover_every_position_once(tiny: Tiny, chunks: list[int | None]) -> None:
    lane, runner = Lane(0, PROMPT, SamplingParams(temperature=0.0, prompt_logprobs=3, logprobs=0)), tiny.runner()
    measured: list[TokenLogprobs] = []
    drawn: list[TokenLogprobs] = []
    for count in [*chunks, None]:
        (result,) = run(runner, [lane], [count])
        measured += result.prompt_logprobs
        drawn += result.logprobs
    with torch.inference_mode():
        expected = tiny.model(torch.tensor([lane.tokens])).logits[0].log_softmax(-1)
    assert [entry.token_id for entry in (*measured, *drawn)] == lane.tokens[1:]
    for row, entry in zip(expected, (*measured, *drawn), strict=False):
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
        assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
    for row, entry in zip(expected, measured, strict=False):
        assert [value for _, value in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    assert all(entry.top == () for entry in drawn)


def test_a_measured_prompt_beside_others(tiny: Tiny) -> None:
    """In its steps all rows are read, of its neighbours too; in others the last ones of some items, or none."""
    measuring = SamplingParams(temperature=0.0, prompt_logprobs=0)
    first, second, third = Lane(0, PROMPT, measuring), Lane(1, PROMPT), Lane(2, OTHER)
    runner = tiny.runner()
    measured: list[TokenLogprobs] = []
    steps: list[tuple[list[Lane], list[int | None]]] = [
        ([second], [2]),
        ([second, first, third], [3, 6, None]),
        ([first, third, second], [None, None, 2]),
        ([second, third, first], [3, None, None]),
        ([third, second, first], [None, None, None]),
    ]
    for lanes, counts in steps:
        found = run(runner, lanes, counts)
        measured += found[lanes.index(first)].prompt_logprobs if first in lanes else ()
    for _ in range(6):
        run(runner, [second, first, third])
    for lane in (first, second, third):
        assert lane.output == tiny.greedy(tuple(lane.tokens[: lane.num_prompt]), len(lane.output))
    with torch.inference_mode():
        expected = tiny.model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    assert [entry.token_id for entry in measured] == list(PROMPT[1:])
    for row, entry in zip(expected, measured, strict=False):
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)


class Hidden(torch.Tensor):
    """Hidden states of which no list of rows is taken: the list would be copied to a GPU, which the host waits for."""

    def __getitem__(self, index: object) -> torch.Tensor:
        assert not isinstance(index, list)
        return super().__getitem__(index)  # type: ignore[no-any-return, index]


def test_the_host_does_not_wait_for_the_rows_that_are_sampled(qwen: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = qwen.runner()
    compute = runner._compute
    monkeypatch.setattr(runner, "_compute", lambda *args: compute(*args).as_subclass(Hidden))
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    (result,) = run(runner, [Lane(0, PROMPT, params)])
    assert list(result.token_ids) == qwen.greedy(PROMPT, 1)


def test_prompt_logprobs_are_measured_in_tiles_of_bounded_size() -> None:
    assert 4 * 151_936 * rows_per_tile(151_936) <= TILE_BYTES
    assert rows_per_tile(10**9) == 1


def test_a_broken_embedding_fails_only_who_uses_it(tmp_path: Path) -> None:
    tiny = Tiny(tiny_llama, tmp_path)
    tiny.model.model.embed_tokens.weight.data[50] = float("nan")
    tiny.model.save_pretrained(tmp_path)
    tiny.decoder = load_decoder(Checkpoint.open(str(tmp_path)), device="cpu", dtype=torch.float32)
    params = SamplingParams(temperature=0.8, prompt_logprobs=2)
    good, bad, hidden = Lane(0, OTHER, params), Lane(1, (3, 50, 4), params), Lane(2, (3, 50, 4), GREEDY)
    result = tiny.runner().execute(StepPlan(0, (bad.item(), good.item(), hidden.item()), NO_OPS, ()))
    assert [bool(item.error) for item in result.items] == [True, False, True]
    alone = tiny.runner().execute(StepPlan(0, (Lane(0, OTHER, params).item(),), NO_OPS, ())).items[0]
    assert result.items[1].token_ids == alone.token_ids


def test_the_executor_names_the_step_that_failed(qwen: Tiny) -> None:
    executor = InProcessExecutor(qwen.runner())
    lane = Lane(0, PROMPT)
    assert executor.launch(StepPlan(3, (lane.item(),), NO_OPS, ())).result().tick == 3
    with pytest.raises(WorkerError, match=r"step 4 .*IndexError") as caught:
        executor.launch(StepPlan(4, (Lane(1, (VOCAB,)).item(),), NO_OPS, ())).result()
    assert isinstance(caught.value.__cause__, IndexError)
    executor.close()
    with pytest.raises(WorkerError, match=r"step 5 .*closed"):
        executor.launch(StepPlan(5, (lane.item(),), NO_OPS, ())).result()
