"""Random concurrent requests with grammars and thinking, alike but for their prompts: outputs are those of solo runs.

Few seeds, few forms and prompts of one length make requests that differ in nothing but what their prompt ends with, and
that decides whether the output begins inside thinking, after it or before it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed")

from quire import LLM, SamplingParams
from quire.engine.outputs.outputs import RequestOutput
from quire.sequences.thinking import ThinkingTokens
from quire.text.tool_calls import ToolModel
from tests.engine.bundled import load
from tests.engine.structured_forms import CHOICES, REGEX

START, END, OTHER = 90, 91, 95
TOKENS = ThinkingTokens(START, (END,), (89, END))
TEXTS = ("Once upon a time, a small fox", "Tom and the old sailor found a red kite in the forest")
SUM = {"type": "object", "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["sum"]}
ADD = {"type": "function", "function": {"name": "add", "parameters": SUM | {"additionalProperties": False}}}
LONG = {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 8}
# By name: the form of the answer; "tools" is a grammar of calls and text, None is any text.
FORMS: dict[str, Any] = {
    "json": {"json": LONG},
    "regex": {"regex": REGEX},
    "choice": {"choice": CHOICES},
    "tools": None,
    "any": None,
}
# What changes when requests are scheduled, and may not change what they say.
ENGINES: dict[str, dict[str, Any]] = {
    "plenty": {},
    "recompute": {"num_kv_blocks": 26, "max_model_len": 160, "enable_prefix_caching": False},
    "swap": {"num_kv_blocks": 26, "max_model_len": 160, "swap_space": 1 << 26, "preemption_mode": "swap"},
    "drafts": {"speculative_method": "suffix", "num_speculative_tokens": 4},
    "chunks": {"max_num_batched_tokens": 64},
}
CASES = [
    pytest.param(name, seed, marks=() if seed == 0 and name != "chunks" else pytest.mark.slow)
    for name in ENGINES
    for seed in range(6)
]


class Asked(NamedTuple):
    """A request.

    Args:
        text: index in `TEXTS`.
        last: last token of the prompt, which all prompts of a text have at one position.
        form: key of `FORMS`.
        budget: maximum number of thinking tokens.
        seed: seed of its draws.
        kind: "one" sample, three "samples", or "beams".
    """

    text: int
    last: int
    form: str
    budget: int | None
    seed: int
    kind: str


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    llm = load()
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def solo() -> dict[Asked, Any]:
    """The outputs of requests that ran alone, so far."""
    return {}


def asked(rng: random.Random) -> Asked:
    form = rng.choice([*FORMS])
    budgets = (0, 3, 9) if form == "any" else (0, 3, 9, None)
    kind = rng.choice(("one", "samples", "samples", "beams"))
    return Asked(rng.randrange(2), OTHER, form, rng.choice(budgets), rng.randrange(2), kind)


def request(llm: LLM, one: Asked) -> tuple[list[int], SamplingParams]:
    """Return the prompt and the parameters of a request."""
    params: dict[str, Any] = {"thinking": TOKENS, "thinking_token_budget": one.budget, "max_tokens": 30}
    if one.form == "tools":
        use = ToolModel.find("hermes", llm.tokenizer, llm.resolved.vocab_size).read([ADD], "required", None)
        assert use is not None
        params |= use.sampling(None, one.budget)
    elif FORMS[one.form] is not None:
        params["structured_outputs"] = FORMS[one.form]
    kinds: dict[str, dict[str, Any]] = {"one": {}, "samples": {"n": 3}, "beams": {"n": 2, "beam_width": 2}}
    params |= {"temperature": 1.0, "seed": one.seed} | kinds[one.kind]
    if one.kind == "beams":
        params["seed"] = None
    return [*llm.get_tokenizer().encode(TEXTS[one.text]), one.last], SamplingParams(**params)


def told(output: RequestOutput) -> Any:
    assert output.error is None
    return [(sample.token_ids, sample.text, sample.finish_reason) for sample in output.outputs]


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_outputs_among_many_are_those_of_a_run_alone(alone: LLM, solo: dict[Asked, Any], name: str, seed: int) -> None:
    rng = random.Random(f"{name} {seed}")
    # Each with every end of the prompt: nothing else tells the three apart.
    seen = [one._replace(last=last) for one in (asked(rng) for _ in range(5)) for last in (START, END, OTHER)]
    rng.shuffle(seen)
    for one in seen:
        if one not in solo:
            prompt, params = request(alone, one)
            solo[one] = told(alone.generate([prompt], params, use_tqdm=False)[0])
    llm = load(max_num_seqs=64, **ENGINES[name])
    requests = [request(llm, one) for one in seen]
    outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests], use_tqdm=False)
    assert [told(output) for output in outputs] == [solo[one] for one in seen]
    if "num_kv_blocks" in ENGINES[name]:
        assert llm.stats.num_preemptions > 0
    assert llm.usage().used == 0
    llm.close()
