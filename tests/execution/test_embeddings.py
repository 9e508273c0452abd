"""The rows of a step that take given embeddings."""

from __future__ import annotations

import torch

from quire.execution.runners.runner import keep_extras
from quire.execution.step.embeddings import MultimodalEmbeddings
from quire.memory.prefix.prompt_embeddings import MediaSpan
from quire.scheduling.plan import NewSequence, ScheduledSequence
from quire.sequences.media import Media
from quire.sequences.params import SamplingParams

FOX, KITE = torch.arange(8.0).reshape(4, 2), torch.arange(100.0, 106.0).reshape(3, 2)
MEDIA = (Media(MediaSpan(2, 4, b"fox"), FOX), Media(MediaSpan(6, 3, b"kite"), KITE))


def item(seq_id: int, start: int, count: int, media: tuple[Media, ...] | None = None) -> ScheduledSequence:
    new_sequence = None if media is None else NewSequence(SamplingParams(), 0, 0, 12, (5,) * 12, (), media)
    return ScheduledSequence(seq_id, start, (5,) * count, (), 0, new_sequence)


def rows(
    open_media: MultimodalEmbeddings, *items: ScheduledSequence, finished_ids: tuple[int, ...] = ()
) -> dict[int, list[float]] | None:
    """Return the embeddings of a step by row."""
    keep_extras({"media": open_media.by_sequence}, finished_ids, items)
    starts = [sum(len(one.token_ids) for one in items[:idx]) for idx in range(len(items) + 1)]
    found = open_media.rows(items, starts)
    if found is None:
        return None
    assert found[0].dtype is torch.int64
    return dict(zip(found[0].tolist(), found[1].tolist(), strict=True))


def test_a_step_has_the_embedding_rows_of_its_own_tokens() -> None:
    for cut in range(1, 12):
        open_media = MultimodalEmbeddings(torch.device("cpu"))
        first = rows(open_media, item(0, 0, 3, ()), item(1, 0, cut, MEDIA)) or {}
        second = rows(open_media, item(1, cut, 12 - cut), item(0, 3, 1)) or {}
        by_place = {row - 3: row_of for row, row_of in first.items()} | {row + cut: at for row, at in second.items()}
        assert by_place == dict(enumerate([*FOX.tolist(), *KITE.tolist()], 2))
        assert rows(open_media, item(0, 4, 1), item(1, 12, 1)) is None


def test_what_is_closed_is_forgotten_and_may_be_opened_again() -> None:
    open_media = MultimodalEmbeddings(torch.device("cpu"))
    assert rows(open_media, item(0, 0, 1, ())) is None
    assert rows(open_media, item(1, 0, 3, MEDIA)) == {2: [0.0, 1.0]}
    assert rows(open_media, item(1, 0, 3, ()), finished_ids=(1,)) is None
    assert rows(open_media, item(2, 5, 2, MEDIA), finished_ids=(0, 1)) == {0: [6.0, 7.0], 1: [100.0, 101.0]}
    # Preempted, it comes again from its beginning.
    assert rows(open_media, item(2, 0, 3, MEDIA), finished_ids=(2,)) == {2: [0.0, 1.0]}
