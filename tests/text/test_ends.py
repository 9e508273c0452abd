"""The tokens of GGUF files that end an answer: those that a file names, and those with known texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from quire.text.tokenizers.ends import EndToken, describe
from quire.text.tokenizers.gguf_tokenizer import end_token_ids
from tests.text.gguf_fields import CONTROL, NORMAL, USER_DEFINED
from tests.text.real_size import PREFIX, gemma_size_fields, qwen_size_fields


def fields(*tokens: str, kind: int = CONTROL, **named: int) -> dict[str, Any]:
    """Return the fields of a vocabulary of tokens of one kind, after an ordinary token."""
    return {
        f"{PREFIX}tokens": ["a", *tokens],
        f"{PREFIX}token_type": [NORMAL, *[kind] * len(tokens)],
        **{f"{PREFIX}{name}_token_id": token_id for name, token_id in named.items()},
    }


TURN_ENDS = (
    *("<end_of_turn>", "<|eot_id|>", "<|im_end|>", "<turn|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>"),
    *("<|endoftext|>", "<|end_of_text|>", "<EOT>", "[EOT]", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<|eot|>"),
)


@pytest.mark.parametrize("end", TURN_ENDS)
def test_a_control_token_that_ends_turns_is_found_by_its_text(end: str) -> None:
    assert end_token_ids(fields("<bos>", "<start>", end, eos=1)) == (1, 3)
    assert end_token_ids(fields(end, kind=NORMAL, eos=0)) == (0,)


def test_ends_that_a_file_names_come_first() -> None:
    named = fields("<|im_end|>", "x", "y", "z", eos=2, eot=4, eom=2, fim_pad=3)
    assert end_token_ids(named) == (2, 4, 3, 1)
    assert end_token_ids({}) == ()
    assert end_token_ids({f"{PREFIX}eos_token_id": 7}) == (7,)


@pytest.mark.parametrize("token_id", [-1, 3, 0xFFFFFFFF, True, "a", None, [1]])
def test_an_end_outside_the_vocabulary_is_none(token_id: Any) -> None:
    assert end_token_ids(fields("x", "<|im_end|>") | {f"{PREFIX}eos_token_id": token_id}) == (2,)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        # Another message of the same turn follows.
        (("<|end|>", "<|return|>", "<|call|>"), (2, 3)),
        (("<|end|>", "<|flush|>", "<|calls|>"), (2, 3)),
        (("<|end|>", "<|return|>"), (1, 2)),
        # A tag of HTML.
        (("</s>", "<end_of_turn>"), (2,)),
        (("</s>", "<turn|>"), (2,)),
        (("</s>", "<|im_end|>"), (1, 2)),
    ],
)
def test_texts_with_another_meaning(tokens: tuple[str, ...], expected: tuple[int, ...]) -> None:
    assert end_token_ids(fields(*tokens)) == expected
    # What a file names is an end whatever its text.
    assert end_token_ids(fields(*tokens, eos=1))[0] == 1


def test_added_tokens_that_converters_do_not_mark_as_control_tokens() -> None:
    """DeepSeek Coder's `<|EOT|>` and Gemma 4's `<|tool_response>` are user-defined; so is the HTML tag."""
    assert end_token_ids(fields("<|EOT|>", "<|tool_response>", "</s>", "[PAD]", "<EOT>", kind=USER_DEFINED)) == (1, 2)


def test_a_file_without_types_has_texts_only() -> None:
    without = fields("<|endoftext|>", "<|end|>")
    del without[f"{PREFIX}token_type"]
    assert end_token_ids(without) == (1, 2)


def test_fillers_and_other_files_end_what_fills_in_a_middle() -> None:
    tokens = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
    assert end_token_ids(fields(*tokens, kind=USER_DEFINED)) == (4, 5, 6)


@pytest.mark.parametrize(
    ("make", "expected"),
    [(qwen_size_fields, ["<|im_end|>", "<|endoftext|>"]), (gemma_size_fields, ["<eos>", "<end_of_turn>"])],
)
def test_vocabularies_of_real_size(make: Callable[[], Mapping[str, Any]], expected: list[str]) -> None:
    assert [make()[f"{PREFIX}tokens"][token_id] for token_id in end_token_ids(make())] == expected


def test_the_line_of_the_log() -> None:
    ends = [EndToken(1, "<eos>", False), EndToken(106, "<end_of_turn>", True), EndToken(7, "", False)]
    assert describe(ends) == "1 '<eos>', 106 '<end_of_turn>' (by its text), 7"
    assert describe([]).startswith("none")
