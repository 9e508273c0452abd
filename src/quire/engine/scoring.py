"""Scores of documents for a query, and of classes: their prompts, and the conversion of results to scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import mul, sub
from typing import NamedTuple

from quire.engine.inputs.prompts import TextPair
from quire.engine.outputs.pooled_outputs import embedding_of
from quire.errors import InvalidParameter, UnsupportedFeature
from quire.models.checkpoints.pooling_config import PoolingConfig
from quire.models.specs.pooled_spec import ClassifierHead
from quire.sequences.pooling import Pooling, PoolingParams, PromptedText

CLASSES, TOKEN_CLASSES = Pooling(kind="classify"), Pooling(kind="tokens")
# Fields with the names of a checkpoint's prompts.
QUERY_PROMPT, DOCUMENT_PROMPT = "query_prompt_name", "document_prompt_name"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# The prompt on which Qwen3-Reranker was trained, which answers yes or no.
_RERANKER_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {}\n'
    "<Query>: {}\n<Document>: {}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return math.fsum(map(mul, first, second))


def _manhattan(first: Sequence[float], second: Sequence[float]) -> float:
    return -math.fsum(map(abs, map(sub, first, second)))


def _cosine(first: Sequence[float], second: Sequence[float]) -> float:
    units = (embedding_of(vector, None, normalize=True) for vector in (first, second))
    return max(-1.0, min(_dot(*units), 1.0))  # a unit vector times itself can round to more than 1


# Similarity functions of two embeddings, by their names in a checkpoint; higher for more similar texts.
SIMILARITIES: Mapping[str, Callable[[Sequence[float], Sequence[float]], float]] = {
    "cosine": _cosine,
    "dot": _dot,
    "euclidean": lambda first, second: -math.dist(first, second),
    "manhattan": _manhattan,
}


class ScoreJob(NamedTuple):
    """The pooled requests from which scores are computed.

    Args:
        prompts: prompts of the requests.
        pooling: result of each request.
        pairs: indices of the query's and the document's prompts for each score; equal if one prompt has both texts.
        to_scores: function from the results of the prompts to the scores.
    """

    prompts: list[str | TextPair | PromptedText]
    pooling: Pooling
    pairs: list[tuple[int, int]]
    to_scores: Callable[[Sequence[float], Sequence[float]], float]

    @property
    def adds_special_tokens(self) -> bool:
        """True if the tokenizer adds its special tokens to the prompts."""
        return not self.pooling.token_ids

    def text_name(self, idx: int, names: tuple[str, str]) -> str:
        """Return the name of a prompt's text; of the document's, if the prompt has both texts."""
        num_queries = len(self.prompts) - len(self.pairs)  # none if each prompt has both
        is_query = idx < num_queries
        name, count = (names[0], num_queries) if is_query else (names[1], len(self.pairs))
        return name if count == 1 else f"{name}[{idx if is_query else idx - num_queries}]"

    def scores(self, values: Sequence[Sequence[float]]) -> list[float]:
        """Return the scores from the results of the prompts."""
        return [self.to_scores(values[first], values[second]) for first, second in self.pairs]


def make_score_job(
    config: PoolingConfig,
    queries: Sequence[str],
    documents: Sequence[str],
    instruction: str | None = None,
    names: tuple[str, str] = ("queries", "documents"),
    use_activation: bool | None = None,
    prompt_names: tuple[str | None, str | None] = (None, None),
) -> ScoreJob:
    """Return the requests for the score of each document with the query at the same index, or the only query.

    Args:
        config: pooling of the model: a reranker and a cross-encoder read query and document in one prompt, other models
            embed each.
        queries: one query, or one for each document.
        documents: documents, at least one.
        instruction: task of a reranker; None for web search.
        names: names of the fields of both, for errors.
        use_activation: False for the logits of a classification head; None or True for its scores.
        prompt_names: names of the checkpoint's prompts for queries and for documents; None for those of their roles.

    Raises:
        InvalidParameter: another type, numbers of texts that do not match, or a prompt that the checkpoint lacks.
        UnsupportedFeature: an instruction for a model without one, a head of several classes, or a model whose
            embeddings are not supported.
    """
    for name, texts in zip(names, (queries, documents), strict=True):
        if not isinstance(texts, list | tuple) or not texts:
            raise InvalidParameter(name, texts, "a string or a list of strings, at least one")
        for idx, text in enumerate(texts):
            if not isinstance(text, str):
                raise InvalidParameter(f"{name}[{idx}]", text, "a string")
    if len(queries) not in (1, len(documents)):
        raise InvalidParameter(names[0], f"{len(queries)} texts", f"one text, or as many as {names[1]} has")
    _check_activation(use_activation)
    if instruction is not None and not isinstance(instruction, str):
        raise InvalidParameter("instruction", instruction, "a string")
    places = [(0 if len(queries) == 1 else idx, idx) for idx in range(len(documents))]
    joint = [(idx, idx) for _, idx in places]
    of_query, of_document = prompt_names
    if of_document is not None and (config.classifier is not None or config.head is not None):
        raise UnsupportedFeature(DOCUMENT_PROMPT, "the model reads query and document in one prompt")
    if config.classifier is not None:
        if of_query is not None:
            raise UnsupportedFeature(QUERY_PROMPT, "the model has a prompt of its own; see instruction")
        task = INSTRUCTION if instruction is None else instruction
        texts = [_RERANKER_PROMPT.format(task, queries[query], documents[idx]) for query, idx in places]
        return ScoreJob([*texts], Pooling(config.classifier), joint, lambda values, _: _probability_of_yes(values))
    if instruction is not None:
        raise UnsupportedFeature("instruction", "an embedding model has none; write it in front of the query")
    if config.head is not None:
        head = config.head
        if head.pooling == "tokens":
            raise UnsupportedFeature("score", "the model classifies tokens, not texts")
        if len(head.labels) != 1:
            raise UnsupportedFeature("score", f"the model has {len(head.labels)} classes; a score needs one")
        firsts = config.with_prompt(queries, of_query, field=QUERY_PROMPT)
        pairs = [TextPair(firsts[query], documents[idx]) for query, idx in places]
        return ScoreJob(
            [*pairs], CLASSES, joint, lambda values, _: class_scores(head, values, use_activation=use_activation)[0]
        )
    config.check(PoolingParams())
    embedded = [(query, len(queries) + idx) for query, idx in places]
    similarity, normalize = SIMILARITIES[config.similarity], config.normalize

    def compare(query: Sequence[float], document: Sequence[float]) -> float:
        return similarity(*(embedding_of(vector, None, normalize=normalize) for vector in (query, document)))

    prompted = [
        *config.with_prompt(queries, of_query, role="query", field=QUERY_PROMPT),
        *config.with_prompt(documents, of_document, role="document", field=DOCUMENT_PROMPT),
    ]
    return ScoreJob(prompted, config.pooling, embedded, compare)


def class_scores(head: ClassifierHead, logits: Sequence[float], *, use_activation: bool | None = None) -> list[float]:
    """Return the scores of classes.

    Args:
        head: head of the model, which states the function from logits to scores.
        logits: logits of the classes.
        use_activation: False for the logits themselves; None or True for scores.

    Raises:
        InvalidParameter: `use_activation` is no such value.
    """
    _check_activation(use_activation)
    if use_activation is False or head.scores == "none":
        return list(logits)
    if head.scores == "sigmoid":
        return [0.5 + 0.5 * math.tanh(logit / 2) for logit in logits]
    largest = max(logits)
    powers = [math.exp(logit - largest) for logit in logits]
    return [power / sum(powers) for power in powers]


def token_scores(
    head: ClassifierHead, logits: Sequence[float], token_ids: Sequence[int], *, use_activation: bool | None = None
) -> dict[int, list[float]]:
    """Return the scores of the classes of each token by its position, or of those that end a step.

    Args:
        head: head of the model.
        logits: logits of the classes, one token after the other.
        token_ids: the tokens.
        use_activation: see `class_scores`.
    """
    count, wanted = len(head.labels), head.step_token
    return {
        idx: class_scores(head, logits[idx * count : (idx + 1) * count], use_activation=use_activation)
        for idx, token_id in enumerate(token_ids)
        if wanted is None or token_id == wanted
    }


def _check_activation(use_activation: object) -> None:
    if not isinstance(use_activation, bool | None):
        raise InvalidParameter("use_activation", use_activation, "true, false or None")


def _probability_of_yes(logits: Sequence[float]) -> float:
    """Return P(yes) of P(yes) + P(no) from the logits of no and yes."""
    return 0.5 + 0.5 * math.tanh((logits[1] - logits[0]) / 2)
