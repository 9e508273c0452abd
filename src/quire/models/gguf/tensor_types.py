"""The types of tensors in GGUF files: numbers, names, and sizes of blocks."""

from __future__ import annotations

from typing import NamedTuple


class TensorType(NamedTuple):
    """A type of tensors that is served.

    Args:
        id: number of the type in a file.
        name: name of the type.
        block_values: number of values of a block; a row holds whole blocks.
        block_bytes: number of bytes of a block.
    """

    id: int
    name: str
    block_values: int
    block_bytes: int


F32 = TensorType(0, "F32", 1, 4)
F16 = TensorType(1, "F16", 1, 2)
BF16 = TensorType(30, "BF16", 1, 2)
Q4_0 = TensorType(2, "Q4_0", 32, 18)
Q4_1 = TensorType(3, "Q4_1", 32, 20)
Q5_0 = TensorType(6, "Q5_0", 32, 22)
Q5_1 = TensorType(7, "Q5_1", 32, 24)
Q8_0 = TensorType(8, "Q8_0", 32, 34)
Q2_K = TensorType(10, "Q2_K", 256, 84)
Q3_K = TensorType(11, "Q3_K", 256, 110)
Q4_K = TensorType(12, "Q4_K", 256, 144)
Q5_K = TensorType(13, "Q5_K", 256, 176)
Q6_K = TensorType(14, "Q6_K", 256, 210)
IQ4_NL = TensorType(20, "IQ4_NL", 32, 18)
IQ4_XS = TensorType(23, "IQ4_XS", 256, 136)
MXFP4 = TensorType(39, "MXFP4", 32, 17)

TENSOR_TYPES = {
    tensor_type.id: tensor_type
    for tensor_type in (
        F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4,
    )
}  # fmt: skip

# Names of types that files may have and that are not served.
OTHER_TYPES = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
    22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
    40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
