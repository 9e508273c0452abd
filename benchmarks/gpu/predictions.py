"""Times of each kernel, predicted by a roofline model from its bytes and operations before any measurement."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from benchmarks.gpu.shapes import LLAMA_8B, QWEN_06B, Ceilings, attention_flops, decode_floor, prompt_floor

# Minimum time of a launch, in seconds.
LAUNCH: Final = 2.5e-6


class Prediction(NamedTuple):
    """A kernel at one size.

    Args:
        kernel: name and size.
        num_bytes: bytes of memory traffic.
        flops: operations of matmuls.
        share: predicted share of the ceiling.
    """

    kernel: str
    num_bytes: float
    flops: float
    share: float

    def seconds(self, rates: Ceilings) -> float:
        """Return the predicted time."""
        return max(LAUNCH, self.num_bytes / rates.bytes_per_s / self.share, self.flops / rates.flops_per_s / self.share)


def kernel_predictions() -> Iterator[Prediction]:
    """Yield a prediction of each kernel, one layer of Llama-3.1-8B's shape unless it says otherwise."""
    shape = LLAMA_8B
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    kv_bytes = 2 * 2 * shape.num_kv_heads * shape.head_dim
    for batch in (1, 64, 256):
        row = batch * 2.0  # bytes of one number of every row
        yield Prediction(f"prepare_heads, rows: {batch}", 2 * heads * row, 0, 0.6)
        yield Prediction(f"rms_norm, rows: {batch}", 2 * shape.width * row, 0, 0.6)
        yield Prediction(f"gate, rows: {batch}", 3 * shape.ffn_width * row, 0, 0.6)
    # One sequence of 1,024 tokens is 4 MB: it ends before the pipelines of all SMs are full.
    for batch, context, share in (
        (1, 1024, 0.25),
        (1, 32768, 0.8),
        (64, 1024, 0.8),
        (64, 8192, 0.85),
        (256, 1024, 0.85),
    ):
        yield Prediction(f"attend + combine, {batch} x {context:,}", batch * context * kv_bytes, 0, share)
    yield Prediction("attend + combine, fp8, 64 x 8,192", 64 * 8192 * kv_bytes / 2, 0, 0.7)
    # Slots of 132 bytes are loaded 4 bytes at a time.
    yield Prediction("attend + combine, int8, 64 x 8,192", 64 * 8192 * kv_bytes * 132 / 256, 0, 0.4)
    # Four tiles of 16 sequences read the shared tokens, in 8 splits; the partial results of nine splits of each row are
    # written and read.
    own, partial_bytes = 64 * 128, 64 * 9 * shape.num_heads * (shape.head_dim + 2) * 4 * 2
    shared_bytes = (4 * 8192 + own) * kv_bytes + partial_bytes
    yield Prediction("attend_shared + attend + combine, 64 x 8,320, 8,192 shared", shared_bytes, 0, 0.6)
    for length in (2048, 8192, 32768):
        yield Prediction(f"attend, a prompt of {length:,}", 0, attention_flops(shape, length), 0.5)
    weights = 2.0 * shape.width * shape.ffn_width
    for form, size in (("int4", 0.5625), ("int8", 1.0625), ("e4m3", 1.03)):
        yield Prediction(f"multiply, {form}, 1 row, gates and ups", weights * size, 0, 0.6)
        yield Prediction(f"multiply, {form}, 2,048 rows, gates and ups", 0, 2 * 2048 * weights, 0.2)
    # A layer of Qwen3-30B-A3B: 8 of 128 experts, each of three matrices of 2,048 x 768; 64 rows are routed to 126.
    expert = 3.0 * 2048 * 768
    for form, size in (("int4", 0.5625), ("e4m3", 1.03)):
        yield Prediction(f"experts of stored {form}, both products, 1 row", 8 * expert * size, 0, 0.4)
        yield Prediction(f"experts of stored {form}, both products, 64 rows", 126 * expert * size, 0, 0.6)
        yield Prediction(f"experts of stored {form}, both products, 2,048 rows", 0, 2 * 2048 * 8 * expert, 0.15)
    # Adapters of rank 16 of gate and up, whose joined matrix B has zeros for the other's ranks. Outputs are written,
    # read and written again; those of a prompt are more bytes than its adapter's matrices.
    adapter, added = 2.0 * 32 * (shape.width + 2 * shape.ffn_width), 3 * 2.0 * 2 * shape.ffn_width
    for rows, adapters, share in ((1, 1, 0.3), (64, 16, 0.6), (256, 64, 0.6), (2048, 1, 0.6)):
        name = f"lora_shrink + lora_expand, rank 16, gates and ups, rows: {rows:,}, adapters: {adapters}"
        yield Prediction(name, adapters * adapter + rows * added, 0, share)
    state = 64 * 128 * 4.0
    yield Prediction("scan (48 heads of 64 x 128), 64 rows of 64 sequences", 64 * 48 * 2 * state, 0, 0.6)
    yield Prediction("delta_rule (32 heads of 128 x 128), 64 rows of 64 sequences", 64 * 32 * 2 * 2 * state, 0, 0.6)
    # A matmul with a float32 operand is three of 16 bits.
    scanned = 2.0 * 64 * 64 * (128 + 3 * (64 + 2 * 128))
    yield Prediction("scan in chunks (48 heads of 64 x 128), 2,048 rows", 0, 2048 // 64 * 48 * scanned, 0.15)
    # Both operands are split into two terms, so a matmul is three. Within a chunk: keys and queries by keys, and ten of
    # 64 x 64 for an inverse; across chunks: keys and queries by the state, two of 64 x 64, and keys by the values.
    corrected = 3 * 2.0 * 64 * (2 * 64 * 128 + 10 * 64 * 64 + 3 * 128 * 128 + 2 * 64 * 128)
    yield Prediction("delta rule in chunks (32 heads of 128 x 128), 2,048 rows", 0, 2048 // 64 * 32 * corrected, 0.25)
    yield Prediction("convolve_rows, 64 rows of 8,192 channels", 64 * 8192 * 2 * 5, 0, 0.5)
    yield Prediction("apply_token_bitmask, 64 rows of 151,936", 64 * 151936 * 4, 0, 0.6)


def table(rates: tuple[Ceilings, ...]) -> str:
    """Return the predictions as a table of Markdown, in microseconds."""
    lines = ["| kernel | bytes | operations | share | " + " | ".join(f"{each.name}, us" for each in rates) + " |"]
    lines.append("|" + "---|" * (4 + len(rates)))
    for each in kernel_predictions():
        times = " | ".join(f"{each.seconds(rate) * 1e6:,.1f}" for rate in rates)
        lines.append(f"| {each.kernel} | {each.num_bytes:.3g} | {each.flops:.3g} | {each.share:.0%} | {times} |")
    lines += ["", "| step, least time | " + " | ".join(f"{each.name}, ms" for each in rates) + " |"]
    lines.append("|" + "---|" * (1 + len(rates)))
    for shape in (LLAMA_8B, QWEN_06B):
        for batch in (1, 8, 64, 256):
            times = " | ".join(f"{decode_floor(shape, batch, 1024, rate) * 1e3:,.2f}" for rate in rates)
            lines.append(f"| {shape.name}, decode, {batch} x 1,024 | {times} |")
        times = " | ".join(f"{prompt_floor(shape, 8192, rate) * 1e3:,.0f}" for rate in rates)
        lines.append(f"| {shape.name}, a prompt of 8,192 | {times} |")
    return "\n".join(lines)
