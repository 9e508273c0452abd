"""The part of `LLM` whose requests are pooled: embeddings and scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from quire.config import ResolvedConfig
from quire.engine.engine import Engine
from quire.engine.inputs.prompt_names import naming_prompt, prompt_name
from quire.engine.inputs.prompts import Prompt, TextPair
from quire.engine.outputs.outputs import RequestOutput
from quire.engine.outputs.pooled_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    TokenClassificationOutput,
    TokenClassificationRequestOutput,
    embedding_of,
    pooled_values,
)
from quire.engine.scoring import CLASSES, TOKEN_CLASSES, class_scores, make_score_job, token_scores
from quire.errors import InvalidParameter, RequestError
from quire.models.checkpoints.pooling_config import PoolingConfig
from quire.models.specs.pooled_spec import ClassifierHead
from quire.sequences.lora import LoRARequest
from quire.sequences.params import SamplingParams
from quire.sequences.pooling import NO_SAMPLING, Pooling, PoolingParams, PromptedText


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
        prompt_name: str | None = None,
        use_tqdm: bool = True,
        cache_salt: str | None = None,
        tenant: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embeddings of prompts: pooled hidden states after the last norm, by default of length 1.

        Last-token embeddings use the prefix cache, and all requests are batched together. A text gets the special
        tokens of the tokenizer, such as an end token.

        Args:
            prompts: one prompt or several: text, token ids, or `{"prompt_token_ids": [...]}`.
            pooling_params: dimensions, normalisation and truncation; None takes the defaults.
            prompt_name: name of the checkpoint's prompt that is put in front of texts; None takes its default, if any.
            use_tqdm: show a progress bar on standard error, if it is a terminal.
            cache_salt, tenant: only requests with equal values of both share cached prefixes.
            lora_request: adapter of all prompts; None for the base model.

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
        inputs = self.pooling.with_prompt(as_prompts(prompts), prompt_name)
        return [
            EmbeddingRequestOutput(
                output.request_id,
                EmbeddingOutput(embedding_of(pooled_values(output), params.dimensions, normalize=is_normal)),
                output.prompt_token_ids,
                output.num_cached_tokens,
            )
            for output in self._pool(inputs, self.pooling.pooling, params.truncate_prompt_tokens, options)
        ]

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        query_prompt_name: str | None = None,
        document_prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_activation: bool | None = None,
        use_tqdm: bool = True,
        cache_salt: str | None = None,
        tenant: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well each document matches the query at the same index, or the only query.

        With the option `classifier_from_token` the score is the probability of the second of these tokens against the
        first, after a prompt with both texts; with a cross-encoder, the score of its only class for both texts; else
        the similarity of their embeddings, by default the cosine.

        Args:
            queries: one text, or one for each document.
            documents: texts.
            instruction: task of a reranker; None for web search.
            query_prompt_name, document_prompt_name: names of the checkpoint's prompts that are put in front of queries
                and of documents; None takes the prompts named "query" and "document" ("passage", "corpus"), or its
                default without any of these. A cross-encoder has a prompt for the query alone.
            truncate_prompt_tokens: see `PoolingParams`; of a pair, the longer text is cut first.
            use_activation: False for the logit of a cross-encoder; None or True for its score.
            use_tqdm, cache_salt, tenant, lora_request: see `embed`.

        Returns:
            One output for each document, in their order.

        Raises:
            RequestError, WorkerError: see `embed`.
        """
        first, second = ([texts] if isinstance(texts, str) else texts for texts in (queries, documents))
        prompt_names = query_prompt_name, document_prompt_name
        job = make_score_job(
            self.pooling, first, second, instruction, use_activation=use_activation, prompt_names=prompt_names
        )
        limit = PoolingParams(truncate_prompt_tokens=truncate_prompt_tokens).truncate_prompt_tokens
        options: dict[str, Any] = {"use_tqdm": use_tqdm, "cache_salt": cache_salt, "tenant": tenant}
        options["lora_request"] = lora_request
        special, text_name = job.adds_special_tokens, partial(job.text_name, names=("queries", "documents"))
        outputs = self._pool(job.prompts, job.pooling, limit, options, add_special_tokens=special, text_name=text_name)
        scores = job.scores([pooled_values(output) for output in outputs])
        document_outputs = (outputs[document] for _, document in job.pairs)
        return [
            ScoringRequestOutput(
                output.request_id, ScoringOutput(score), output.prompt_token_ids, output.num_cached_tokens
            )
            for output, score in zip(document_outputs, scores, strict=True)
        ]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_activation: bool | None = None,
        use_tqdm: bool = True,
        cache_salt: str | None = None,
        tenant: str | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the scores of the classes of each prompt, with a model that has a classification head.

        Args:
            prompts: see `embed`.
            truncate_prompt_tokens: see `PoolingParams`.
            use_activation: False for logits; None or True for scores.
            use_tqdm, cache_salt, tenant: see `embed`.

        Returns:
            One output for each prompt, in their order.

        Raises:
            RequestError, WorkerError: see `embed`.
        """
        head = self.pooling.require_classes(of_tokens=False)
        options: dict[str, Any] = {"use_tqdm": use_tqdm, "cache_salt": cache_salt, "tenant": tenant}
        outputs = self._run_head(prompts, CLASSES, head, truncate_prompt_tokens, use_activation, options)
        return [
            ClassificationRequestOutput(
                output.request_id,
                ClassificationOutput(class_scores(head, pooled_values(output), use_activation=use_activation)),
                output.prompt_token_ids,
            )
            for output in outputs
        ]

    def classify_tokens(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_activation: bool | None = None,
        use_tqdm: bool = True,
        cache_salt: str | None = None,
        tenant: str | None = None,
    ) -> list[TokenClassificationRequestOutput]:
        """Return the scores of the classes of each token of prompts, with a model whose head classifies tokens.

        A process reward model gives those of the tokens that end a step.

        Args:
            prompts, truncate_prompt_tokens, use_activation, use_tqdm, cache_salt, tenant: see `classify`.

        Returns:
            One output for each prompt, in their order.

        Raises:
            RequestError, WorkerError: see `embed`.
        """
        head = self.pooling.require_classes(of_tokens=True)
        options: dict[str, Any] = {"use_tqdm": use_tqdm, "cache_salt": cache_salt, "tenant": tenant}
        found = []
        for output in self._run_head(prompts, TOKEN_CLASSES, head, truncate_prompt_tokens, use_activation, options):
            token_ids = output.prompt_token_ids
            scores = token_scores(head, pooled_values(output), token_ids, use_activation=use_activation)
            classes = TokenClassificationOutput([*scores], [*scores.values()])
            found.append(TokenClassificationRequestOutput(output.request_id, classes, token_ids))
        return found

    def _run_head(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: Pooling,
        head: ClassifierHead,
        truncate_prompt_tokens: int | None,
        use_activation: bool | None,
        options: dict[str, Any],
    ) -> list[RequestOutput]:
        """Return the outputs of a head over prompts; options of their scores are refused before any request runs."""
        limit = PoolingParams(truncate_prompt_tokens=truncate_prompt_tokens).truncate_prompt_tokens
        class_scores(head, [0.0], use_activation=use_activation)
        return self._pool(as_prompts(prompts), pooling, limit, options)

    def _pool(
        self,
        prompts: Sequence[Prompt | TextPair | PromptedText],
        pooling: Pooling,
        truncate_prompt_tokens: int | None,
        options: dict[str, Any],
        *,
        add_special_tokens: bool = True,
        text_name: Callable[[int], str] | None = None,
    ) -> list[RequestOutput]:
        """Run a pooled request for each prompt, with options of `generate`."""
        prepare = partial(self.engine.requests.prepare_pooled, add_special_tokens=add_special_tokens)
        prepared = []
        for idx, prompt in enumerate(prompts):
            with naming_prompt(text_name(idx) if text_name else prompt_name(idx, len(prompts))):
                prepared.append(prepare(prompt, pooling, truncate_prompt_tokens))
        return self.generate(cast(list[Prompt], prepared), NO_SAMPLING, **options)

    def _check_idle(self) -> None:
        """Check that no stream is in progress: its outputs would be taken for outputs of the next prompts."""
        if self.engine.has_unfinished:
            raise RequestError("an earlier stream of this LLM has not ended: read it to its end, or close it")


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return a list of prompts; a list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidParameter("prompts", prompts, "a prompt or a list of prompts")
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def as_conversations(messages: Any) -> Sequence[Any]:
    """Return a list of conversations; a list of messages is one conversation, and so is any malformed value."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    return messages if is_list and not (messages and isinstance(messages[0], Mapping)) else [messages]


def priorities_of(priority: int | Sequence[int] | None, count: int, config: ResolvedConfig) -> Sequence[int]:
    """Return the priority of each prompt."""
    levels = priority if isinstance(priority, Sequence) else [priority or 0] * count
    if len(levels) != count or isinstance(priority, str):
        raise InvalidParameter("priority", priority, f"an integer, or a list of one for each of {count} prompts")
    for level in levels:
        config.check_priority(level)
    return levels
