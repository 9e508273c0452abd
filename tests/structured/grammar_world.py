"""A small vocabulary with several ways to write most texts, grammars over it, and a constraint without memory."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from quire.platform.bounded.process import RemoteCall
from quire.scheduling.plan import NewSequence
from quire.sequences.params import SamplingParams
from quire.sequences.structured import GrammarSource, StructuredOutputs
from quire.text.structured.compiled_grammar import Grammar
from quire.text.structured.grammar_setup import CompiledGrammars, GrammarSetup
from quire.text.structured.grammar_state import GrammarState
from quire.text.structured.local_grammars import LocalMasks
from quire.text.structured.mask_filler import GrammarStates
from quire.text.structured.output_constraint import OutputConstraint
from quire.text.structured.state_table import StateTable

MERGES = [
    *(("a", "b"), ("n", "a"), ("na", "m"), ("nam", "e"), ('"', "name")),
    *(('"', ":"), ("t", "r"), ("u", "e"), ("1", "2")),
]
CHARS = [*'abcdefghijklmnopqrstuvwxy{}[]":,.0123456789', "Ġ", "Ċ"]
VOCAB = ["<eos>", *sorted(CHARS), *("".join(pair) for pair in MERGES)]
END = 0
STEPS = itertools.count()
# Ids that the model's head has, and no token.
NUM_IDS = len(VOCAB) + 5
NUM_WORDS = -(-NUM_IDS // 32)
# There is no z to write.
WANTED: dict[str, dict[str, Any]] = {
    "schema": {
        "json": {
            "type": "object",
            "properties": {"name": {"enum": ["ab", "true"]}, "n": {"type": "integer", "maximum": 120}},
            "required": ["name", "n"],
            "additionalProperties": False,
        }
    },
    "compact": {
        "json": {
            "type": "object",
            "properties": {
                "name": {"type": "boolean"},
                "ab": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
            },
            "required": ["name", "ab"],
            "additionalProperties": False,
        },
        "disable_any_whitespace": True,
    },
    "regex": {"regex": "(ab|name){1,4}( true)?[.]"},
    "choice": {"choice": ["a", "ab", "name", "names are true"]},
    "grammar": {"grammar": 'start: "name" x "."\nx: "ab" x | "12"'},
    "dead": {"regex": "[ab]{2,6}z|c"},
}


def tokenizer() -> Tokenizer:
    library = Tokenizer(models.BPE(vocab={token: idx for idx, token in enumerate(VOCAB)}, merges=MERGES))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<eos>"])
    return library


def json_call() -> RemoteCall:
    return RemoteCall("quire.text.tokenizers.tokenizer_json:same", (str(tokenizer().to_str()),))


@cache
def grammars(end_token_ids: tuple[int, ...] = (END,)) -> CompiledGrammars:
    return CompiledGrammars(GrammarSetup(json_call(), NUM_IDS, end_token_ids))


@cache
def compiled(source: GrammarSource, end_token_ids: tuple[int, ...] = (END,)) -> Grammar:
    return grammars(end_token_ids).find(source)


def states(find: Callable[[GrammarSource], Grammar] = compiled) -> GrammarStates:
    """Return grammar states whose masks this thread fills."""
    return GrammarStates(LocalMasks(StateTable(find, NUM_IDS, (END,))), NUM_IDS, (END,))


def constraint_of(new: NewSequence) -> OutputConstraint:
    constraint = OutputConstraint.of(new)
    assert constraint is not None
    return constraint


def new_sequence(
    name: str, output: tuple[int, ...] = (), *, prompt: tuple[int, ...] = (3, 4), **params: Any
) -> NewSequence:
    wanted = StructuredOutputs(**WANTED[name])
    return NewSequence(SamplingParams(structured_outputs=wanted, **params), 7, 0, len(prompt), prompt + output, (END,))


def grammar_state(name: str, **params: Any) -> GrammarState:
    constraint = constraint_of(new_sequence(name, **params))
    assert constraint.source is not None
    return GrammarState(compiled(constraint.source), constraint, (END,))


def filled(known: GrammarState, draft: tuple[int, ...] = ()) -> list[set[int]]:
    """Return the tokens that are allowed at the next position, and behind each draft that the grammar has."""
    rows = [memoryview(bytearray(b"\xff" * 4 * NUM_WORDS)) for _ in range(1 + len(draft))]
    known.begin_step(next(STEPS))
    return [allowed(row) for row in rows[: known.fill(rows, draft)]]


def allowed(mask: memoryview | bytes) -> set[int]:
    """Return the ids whose bits are set, looked at one by one."""
    return {idx for idx in range(len(mask) * 8) if mask[idx // 8] >> (idx % 8) & 1}


def fresh(name: str, output: list[int], **params: Any) -> GrammarState:
    """Return a constraint that has seen nothing but an output, token by token."""
    known = grammar_state(name, **params)
    for place, token_id in enumerate(output):
        known.sync(place, [token_id])
    return known


def walk(name: str, rng: random.Random, length: int = 40, **params: Any) -> list[int]:
    """Return an output drawn from the masks, without what ends it; stops at a dead end too."""
    known = grammar_state(name, **params)
    output: list[int] = []
    while len(output) < length:
        rows = filled(known)
        if known.error is not None:
            return output
        token_id = rng.choice(sorted(rows[0]))
        if token_id == END:
            return output
        known.sync(len(output), [token_id])
        output.append(token_id)
    return output


def text(output: list[int]) -> str:
    return str(tokenizer().decode(output, skip_special_tokens=False))
