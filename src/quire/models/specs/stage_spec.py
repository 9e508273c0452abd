"""Pipeline parallelism as data: the layers, weights and caches of each stage.

A stage has consecutive layers. The first stage also has the embedding, the last stage the last norm and the output
head; both have a tied matrix. A layer that reads the cache of an earlier one is in the same stage as that.

Scheduler and memory manager are the same on all ranks, so block tables have the same groups everywhere: on each stage,
a cache group of the model has as many layers as on the stage with most of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import NamedTuple

from quire.errors import ConfigError
from quire.models.specs.parameter_estimate import layer_parameters
from quire.models.specs.sharding import Split
from quire.models.specs.spec import Attention, LayerGroup, LayerSpec, Mixer, ModelSpec, Parallel, WeightMap

# Prefix of the names of weights that other stages have.
ELSEWHERE = "elsewhere."


class Stage(NamedTuple):
    """A part of a model.

    Args:
        idx: number of the stage.
        size: number of stages.
        first, end: its layers are those from `first` up to `end`.
    """

    idx: int
    size: int
    first: int
    end: int

    @property
    def is_first(self) -> bool:
        """True for the stage that embeds the tokens."""
        return self.idx == 0

    @property
    def is_last(self) -> bool:
        """True for the stage that computes logits."""
        return self.idx == self.size - 1

    def has(self, name: str, *, is_tied: bool) -> bool:
        """Return whether the stage has a weight that does not belong to a layer."""
        if name == "embedding.weight":
            return self.is_first or (self.is_last and is_tied)
        if name == "positions.weight":
            return self.is_first
        return self.is_last or not name.startswith(("norm.", "head.", "classifier.", "dense."))


@dataclass(frozen=True, slots=True)
class StageSpec(ModelSpec):
    """A model with the layers of one stage.

    Args:
        groups: cache groups of the whole model, with the layers of the stage that has most of them.
        first: number of its first layer in the whole model.
    """

    groups: tuple[LayerGroup, ...] = ()
    first: int = 0

    @property
    def cache_groups(self) -> tuple[LayerGroup, ...]:
        """The cache groups, which are the same on all stages."""
        return self.groups


def divide(spec: ModelSpec, size: int) -> tuple[Stage, ...]:
    """Divide the layers of a model among stages, so that the largest stage has as few parameters as possible.

    The output head counts, since each step reads it; the embedding does not. Of equal divisions, the one with more
    layers at the beginning is taken.

    Args:
        spec: specification of the whole model.
        size: number of stages.

    Raises:
        ConfigError: the model cannot be divided into so many stages.
    """
    ends = [*_places_to_cut(spec), len(spec.layers)]
    if size > len(ends):
        shared = "" if len(ends) == len(spec.layers) else ", of which some read the cache of others"
        num_added = spec.image_rows.num_deepstack
        shared = shared if not num_added else f", the first {num_added} of which add features of images"
        shared = shared if spec.alt_up is None else " with several hidden states of a token, of which one travels"
        raise ConfigError(
            f"pipeline_parallel_size must be at most {len(ends)}, got {size}: the model has {len(spec.layers)} "
            f"layers{shared}",
            field="pipeline_parallel_size",
        )
    costs = [0]
    for layer in spec.layers:
        costs.append(costs[-1] + layer_parameters(layer, spec.width))
    head = spec.vocab_size * spec.width
    # For each end: the size of the largest stage in the best division of the layers before it, and its stages' ends.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}
    for idx in range(size):
        extra = head if idx == size - 1 else 0
        best = {
            end: min(
                (max(largest, costs[end] - costs[start] + extra), (*cuts, end))
                for start, (largest, cuts) in best.items()
                if start < end
            )
            for end in ends[idx:]
            if any(start < end for start in best)
        }
    _, cuts = best[len(spec.layers)]
    return tuple(Stage(idx, size, first, end) for idx, (first, end) in enumerate(pairwise(cuts)))


def most_stages(spec: ModelSpec) -> int:
    """Return the largest number of stages into which a model can be divided."""
    return len(_places_to_cut(spec)) + 1


def _places_to_cut(spec: ModelSpec) -> list[int]:
    """Return the layers at which a stage may begin: no layer from there on reads an earlier layer's cache.

    The first stage has all layers with additions of images' features, which do not travel.
    """
    if spec.alt_up is not None:
        return []
    layers = spec.layers
    places, least = [], len(layers)
    for idx in range(len(layers) - 1, 0, -1):
        sources = [part.source for part in layers[idx].parts if isinstance(part, Attention) and part.source is not None]
        least = min([least, *sources])
        if least >= idx and idx >= spec.image_rows.num_deepstack:
            places.append(idx)
    return places[::-1]


def stage_spec(spec: ModelSpec, stages: tuple[Stage, ...], idx: int) -> StageSpec:
    """Return the part of a model that a stage computes, with the whole model's vocabulary and width."""
    stage = stages[idx]
    values = {field.name: getattr(spec, field.name) for field in fields(ModelSpec)}
    parts = [replace(spec, layers=_moved(spec.layers[other.first : other.end], other.first)) for other in stages]
    counts = [{cache: num_layers for num_layers, cache in part.cache_groups} for part in parts]
    groups = (LayerGroup(max(count.get(cache, 0) for count in counts), cache) for _, cache in spec.cache_groups)
    return StageSpec(
        **values | {"layers": parts[stage.idx].layers, "mtp": None, "groups": tuple(groups), "first": stage.first}
    )


