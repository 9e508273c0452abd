"""The part of `LLM` whose requests are pooled: embeddings and scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

from quire.engine.engine import Engine
from quire.engine.inputs.prompts import Prompt
from quire.engine.outputs.outputs import RequestOutput
from quire.engine.outputs.pooled_outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    embedding_of,
    pooled_values,
)
from quire.engine.scoring import make_score_job
from quire.errors import InvalidParameter
from quire.models.pooling_config import PoolingConfig
from quire.sequences.lora import LoRARequest
from quire.sequences.params import SamplingParams
from quire.sequences.pooling import NO_SAMPLING, Pooling, PoolingParams


class PooledLLM(ABC):
    """Embeddings and scores over an engine that also generates.

    Attributes:
        engine: the engine.
        pooling: pooling of the model.
    """

    engine: Engine
    pooling: PoolingConfig

    @abstractmethod
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        use_tqdm: bool = True,
        cache_salt: str | None = None,
        tenant: str | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """See `LLM.generate`."""

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        cache_salt: str | None = None,
        tenant: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embeddings of prompts: the last token's hidden state after the last norm, by default of length 1.

        They use the prefix cache, and are batched with all other requests. A text ends with the special tokens of the
        tokenizer, such as an end token.

        Args:
            prompts: one prompt or several: text, token ids, or `{"prompt_token_ids": [...]}`.
            pooling_params: dimensions, normalisation and truncation; None takes the defaults.
            use_tqdm: show a progress bar on standard error, where that is a terminal.
            cache_salt, tenant: only requests with equal values of both share cached prefixes.
            lora_request: adapter of all prompts; None for the model alone.

        Returns:
            One output for each prompt, in their order.

        Raises:
            RequestError: a prompt or a parameter is refused; then nothing runs.
            WorkerError: a result is not of finite numbers, or the engine has failed.
        """
        params = PoolingParams() if pooling_params is None else pooling_params
        self.pooling.check(params)
        options: dict[str, Any] = {"use_tqdm": use_tqdm, "cache_salt": cache_salt, "tenant": tenant}
        options["lora_request"] = lora_request
        is_normal = self.pooling.normalize if params.normalize is None else params.normalize
        return [
            EmbeddingRequestOutput(
                output.request_id,
                EmbeddingOutput(embedding_of(pooled_values(output), params.dimensions, normalize=is_normal)),
                output.prompt_token_ids,
                output.num_cached_tokens,
            )
            for output in self._pool(as_prompts(prompts), Pooling(), params.truncate_prompt_tokens, options)
        ]

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        use_tqdm: bool = True,
        cache_salt: str | None = None,
        tenant: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well each document matches the query at its place, or the only query.

        With the option `classifier_from_token` it is the probability of the second of these tokens against the first,
        after a prompt with both texts, else the cosine of their embeddings.

        Args:
            queries: one text, or one for each document.
            documents: texts.
            instruction: task of a reranker; None takes that of a web search.
            use_tqdm, cache_salt, tenant, lora_request: see `embed`.

        Returns:
            One output for each document, in their order.

        Raises:
            RequestError, WorkerError: see `embed`.
        """
        first, second = ([each] if isinstance(each, str) else each for each in (queries, documents))
        job = make_score_job(self.pooling, first, second, instruction)
        options: dict[str, Any] = {"use_tqdm": use_tqdm, "cache_salt": cache_salt, "tenant": tenant}
        options["lora_request"] = lora_request
        outputs = self._pool(job.prompts, job.pooling, None, options, add_special_tokens=job.adds_special_tokens)
        scores = job.scores([pooled_values(output) for output in outputs])
        found = (outputs[document] for _, document in job.pairs)
        return [
            ScoringRequestOutput(each.request_id, ScoringOutput(score), each.prompt_token_ids, each.num_cached_tokens)
            for each, score in zip(found, scores, strict=True)
        ]

    def _pool(
        self,
        prompts: Sequence[Prompt],
        pooling: Pooling,
        truncate_prompt_tokens: int | None,
        options: dict[str, Any],
        *,
        add_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        """Run a pooled request for each prompt, with options of `generate`."""
        prepare = partial(self.engine.requests.prepare_pooled, add_special_tokens=add_special_tokens)
        prepared = [prepare(prompt, pooling, truncate_prompt_tokens) for prompt in prompts]
        return self.generate(cast(list[Prompt], prepared), NO_SAMPLING, **options)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return a list of prompts; a list of integers is one prompt.

    Raises:
        InvalidParameter: another type.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidParameter("prompts", prompts, "a prompt or a list of prompts")
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
