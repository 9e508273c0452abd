"""Examination of a model of transformers by trial steps: what its layers ask of attention, and whether they may.

No weights are read. The modules compute a few rows with weights that have no memory (`hosted.sketch`), while their
attention is a function of each row alone. What they do beside attention must then be a function of each row, too:

1. in one sequence of rows: each call of the attention function is recorded, and each mask is compared with causal,
   windowed and chunked masks by evaluating it at positions around its size;
2. in the same rows in another order: a row that differs was computed from other rows, or from its place in the step;
3. in the same rows in two steps with transformers' own cache: keys, values and queries must be those of the first step,
   or the model keeps more than keys and values.
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from quire.errors import CheckpointError, ConfigError
from quire.models.hosted.body import POSITIONS, HostedHead, bodies, parameter_names, run_body
from quire.models.hosted.build import architecture_of, build_module, first_line, hindered, library_name
from quire.models.hosted.heads import recognise_heads
from quire.models.hosted.interface import HostedMask, hosted_by
from quire.models.hosted.linear import LayerUse, watch_layers
from quire.models.hosted.rope import original_length
from quire.models.hosted.sketch import Sketch, put_values
from quire.models.specs.hosted_spec import Hindrance, HostedAttention, HostedSpec
from quire.models.specs.parameter_counts import ParameterCounts

# Rows of a trial step, the order of the second one, and the rows of the first of two cached steps.
NUM_ROWS: Final = 6
ORDER: Final = (3, 0, 5, 1, 4, 2)
NUM_CACHED: Final = 4
# Relative difference of the values of a row from which it was computed otherwise. In steps of other numbers of rows,
# rounding moves values by some millionths, and by more in networks on a sphere (nGPT).
TOLERANCE: Final = 1e-4
# Positions at which masks are evaluated, besides those around their size.
PROBES: Final = (0, 1, 2, 3, 7, 63, 1000, 100_003)
# Name of the function of experts in trial steps.
EXPERTS: Final = "quire-trial"
# Arguments of attention that change nothing, or are given to it in another form.
IGNORED: Final = frozenset(
    (
        *("dropout", "position_ids", "position_embeddings", "use_cache", "cache", "past_key_values", "cache_position"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "deterministic"),
        *("is_causal", "sliding_window", "logits_to_keep"),
    )
)


@dataclass(frozen=True, slots=True)
class _TrialCall:
    """A call of the attention function in a trial step.

    Args:
        module: the module that calls.
        heads: queries, keys and values, [H or K, T, D].
        mask, options: the other arguments.
    """

    module: nn.Module
    heads: tuple[Tensor, Tensor, Tensor]
    mask: Any
    options: dict[str, Any]


class _Refused(Exception):
    """A hindrance that a trial step has met; it passes through transformers' modules."""

    def __init__(self, hindrance: Hindrance, reason: str) -> None:
        super().__init__(reason)
        self.hindrance, self.reason = hindrance, reason


