"""Histories of memory, each of which must leave the greedy tokens of a checkpoint what transformers says they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.memory import check
from tests.hosted.checkpoints import BEAM_TOKENS, BEAMS, NEW_TOKENS, Reference

GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
BEAM_SEARCH = SamplingParams(temperature=0.0, max_tokens=BEAM_TOKENS, ignore_eos=True, beam_width=BEAMS, n=BEAMS)
# Room for the longest prompt with its continuation alone, so that others are preempted: the first that is enough.
SMALL_POOLS = (12, 16, 24)
# How often each prompt is there: more often where all layers have windows, and little memory is enough for many.
COPIES = (1, 2, 4)


def run_histories(folder: Path, reference: Reference, names: tuple[str, ...], **options: Any) -> dict[str, str]:
    """Run histories; return "equal" for each, or what was wrong.

    Args:
        names: keys of `ENGINES`.
        options: of the engines, besides those of the histories.
    """
    return {history: said for name in names for history, said in ENGINES[name](folder, reference, options)}


def load(folder: Path, options: Any, **more: Any) -> LLM:
    """Load a checkpoint in float32 on one thread, with options besides, and those of a history."""
    defaults = {"skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "num_threads": 1, "block_size": 8}
    return LLM(str(folder), **defaults | {"max_model_len": 128, "num_kv_blocks": 200} | options | more)


Said = Iterator[tuple[str, str]]


def _uncached(folder: Path, reference: Reference, options: Any) -> Said:
    """Each prompt alone, then all of them in one batch."""
    with load(folder, options, max_num_seqs=8, enable_prefix_caching=False) as llm:
        yield "alone", _difference(llm, reference, at_once=1)
        yield "batched", _difference(llm, reference)


def _chunked(folder: Path, reference: Reference, options: Any) -> Said:
    """In chunks of 7 tokens and less, which no prompt or block is a multiple of; then from the cache; then forked."""
    with load(folder, options, max_num_seqs=3, max_num_batched_tokens=7) as llm:
        yield "chunked", _difference(llm, reference)
        computed = llm.stats.computed_tokens
        said = _difference(llm, reference)
        yield "hit", said if llm.stats.computed_tokens < 2 * computed else "no prompt hits the cache the second time"
        said = _difference(llm, reference, replace(GREEDY, n=3))
        yield "forked", said if llm.stats.num_copies else "no block is copied after a fork"
        (output,) = llm.generate([reference.prompts[1]], BEAM_SEARCH, use_tqdm=False)
        found = [beam.token_ids for beam in output.outputs]
        yield "beams", "equal" if found == reference.beams else f"{found}, not {reference.beams}; {output.error}"


def _recomputed(folder: Path, reference: Reference, options: Any) -> Said:
    yield "recomputed", _preempted(folder, reference, options)


def _swapped(folder: Path, reference: Reference, options: Any) -> Said:
    yield "swapped", _preempted(folder, reference, {**options, "swap_space": 8 << 20, "preemption_mode": "swap"})


def _preempted(folder: Path, reference: Reference, options: Any) -> str:
    for num_copies in COPIES:
        with _load_small(folder, options) as llm:
            said = _difference(llm, reference, num_copies=num_copies)
            if llm.stats.num_preemptions:
                return said
    return "nothing is preempted"


def _load_small(folder: Path, options: Any) -> LLM:
    *smaller, largest = SMALL_POOLS
    for num_blocks in smaller:
        with suppress(ConfigError):
            return load(folder, options, num_kv_blocks=num_blocks, max_model_len=96)
    return load(folder, options, num_kv_blocks=largest, max_model_len=96)


ENGINES: Mapping[str, Callable[[Path, Reference, Any], Said]] = {
    "uncached": _uncached,
    "chunked": _chunked,
    "recomputed": _recomputed,
    "swapped": _swapped,
}


def _difference(
    llm: LLM, reference: Reference, params: SamplingParams = GREEDY, at_once: int = 16, num_copies: int = 1
) -> str:
    """Return "equal" if all samples of all prompts are as expected, or the first difference."""
    pairs = list(zip(reference.prompts, reference.outputs, strict=True)) * num_copies
    for start in range(0, len(pairs), at_once):
        part = pairs[start : start + at_once]
        outputs = llm.generate([prompt for prompt, _ in part], params, use_tqdm=False)
        check(llm.engine.scheduler.memory)
        for (prompt, expected), output in zip(part, outputs, strict=True):
            for sample in output.outputs:
                if sample.token_ids != expected:
                    return f"after {len(prompt)} tokens {sample.token_ids}, not {expected}; {output.error}"
    return "equal"
