"""The marks, as data, and their comparison with measured medians."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from benchmarks.contenders import CONTENDERS, MIXES, peers_of
from benchmarks.serving import NUM_KV_TOKENS, Figures
from benchmarks.shapes import CheckpointShape
from quire.measurement.bench.workloads import workload

# Figures where less is better; elsewhere more is.
TIMES = ("wall_s", "all_started_s")
MEDIANS = ("wall_s", "tokens_per_s", "all_started_s", "decode_tokens_per_s", "peak_memory_bytes", "bandwidth_share")
Table = dict[str, dict[str, Figures]]  # workload -> contender -> medians


class Mark(NamedTuple):
    """The required ratio of a contender to another one in one figure.

    Args:
        workload: name of the workload.
        contender: name of the judged contender.
        against: a contender, or a class of weights, which is the best of its peers that were measured.
        at_least: the ratio; for a time theirs divided by ours, for a rate ours divided by theirs.
        figure: name of the compared figure.
        beside: the workload that `against` ran, where that is another one.
    """

    workload: str
    contender: str
    against: str
    at_least: float
    figure: str = "wall_s"
    beside: str | None = None


MARKS = (
    Mark("W1", "quire", "bf16", 1.0),
    Mark("W1", "quire-lossless", "quire-plain", 1.1),
    Mark("W1", "quire-int8", "int8", 1.2),
    Mark("W1", "quire-int4", "int4", 1.15),
    Mark("W2", "quire", "bf16", 1.0),
    Mark("W2", "quire-int8", "int8", 1.2),
    Mark("W3", "quire", "bf16", 1.2),
    Mark("W3", "quire-int8", "int8", 1.2),
    Mark("W4", "quire", "bf16", 1.6, "decode_tokens_per_s"),
    Mark("W4", "quire-kv8", "bf16", 2.2, "decode_tokens_per_s"),
    Mark("W4", "quire", "bf16", 1.0, "all_started_s"),
    Mark("W4", "quire-int8", "int8", 1.3, "all_started_s"),
    Mark("W5-warm", "quire", "bf16", 1.2),
    Mark("W5-cold", "quire", "bf16", 1.1),
    Mark("W1", "quire", "generate", 1.8),
    Mark("W1", "quire", "cb", 1.8),
    Mark("W3", "quire", "generate", 2.4),
    Mark("W3", "quire", "cb", 3.5),
    Mark("W5-warm", "quire", "quire", 4.0, beside="W5-off"),
    *(Mark(name, "quire-hosted", "quire", 0.6) for name in ("W1", "W2", "W3")),
    *(Mark(name, "quire-hosted-int8", "quire-int8", 0.6) for name in ("W1", "W2", "W3")),
    *(Mark("W1", f"quire-{mix}", mix, 1.05 if mix == "q4_k_m" else 1.15) for mix in MIXES),
    *(Mark(name, f"quire-{mix}", f"llamacpp-{mix}", 2.0) for name in ("W2", "W3") for mix in MIXES),
    *(Mark("W6-4k", f"quire-{mix}", mix, 1.2, "decode_tokens_per_s") for mix in MIXES),
    *(Mark("W6-16k", f"quire-{mix}", mix, 1.2, "decode_tokens_per_s") for mix in MIXES),
)
MIN_BANDWIDTH_SHARE = 0.85  # of one stream, "quire" in W1
MAX_OVERHEAD_BYTES = 400_000_000  # past weights and KV
# Bits of a weight, scales included, in the block type that a mix is named after.
GGUF_BITS = {"q4_k_m": 4.5, "q8_0": 8.5, "q6_k": 6.5625, "q4_0": 4.5, "iq4_xs": 4.25, "q5_k": 5.5}
BITS: dict[str, float] = {"bf16": 16, "int8": 8, "int4": 4, **GGUF_BITS}


class MarkResult(NamedTuple):
    """The result of one mark.

    Args:
        what: is judged, in words; with the best peer's name where there was a choice.
        value: measured.
        mark: required value.
        is_met: whether it was reached.
    """

    what: str
    value: float
    mark: float
    is_met: bool


def medians(rows: list[Figures]) -> Table:
    """Return the medians of the runs of each workload and contender; a figure that some run lacks is left out."""
    table: Table = {}
    for name, who in dict.fromkeys((row["workload"], row["contender"]) for row in rows):
        runs = [row for row in rows if (row["workload"], row["contender"]) == (name, who)]
        table.setdefault(name, {})[who] = {
            key: statistics.median(row[key] for row in runs)
            for key in MEDIANS
            if all(row.get(key) is not None for row in runs)
        }
    return table


def bandwidth_share(shape: CheckpointShape, row: Figures) -> float | None:
    """Return the share of the probed bandwidth at which one stream's decode steps read weights and KV, both in 16 bits.

    Args:
        shape: shape of the checkpoint.
        row: a run of "W1", with the probes before and after it.

    Returns:
        None for another workload, and where nothing was probed.
    """
    probes = [gb_s for gb_s in row["probe_gb_s"] if gb_s is not None]
    if row["workload"] != "W1" or not probes:
        return None
    (request,) = workload("W1", 0).requests
    mean_context = len(request.prompt) + request.num_new / 2
    steps_per_s: float = row["decode_tokens_per_s"]
    probed_gb_s: float = statistics.mean(probes)
    return shape.step_bytes(mean_context) * steps_per_s / (probed_gb_s * 1e9)


def best_of(names: list[str], column: dict[str, Figures], figure: str) -> str | None:
    """Return which of some contenders has the best median of a figure; None where no contender has one."""
    values = {name: column[name][figure] for name in names if figure in column.get(name, {})}
    if not values:
        return None
    return (min if figure in TIMES else max)(values, key=lambda name: values[name])


def judge(table: Table, shape: CheckpointShape | None) -> list[MarkResult]:
    """Return how the medians stand against the marks whose contenders were measured; memory if the shape is known."""
    return [
        *filter(None, (ratio(mark, table) for mark in MARKS)),
        *bandwidth(table),
        *(() if shape is None else memory(table, shape)),
    ]


def ratio(mark: Mark, table: Table) -> MarkResult | None:
    """Return how one mark stands, or None where either side was not measured."""
    ours = table.get(mark.workload, {}).get(mark.contender, {}).get(mark.figure)
    others = table.get(mark.beside or mark.workload, {})
    names = [mark.against] if mark.against in CONTENDERS else peers_of(mark.against)
    best = best_of(names, others, mark.figure)
    if ours is None or best is None:
        return None
    theirs = others[best][mark.figure]
    value = theirs / ours if mark.figure in TIMES else ours / theirs
    which = f"{mark.beside or ''} {best}" if mark.against in CONTENDERS else f"the best peer ({best})"
    what = f"{mark.workload} {mark.contender} against {which.strip()}, {mark.figure}"
    return MarkResult(what, value, mark.at_least, value >= mark.at_least)


def bandwidth(table: Table) -> list[MarkResult]:
    """Return how near one stream comes to the bandwidth of memory."""
    share = table.get("W1", {}).get("quire", {}).get("bandwidth_share")
    if share is None:
        return []
    return [
        MarkResult("W1 quire, share of the probed bandwidth", share, MIN_BANDWIDTH_SHARE, share >= MIN_BANDWIDTH_SHARE)
    ]


def memory(table: Table, shape: CheckpointShape) -> list[MarkResult]:
    """Return by how many bytes Quire's processes exceed their weights and their KV cache."""
    verdicts = []
    for name, column in table.items():
        for who, figures in column.items():
            if CONTENDERS[who].engine != "quire":
                continue
            over = figures["peak_memory_bytes"] - held_bytes(shape, who)
            what = f"{name} {who}, peak bytes past weights and KV, at most"
            verdicts.append(MarkResult(what, over, MAX_OVERHEAD_BYTES, over <= MAX_OVERHEAD_BYTES))
    return verdicts


def held_bytes(shape: CheckpointShape, who: str) -> int:
    """Return the bytes of a contender's weights and of the KV cache that everyone has."""
    contender = CONTENDERS[who]
    kv = NUM_KV_TOKENS * shape.kv_token_bytes(1 if "kv_cache_dtype" in contender.options else 2)
    return shape.weight_bytes(BITS[contender.weights]) + kv