class _Recorder:
    """Attention of trial steps: calls are recorded, and each row gets its own values.

    Args:
        knows_positions: rows are those of one sequence from its start, so that masks can be evaluated anywhere.
    """

    def __init__(self, *, knows_positions: bool = False) -> None:
        self._knows_positions = knows_positions
        self.calls: list[_TrialCall] = []

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Record a call; return the last rows' values, [1, T, H, W]."""
        heads = (query, key, value)
        if any(part.dim() != 4 or len(part) != 1 for part in heads) or query.shape[1] % key.shape[1]:
            shapes = ", ".join(str(list(part.shape)) for part in heads)
            raise _Refused("shape", f"queries, keys and values are of shapes {shapes}")
        if key.shape[:3] != value.shape[:3] or query.shape[-1] != key.shape[-1] or key.shape[2] < query.shape[2]:
            shapes = ", ".join(str(list(part.shape)) for part in heads)
            raise _Refused("shape", f"queries, keys and values are of shapes {shapes}")
        self.calls.append(_TrialCall(module, (query[0].clone(), key[0].clone(), value[0].clone()), mask, options))
        own = value[:, :, -query.shape[2] :].repeat_interleave(query.shape[1] // key.shape[1], 1)
        return own.transpose(1, 2).contiguous()

    def make_mask(self, arguments: dict[str, Any]) -> HostedMask:
        """Recognise a mask."""
        return _recognise(arguments) if self._knows_positions else HostedMask()


def _recognise(arguments: Mapping[str, Any]) -> HostedMask:
    """Return the mask that a mask function of transformers is, by evaluating it."""
    size = arguments.get("local_size")
    around = () if size is None else (size - 1, size, size + 1, 2 * size - 1, 2 * size, 3 * size + 1)
    positions = torch.tensor(sorted({*PROBES, *(position for position in around if position >= 0)}))
    rows, columns = positions[:, None], positions[None]
    try:
        seen = arguments["mask_function"](torch.tensor(0), torch.tensor(0), rows, columns)
        seen = seen.expand(len(positions), len(positions))
    except Exception as error:
        return HostedMask(refusal=("mask", f"a mask cannot be evaluated at any position: {first_line(error)}"))
    causal = columns <= rows
    known = {HostedMask(): causal}
    if size is not None:
        known[HostedMask(window=size)] = causal & (columns > rows - size)
        known[HostedMask(chunk=size)] = causal & (columns // size == rows // size)
    for mask, expected in known.items():
        if torch.equal(seen, expected):
            return mask
    if bool((seen & ~causal).any()):
        return HostedMask(refusal=("encoder", "tokens see tokens after them"))
    return HostedMask(refusal=("mask", "a mask is neither causal nor one of a window or of chunks"))


def examine(config: Mapping[str, Any]) -> HostedSpec:
    """Describe a model of transformers, and refuse one that cannot run over paged memory.

    Args:
        config: content of `config.json`, without its quantisation.

    Raises:
        UnsupportedModel: transformers has no such causal language model, or it has a hindrance.
        CheckpointError: transformers refuses the configuration, or a size is absurd.
    """
    key = json.dumps(config, sort_keys=True, default=str)
    if key not in _EXAMINED:
        if len(_EXAMINED) >= MAX_EXAMINED:
            _EXAMINED.clear()
        _EXAMINED[key] = _examine(config)
    return _EXAMINED[key]


# Results of `examine`: an engine asks several times for the model that it starts.
_EXAMINED: Final[dict[str, HostedSpec]] = {}
MAX_EXAMINED: Final = 64


def _examine(config: Mapping[str, Any]) -> HostedSpec:
    architecture = architecture_of(config)
    _register_experts()
    module = build_module(config, experts=EXPERTS)
    if getattr(module, "_is_stateful", False):
        raise hindered("state", architecture, "transformers declares that its layers keep a state of their own")
    counts = count_parameters(module)
    put_values(module)
    try:
        with torch.inference_mode(), Sketch():
            return _try(module, config, counts)
    except _Refused as refused:
        raise hindered(refused.hindrance, architecture, refused.reason) from refused
    except ConfigError:
        raise
    except Exception as error:
        raise hindered("shape", architecture, f"a trial step fails: {first_line(error)}") from error


def _try(module: nn.Module, config: Mapping[str, Any], counts: ParameterCounts) -> HostedSpec:
    """Run the trial steps."""
    ids, positions, order = torch.arange(NUM_ROWS) % 5 + 1, torch.arange(NUM_ROWS), torch.tensor(ORDER)
    whole = _run_whole(module, ids, positions)
    body, reordered = module.get_submodule(whole.body), _Recorder()
    given: dict[nn.Module, dict[str, Any]] = {}
    hooks = [call.module.register_forward_pre_hook(partial(_keep, given), with_kwargs=True) for call in whole.calls]
    with hosted_by(reordered):
        permuted = run_body(body, ids[order], positions[order])[0][0]
    for hook in hooks:
        hook.remove()
    names = {part: name for name, part in module.named_modules()}
    attention = tuple(_described(call, names[call.module]) for call in whole.calls)
    if len(whole.calls) != len(reordered.calls):
        raise _Refused("attention", "the calls of attention depend on the rows of a step")
    for one, other in zip(whole.calls, reordered.calls, strict=True):
        if not all(_is_close(mine[:, order], its) for mine, its in zip(one.heads, other.heads, strict=True)):
            raise _mixed(body, whole.calls, f"before the attention of {names[one.module]}")
    if not _is_close(whole.hidden[order], permuted):
        raise _mixed(body, whole.calls, "after the last attention")
    if not whole.calls:
        raise _Refused("attention", "no layer calls transformers' attention interface")
    _check_cache(body, whole.calls, ids, positions)
    if not _is_close(whole.logits, HostedHead(module, whole.body)(whole.hidden)):
        raise _Refused("shape", "logits are computed from more than the last hidden states")
    attention = tuple(
        replace(described, heads=recognise_heads(call.module, described, given.get(call.module, {})))
        for call, described in zip(whole.calls, attention, strict=True)
    )
    made: Any = module.config
    longest = _max_position(made.get_text_config())
    return HostedSpec(
        library=library_name(),
        architecture=type(module).__name__,
        body=whole.body,
        config=config,
        vocab_size=whole.logits.shape[-1],
        width=whole.hidden.shape[-1],
        num_layers=int(getattr(made.get_text_config(), "num_hidden_layers", len(attention))),
        max_position=longest,
        attention=attention,
        parameters=counts,
        most_columns=max((part.out_features for part in names if isinstance(part, nn.Linear)), default=0),
        original_length=original_length(module),
        context_length=longest,
        kept_layers=whole.use.kept,
        adapted_layers=whole.use.adapted,
    )


def _keep(given: dict[nn.Module, dict[str, Any]], module: nn.Module, others: Any, options: dict[str, Any]) -> None:
    """Keep the arguments of a module's forward pass if all are named; a hook."""
    given[module] = {} if others else options


class _WholeRun(NamedTuple):
    """A trial step of a whole model: the name of its layers, their calls of attention, what they return, their use."""

    body: str
    calls: list[_TrialCall]
    hidden: Tensor
    logits: Tensor
    use: LayerUse


def _run_whole(module: nn.Module, ids: Tensor, positions: Tensor) -> _WholeRun:
    """Run a whole model; of the modules that may be its layers, the outermost that takes positions is taken, if any."""
    outputs: dict[str, Any] = {}

    def keep(name: str, output: Any) -> None:
        outputs[name] = output

    hooks = [
        module.get_submodule(name).register_forward_hook(lambda *given, name=name: keep(name, given[-1]))
        for name in bodies(module)
    ]
    given = {POSITIONS: positions[None]} if POSITIONS in parameter_names(module) else {}
    recorder = _Recorder(knows_positions=True)
    with hosted_by(recorder), watch_layers(module, NUM_ROWS) as watched:
        try:
            logits: Tensor = module(input_ids=ids[None], use_cache=False, **given).logits
        except (AttributeError, TypeError) as error:
            if HostedMask.__name__ not in str(error):
                raise
            # Its own code reads the mask: for another mask, or for attention without the interface.
            hindrance: Hindrance = "mask" if recorder.calls or _asks_interface(module) else "attention"
            raise _Refused(hindrance, f"its own code reads masks: {first_line(error)}") from error
        use = watched.use
    for hook in hooks:
        hook.remove()
    ran = [name for name in bodies(module) if name in outputs]
    if not ran:
        raise _Refused("shape", "its layers and its head are one module")
    body = next((name for name in ran if POSITIONS in parameter_names(module.get_submodule(name))), ran[0])
    hidden: Tensor = outputs[body][0]
    return _WholeRun(body, recorder.calls, hidden[0], logits[0], use)


def _asks_interface(module: nn.Module) -> bool:
    """Return whether the source of a class asks for the attention function by its name."""
    return "get_interface(" in inspect.getsource(inspect.getmodule(type(module)) or type(module))


def _mixed(body: nn.Module, calls: Sequence[_TrialCall], place: str) -> _Refused:
    """Return the hindrance of a row that depends on other rows, or on its place in the step."""
    if not calls:
        return _Refused("attention", "rows are mixed without a call of transformers' attention interface")
    if POSITIONS not in parameter_names(body):
        config: Any = getattr(body, "config", None)
        hindrance: Hindrance = "encoder" if hasattr(config, "encoder_layers") else "shape"
        return _Refused(hindrance, "its rows have the positions of their places in a step, and no others can be given")
    return _Refused("state", f"rows of a step are mixed {place}, as by a recurrent state or a convolution")


def _described(call: _TrialCall, name: str) -> HostedAttention:
    """Describe a call of attention; refuse arguments that are not known."""
    if not isinstance(call.mask, HostedMask):
        what = "no mask" if call.mask is None else f"a mask of its own ({type(call.mask).__name__})"
        raise _Refused("mask", f"{name} gives {what} to attention")
    options = dict(call.options)
    scale, soft_cap, sinks = (options.pop(key, None) for key in ("scaling", "softcap", "s_aux"))
    if options.get("is_causal") is False:
        raise _Refused("encoder", f"{name} lets tokens see tokens after them")
    unknown = [key for key, value in options.items() if key not in IGNORED and value is not None and value is not False]
    if unknown:
        raise _Refused("mask", f"{name} gives {', '.join(unknown)} to attention, which is not known")
    if call.mask.refusal is not None:
        raise _Refused(*call.mask.refusal)
    query, key, value = call.heads
    num_heads, num_rows, key_width = query.shape
    if key.shape[1] != num_rows:
        raise _Refused("shape", f"{name} has {key.shape[1]} keys for {num_rows} rows")
    if isinstance(scale, Tensor) or (sinks is not None and sinks.shape != (num_heads,)):
        raise _Refused("shape", f"{name} gives a scale or sinks that are not one of a head")
    return HostedAttention(
        module=name,
        layer_idx=int(getattr(call.module, "layer_idx", None) or 0),
        num_heads=num_heads,
        num_kv_heads=len(key),
        key_width=key_width,
        value_width=value.shape[-1],
        window=call.mask.window,
        chunk=call.mask.chunk,
        scale=key_width**-0.5 if scale is None else float(scale),
        soft_cap=None if not soft_cap else float(soft_cap),
        sinks=sinks is not None,
    )


def _check_cache(body: nn.Module, calls: Sequence[_TrialCall], ids: Tensor, positions: Tensor) -> None:
    """Compare attention in two steps with transformers' cache with attention in one step."""
    cache: Any = None
    for rows in (slice(0, NUM_CACHED), slice(NUM_CACHED, None)):
        recorder = _Recorder()
        with hosted_by(recorder):
            output = run_body(body, ids[rows], positions[rows], cache, use_cache=True)
        cache = next((output[name] for name in ("cache", "past_key_values") if output.get(name) is not None), None)
        if cache is None:
            raise _Refused("state", "its layers return none of transformers' caches")
    if len(recorder.calls) != len(calls):
        raise _Refused("state", "with transformers' cache, attention is called another number of times")
    for whole, cached in zip(calls, recorder.calls, strict=True):
        # A window keeps the last keys and values.
        for one, other in zip(whole.heads, cached.heads, strict=True):
            if not _is_close(one[:, -other.shape[1] :], other):
                raise _Refused("state", "with transformers' cache, other keys, values or queries reach attention")


def _max_position(config: Any) -> int:
    """Return the longest context of a configuration."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions"):
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise CheckpointError(
        "config.json lacks the field max_position_embeddings, the longest context", field="max_position_embeddings"
    )


def _is_close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    reach = float(one.abs().nan_to_num(0.0, 0.0, 0.0).max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * reach, equal_nan=True)


def count_parameters(module: nn.Module) -> ParameterCounts:
    """Count the parameters of a module: tables, the head, and all other matrices."""
    made: Any = module
    table, head = (
        None if layer is None else getattr(layer, "weight", None)
        for layer in (made.get_input_embeddings(), made.get_output_embeddings())
    )
    others = [each for each in module.parameters() if each.dim() > 1 and each is not table and each is not head]
    head_size = 0 if head is None else head.numel()
    return ParameterCounts(
        tables=0 if table is None else table.numel(),
        head=head_size,
        is_tied=head is table,
        projections=sum(each.numel() for each in others),
        experts=sum(each.numel() for each in others if each.dim() == 3),
    )


def _register_experts() -> None:
    """Register a function of experts that gives each row a part of itself."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)


def _experts(_: nn.Module, hidden_states: Tensor, *__: Any, **___: Any) -> Tensor:
    return hidden_states * 0.5
