"""The texts that a front makes of tokens are those that the engine's thread would have made."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from quire.engine.outputs.outputs import CompletionOutput
from quire.engine.outputs.text import SampleText
from quire.sequences.params import SamplingParams
from quire.sequences.sequence import Request
from quire.server.fronts.front_texts import FrontTexts
from quire.text.tokenizers.tokenizer import Tokenizer

NUM_TOKENS = 12


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
@pytest.mark.parametrize("fields", [{}, {"include_stop_str_in_output": True}, {"skip_special_tokens": False}])
def test_texts_are_the_engines_however_tokens_are_cut_into_deltas(
    tokenizer: Tokenizer, fields: dict[str, Any], reason: str
) -> None:
    rng, params = random.Random(7), SamplingParams(**fields)
    assert FrontTexts.can_make(params)
    made = 0
    for _ in range(30):
        # Most tokens of the tiny vocabulary are bytes of characters.
        prompt, *rest = ([rng.randrange(tokenizer.vocab_size) for _ in range(NUM_TOKENS)] for _ in range(3))
        request = Request("r", prompt, params, 100, frozenset(), arrival=0, seed=0)
        front = FrontTexts(params, tokenizer, prompt)
        for index, ids in enumerate(rest):
            engine, wanted = SampleText(request, tokenizer), ""
            for idx, token_id in enumerate(ids):
                is_end_token = reason == "stop" and idx == NUM_TOKENS - 1
                wanted += engine.take((token_id,), idx + 1, is_end_token=is_end_token)[0]
            wanted += engine.flush()
            got = ""
            for begin, end in pairwise([0, *sorted(rng.sample(range(1, NUM_TOKENS), 3)), NUM_TOKENS]):
                is_last = end == NUM_TOKENS
                output = CompletionOutput(index, token_ids=ids[begin:end], finish_reason=reason if is_last else None)
                front.add_text(output)
                got += output.text
            assert got == wanted
            made += len(got)
    assert made > 100


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(stop=("a",)),
        SamplingParams(detokenize=False),
        SamplingParams(n=1, best_of=2),
        SamplingParams(beam_width=2),
    ],
)
def test_texts_that_decide_something_are_left_to_the_engine(params: SamplingParams) -> None:
    assert not FrontTexts.can_make(params)
