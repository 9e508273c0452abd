"""Attention of the modules of transformers in a step, over paged memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.models.hosted.heads import ANGLES, ROWS, rotation_of
from quire.models.hosted.interface import HostedMask, current_host
from quire.models.hosted.norms import HostedNorm
from quire.models.specs.hosted_spec import HostedAttention, HostedHeads
from quire.ops.interface.ops import HeadNorms, Rotation, StepAttention


class HostedCall:
    """A call of attention in each step: its module, its place in the cache, and the width that its heads are padded to.

    Args:
        module: the module that calls.
        attention: description of the call.
        position: cache group, and position in the group.
    """

    __slots__ = ("attention", "group_idx", "head_dim", "module", "position")

    def __init__(self, module: nn.Module, attention: HostedAttention, position: tuple[int, int]) -> None:
        self.module, self.attention = module, attention
        self.group_idx, self.position = position
        self.head_dim = attention.head_dim


class HostedStep:
    """The attention of one step.

    Args:
        calls: calls of attention, in order.
        attention: the step's attention in each cache group.
        rotations: a rotation by zero for each width of heads: modules rotate heads themselves.
        dtype: dtype of keys and values.
    """

    def __init__(
        self,
        calls: Sequence[HostedCall],
        attention: Sequence[StepAttention],
        rotations: Mapping[int, Rotation],
        dtype: torch.dtype,
    ) -> None:
        self._calls, self._attention, self._rotations, self._dtype = calls, attention, rotations, dtype
        self._made: dict[int, tuple[Tensor, Rotation]] = {}
        self.num_calls = 0

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,  # noqa: ARG002 (the trial step has seen it)
        options: dict[str, Any],
    ) -> Tensor:
        """Store keys and values, and attend to the rows' sequences."""
        call = self._next(module)
        head_dim, attention = call.head_dim, call.attention
        # Heads of each row side by side: [T, H + 2 K, D].
        heads = torch.cat([_padded(part[0].transpose(0, 1), head_dim) for part in (query, key, value)], 1)
        step, rows = self._attention[call.group_idx], heads.to(self._dtype).flatten(1)
        queries = step.prepare(call.position, rows, None, self._rotations[head_dim])
        sinks = options["s_aux"].float() if attention.sinks else None
        gathered = step.attend(call.position, queries, attention.scale, sinks, attention.soft_cap)
        output = gathered.view(1, len(rows), -1, head_dim)
        if attention.value_width != head_dim:
            output = output[..., : attention.value_width]
        return output.to(query.dtype)

    def attend_rows(
        self, module: nn.Module, qkv: Tensor, norms: HeadNorms | None, angles: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Norm and rotate heads, store keys and values, and attend to the rows' sequences: `attend` by a backend alone.

        Args:
            module: the module that calls.
            qkv: [T, (H + 2 K) * D], contiguous: heads of queries, keys and values.
            norms: norms of the heads of queries and keys; None if they are not normed.
            angles: cosines and sines of the rows [1, T, D], equal in both halves of D; None if heads are not rotated.

        Returns:
            [T, H * D], contiguous.
        """
        call = self._next(module)
        rotation = self._rotations[call.head_dim] if angles is None else self._rotation_by(angles)
        step, attention = self._attention[call.group_idx], call.attention
        queries = step.prepare(call.position, qkv, norms, rotation)
        return step.attend(call.position, queries, attention.scale, None, attention.soft_cap)

    def _next(self, module: nn.Module) -> HostedCall:
        """Return the next call of the step."""
        if self.num_calls == len(self._calls) or self._calls[self.num_calls].module is not module:
            raise RuntimeError(f"call {self.num_calls} of attention is not that of the trial step")
        self.num_calls += 1
        return self._calls[self.num_calls - 1]

    def _rotation_by(self, angles: tuple[Tensor, Tensor]) -> Rotation:
        """Return a rotation, made once for all layers that have the same cosines and sines."""
        cos, sin = angles
        if id(cos) not in self._made:
            self._made[id(cos)] = cos, rotation_of(cos, sin)
        return self._made[id(cos)][1]

    def make_mask(self, arguments: dict[str, Any]) -> HostedMask:  # noqa: ARG002
        """Return a mask that says nothing: attention knows its windows from the trial step."""
        return HostedMask()


def _padded(heads: Tensor, head_dim: int) -> Tensor:
    """Return heads [T, H, D] with zeros up to `head_dim` values."""
    missing = head_dim - heads.shape[-1]
    return functional.pad(heads, (0, missing)) if missing else heads


class BackendHeads:
    """The forward pass of an attention module whose heads a backend norms and rotates.

    Args:
        module: module of transformers.
        heads: description of its heads.
        norms: norms of the heads of queries and keys; None if they are not normed.
        dtype: dtype of cosines and sines; with those of another, the module's own forward pass runs.
    """

    __slots__ = ("_dtype", "_module", "_norms", "_num_others", "_output", "_own", "_projections", "_rotates")

    def __init__(self, module: nn.Module, heads: HostedHeads, norms: HeadNorms | None, dtype: torch.dtype) -> None:
        self._module, self._norms, self._rotates = module, norms, heads.rotates
        self._projections = [module.get_submodule(name) for name in heads.projections]
        self._output = module.get_submodule(heads.output)
        self._num_others = heads.num_results - 1
        self._own, self._dtype = module.forward, dtype

    def __call__(self, **given: Any) -> tuple[Tensor | None, ...]:
        """Return the result [1, T, E] for rows [1, T, E], and None for what the module may return besides."""
        host, rows, angles = current_host(), given[ROWS], given[ANGLES] if self._rotates else None
        assert isinstance(host, HostedStep), "modules with weights run in steps of their decoder"
        if angles is not None and angles[0].dtype is not self._dtype:
            own: tuple[Tensor | None, ...] = self._own(**given)
            return own
        qkv = torch.cat([project(rows) for project in self._projections], -1)[0]
        gathered = host.attend_rows(self._module, qkv, self._norms, angles)
        return (self._output(gathered[None]), *[None] * self._num_others)


def use_backend_heads(calls: Sequence[HostedCall], dtype: torch.dtype) -> None:
    """Make attention modules run by a backend, where it computes their heads, and the norms of these.

    Args:
        calls: calls of attention in a step, of modules with their weights; `use_backend_norms` has changed their norms.
        dtype: dtype of rows.
    """
    for call in calls:
        heads = call.attention.heads
        norms: HeadNorms | None = None
        if heads is None or "forward" in call.module.__dict__:
            continue
        if heads.norms:
            norms = _head_norms([call.module.get_submodule(name) for name in heads.norms], call.attention)
            if norms is None:
                continue
        call.module.__dict__["forward"] = BackendHeads(call.module, heads, norms, dtype)


def _head_norms(parts: Sequence[nn.Module], attention: HostedAttention) -> HeadNorms | None:
    """Return the norms of the heads of queries and keys; None if a backend does not compute both alike."""
    norms = [part.__dict__.get("forward") for part in parts]
    known = [norm.known for norm in norms if isinstance(norm, HostedNorm)]
    if len(known) != 2 or known[0].eps != known[1].eps or known[0].scale.dtype is not known[1].scale.dtype:
        return None
    counts = attention.num_heads, attention.num_kv_heads
    scales = [norm.scale.expand(count, -1) for norm, count in zip(known, counts, strict=True)]
    return HeadNorms(torch.cat(scales), known[0].eps)
