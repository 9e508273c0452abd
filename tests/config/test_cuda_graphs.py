"""Sizes of captured steps."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config import CudaGraphConfig, EngineConfig, capture_sizes
from quire.errors import ConfigError


def test_the_default_ladder_ends_at_the_most_sequences() -> None:
    config = CudaGraphConfig()
    assert config.sizes("triton", "cuda", 20) == (1, 2, 4, 8, 16, 20)
    assert config.sizes("triton", "cuda", 1) == (1,)
    ladder = config.sizes("triton", "cuda", 4096)
    assert ladder[-2:] == (496, 512)
    assert len(ladder) == 51  # as docs/gpu.md counts them
    assert list(ladder) == sorted(set(ladder))


def test_nothing_is_captured_by_default_on_a_cpu_or_by_other_kernels() -> None:
    assert CudaGraphConfig().sizes("triton", "cpu", 20) == ()
    assert CudaGraphConfig().sizes("auto", "cuda", 20) == ()
    assert CudaGraphConfig(enforce_eager=True).sizes("triton", "cuda", 20) == ()


def test_drafts_that_are_verified_have_rows() -> None:
    options = {"kernels": "triton", "max_num_seqs": 4, "speculative_method": "ngram", "num_speculative_tokens": 3}
    assert capture_sizes(EngineConfig.from_options(**options), "cuda") == (1, 2, 4, 8, 16)
    assert capture_sizes(EngineConfig.from_options(**options | {"max_num_seqs": 500}), "cuda")[-1] == 512


def test_given_sizes_are_sorted_and_bounded() -> None:
    config = CudaGraphConfig(cudagraph_capture_sizes=[4, 1, 4, 64])  # type: ignore[arg-type]
    assert config.cudagraph_capture_sizes == (1, 4, 64)
    assert config.sizes("triton", "cpu", 20) == (1, 4)
    assert CudaGraphConfig(cudagraph_capture_sizes=(64,)).sizes("triton", "cuda", 20) == (20,)


@pytest.mark.parametrize("sizes", [(), (0,), "8", 8, (1, True), (2.0,)])
def test_other_sizes_are_refused(sizes: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options(kernels="triton", cudagraph_capture_sizes=sizes)
    assert caught.value.field == "cudagraph_capture_sizes"


def test_sizes_that_nothing_would_capture_are_refused() -> None:
    for options in ({"kernels": "torch"}, {"kernels": "native"}, {"kernels": "triton", "enforce_eager": True}):
        with pytest.raises(ConfigError) as caught:
            EngineConfig.from_options(cudagraph_capture_sizes=[1], **options)
        assert caught.value.field == "cudagraph_capture_sizes"


PIECES = "full_and_piecewise"


def test_pieces_are_captured_where_they_are_asked_for() -> None:
    assert CudaGraphConfig().piece_sizes("cuda", 8192) == ()
    config = CudaGraphConfig(cudagraph_mode=PIECES)
    assert config.piece_sizes("cuda", 8192)[-2:] == (1536, 2048)
    assert config.piece_sizes("cuda", 100) == (16, 32, 48, 64, 96, 100)
    assert config.piece_sizes("cpu", 8192) == ()
    given = CudaGraphConfig(cudagraph_mode=PIECES, piecewise_cudagraph_capture_sizes=(64, 8))
    assert given.piece_sizes("cpu", 8192) == (8, 64)
    assert given.piece_sizes("cpu", 32) == (8, 32)


def test_pieces_that_nothing_would_capture_are_refused() -> None:
    name = "piecewise_cudagraph_capture_sizes"
    sizes: dict[str, Any] = {name: (8,)}
    for options, field in (
        ({"kernels": "triton", **sizes}, name),
        ({"kernels": "torch", "cudagraph_mode": PIECES}, "cudagraph_mode"),
        ({"kernels": "triton", "cudagraph_mode": PIECES, "enforce_eager": True}, "cudagraph_mode"),
        ({"kernels": "triton", "cudagraph_mode": PIECES, "enforce_eager": True, **sizes}, name),
    ):
        with pytest.raises(ConfigError) as caught:
            EngineConfig.from_options(**options)
        assert caught.value.field == field
