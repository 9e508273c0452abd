"""Scores of documents for a query: the prompts that they take, and how results of prompts make scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

from quire.engine.outputs.pooled_outputs import embedding_of
from quire.errors import InvalidParameter, UnsupportedFeature
from quire.models.pooling_config import PoolingConfig
from quire.sequences.pooling import Pooling, PoolingParams

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# The prompt on which Qwen3-Reranker was trained, which answers yes or no.
_RERANKER_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {}\n'
    "<Query>: {}\n<Document>: {}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


class ScoreJob(NamedTuple):
    """The pooled requests of some scores.

    Args:
        prompts: their prompts.
        pooling: result of each.
        pairs: indices of the prompts of each score: of the query's and the document's embedding, or twice that of the
            prompt with both.
    """

    prompts: list[str]
    pooling: Pooling
    pairs: list[tuple[int, int]]

    @property
    def adds_special_tokens(self) -> bool:
        """True where the tokenizer's special tokens belong to the prompts."""
        return not self.pooling.token_ids

    def scores(self, values: Sequence[Sequence[float]]) -> list[float]:
        """Return the scores from the results of the prompts: P(yes) of P(yes) + P(no), or cosines of embeddings."""
        if self.pooling.token_ids:
            return [0.5 + 0.5 * math.tanh((values[idx][1] - values[idx][0]) / 2) for idx, _ in self.pairs]
        units = [embedding_of(each, None, normalize=True) for each in values]
        return [sum(map(mul, units[query], units[document])) for query, document in self.pairs]


def make_score_job(
    config: PoolingConfig,
    queries: Sequence[str],
    documents: Sequence[str],
    instruction: str | None = None,
    names: tuple[str, str] = ("queries", "documents"),
) -> ScoreJob:
    """Return the requests for the score of each document with the query at its place, or with the only query.

    Args:
        config: pooling of the model: a reranker reads query and document in one prompt, others embed each.
        queries: one query, or one for each document.
        documents: documents, at least one.
        instruction: task of a reranker; None takes that of a web search.
        names: names of the fields of both, for errors.

    Raises:
        InvalidParameter: another type, or numbers of texts that do not match.
        UnsupportedFeature: an instruction for an embedding model, or one whose embeddings are not supported.
    """
    for name, texts in zip(names, (queries, documents), strict=True):
        if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str) for text in texts):
            raise InvalidParameter(name, texts, "a string or a list of strings, at least one")
    if len(queries) not in (1, len(documents)):
        raise InvalidParameter(names[0], f"{len(queries)} texts", f"one text, or as many as {names[1]} has")
    if instruction is not None and not isinstance(instruction, str):
        raise InvalidParameter("instruction", instruction, "a string")
    places = [(0 if len(queries) == 1 else idx, idx) for idx in range(len(documents))]
    if config.classifier is not None:
        task = INSTRUCTION if instruction is None else instruction
        prompts = [_RERANKER_PROMPT.format(task, queries[query], documents[idx]) for query, idx in places]
        return ScoreJob(prompts, Pooling(config.classifier), [(idx, idx) for _, idx in places])
    if instruction is not None:
        raise UnsupportedFeature("instruction", "an embedding model has none; write it in front of the query")
    config.check(PoolingParams())
    pairs = [(query, len(queries) + idx) for query, idx in places]
    return ScoreJob([*queries, *documents], Pooling(), pairs)
