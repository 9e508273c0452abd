"""Options of images in prompts, under vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from quire.config.checks import OWN, check_flag, put_path
from quire.errors import ConfigError, shown

DEFAULT_MAX_IMAGES: Final = 16
# Kinds of media, of which images alone can be accepted.
KINDS: Final = ("image", "video", "audio")
# Fields of an image processor that can be changed, and those of `size` with their other names.
PROCESSOR_FIELDS: Final = ("max_pixels", "min_pixels", "size")
SIZE_FIELDS: Final[Mapping[str, str]] = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MultimodalConfig:
    """Images in prompts: their number and size, and the sources that are read for clients.

    Args:
        limit_mm_per_prompt: maximum number of images in a prompt or a conversation, `{"image": N}` or `image=N`; with 0
            the encoder of images is not loaded. None takes 16. Videos and audio are refused, so they can only be 0.
        language_model_only: load no encoder of images, as with 0 images.
        mm_processor_kwargs: fields of the model's image processor to change: `min_pixels` and `max_pixels`, the limits
            of an image's pixels after resizing, or `size` with them as `shortest_edge` and `longest_edge`.
        allowed_local_media_path: folder below which `file` URLs of images may be read; None reads none.
        allowed_media_domains: hosts of `http` and `https` URLs from which images may be fetched.
    """

    limit_mm_per_prompt: Mapping[str, int] | None = None
    language_model_only: bool = False
    mm_processor_kwargs: Mapping[str, Any] | None = None
    allowed_local_media_path: str | None = field(default=None, metadata=OWN)
    allowed_media_domains: tuple[str, ...] = field(default=(), metadata={"nargs": "+", **OWN})

    def __post_init__(self) -> None:
        check_flag("language_model_only", self.language_model_only)
        if self.allowed_local_media_path == "":  # vLLM's default
            object.__setattr__(self, "allowed_local_media_path", None)
        put_path(self, "allowed_local_media_path", optional=True)
        object.__setattr__(self, "allowed_media_domains", _domains(self.allowed_media_domains))
        if self.limit_mm_per_prompt is not None:
            _check_limits(self.limit_mm_per_prompt)
        if self.mm_processor_kwargs is not None:
            _check_processor(self.mm_processor_kwargs)

    @property
    def max_images(self) -> int:
        """Maximum number of images in a prompt."""
        if self.language_model_only:
            return 0
        return (self.limit_mm_per_prompt or {}).get("image", DEFAULT_MAX_IMAGES)

    @property
    def processor_changes(self) -> dict[str, object]:
        """The changed limits of an image's pixels, by `min_pixels` and `max_pixels`."""
        changes = dict(self.mm_processor_kwargs or {})
        size = changes.pop("size", {})
        return changes | {SIZE_FIELDS[name]: value for name, value in size.items()}


def _domains(value: object) -> tuple[str, ...]:
    name = "allowed_media_domains"
    domains = (value,) if isinstance(value, str) else value
    if domains is None:
        return ()
    if not isinstance(domains, list | tuple) or not all(_is_domain(domain) for domain in domains):
        allowed = "names of hosts without schemes, ports and paths, like images.example.com"
        raise ConfigError(f"{name} must be {allowed}, got {shown(value)}", field=name)
    return tuple(domains)


def _is_domain(domain: object) -> bool:
    return isinstance(domain, str) and domain != "" and not set(domain) & set("/:@?# *")


def _check_limits(limits: object) -> None:
    name = "limit_mm_per_prompt"
    if not isinstance(limits, Mapping) or not set(limits) <= {*KINDS}:
        raise ConfigError(f'{name} must be an object like {{"image": 4}}, got {shown(limits)}', field=name)
    for kind, limit in limits.items():
        if type(limit) is not int or limit < 0 or (limit and kind != "image"):
            allowed = "an integer of at least 0" if kind == "image" else "0, since only images are accepted"
            raise ConfigError(f"{name}: {kind} must be {allowed}, got {shown(limits)}", field=name)


def _check_processor(changes: object) -> None:
    """Check the names of changed fields; their values depend on the model."""
    name = "mm_processor_kwargs"
    if not isinstance(changes, Mapping) or not set(changes) <= {*PROCESSOR_FIELDS}:
        allowed = f"an object with any of {', '.join(PROCESSOR_FIELDS)}"
        raise ConfigError(f"{name} must be {allowed}, got {shown(changes)}", field=name)
    size = changes.get("size", {})
    if not isinstance(size, Mapping) or not set(size) <= {*SIZE_FIELDS}:
        allowed = f"an object with any of {', '.join(SIZE_FIELDS)}"
        raise ConfigError(f"{name}: size must be {allowed}, got {shown(changes)}", field=name)
    if size and len(changes) > 1:
        raise ConfigError(f"{name} must have either size or min_pixels and max_pixels, got both", field=name)
