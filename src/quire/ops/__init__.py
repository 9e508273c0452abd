"""The kernels, and the choice of a backend."""

from __future__ import annotations

from typing import Final

import torch

from quire.config import Quantization
from quire.errors import ConfigError
from quire.ops.cpu.native_library import NativeLibrary, find_library
from quire.ops.cpu.native_ops import NativeOps
from quire.ops.interface.ops import Ops
from quire.ops.interface.weight_formats import FORMS
from quire.ops.pytorch.torch_ops import TorchOps

# Least compute capability of a GPU with bfloat16, and with the tensor cores that Triton's kernels need.
BFLOAT16_CAPABILITY: Final = (8, 0)


def make_ops(
    device: torch.device,
    kernels: str = "auto",
    quantization: Quantization | None = None,
    weight_packing: str = "auto",
    deterministic: bool = False,
) -> Ops:
    """Make the backend that computes on a device.

    Args:
        device: any device of torch.
        kernels: "torch" for stock operators, "native" for the kernels that the package's build compiled, "triton" for
            Triton kernels, on an NVIDIA GPU or in the interpreter; "auto" for native kernels on a CPU, else for the
            result of `choose_kernels`.
        quantization: quantisation of the weights of linear layers, and of their inputs.
        weight_packing: "lossless" for bfloat16 weights in three quarters of their bytes, "plain" for unchanged weights,
            "auto" for "lossless" if the kernels support it.
        deterministic: batch-invariant results: a row gets the same bits in every batch. The backend refuses weights for
            which it cannot promise that.

    Raises:
        ConfigError: the kernels, the weight packing or deterministic results that were asked for are not available; the
            message says why.
    """
    if quantization is not None and weight_packing == "lossless":
        raise ConfigError(
            f"weight_packing 'lossless' is for weights as they came, and quantization {quantization!r} rounds them: "
            "leave one of the two out",
            field="weight_packing",
        )
    if deterministic and (kernels in ("torch", "triton") or device.type != "cpu"):
        raise _not_deterministic(f"kernels {kernels!r} on device {device.type!r} are others")
    kernels = choose_kernels(device, kernels)
    if kernels == "triton":
        return _plain(_triton(device, quantization), weight_packing)
    if kernels == "torch":
        return _plain(TorchOps(device, quantization=quantization), weight_packing)
    library_or_reason = find_library() if device.type == "cpu" else f"they are for CPUs, not for device {device.type!r}"
    if not isinstance(library_or_reason, str) and quantization is not None and not _rounds_alike(library_or_reason):
        library_or_reason = (
            f"those of level {library_or_reason.level} give other products of rounded weights than stock operators"
        )
    if not isinstance(library_or_reason, str):
        wants_lossless = weight_packing != "plain" and quantization is None
        if wants_lossless and library_or_reason.lossless is not None and _agrees(library_or_reason):
            return NativeOps(library_or_reason, is_lossless=True, deterministic=deterministic)
        return _plain(NativeOps(library_or_reason, quantization, deterministic=deterministic), weight_packing)
    if kernels == "native":
        raise ConfigError(
            f"native kernels were asked for, but {library_or_reason}; use 'torch' or 'auto'", field="kernels"
        )
    if deterministic:
        raise _not_deterministic(library_or_reason)
    return _plain(
        TorchOps(device, note=f"no native kernels: {library_or_reason}", quantization=quantization), weight_packing
    )


def choose_kernels(device: torch.device, kernels: str) -> str:
    """Return the kernels that "auto" selects on a GPU, "triton" or "torch"; any other option, or a CPU, unchanged.

    Triton kernels need Triton, which a torch for CUDA brings, and tensor cores of compute capability 8.0.
    """
    if kernels != "auto" or device.type == "cpu":
        return kernels
    if torch.cuda.get_device_capability(device) < BFLOAT16_CAPABILITY:
        return "torch"
    try:
        import triton
    except ImportError:
        return "torch"
    return "torch" if triton.knobs.runtime.interpret else "triton"


def _triton(device: torch.device, quantization: Quantization | None) -> Ops:
    """Return the backend of Triton kernels, which is imported here only: Triton is an extra."""
    reason: str | None = None
    try:
        import triton
    except ImportError as error:
        reason = f"Triton cannot be imported ({error}); install quire[gpu], or use 'torch'"
    else:
        is_interpreted = bool(triton.knobs.runtime.interpret)
        if device.type == "cpu" and not is_interpreted:
            reason = "they are for NVIDIA GPUs, and the device is 'cpu'; use 'auto'"
        elif device.type != "cpu" and is_interpreted:
            reason = "Triton interprets its kernels on the CPU, for TRITON_INTERPRET is set; unset it, or use 'torch'"
    if reason is not None:
        raise ConfigError(f"kernels 'triton' were asked for, but {reason}", field="kernels")
    from quire.ops.triton.triton_ops import TritonOps

    return TritonOps(device, quantization)


def _rounds_alike(library: NativeLibrary) -> bool:
    """Return whether small matmuls with quantised weights agree with stock operators, to within 1e-4."""
    weight = torch.linspace(-1, 1, 70 * 96).view(70, 96).sin()
    x = torch.linspace(0, 9, 7 * 96).view(7, 96).sin()
    for form in FORMS.values():
        quantization: Quantization = "int8" if form.bits == 8 else "int4"
        backends = TorchOps(torch.device("cpu"), quantization=quantization), NativeOps(library, quantization)
        stock, native = (ops.pack_linear(weight, min_bits=form.bits, max_group=form.group) for ops in backends)
        for rows in (x[:1], x[:2], x):
            if not torch.allclose(native(rows), stock(rows), rtol=1e-4, atol=1e-4):
                return False
    return True


def _agrees(library: NativeLibrary) -> bool:
    """Return whether a small lossless matmul has the bits of the plain one: tests may not have run on this level."""
    weight = torch.linspace(-1, 1, 64 * 66).view(64, 66).bfloat16()
    plain, lossless = (NativeOps(library, is_lossless=flag).pack_linear(weight) for flag in (False, True))
    return all(torch.equal(plain(x), lossless(x)) for x in (weight[:1], weight[:2], weight[:5]))


def _not_deterministic(reason: str) -> ConfigError:
    return ConfigError(
        f"deterministic needs native kernels on a CPU, but {reason}; leave deterministic out, or set kernels to "
        "'native' and device to 'cpu'",
        field="deterministic",
    )


def _plain(ops: Ops, weight_packing: str) -> Ops:
    if weight_packing == "lossless":
        raise ConfigError(
            "weight_packing 'lossless' needs native kernels of level avx2 or better that give the plain "
            f"product's bits, and what computes here is {ops.name}; use 'plain'",
            field="weight_packing",
        )
    return ops
