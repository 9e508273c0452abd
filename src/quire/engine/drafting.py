"""From the options of speculative decoding to a drafter, and what the engine tells it of each step."""

from __future__ import annotations

from collections.abc import Sequence

from quire.capacity.draft_compat import check_draft
from quire.config import EngineConfig, SpeculativeConfig
from quire.decoding.drafting import Drafter, ModelDrafter
from quire.decoding.lookup import PromptLookup
from quire.decoding.speculation import Speculation
from quire.decoding.suffixes import SuffixDrafter
from quire.engine.draft_costs import DraftCosts
from quire.errors import ConfigError
from quire.models.checkpoint import Checkpoint
from quire.models.decoder import Decoder
from quire.models.families import build
from quire.scheduling.plan import PlanItem
from quire.text.tokenizer import Tokenizer


def make_speculation(config: SpeculativeConfig) -> Speculation | None:
    """Return what guesses how sequences go on; None where nobody does."""
    source: Drafter
    match config.speculative_method:
        case "ngram":
            source = PromptLookup(config.lookup_min, config.lookup_max)
        case "suffix":
            source = SuffixDrafter(config.lookup_min, config.cache_bytes)
        case "draft":
            source = ModelDrafter()
        case _:
            return None
    return Speculation(source, config.num_tokens)


def open_draft(config: EngineConfig, decoder: Decoder, tokenizer: Tokenizer | None) -> Checkpoint | None:
    """Open the draft model's files, if there is one, and see that it can guess for the target.

    Args:
        config: of the engine.
        decoder: the target.
        tokenizer: the target's, None where token ids are all that is known of tokens.

    Raises:
        ConfigError: it cannot be found or read, has another vocabulary, or was made for shorter contexts.
    """
    name = config.speculative.draft_model
    if name is None:
        return None
    checkpoint = Checkpoint.open(name)
    spec, _ = build(checkpoint.config)
    check_draft(config, decoder.spec, spec)
    if tokenizer is not None and (checkpoint.folder / "tokenizer.json").is_file():
        different = tokenizer.differs_at(Tokenizer.from_folder(checkpoint.folder))
        if different is not None:
            raise ConfigError(
                f"draft_model {name} has another vocabulary than {config.model.model}: token {different} is another "
                "one",
                field="draft_model",
            )
    return checkpoint


class DraftPacer:
    """Tells a speculation what drafts cost, as steps go by.

    Args:
        speculation: decides how many drafts there are.
    """

    def __init__(self, speculation: Speculation) -> None:
        self._speculation = speculation
        self._costs = DraftCosts(speculation.num_tokens)
        self._num_seqs = 0

    def note_step(self, items: Sequence[PlanItem], elapsed_s: float) -> None:
        """Take in how long a step took; one that computes prompts says nothing about drafts."""
        num_drafts = sum(item.num_draft for item in items)
        if sum(len(item.token_ids) for item in items) - num_drafts == len(items):
            num_seqs = len(items)
            self._costs.note_step(num_seqs, num_drafts, elapsed_s)
            self._speculation.is_resting = self._costs.wants_rest
            # Steps without drafts change nothing of what drafts cost.
            if num_drafts or num_seqs != self._num_seqs:
                self._num_seqs = num_seqs
                self._speculation.step_costs = self._costs.by_depth(num_seqs)
