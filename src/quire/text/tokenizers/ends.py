"""Known texts of tokens that end an answer, from released models.

Many published files name only the token that ends a *text*: without the token that ends a turn, a chat never ends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from quire.errors import shown

# Tokens that end a turn, a message or a text.
END_TEXTS: Final = frozenset(
    {
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<end_of_turn>", "<turn|>", "<|endofturn|>"),
        *("<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|end_of_turn|>", "<|tool_response>"),
        *("[|endofturn|]", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>", "<EOT>", "▁<EOT>", "[EOT]", "<|EOT|>"),
        *("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>", "[EOS]", "</s>", "[e~["),
    }
)
# Tokens of models that fill in the middle of a file: padding, and the beginning of another file or repository.
FILL_TEXTS: Final = frozenset(
    {
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    }
)
# Texts that do not end an answer in a vocabulary with all tokens of one of the sets: another message follows in the
# same turn (Harmony, Solar), or the text is a tag of HTML (Gemma).
EXCEPTIONS: Final[Mapping[str, tuple[frozenset[str], ...]]] = {
    "<|end|>": (frozenset({"<|return|>", "<|call|>"}), frozenset({"<|flush|>", "<|calls|>"})),
    "</s>": (frozenset({"<end_of_turn>"}), frozenset({"<turn|>"})),
}
# Texts that end an answer only if the token is a control token.
CONTROL_ONLY: Final = frozenset({"</s>", "<eos>", "<PAD>", "[PAD]", "<EOT>", "▁<EOT>", "[EOT]", "[EOS]"})


class EndToken(NamedTuple):
    """A token that ends an answer.

    Args:
        token_id: id of the token.
        text: text of the token, "" if no vocabulary is known.
        is_by_text: True if the model's files do not name the token, and it was found by its text.
    """

    token_id: int
    text: str
    is_by_text: bool


def ends_by_text(control: Mapping[int, str], added: Mapping[int, str], texts: Collection[str]) -> dict[int, str]:
    """Return the tokens whose texts are known ends.

    Args:
        control: texts of control tokens by id.
        added: texts of other added tokens by id; converters mark some control tokens in this way.
        texts: the known texts.
    """
    every = {*control.values(), *added.values()}
    other = {text for text, beside in EXCEPTIONS.items() if any(all_of <= every for all_of in beside)}
    meant = every.intersection(texts) - other
    ends = {token_id: text for token_id, text in control.items() if text in meant}
    return ends | {token_id: text for token_id, text in added.items() if text in meant - CONTROL_ONLY}


def describe(ends: Collection[EndToken]) -> str:
    """Return a line that lists the end tokens, and marks those found by their texts."""
    if not ends:
        return "none, so that answers end at max_tokens or a stop string"
    return ", ".join(
        f"{end.token_id}{f' {shown(end.text)}' if end.text else ''}{' (by its text)' if end.is_by_text else ''}"
        for end in ends
    )
