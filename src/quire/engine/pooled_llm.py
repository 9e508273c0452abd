"""The part of `LLM` whose requests are pooled: embeddings and scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, cast

from quire.engine.engine import Engine
from quire.engine.inputs.prompts import Prompt
from quire.engine.outputs.outputs import RequestOutput
from quire.engine.outputs.pooled_outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    embedding_of,
    pooled_values,
)
from quire.errors import InvalidParameter
from quire.models.pooling_config import PoolingConfig
from quire.sequences.params import SamplingParams
from quire.sequences.pooling import NO_SAMPLING, Pooling, PoolingParams


class PooledLLM(ABC):
    """Embeddings over an engine that also generates.

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
    ) -> list[EmbeddingRequestOutput]:
        """Return the embeddings of prompts: the last token's hidden state after the last norm, by default of length 1.

        They use the prefix cache, and are batched with all other requests. A text ends with the special tokens of the
        tokenizer, such as an end token.

        Args:
            prompts: one prompt or several: text, token ids, or `{"prompt_token_ids": [...]}`.
            pooling_params: dimensions, normalisation and truncation; None takes the defaults.
            use_tqdm: show a progress bar on standard error, where that is a terminal.
            cache_salt, tenant: only requests with equal values of both share cached prefixes.

        Returns:
            One output for each prompt, in their order.

        Raises:
            RequestError: a prompt or a parameter is refused, then nothing runs; or the result of one is not finite.
        """
        params = PoolingParams() if pooling_params is None else pooling_params
        self.pooling.check(params)
        options: dict[str, Any] = {"use_tqdm": use_tqdm, "cache_salt": cache_salt, "tenant": tenant}
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

    def _pool(
        self, prompts: Sequence[Prompt], pooling: Pooling, truncate_prompt_tokens: int | None, options: dict[str, Any]
    ) -> list[RequestOutput]:
        """Run a pooled request for each prompt, with options of `generate`."""
        prepare = self.engine.requests.prepare_pooled
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
