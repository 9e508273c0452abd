"""Share of generated questions that a model answers with the right call: `python -m tools.bundled_model.evaluate`.

The questions are phrased in ways that the training does not have. The real engine and its parsers run at temperature 0
with `tool_choice` "auto". Further counts: plain questions that are answered without a call, results that reach the
answer, and outputs with thinking where it is asked for.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from quire import LLM, SamplingParams
from quire.engine.outputs.outputs import CompletionOutput
from tools.bundled_model import words
from tools.bundled_model.stories import pick
from tools.bundled_model.tool_chats import ExampleTool, ToolExchange, exchange, plain_exchange, some_tools
from tools.bundled_model.tool_kinds import CITIES, KINDS

Messages = list[dict[str, Any]]
SEED = 30
NAMES = frozenset({*CITIES, *words.GIRLS, *words.BOYS})


def cases(count: int, *, with_invented: bool) -> Iterator[tuple[list[ExampleTool], ToolExchange]]:
    """Yield tools, and a question that one of them answers, in phrasings that only the evaluation has.

    Args:
        count: number of questions.
        with_invented: True for tools or names that are invented, False for those of the training.
    """
    rng = random.Random(SEED)
    while count:
        tools = some_tools(rng, pick(rng, (1, 2, 3, 4)))
        tool = pick(rng, tuple(tools))
        told = exchange(rng, tool, is_held_out=True)
        if not told.results[0].startswith("error") and is_invented(tool, told) == with_invented:
            count -= 1
            yield tools, told


def is_invented(tool: ExampleTool, told: ToolExchange) -> bool:
    """Return whether a tool, or a name in its call, is invented."""
    arguments = told.calls[0]["function"]["arguments"]
    names = [arguments[tool.parameters[slot]] for slot in ("city", "person") if slot in tool.parameters]
    return tool.kind not in KINDS or any(name not in NAMES for name in names)


class Evaluation:
    """The counts of right and wrong outputs of one model.

    Args:
        llm: engine with the model.
        is_verbose: True prints wrong outputs.
    """

    def __init__(self, llm: LLM, *, is_verbose: bool) -> None:
        self._llm = llm
        self._is_verbose = is_verbose
        self.right: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()

    def sample(self, messages: Messages, tools: Sequence[ExampleTool] = (), **variables: bool) -> CompletionOutput:
        """Return the best output of a chat."""
        params = SamplingParams(temperature=0, max_tokens=160)
        definitions = [tool.definition for tool in tools] or None
        (output,) = self._llm.chat(
            messages, params, tools=definitions, chat_template_kwargs=variables or None, use_tqdm=False
        )
        return output.outputs[0]

    def count(self, name: str, is_right: bool, *shown: object) -> None:
        """Count one output."""
        self.asked[name] += 1
        self.right[name] += is_right
        if self._is_verbose and not is_right:
            print(name, *map(repr, shown), sep=" | ")

    def call(self, tools: list[ExampleTool], told: ToolExchange, kind: str = "") -> None:
        """Ask a question for which a tool is to be called, without thinking and with it, and give the result."""
        messages = told.messages()
        expected = [call_line(call["function"]["name"], call["function"]["arguments"]) for call in told.calls]
        sample = self.sample(messages[:1], tools)
        self.count(f"call{kind}", lines(sample) == expected, told.question, sample.text, expected)
        sample = self.sample(messages[:-1], tools)
        self.count(
            f"answer from the result{kind}", sample.content == told.answer, told.question, sample.text, told.answer
        )
        sample = self.sample(messages[:1], tools, enable_thinking=True)
        is_right = bool(sample.reasoning) and lines(sample) == expected
        self.count(f"call after thinking{kind}", is_right, told.question, sample.text, expected)

    def no_call(self, rng: random.Random) -> None:
        """Ask a question that needs no tool, with tools, and without them with thinking."""
        tools = some_tools(rng, pick(rng, (1, 2, 3, 4)))
        told = plain_exchange(rng, tools)
        sample = self.sample(told.messages()[:1], tools)
        self.count("no call", not sample.tool_calls, told.question, sample.text)
        sample = self.sample(told.messages()[:1], enable_thinking=True)
        self.count("thinking", bool(sample.reasoning and sample.content), told.question, sample.text)


def call_line(name: str, arguments: object) -> str:
    """Return a call as one line."""
    return f"{name} {json.dumps(arguments)}"


def lines(sample: CompletionOutput) -> list[str]:
    """Return the calls of a sample as lines; a call that is cut off has no arguments."""
    said = []
    for call in sample.tool_calls or ():
        try:
            said.append(call_line(call.name, json.loads(call.arguments)))
        except ValueError:
            said.append(call.name)
    return said


def main() -> None:
    """Print the share of right outputs of each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="bundled")
    parser.add_argument("--count", type=int, default=200, help="number of questions of each kind")
    parser.add_argument("--wrong", action="store_true", help="print wrong outputs")
    options = parser.parse_args()
    with closing(LLM(options.model, num_threads=1, num_kv_blocks=256)) as llm:
        evaluation = Evaluation(llm, is_verbose=options.wrong)
        rng = random.Random(SEED + 1)
        for tools, told in cases(options.count, with_invented=False):
            evaluation.call(tools, told)
            evaluation.no_call(rng)
        for tools, told in cases(options.count, with_invented=True):
            evaluation.call(tools, told, " (invented tool or name)")
    for name, asked in evaluation.asked.items():
        right = evaluation.right[name]
        print(f"{name}: {right} of {asked} ({right / asked:.1%})")


if __name__ == "__main__":
    main()