def _moved(layers: tuple[LayerSpec, ...], first: int) -> tuple[LayerSpec, ...]:
    """Return layers whose cache sources are numbered within a stage that begins with layer `first`."""

    def moved(mixer: Mixer) -> Mixer:
        if not isinstance(mixer, Attention) or mixer.source is None:
            return mixer
        return replace(mixer, source=mixer.source - first)

    return tuple(
        replace(layer, mixer=replace(layer.mixer, parts=tuple(map(moved, layer.mixer.parts))))
        if isinstance(layer.mixer, Parallel)
        else replace(layer, mixer=None if layer.mixer is None else moved(layer.mixer))
        for layer in layers
    )


def stage_weights(
    spec: ModelSpec, stage: Stage, weight_map: WeightMap, shares: Mapping[str, Split] | None = None
) -> tuple[WeightMap, dict[str, Split]]:
    """Return a stage's weight map, with layers numbered within the stage, and the splits of its weights.

    Weights of other stages have names with the prefix `ELSEWHERE`, since the checkpoint has them.

    Args:
        spec: specification of the whole model.
        stage: the stage.
        weight_map: weight map of the whole model.
        shares: parts of weights of the whole model that this one of several ranks of the stage reads; None for one.
    """
    renamed = renamer(stage)
    splits = {renamed(name): split for name, split in (shares or {}).items()}
    if spec.per_layer_inputs is not None:
        width = spec.per_layer_inputs.width
        bounds, length = (stage.first * width, stage.end * width), len(spec.layers) * width
        # A column of the table, and a row of the projection, for each per-layer input of the stage's layers.
        table, projection = "per_layer_inputs.embedding.weight", "per_layer_inputs.projection.weight"
        splits[table] = Split(1, (bounds,), length, then=splits.get(table))
        splits[projection] = Split(0, (bounds,), length)
    return {renamed(name): sources for name, sources in weight_map.items()}, splits


def renamer(stage: Stage) -> Callable[[str], str]:
    """Return a function from a weight's name in the whole model to its name in a stage; see `ELSEWHERE`."""

    def renamed(name: str) -> str:
        part, _, suffix = name.partition(".")
        if part != "layers":
            return name
        number, _, weight = suffix.partition(".")
        idx = int(number)
        return f"layers.{idx - stage.first}.{weight}" if stage.first <= idx < stage.end else ELSEWHERE + name

    return renamed
