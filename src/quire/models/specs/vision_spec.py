"""Vision encoders as values: a `VisionSpec` describes what makes a decoder's hidden states from patches of an image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from quire.models.specs.encoder_spec import EncoderLayer
from quire.models.specs.norm_spec import LayerNorm, RMSNorm

if TYPE_CHECKING:  # planning reads configurations without torch
    from quire.ops.interface.ops import Elementwise

# Rows of a piece of a layer, and scores of attention of a piece: some 10 billion operations with Qwen3-VL's sizes, a
# tenth of a second of two cores without bfloat16 instructions.
PIECE_ROWS: Final = 512
PIECE_SCORES: Final = 1 << 25


@dataclass(frozen=True, slots=True)
class JoinedSquares:
    """A merger that joins the patches of a square, between two linear layers with biases.

    Args:
        norm: norm of what is joined.
        norm_joined: whether it is over the joined patches, or over each of them before.
        activation: activation between the layers, of which the first keeps the joined width.
    """

    norm: LayerNorm
    norm_joined: bool
    activation: Elementwise


@dataclass(frozen=True, slots=True)
class AveragedSquares:
    """A merger that averages the patches of a square, and projects their norm without a bias.

    Args:
        norm: norm of the average.
    """

    norm: RMSNorm


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """A vision encoder: a projection of patches, positions, layers of bidirectional attention, and mergers of squares.

    Args:
        patch_shape: channels, frames, height and width of a patch; in models of images only, without frames.
        width: E, the size of a hidden state.
        layers: layers, from the patches upwards.
        table_side: side of the square table of learned positions, which is resampled for other grids.
        is_resampled: False if images always have the table's grid.
        rope_theta: base of the rotation of heads by row and column; None for none.
        norm: norm after the last layer; None for none.
        merge_size: side of a square of patches that becomes one hidden state of the decoder.
        out_width: size of a hidden state of the decoder.
        merger: layers that make them of the last layer's output.
        deepstack: layers whose output is merged as well, for the decoder's first layers, in order.
        deepstack_merger: layers that merge their output; None without such layers.
        frames_apart: whether the projection of patches is stored frame by frame.

    Source: Qwen3-VL, arXiv 2511.21631 (rotation, resampled positions, deepstack); SigLIP, arXiv 2303.15343, as in
    Gemma 3, arXiv 2503.19786 (average of squares).
    """

    patch_shape: tuple[int, ...]
    width: int
    layers: tuple[EncoderLayer, ...]
    table_side: int
    is_resampled: bool
    rope_theta: float | None
    norm: LayerNorm | None
    merge_size: int
    out_width: int
    merger: JoinedSquares | AveragedSquares
    deepstack: tuple[int, ...] = ()
    deepstack_merger: JoinedSquares | None = None
    frames_apart: bool = False

    @property
    def num_features(self) -> int:
        """Number of hidden states of an image's token: of the last layer, and of each deepstack layer."""
        return 1 + len(self.deepstack)


class LayerPieces(NamedTuple):
    """The pieces of a layer of an image: of rows, then of heads, then of rows again; or the layer in one piece.

    Args:
        num_patches, num_heads: numbers of rows and heads.
        piece_rows, piece_heads: rows and heads of a piece; the last ones may be smaller.
    """

    num_patches: int
    num_heads: int
    piece_rows: int
    piece_heads: int

    @classmethod
    def of(cls, spec: VisionSpec, num_patches: int) -> LayerPieces:
        """Return the pieces of a layer of an image; the patches of a token are in one piece."""
        merged, num_heads = spec.merge_size**2, spec.layers[0].attention.num_heads
        piece_heads = min(num_heads, max(1, PIECE_SCORES // num_patches**2))
        return cls(num_patches, num_heads, max(1, PIECE_ROWS // merged) * merged, piece_heads)

    @property
    def is_divided(self) -> bool:
        """Whether there are several pieces."""
        return self.num_patches > self.piece_rows

    @property
    def num_row_pieces(self) -> int:
        """Number of pieces of rows, of which there are two series."""
        return -(-self.num_patches // self.piece_rows)

    @property
    def num_head_pieces(self) -> int:
        """Number of pieces of heads, between the two series."""
        return -(-self.num_heads // self.piece_heads)

    @property
    def num_pieces(self) -> int:
        """Number of all pieces of a layer."""
        return 2 * self.num_row_pieces + self.num_head_pieces if self.is_divided else 1

    def rows(self, piece: int) -> slice:
        """Return the rows of a piece of one of the two series."""
        return slice(piece * self.piece_rows, min(self.num_patches, (piece + 1) * self.piece_rows))

    def heads(self, piece: int) -> tuple[int, int]:
        """Return the range of heads of a piece."""
        return piece * self.piece_heads, min(self.num_heads, (piece + 1) * self.piece_heads)
