"""Reasoning of a chat: the sampling parameters that it needs, and the reasoning in outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from quire.engine.outputs.outputs import RequestOutput
from quire.errors import InvalidParameter
from quire.sequences.params import SamplingParams
from quire.text.reasoning import ReasoningModel


def with_reasoning(each: Sequence[SamplingParams], model: ReasoningModel | None) -> Sequence[SamplingParams]:
    """Return sampling parameters under which reasoning can be told from the answer."""
    if model is None:
        return each
    read: dict[int, SamplingParams] = {}
    for params in each:
        if not isinstance(params, SamplingParams):
            raise InvalidParameter("sampling_params", params, "SamplingParams")
        if id(params) not in read:
            needed = model.sampling()
            kept = (*params.kept_special_ids, *needed.pop("kept_special_ids"))
            read[id(params)] = replace(params, kept_special_ids=kept, **needed)
    # Conversations with the same parameters share them: their strings are tokenized once.
    return [read[id(params)] for params in each]


def add_reasoning(outputs: Iterable[RequestOutput], model: ReasoningModel | None) -> None:
    """Write reasoning and content into whole outputs; do nothing where `model` is None."""
    if model is not None:
        for output in outputs:
            for sample in output.outputs:
                sample.reasoning, sample.content = model.split(output.prompt_token_ids, sample.text)
