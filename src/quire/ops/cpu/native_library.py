"""The shared libraries that the package's build compiles from `native/`: choice by instruction set, and functions.

Functions take raw pointers, and libraries link to neither torch nor Python, so one build serves every version of both.
They run on torch's threads, through a C interface that torch keeps stable.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.ops.cpu.native_decode_work import DecodeWorkKernels
from quire.ops.cpu.native_functions import typed
from quire.ops.cpu.native_quantized import BlockRows, QuantizedKernels, UnpackedRows
from quire.ops.cpu.native_ranks import RankKernels
from quire.ops.cpu.native_row_layout import RowLayoutKernels
from quire.ops.cpu.native_step_work import StepWorkKernels
from quire.ops.cpu.native_structures import (
    Cache,
    ExpertsCall,
    GatedDeltaNetCall,
    LinearCall,
    NormScales,
    ShortConvCall,
    StateCache,
    StateRows,
    StepRows,
)
from quire.ops.interface.ops import Activation
from quire.ops.interface.quantized_weight import WeightForm
from quire.ops.interface.shared_ranks import RankGroupCall
from quire.ops.interface.weight_formats import FORMS
from quire.ops.interface.weight_memory import WeightMemory

FOLDER: Final = Path(__file__).parents[1] / "native"
# `quire_interface_version` must return this number.
INTERFACE_VERSION: Final = 35
# The best level last. A processor that supports one supports those before it, except that some with AVX-512 lack
# AVX-VNNI.
LEVELS: Final = ("portable", "avx2", "avx_vnni", "avx512", "avx512_bf16")
# An environment variable that limits the level, for tests of the levels below the processor's.
MAX_LEVEL_VARIABLE: Final = "QUIRE_MAX_CPU_LEVEL"
MAX_HEAD_DIM: Final = 256
# In steps of more rows the overhead of calls is not measurable, and recurrences over many rows of a sequence are faster
# in chunks with matmuls.
MAX_ROWS: Final = 32
# The libraries' numbers of dtypes and activations.
TYPES: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
ACTIVATIONS: Final[dict[Activation | None, int]] = {None: 0, "silu": 1, "gelu_tanh": 2, "swigluoai": 3}
# Lossless weights: columns of a panel, values of a column in a block, bytes of a block's table.
PANEL_COLUMNS, BLOCK_WIDTH, TABLE_BYTES = 64, 32, 16

_POINTER, _INT, _BOOL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_bool
_FLOAT = ctypes.c_float
# Arguments of a matmul with a packed weight, and of a look-up of its rows, for every weight format.
_PRODUCT: Final = (_INT, _POINTER, _INT, _INT, _POINTER, _INT, _INT, _POINTER, _POINTER, _INT, _POINTER)
_LAYERS: Final = (_INT, _POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, _POINTER)
_LOOK_UP: Final = (_INT, _POINTER, _INT, _INT, _POINTER, _INT, _POINTER)


class PlainKernels(NamedTuple):
    """The kernels of plain weights.

    Args:
        num_bytes: number of bytes of a packed weight [out, in].
        pack: `quire_pack` of the sources.
        multiply: `quire_linear`.
        rows: `quire_rows`.
    """

    num_bytes: Callable[[Tensor], int]
    pack: Callable[..., Any]
    multiply: Callable[..., Any]
    rows: Callable[..., Any]

    def pack_weight(
        self,
        memory: WeightMemory,
        weight: Tensor,
        is_gated: bool,
        num_slices: int = 1,  # noqa: ARG002 (plain sums have their own order)
    ) -> tuple[Tensor, ...]:
        """Pack a contiguous weight; return the tensor whose pointer is passed to `multiply` and `rows`."""
        packed = memory.take(self.num_bytes(weight))
        self.pack(TYPES[weight.dtype], weight.data_ptr(), *weight.shape, is_gated, packed.data_ptr())
        return (packed,)


class RoundedKernels(NamedTuple):
    """The kernels of a format of weights that are quantised while loading; their rows cannot be looked up.

    Args:
        quantized: kernels of all forms.
        form: form of the quantised weights.
    """

    quantized: QuantizedKernels
    form: WeightForm

    @property
    def multiply(self) -> Callable[..., Any]:
        """The matmul, as for stored weights."""
        return self.quantized.multiply

    def pack_weight(
        self, memory: WeightMemory, weight: Tensor, is_gated: bool, num_slices: int = 1
    ) -> tuple[Tensor, ...]:
        """Quantise and pack a contiguous weight; return the tensors of `QuantizedKernels.pack_weight`."""
        return self.quantized.round_weight(memory, weight, TYPES[weight.dtype], self.form, is_gated, num_slices)


class LosslessKernels(NamedTuple):
    """The kernels of bfloat16 weights that are compressed losslessly to three quarters of their bytes.

    Args:
        tables: `quire_lossless_tables` of the sources: the tables and the number of bytes of each panel.
        pack: `quire_lossless_pack`.
        multiply: `quire_lossless_linear`; its results are bit-identical to those with plain weights.
        rows: `quire_lossless_rows`.
    """

    tables: Callable[..., Any]
    pack: Callable[..., Any]
    multiply: Callable[..., Any]
    rows: Callable[..., Any]

    @classmethod
    def of(cls, library: ctypes.CDLL) -> LosslessKernels:
        """Load the functions from a library."""
        weight = (_POINTER, _INT, _INT)
        return cls(
            typed(library.quire_lossless_tables, *weight, _BOOL, _POINTER, _POINTER),
            typed(library.quire_lossless_pack, *weight, _BOOL, _POINTER, _POINTER, _POINTER),
            typed(library.quire_lossless_linear, *_PRODUCT),
            typed(library.quire_lossless_rows, *_LOOK_UP, returns=_BOOL),
        )

    def pack_weight(
        self,
        memory: WeightMemory,
        weight: Tensor,
        is_gated: bool,
        num_slices: int = 1,  # noqa: ARG002 (plain sums have their own order)
    ) -> tuple[Tensor, ...]:
        """Pack a contiguous weight; return a tensor of pointers, and the tables, panel offsets and panels."""
        num_columns, width = weight.shape
        num_panels, num_blocks = -(-num_columns // PANEL_COLUMNS), -(-width // BLOCK_WIDTH)
        tables = torch.empty(num_panels, num_blocks, TABLE_BYTES, dtype=torch.uint8)
        starts = torch.zeros(num_panels + 1, dtype=torch.int64)
        arguments = (weight.data_ptr(), num_columns, width, is_gated)
        self.tables(*arguments, tables.data_ptr(), starts[1:].data_ptr())
        starts.cumsum_(0)
        data = memory.take(int(starts[-1]))
        self.pack(*arguments, tables.data_ptr(), starts.data_ptr(), data.data_ptr())
        pointers = torch.tensor([part.data_ptr() for part in (tables, starts, data)])  # `LosslessWeight` of the sources
        return pointers, tables, starts, data


class NativeLibrary:
    """A loaded library.

    Args:
        level: instruction set that it was compiled for, which this processor must support.
        path: path of the library.

    Attributes:
        packed_types: dtypes of weights that it packs and multiplies faster than torch does.
        panel_columns: columns of a panel, for weights quantised while loading (True) and for plain ones (False).
        attend, plan_attention, free_attention_plan, tokens_read, gate, sigmoid_gate, prepare, rms_norm, layers,
            experts, short_conv, gated_delta_net, normed_linear: functions of the sources, whose names have the prefix
            `quire_` there.
        apply_token_bitmask: `quire_keep_tokens`.
        ranks: collective operations of the ranks of one host.
        decode_work: attention work items of captured decode steps on a GPU.
        row_layout: layout of the rows of a step.
        step_work: attention work items of other steps on a GPU, and shared prefixes of captured decode steps.
        plain: kernels of plain weights.
        quantized: kernels of quantised weights.
        rounded: kernels of each format of weights quantised while loading.
        lossless: kernels of losslessly compressed weights, on AVX2 and better.

    Raises:
        OSError: the library cannot be loaded, or was built from other sources.
        AttributeError: this torch has no `torch_parallel_for`.
    """

    def __init__(self, level: str, path: Path) -> None:
        self.level = level
        library = ctypes.CDLL(str(path))
        if library.quire_interface_version() != INTERFACE_VERSION:
            raise OSError(f"{path} was built from other sources; run python hatch_build.py, or install Quire again")
        suffix = "dylib" if sys.platform == "darwin" else "so"
        threads = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"))
        library.quire_use_threads(
            ctypes.cast(threads.torch_parallel_for, _POINTER), ctypes.cast(threads.torch_get_num_threads, _POINTER)
        )
        rows, kv = ctypes.POINTER(StepRows), ctypes.POINTER(Cache)
        layer = _POINTER, _INT, _POINTER, _INT, _FLOAT, _FLOAT, _POINTER, _POINTER
        self.attend = typed(library.quire_attend, rows, kv, *layer)
        self.plan_attention = typed(library.quire_plan_attention, rows, kv, _INT, _INT, _INT, _INT, returns=_POINTER)
        self.free_attention_plan = typed(library.quire_free_attention_plan, _POINTER)
        self.tokens_read = typed(library.quire_tokens_read, _POINTER, returns=_INT)
        self.gate = typed(library.quire_gate, _INT, _INT, _POINTER, _INT, _INT, _POINTER)
        self.prepare = typed(
            library.quire_prepare,
            rows,
            kv,
            *(_INT, _POINTER, _INT, _POINTER, _INT, _FLOAT, _POINTER, _POINTER, _INT, _POINTER),
        )
        norm_rows = _INT, _POINTER, _INT, _INT, _POINTER, _FLOAT, _INT, _INT, _POINTER
        self.rms_norm = typed(library.quire_rms_norm, *norm_rows)
        self.sigmoid_gate = typed(library.quire_sigmoid_gate, _INT, _POINTER, _POINTER, _INT, _INT, _POINTER)
        self.layers = typed(library.quire_layers, *_LAYERS, ctypes.POINTER(RankGroupCall), returns=_INT)
        self.ranks = RankKernels.of(library)
        self.decode_work, self.step_work = DecodeWorkKernels.of(library), StepWorkKernels.of(library)
        self.row_layout = RowLayoutKernels.of(library)
        states = ctypes.POINTER(StateRows), ctypes.POINTER(StateCache), _INT
        self.short_conv = typed(
            library.quire_short_conv, _INT, *states, ctypes.POINTER(ShortConvCall), _POINTER, _POINTER
        )
        self.gated_delta_net = typed(
            library.quire_gated_delta_net, _INT, *states, ctypes.POINTER(GatedDeltaNetCall), _POINTER, _POINTER
        )
        norm, linear = ctypes.POINTER(NormScales), ctypes.POINTER(LinearCall)
        self.normed_linear = typed(
            library.quire_normed_linear, _INT, norm, linear, _INT, _POINTER, _INT, _POINTER, _POINTER
        )
        self.experts = typed(
            library.quire_experts, _INT, ctypes.POINTER(ExpertsCall), _INT, _POINTER, _POINTER, _POINTER, _POINTER
        )
        self.lora = typed(
            library.quire_lora, *(_INT, _POINTER, _INT, _INT, _INT, _POINTER, _POINTER, _POINTER, _INT, _POINTER)
        )
        self.adapted_linear = typed(library.quire_adapted_linear, *_PRODUCT)
        self.lora_values = typed(library.quire_lora_values, _INT, _POINTER, _POINTER)
        self.lora_columns: int = typed(library.quire_lora_columns, returns=_INT)()
        self.lora_ranks: int = typed(library.quire_lora_ranks, returns=_INT)()
        self.apply_token_bitmask = typed(library.quire_keep_tokens, _POINTER, _INT, _INT, _POINTER, _INT, _POINTER)
        panel_columns = typed(library.quire_panel_columns, _BOOL, returns=_INT)
        self.panel_columns = {is_rounded: panel_columns(is_rounded) for is_rounded in (False, True)}
        self.plain = _plain_kernels(library)
        self.quantized = quantized_kernels(library, self.panel_columns[True])
        self.rounded = {name: RoundedKernels(self.quantized, form) for name, form in FORMS.items()}
        packs = typed(library.quire_packs, _INT, returns=_BOOL)
        self.packed_types = frozenset(dtype for dtype, number in TYPES.items() if packs(number))
        self.lossless = LosslessKernels.of(library) if hasattr(library, "quire_lossless_linear") else None


def find_library(folder: Path = FOLDER) -> NativeLibrary | str:
    """Return the best library that was built and that this processor supports, or the reason why there is none."""
    paths = runnable_libraries(folder)
    if not paths:
        return "none were built when Quire was installed (no C++ compiler?)"
    level = list(paths)[-1]
    try:
        return NativeLibrary(level, paths[level])
    except (OSError, AttributeError) as error:
        return str(error)


def runnable_libraries(folder: Path = FOLDER) -> dict[str, Path]:
    """Return the libraries that this processor supports by level, the best last, up to `MAX_LEVEL_VARIABLE`.

    Raises:
        ConfigError: the value of the variable is not a level.
    """
    wanted = os.environ.get(MAX_LEVEL_VARIABLE, LEVELS[-1])
    if wanted not in LEVELS:
        raise ConfigError(f"the environment variable {MAX_LEVEL_VARIABLE} must be one of {LEVELS}, got {wanted!r}")
    paths = {level: folder / f"libquire_{level}.so" for level in LEVELS}
    try:
        has_level = typed(ctypes.CDLL(str(paths["portable"])).quire_has_level, ctypes.c_char_p, returns=_BOOL)
    except (OSError, AttributeError):  # no library, or one built from other sources
        return {}
    levels = LEVELS[: LEVELS.index(wanted) + 1]
    return {level: paths[level] for level in levels if paths[level].exists() and has_level(level.encode())}


def _plain_kernels(library: Any) -> PlainKernels:
    packed_columns = typed(library.quire_packed_columns, _INT, returns=_INT)
    return PlainKernels(
        num_bytes=lambda weight: packed_columns(weight.shape[0]) * weight.shape[1] * weight.itemsize,
        pack=typed(library.quire_pack, _INT, _POINTER, _INT, _INT, _BOOL, _POINTER),
        multiply=typed(library.quire_linear, *_PRODUCT),
        rows=typed(library.quire_rows, *_LOOK_UP, returns=_BOOL),
    )


def quantized_kernels(library: Any, panel_columns: int) -> QuantizedKernels:
    """Load the functions for quantised weights from a library."""
    destination = (_INT, _INT, _INT, _INT, _INT, _POINTER)
    return QuantizedKernels(
        typed(library.quire_form_of, _INT, _INT, _INT, _BOOL, _BOOL, _INT, returns=_INT),
        typed(library.quire_bytes_quantized, _INT, _INT, _INT, returns=_INT),
        typed(library.quire_pack_quantized, _INT, ctypes.POINTER(UnpackedRows), *destination),
        typed(library.quire_pack_blocks, _INT, ctypes.POINTER(BlockRows), *destination, returns=_BOOL),
        typed(library.quire_pack_rounded, _INT, _INT, _POINTER, _INT, _INT, _BOOL, _POINTER, returns=_BOOL),
        typed(library.quire_linear_quantized, *_PRODUCT),
        typed(library.quire_rows_quantized, *_LOOK_UP, returns=_BOOL),
        panel_columns,
    )
