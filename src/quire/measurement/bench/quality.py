"""The quality of a served model: comparison of its probabilities and greedy outputs with exact arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from quire.config import CacheConfig, CudaGraphConfig, EngineConfig, LoRAConfig, ParallelConfig
from quire.engine.startup.loading import Wrappers
from quire.engine.startup.start import load
from quire.errors import ConfigError, WorkerError
from quire.measurement.bench.divergence import Divergence, DivergenceTally, GreedyAgreement
from quire.measurement.bench.exact_ops import ExactOps
from quire.measurement.bench.quality_text import greedy_prompts, read_quality_text
from quire.measurement.bench.stopwatch import Timed, in_order
from quire.models.modules.blocks import OutputRows
from quire.models.modules.causal_model import CausalModel
from quire.ops.interface.ops import Ops
from quire.platform.host_probe import probe
from quire.sequences.params import SamplingParams
from quire.text.tokenizers.tokenizer import Tokenizer

# Number of logits that are compared at a time: 64 MiB for each model.
PIECE: Final = 1 << 24
# Index of `output_rows` in the arguments of a step.
OUTPUT_ROWS: Final = 5
# Sequences that run at once, and tokens of the cache, unless the options say otherwise.
NUM_SEQS: Final = 32
NUM_KV_TOKENS: Final = 1 << 13


class ReadingEngine:
    """An engine that returns the logits of all positions of a text.

    It runs ordinary steps of the engine: chunks of prompts, with attention over the stored keys and values.
    """

    _decoder: CausalModel

    def __init__(self, config: EngineConfig, wrap_ops: Callable[[Ops], Ops] = lambda ops: ops) -> None:
        self._rows: list[Tensor] | None = None
        self._engine = load(_measured(config), wrap=Wrappers(ops=wrap_ops, decoder=self._tapped)).engine
        if self._engine.config.is_encoder:
            self._engine.close()
            raise ConfigError("model is an encoder, which gives no next token: its quality is not measured here")

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        assert self._engine.tokenizer is not None, "the options do not skip it"
        return self._engine.tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of logits of a position."""
        return self._engine.config.vocab_size

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a prompt, with room for one new token."""
        return self._engine.config.max_model_len - 1

    @property
    def kernels(self) -> str:
        """Name of the kernels."""
        return self._decoder.kernels

    def hidden(self, ids: list[int]) -> Tensor:
        """Return the hidden states [T, E] of a sequence, for `logits`."""
        self._rows = []
        try:
            self._serve([ids], 1)
            hidden = torch.cat(self._rows)
        finally:
            self._rows = None
        assert len(hidden) == len(ids), "each position is computed once, in order"
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states [R, E], float32 [R, V] on the host."""
        with torch.inference_mode():
            return self._decoder.logits(hidden).cpu()

    def greedy(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Return `num_tokens` tokens after each prompt; end tokens are ignored."""
        return self._serve(prompts, num_tokens)

    def close(self) -> None:
        """Release weights and KV memory."""
        self._engine.close()

    def _tapped(self, decoder: CausalModel) -> CausalModel:
        """Return a wrapper of the model that computes and records all rows of a step while a text is read."""
        self._decoder = decoder

        compute: Callable[..., Tensor] = decoder

        def run(*inputs: Any) -> Tensor:
            if self._rows is None:
                return compute(*inputs)
            output_rows: OutputRows | None = inputs[OUTPUT_ROWS]
            hidden = compute(*inputs[:OUTPUT_ROWS], None, *inputs[OUTPUT_ROWS + 1 :])
            self._rows.append(hidden)
            return hidden if output_rows is None else hidden.index_select(0, output_rows.rows)

        made: Any = Timed(decoder, run)
        return made  # type: ignore[no-any-return]

    def _serve(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        outputs: dict[str, list[int]] = {}
        for idx, prompt in enumerate(prompts):
            self._engine.add_request(str(idx), {"prompt_token_ids": prompt}, params)
            outputs[str(idx)] = []
        while self._engine.has_unfinished:
            for delta in self._engine.step():
                if delta.error is not None:
                    raise WorkerError(f"request {delta.request_id} failed: {delta.error}")
                for output in delta.outputs:
                    outputs[delta.request_id] += output.token_ids
        return list(outputs.values())


class QualityBench:
    """Comparison of a served form of a model with its exact values, on one text.

    Args:
        config: configuration of the served form.
        reference: checkpoint whose exact values count; None for the model's own weights.
        text: file of the text; see `read_quality_text`.
        max_tokens: maximum number of tokens of the text; 0 for no limit.

    Attributes:
        served: the served form.
        exact: the model with exact values.
        sequences: the text, as sequences of tokens.

    Raises:
        ConfigError: an option, a checkpoint or the text is refused; or the vocabularies differ in size.
    """

    def __init__(
        self, config: EngineConfig, reference: str | None = None, text: Path | None = None, max_tokens: int = 0
    ) -> None:
        if config.model.skip_tokenizer_init:
            raise ConfigError("skip_tokenizer_init must be False: a text is read", field="skip_tokenizer_init")
        self.served = ReadingEngine(config)
        try:
            room = probe("cpu").available_bytes // 2  # weights of the served form are in memory already
            self.exact = ReadingEngine(exact_config(config, reference), lambda _: ExactOps(room))
            if self.exact.vocab_size != self.served.vocab_size:
                raise ConfigError(
                    f"reference {reference!r} has {self.exact.vocab_size} tokens in its vocabulary, and the model "
                    f"{self.served.vocab_size}: they must be the same",
                    field="reference",
                )
            length = min(self.served.max_length, self.exact.max_length)
            self._is_bundled = text is None
            self.sequences = read_quality_text(self.served.tokenizer, text, length, max_tokens)
        except BaseException:
            self.close()
            raise

    def divergence(self) -> Divergence:
        """Return the divergence of the served probabilities from the exact ones."""
        tally = DivergenceTally()
        size = max(1, PIECE // self.served.vocab_size)
        for ids in self.sequences:
            targets = torch.tensor(ids[1:])
            ours, theirs = (engine.hidden(ids)[:-1] for engine in (self.served, self.exact))
            for part in (slice(first, first + size) for first in range(0, len(targets), size)):
                tally.add(self.served.logits(ours[part]), self.exact.logits(theirs[part]), targets[part])
        return tally.result()

    def greedy(self, num_prompts: int, num_tokens: int) -> GreedyAgreement:
        """Return the agreement of greedy outputs with exact ones.

        Raises:
            ConfigError: prompts and outputs are longer than a model's context.
        """
        prompts = greedy_prompts(self.served.tokenizer, num_prompts, None if self._is_bundled else self.sequences)
        most = min(self.served.max_length, self.exact.max_length) + 1 - max(map(len, prompts))
        if num_tokens > most:
            raise ConfigError(f"greedy outputs must have at most {most} tokens, got {num_tokens}", field="greedy")
        return GreedyAgreement.of(*(engine.greedy(prompts, num_tokens) for engine in (self.served, self.exact)))

    def close(self) -> None:
        """Release both models."""
        for engine in (self.served, getattr(self, "exact", None)):
            if engine is not None:
                engine.close()


def exact_config(config: EngineConfig, reference: str | None = None) -> EngineConfig:
    """Return the configuration of the exact values: float32 on a CPU, including stored keys and values."""
    model = replace(
        config.model,
        skip_tokenizer_init=True,
        dtype="float32",
        device="cpu",
        kernels="torch",
        quantization=None,
        weight_packing="plain",
        deterministic=False,
    )
    if reference is not None:
        model = replace(model, model=reference, revision=None, stored_quantization=None, served_model_name=None)
    return replace(
        config,
        model=model,
        cache=CacheConfig(block_size=config.cache.block_size),
        lora=config.lora if reference is None else LoRAConfig(),
        graphs=CudaGraphConfig(),
    )


def _measured(config: EngineConfig) -> EngineConfig:
    """Return a configuration for measurements: no prefix cache, few sequences, synchronous and eager steps."""
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(config.parallel, name) != ParallelConfig.__dataclass_fields__[name].default:
            raise ConfigError(f"{name} must be 1 where quality is measured, in one process", field=name)
    if config.speculative.speculative_method != "off":
        raise ConfigError(
            f"speculative_method {config.speculative.speculative_method!r} changes no output: leave it out where "
            "quality is measured",
            field="speculative_method",
        )
    cache = replace(config.cache, enable_prefix_caching=False)
    if cache.num_kv_blocks is None and cache.kv_cache_memory_bytes is None:
        cache = replace(cache, num_kv_blocks=NUM_KV_TOKENS // cache.block_size)
    scheduler = replace(config.scheduler, max_num_seqs=min(NUM_SEQS, config.scheduler.max_num_seqs))
    return in_order(replace(config, cache=cache, scheduler=scheduler, graphs=CudaGraphConfig(enforce_eager=True)))
