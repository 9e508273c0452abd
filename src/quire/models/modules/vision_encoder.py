"""The vision encoder of all families, as a `VisionSpec` describes it: one image at a time, layer by layer."""

from __future__ import annotations

import math
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from quire.models.modules.encoder import EncoderBlock
from quire.models.modules.norms import make_norm
from quire.models.modules.projections import Projection
from quire.models.modules.weight_slots import WeightSlot, WeightTable, nested
from quire.models.specs.vision_spec import AveragedSquares, JoinedSquares, LayerPieces, VisionSpec
from quire.ops.interface.ops import Ops, Rotation

# Patches are values of pixels, and there is one such layer: fewer bits would gain nothing.
MIN_PATCH_BITS: Final = 8


class PatchGrid(NamedTuple):
    """The places of an image's patches, in the order of its rows.

    Args:
        rows: number of patches from top to bottom.
        columns: number of patches from left to right.
        merge_size: side of the squares whose patches follow each other.
    """

    rows: int
    columns: int
    merge_size: int

    def places(self, device: torch.device) -> Tensor:
        """Return the row and the column of each patch, [2, P] of int64."""
        rows, columns = torch.meshgrid(
            torch.arange(self.rows, device=device), torch.arange(self.columns, device=device), indexing="ij"
        )
        merge = self.merge_size
        squares = torch.stack((rows, columns)).view(2, self.rows // merge, merge, self.columns // merge, merge)
        return squares.transpose(2, 3).reshape(2, -1)


class ImagePatches(NamedTuple):
    """An image that is encoded when a step needs its features.

    Args:
        digest: digest of the patches, their grid and all else that the features follow from.
        values: float32 [rows x columns, values of a patch]; see `VisionEncoder.start`. Without rows where another
            process encodes it.
        rows, columns: numbers of patches.
        num_bytes: number of bytes of its features.
    """

    digest: bytes
    values: Tensor
    rows: int
    columns: int
    num_bytes: int


class ImagePass:
    """An image on its way through the layers: the work of an encoder between two steps of a decoder.

    Args:
        spec: the encoder.
        hidden: hidden states before the first layer, [P, E]; those after a layer take their place.
        rotation: rotation of queries and keys; None for none.

    Attributes:
        num_layers: layers that it has passed.
        num_pieces: pieces of the next layer that it has passed.
        pieces: sizes of these pieces.
        heads, seen: queries, keys and values of a divided layer, and results of its heads, as far as computed.
        features: features, [1 + D, tokens, E of the decoder], as far as computed.
    """

    def __init__(self, spec: VisionSpec, hidden: Tensor, rotation: Rotation | None) -> None:
        self.hidden, self.rotation = hidden, rotation
        self.num_layers = self.num_pieces = 0
        num_patches, width = len(hidden), spec.layers[0].attention.num_heads * spec.layers[0].attention.head_dim
        self.pieces = LayerPieces.of(spec, num_patches)
        self.heads, self.seen = (
            hidden.new_empty(num_patches if self.pieces.is_divided else 0, count * width) for count in (3, 1)
        )
        self.features = hidden.new_empty(spec.num_features, num_patches // spec.merge_size**2, spec.out_width)

    @property
    def kind(self) -> str:
        """Kind of the next piece; those of one kind and image take about the same time."""
        num_rows, num_heads = self.pieces.num_row_pieces, self.pieces.num_head_pieces
        if not self.pieces.is_divided:
            return "layer"
        if self.num_pieces < num_rows:
            return "heads"
        return "seen" if self.num_pieces < num_rows + num_heads else "rest"


class VisionEncoder:
    """A vision encoder. It holds no state of an image. Call it under `torch.inference_mode()`.

    Args:
        spec: specification of the encoder.
        ops: kernels.
        dtype: dtype of weights and hidden states.

    Attributes:
        spec, dtype, device: the arguments of these names.
        weights: the weights to load; the encoder runs when none is missing.
    """

    def __init__(self, spec: VisionSpec, *, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        new_norm = partial(make_norm, width=spec.width, ops=ops, dtype=dtype, device=device)
        self._patches = Projection(math.prod(spec.patch_shape), spec.width, True, ops, min_bits=MIN_PATCH_BITS)
        flat = self._patches.slots["weight"]
        stored = WeightSlot((spec.width, *spec.patch_shape), lambda weight: flat.fill(weight.flatten(1)))
        if spec.frames_apart:
            stored = _frame_by_frame(stored)
        slots = nested(patches=self._patches.slots | {"weight": stored})
        slots["positions.weight"] = WeightSlot((spec.table_side**2, spec.width), self._fill_table)
        self._layers = [EncoderBlock(layer, spec.width, new_norm, ops) for layer in spec.layers]
        self._norm = new_norm(spec.norm)
        self._merger = _merger(spec.merger, spec, ops, dtype, device)
        slots |= nested(norm=self._norm.slots, merger=self._merger.slots)
        for idx, layer in enumerate(self._layers):
            slots |= nested(**{f"layers.{idx}": layer.slots})
        self._deep = {}
        for idx, layer_idx in enumerate(spec.deepstack):
            assert spec.deepstack_merger is not None
            self._deep[layer_idx] = _merger(spec.deepstack_merger, spec, ops, dtype, device)
            slots |= nested(**{f"deepstack.{idx}": self._deep[layer_idx].slots})
        self.weights = WeightTable(slots, dtype, device, lambda: None)

    def _fill_table(self, tensor: Tensor) -> None:
        self._table = tensor.clone()

    def start(self, values: Tensor, rows: int, columns: int) -> ImagePass:
        """Return an image before the first layer.

        Args:
            values: float32 [P, values of a patch], the patches of each square one after the other.
            rows, columns: numbers of patches, multiples of `merge_size`; their product is P.
        """
        spec = self.spec
        places = PatchGrid(rows, columns, spec.merge_size).places(self.device)
        hidden = self._patches.run(values.to(self.device, self.dtype)) + self._positions(places, rows, columns)
        rotation = None
        if spec.rope_theta is not None:
            rotation = axial_rotation(places, spec.layers[0].attention.head_dim, spec.rope_theta, self.dtype)
        return ImagePass(spec, hidden, rotation)

    def advance(self, image: ImagePass) -> Tensor | None:
        """Take an image through a layer, or a piece of one; the last returns [1 + D, tokens, E of the decoder].

        A layer of a large image is divided: queries, keys and values by rows, attention by heads, and all else by rows
        again. The result is that of the whole layer, up to the rounding of products of fewer rows.
        """
        pieces, idx = image.pieces, image.num_layers
        layer, piece, kind = self._layers[idx], image.num_pieces, image.kind
        image.num_pieces += 1
        match kind:
            case "heads":
                rows = pieces.rows(piece)
                image.heads[rows] = layer.heads(image.hidden[rows])
            case "seen":
                self._gather(layer, image, piece - pieces.num_row_pieces)
            case "rest":
                rows = pieces.rows(piece - pieces.num_row_pieces - pieces.num_head_pieces)
                image.hidden[rows] = layer.rest(image.seen[rows], image.hidden[rows])
                self._merge(image, rows)
            case _:
                image.hidden = layer(image.hidden, (0, len(image.hidden)), image.rotation, None)
                self._merge(image, slice(0, len(image.hidden)))
        if image.num_pieces < pieces.num_pieces:
            return None
        image.num_layers, image.num_pieces = idx + 1, 0
        return None if image.num_layers < len(self._layers) else image.features

    def _gather(self, layer: EncoderBlock, image: ImagePass, piece: int) -> None:
        """Compute the attention of some heads."""
        num_patches, part = len(image.hidden), image.pieces.heads(piece)
        seen = layer.seen(image.heads, part, (0, num_patches), image.rotation, None)
        of_heads = image.seen.view(num_patches, layer.spec.attention.num_heads, -1)[:, slice(*part)]
        of_heads.copy_(seen.view(of_heads.shape))

    def _merge(self, image: ImagePass, rows: slice) -> None:
        """Compute the features of rows that leave a layer."""
        idx, merged = image.num_layers, self.spec.merge_size**2
        tokens = slice(rows.start // merged, rows.stop // merged)
        if idx in self._deep:
            image.features[1 + self.spec.deepstack.index(idx), tokens] = self._deep[idx](image.hidden[rows])
        if idx == len(self._layers) - 1:
            image.features[0, tokens] = self._merger(self._norm(image.hidden[rows]))

    def __call__(self, values: Tensor, rows: int, columns: int) -> Tensor:
        """Return the features of an image; see `start` and `advance`."""
        image = self.start(values, rows, columns)
        while (features := self.advance(image)) is None:
            pass
        return features

    def _positions(self, places: Tensor, rows: int, columns: int) -> Tensor:
        """Return the learned positions of patches, [P, E], between those of the table for another grid."""
        side = self.spec.table_side
        if not self.spec.is_resampled:
            return self._table[places[0] * side + places[1]]
        result: Tensor | float = 0.0
        (top, bottom, down), (left, right, across) = (
            _neighbours(place, count, side) for place, count in zip(places, (rows, columns), strict=True)
        )
        for row, row_weight in ((top, 1 - down), (bottom, down)):
            for column, column_weight in ((left, 1 - across), (right, across)):
                result = result + self._table[row * side + column] * (row_weight * column_weight)[:, None]
        assert isinstance(result, Tensor)
        return result.to(self.dtype)


def _frame_by_frame(slot: WeightSlot) -> WeightSlot:
    """Return the slot of a projection of patches [E, C, F, H, W] that is stored as [F x E, C, H, W]."""
    width, channels, num_frames, *sides = slot.shape

    def fill(weight: Tensor) -> object:
        frames = weight.view(num_frames, width, channels, *sides)
        return slot.fill(frames.permute(1, 2, 0, 3, 4).contiguous())

    return WeightSlot((num_frames * width, channels, *sides), fill)


def _neighbours(places: Tensor, count: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the entries of an axis of `side` before and after each place of `count`, and the weight of the second.

    The first and the last place are those of the axis.
    """
    exact = places.float() * ((side - 1) / max(1, count - 1))
    before = exact.long().clamp(max=side - 1)
    return before, (before + 1).clamp(max=side - 1), exact - before


def axial_rotation(places: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Return the rotation of heads by row, in the first half of each pair of halves, and by column, in the second.

    Args:
        places: [2, P] of int64.
        head_dim: D, a multiple of 4.
        theta: base of the frequencies.
        dtype: dtype of the result.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim // 2, 2, device=places.device).float() / (head_dim // 2))
    angles = (places.float()[..., None] * frequencies).transpose(0, 1).flatten(1)
    cos, sin = angles.cos(), angles.sin()
    return Rotation(torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype))


class _JoinedSquares:
    """See `quire.models.specs.vision_spec.JoinedSquares`."""

    def __init__(
        self, merger: JoinedSquares, spec: VisionSpec, ops: Ops, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._merger, self._activate = merger, ops.activate
        self._width = spec.width * spec.merge_size**2
        norm_width = self._width if merger.norm_joined else spec.width
        self._norm = make_norm(merger.norm, norm_width, ops, dtype, device)
        self._up = Projection(self._width, self._width, True, ops)
        self._down = Projection(self._width, spec.out_width, True, ops)
        self.slots = nested(norm=self._norm.slots, up=self._up.slots, down=self._down.slots)

    def __call__(self, x: Tensor) -> Tensor:
        """Return hidden states of the decoder [P / merged, out] of patches [P, E]."""
        x = self._norm(x.view(-1, self._width)) if self._merger.norm_joined else self._norm(x).view(-1, self._width)
        return self._down.run(self._activate(self._up.run(x), self._merger.activation))


class _AveragedSquares:
    """See `quire.models.specs.vision_spec.AveragedSquares`."""

    def __init__(
        self, merger: AveragedSquares, spec: VisionSpec, ops: Ops, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._num_merged = spec.merge_size**2
        self._norm = make_norm(merger.norm, spec.width, ops, dtype, device)
        self._projection = Projection(spec.width, spec.out_width, False, ops)
        # It is stored for a product from the right.
        fill = self._projection.slots["weight"].fill
        stored = WeightSlot((spec.width, spec.out_width), lambda weight: fill(weight.T.contiguous()))
        self.slots = nested(norm=self._norm.slots, projection={"weight": stored})

    def __call__(self, x: Tensor) -> Tensor:
        """Return hidden states of the decoder [P / merged, out] of patches [P, E]."""
        return self._projection.run(self._norm(x.view(-1, self._num_merged, x.shape[1]).mean(1)))


def _merger(
    merger: JoinedSquares | AveragedSquares, spec: VisionSpec, ops: Ops, dtype: torch.dtype, device: torch.device
) -> _JoinedSquares | _AveragedSquares:
    if isinstance(merger, JoinedSquares):
        return _JoinedSquares(merger, spec, ops, dtype, device)
    return _AveragedSquares(merger, spec, ops, dtype, device)
