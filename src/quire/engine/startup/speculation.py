"""Builds the drafter that the options of speculative decoding select."""

from __future__ import annotations

import logging
from collections.abc import Callable

from quire.config import EngineConfig, SpeculativeConfig
from quire.distributed.ranks import Ranks
from quire.errors import ConfigError
from quire.models.capacity.draft_compat import check_draft, mtp_spec
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.families import build
from quire.models.families.quantization_config import without_quantization
from quire.models.hosted.choice import read_decoder
from quire.models.loading.weights import load_weights
from quire.models.modules.causal_model import CausalModel
from quire.models.modules.decoder import Decoder
from quire.models.modules.mtp import MTPHead
from quire.models.specs.sharding import Share, shard_spec, share_of, splits_of
from quire.sequences.decoding.drafting import Drafter, ModelDrafter
from quire.sequences.decoding.lookup import PromptLookup
from quire.sequences.decoding.speculation import AdaptiveDrafter
from quire.sequences.decoding.suffixes import SuffixDrafter
from quire.text.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


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


def open_draft(config: EngineConfig, decoder: CausalModel, tokenizer: Tokenizer | None) -> Checkpoint | None:
    """Open the draft model's checkpoint, if there is one, and check that it can make drafts for the target."""
    name = config.speculative.draft_model
    if name is None:
        return None
    checkpoint = Checkpoint.open(name)
    spec = read_decoder(checkpoint.config, config.model.model_impl).spec
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
    decoder: CausalModel,
    tokenizer: Tokenizer | None,
    load: Callable[..., CausalModel],
    ranks: Ranks | None = None,
) -> tuple[Checkpoint | None, CausalModel | None]:
    """Load the model that makes drafts, if there is one: a draft model, or the target's MTP head."""
    if config.speculative.speculative_method == "mtp":
        return None, _load_mtp_head(config, checkpoint, decoder, ranks)
    guide = open_draft(config, decoder, tokenizer)
    if guide is None:
        return None, None
    if ranks is None:
        draft = load(guide)
    elif is_divisible(guide, share_of(ranks.group)):
        draft = load(guide, ranks=ranks)
    else:
        logger.info("draft model: whole on every rank, as its heads or columns cannot be divided among %d", ranks.size)
        draft = load(guide)
        draft.replicas = ranks.group
    return guide, draft


def is_divisible(checkpoint: Checkpoint, share: Share) -> bool:
    """Return whether ranks can divide the heads and columns of a model among them."""
    spec, _ = build(without_quantization(checkpoint.config))
    try:
        shard_spec(spec, share)
    except ConfigError:
        return False
    return True


def _load_mtp_head(config: EngineConfig, checkpoint: Checkpoint, target: CausalModel, ranks: Ranks | None) -> MTPHead:
    # A config may keep its MTP field without the tensors, for example when transformers saved the model.
    is_stored = any(name.startswith("mtp.") for name in checkpoint.tensors)
    spec, splits = mtp_spec(config.model.model, target.spec, is_stored=is_stored), None
    assert isinstance(target, Decoder), "other models have no head"
    if ranks is not None:  # the target's layers are sharded already, the head's layer is not
        share = share_of(ranks.group)
        splits = {f"mtp.{name}": split for name, split in splits_of(spec, share).items()}
        spec = shard_spec(spec, share)
    head = MTPHead(target, spec)
    _, weight_map = build(without_quantization(checkpoint.config))
    load_weights(checkpoint, weight_map, head, splits)
    return head
