"""Bugs of media put in on purpose, and the nets that must catch them; see `test_seeded_bugs`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.memory import KVCacheManager, MediaSpan, Namespace, TokenChain
from quire.memory.groups import partial_block
from quire.memory.prefix.radix_node import RadixNode
from quire.memory.sequence_blocks import SequenceBlocks
from quire.scheduling import NewSequence, Scheduler
from quire.sequences import Sequence as TokenStream
from tests.memory.nets import MEDIA_NETS, TEARS, each_net, media_reading_back, media_run, media_twin, media_world

Patch = pytest.MonkeyPatch


def forget_the_media(patch: Patch) -> None:
    patch.setattr(TokenChain, "_entries_of", lambda *_: {})


def forget_which_media(patch: Patch) -> None:
    honest = MediaSpan.entry
    patch.setattr(MediaSpan, "entry", lambda span, *place: honest(span._replace(digest=b""), *place))


def forget_where_media_begin(patch: Patch) -> None:
    honest = MediaSpan.entry
    patch.setattr(MediaSpan, "entry", lambda span, start, end: honest(span, start, end)[:-16] + bytes(8) + b"\1" * 8)


def number_media_from_the_block(patch: Patch) -> None:
    """The rows of a block count from its own beginning, so that all blocks within a medium look alike."""
    honest = MediaSpan.entry

    def entry(span: MediaSpan, start: int, end: int) -> bytes:
        first = max(span.start, start)
        return honest(MediaSpan(first, span.end - first, span.digest), start, end)

    patch.setattr(MediaSpan, "entry", entry)


def note_media_in_the_first_block_only(patch: Patch) -> None:
    honest = TokenChain._entries_of

    def entries_of(chain: TokenChain, start: int, end: int) -> dict[int, bytes]:
        return {idx: entry for idx, entry in honest(chain, start, end).items() if idx == 0}

    patch.setattr(TokenChain, "_entries_of", entries_of)


def take_part_of_a_block_for_media(patch: Patch) -> None:
    patch.setattr(TokenChain, "has_media", lambda *_: False)


def take_part_of_a_block_of_media(patch: Patch) -> None:
    """A published block with media begins with a token like any other."""

    def first_token(node: RadixNode, position: int) -> bytes:
        start = position * node.layout.block_bytes
        return bytes(node.data[start : start + 4])

    patch.setattr(RadixNode, "_first_token", first_token)


def publish_tails_of_media(patch: Patch) -> None:
    honest = partial_block.tail_of

    def tail_of(groups: object, state: SequenceBlocks) -> partial_block.PartialMatch | None:
        with pytest.MonkeyPatch.context() as blind:
            blind.setattr(TokenChain, "has_media", lambda *_: False)
            return honest(groups, state)  # type: ignore[arg-type]

    patch.setattr(partial_block, "tail_of", tail_of)


def forget_the_media_of_a_child(patch: Patch) -> None:
    honest = TokenChain.fork

    def fork(chain: TokenChain, tokens: list[int]) -> TokenChain:
        child = honest(chain, tokens)
        child.media = ()
        return child

    patch.setattr(TokenChain, "fork", fork)


def forget_media_when_truncated(patch: Patch) -> None:
    honest = TokenChain.truncate

    def truncate(chain: TokenChain, num_tokens: int) -> None:
        honest(chain, num_tokens)
        chain.media = tuple(span for span in chain.media if span.end <= num_tokens)

    patch.setattr(TokenChain, "truncate", truncate)


def pin_without_the_media(patch: Patch) -> None:
    honest, hidden = KVCacheManager.pin, KVCacheManager.chain

    def pin(manager: KVCacheManager, name: str, chain: TokenChain) -> int:
        return honest(manager, name, hidden(manager, chain.tokens, Namespace()) if chain.media else chain)

    patch.setattr(KVCacheManager, "pin", pin)


def look_up_without_the_media(patch: Patch) -> None:
    """The scheduler's chains know of none."""
    honest = KVCacheManager.chain
    patch.setattr(KVCacheManager, "chain", lambda manager, tokens, namespace, *_: honest(manager, tokens, namespace))


def open_again_without_the_media(patch: Patch) -> None:
    honest = Scheduler._opening

    def new_sequence(scheduler: Scheduler, sequence: TokenStream) -> NewSequence:
        is_first = sequence.request.account is None or not sequence.request.num_preemptions
        return honest(scheduler, sequence) if is_first else honest(scheduler, sequence)._replace(media=())

    patch.setattr(Scheduler, "_opening", new_sequence)


CAUGHT: list[tuple[Callable[[Patch], None], tuple[Callable[[], None], ...]]] = [
    (forget_the_media, (*MEDIA_NETS, media_run)),
    (look_up_without_the_media, (media_run,)),
    (open_again_without_the_media, (media_run,)),
    (forget_which_media, MEDIA_NETS),
    (forget_where_media_begin, MEDIA_NETS),
    (number_media_from_the_block, (media_reading_back, media_twin)),
    (note_media_in_the_first_block_only, (media_reading_back, media_twin)),
    (take_part_of_a_block_for_media, MEDIA_NETS),
    (take_part_of_a_block_of_media, MEDIA_NETS),
    (publish_tails_of_media, (media_twin, media_world)),
    (forget_the_media_of_a_child, (media_reading_back, media_twin)),
    (forget_media_when_truncated, (media_reading_back, media_twin, media_world)),
    (pin_without_the_media, (media_twin,)),
]


@pytest.mark.parametrize(("seed_bug", "net"), each_net(CAUGHT))
def test_the_net_catches_the_bug(
    monkeypatch: pytest.MonkeyPatch, seed_bug: Callable[[Patch], None], net: Callable[[], None]
) -> None:
    seed_bug(monkeypatch)
    with pytest.raises(TEARS):
        net()
