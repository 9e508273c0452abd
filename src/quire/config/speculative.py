"""Options of speculative decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from quire.config.checks import GIVEN_ALIKE, check_choices, check_whole, put_path, put_size
from quire.errors import ConfigError, shown

METHODS = ("off", "ngram", "suffix", "draft", "mtp")
MAX_TOKENS = 32
MAX_LOOKUP = 64
DEFAULT_TOKENS = 8
DEFAULT_LOOKUP_MIN, DEFAULT_LOOKUP_MAX = 2, 8
DEFAULT_CACHE_BYTES = 64 << 20
# Option -> the methods that use it.
METHODS_OF: Final[Mapping[str, tuple[str, ...]]] = {
    "num_speculative_tokens": METHODS[1:],
    "prompt_lookup_min": ("ngram", "suffix"),
    "prompt_lookup_max": ("ngram",),
    "suffix_cache_bytes": ("suffix",),
    "draft_model": ("draft",),
}
# Keys of vLLM's `speculative_config` that have another name here.
KEY_ALIASES: Final[Mapping[str, str]] = {"method": "speculative_method", "model": "draft_model"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding: draft tokens are proposed, and one step verifies several of them.

    Args:
        speculative_method: source of the drafts: "off", "ngram" (tokens after an earlier occurrence of the last tokens
            in the sequence), "suffix" (the same, also in earlier outputs of the same tenant), "draft" (a smaller model,
            see `draft_model`), or "mtp" (the model's own MTP head for multi-token prediction).
        num_speculative_tokens: maximum number of drafts per sequence and step, 1 to 32; the number adapts to the
            acceptance rate and the cost of drafts. None takes 8.
        prompt_lookup_min: minimum number of last tokens that must occur earlier; None takes 2.
        prompt_lookup_max: maximum length of a match that is compared, with "ngram"; None takes 8 or
            `prompt_lookup_min`, whichever is more.
        suffix_cache_bytes: memory for earlier outputs, with "suffix"; the oldest are evicted. None takes 64 MiB.
        draft_model: folder or hub id of a draft model with the same vocabulary, with "draft"; it computes each token
            too.
    """

    speculative_method: str = field(default="off", metadata={"choices": METHODS})
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    suffix_cache_bytes: int | None = None
    draft_model: str | None = field(default=None, metadata=GIVEN_ALIKE)

    def __post_init__(self) -> None:
        method = self.speculative_method
        check_choices(self)
        check_whole("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_TOKENS, optional=True)
        check_whole("prompt_lookup_min", self.prompt_lookup_min, 1, MAX_LOOKUP, optional=True)
        check_whole("prompt_lookup_max", self.prompt_lookup_max, 1, MAX_LOOKUP, optional=True)
        put_size(self, "suffix_cache_bytes", 1 << 16, optional=True)
        put_path(self, "draft_model", optional=True)
        for name, methods in METHODS_OF.items():
            if getattr(self, name) is not None and method not in methods:
                raise ConfigError(
                    f"{name} ({getattr(self, name)}) needs speculative_method {' or '.join(map(repr, methods))}, "
                    f"got {shown(method)}",
                    field=name,
                )
        if method == "draft" and self.draft_model is None:
            raise ConfigError(
                "draft_model must be a model with the same vocabulary where speculative_method is 'draft', got None",
                field="draft_model",
            )
        if self.prompt_lookup_max is not None and self.prompt_lookup_max < self.lookup_min:
            raise ConfigError(
                f"prompt_lookup_max ({self.prompt_lookup_max}) must be at least prompt_lookup_min ({self.lookup_min})",
                field="prompt_lookup_max",
            )

    @property
    def num_tokens(self) -> int:
        """Maximum number of drafts per sequence and step; 0 without speculative decoding."""
        return 0 if self.speculative_method == "off" else self.num_speculative_tokens or DEFAULT_TOKENS

    @property
    def lookup_min(self) -> int:
        """Minimum length of a match, in tokens."""
        return self.prompt_lookup_min or DEFAULT_LOOKUP_MIN

    @property
    def lookup_max(self) -> int:
        """Maximum length of a match that is compared, in tokens."""
        return self.prompt_lookup_max or max(DEFAULT_LOOKUP_MAX, self.lookup_min)

    @property
    def cache_bytes(self) -> int:
        """Memory for earlier outputs, in bytes."""
        return self.suffix_cache_bytes or DEFAULT_CACHE_BYTES


def flatten(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the fields of `speculative_config`, vLLM's mapping, as separate options."""
    if "speculative_config" not in options:
        return dict(options)
    flat = {name: value for name, value in options.items() if name != "speculative_config"}
    speculative = options["speculative_config"]
    if speculative is None:
        return flat
    if not isinstance(speculative, Mapping):
        raise ConfigError(
            f"speculative_config must be a mapping or None, got {shown(speculative)}", field="speculative_config"
        )
    names = {KEY_ALIASES.get(key, key): value for key, value in speculative.items()}
    if names.get("speculative_method") == "draft_model":  # vLLM's name of the method
        names["speculative_method"] = "draft"
    if "draft_model" in names:
        names.setdefault("speculative_method", "draft")
    twice = next((name for name in names if name in flat), None)
    if twice is not None:
        raise ConfigError(f"{twice} is given twice, once in speculative_config", field=twice)
    # A removed option is refused by its own sentence later.
    keys = {"speculative_method", *METHODS_OF, "num_speculative_branches"}
    unknown = next((name for name in names if name not in keys), None)
    if unknown is not None:
        raise ConfigError(
            f"unknown key {shown(unknown)} of speculative_config; "
            f"known keys are {', '.join(('method', 'model', *METHODS_OF))}",
            field="speculative_config",
        )
    return flat | names
