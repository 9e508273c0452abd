"""Builds the drafter that the options of speculative decoding select."""

from __future__ import annotations

from collections.abc import Callable

from quire.capacity.draft_compat import check_draft, mtp_spec
from quire.config import EngineConfig, SpeculativeConfig
from quire.decoding.drafting import Drafter, ModelDrafter
from quire.decoding.lookup import PromptLookup
from quire.decoding.speculation import AdaptiveDrafter
from quire.decoding.suffixes import SuffixDrafter
from quire.errors import ConfigError
from quire.models.checkpoint import Checkpoint
from quire.models.decoder import Decoder
from quire.models.families import build
from quire.models.mtp import MTPHead
from quire.models.quantization_config import without_quantization
from quire.models.weights import load_weights
from quire.text.tokenizer import Tokenizer


def make_speculation(config: SpeculativeConfig) -> AdaptiveDrafter | None:
    """Return the drafter of speculative decoding; None without a method."""
    source: Drafter
    match config.speculative_method:
        case "ngram":
            source = PromptLookup(config.lookup_min, config.lookup_max)
        case "suffix":
            source = SuffixDrafter(config.lookup_min, config.cache_bytes)
        case "draft" | "mtp":
            source = ModelDrafter()
        case _:
            return None
    return AdaptiveDrafter(source, config.num_tokens)


def open_draft(config: EngineConfig, decoder: Decoder, tokenizer: Tokenizer | None) -> Checkpoint | None:
    """Open the draft model's checkpoint, if there is one, and check that it can make drafts for the target.

    Args:
        config: configuration of the engine.
        decoder: decoder of the target.
        tokenizer: tokenizer of the target, None where the engine works on token ids only.

    Raises:
        ConfigError: the draft model cannot be found or read, has another vocabulary, or a shorter context.
    """
    name = config.speculative.draft_model
    if name is None:
        return None
    checkpoint = Checkpoint.open(name)
    spec, _ = build(without_quantization(checkpoint.config))
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


def load_draft(
    config: EngineConfig,
    checkpoint: Checkpoint,
    decoder: Decoder,
    tokenizer: Tokenizer | None,
    load: Callable[[Checkpoint], Decoder],
) -> tuple[Checkpoint | None, Decoder | None]:
    """Load the model that makes drafts, if there is one: a draft model, or the target's MTP head.

    Args:
        config: configuration of the engine.
        checkpoint: files of the target.
        decoder: decoder of the target, with all its weights.
        tokenizer: tokenizer of the target, None where the engine works on token ids only.
        load: function that loads the decoder of a checkpoint.

    Returns:
        The checkpoint of a draft model, and the decoder.

    Raises:
        ConfigError: see `open_draft`, or the target has no MTP head.
        CheckpointError: a tensor is missing or wrong.
    """
    if config.speculative.speculative_method == "mtp":
        return None, _load_mtp_head(config, checkpoint, decoder)
    guide = open_draft(config, decoder, tokenizer)
    return guide, None if guide is None else load(guide)


def _load_mtp_head(config: EngineConfig, checkpoint: Checkpoint, target: Decoder) -> MTPHead:
    # Configurations keep the field where the tensors were left out, as when transformers saves a model.
    is_stored = any(name.startswith("mtp.") for name in checkpoint.tensors)
    head = MTPHead(target, mtp_spec(config.model.model, target.spec, is_stored=is_stored))
    _, weight_map = build(without_quantization(checkpoint.config))
    load_weights(checkpoint, weight_map, head)
    return head
