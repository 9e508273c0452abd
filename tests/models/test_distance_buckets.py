"""The buckets of distances between tokens are those of transformers."""

from __future__ import annotations

import torch
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from quire.models.modules.encoder import distance_buckets
from quire.models.specs.encoder_spec import RelativePositions


def test_buckets_of_all_distances() -> None:
    """Up to the longest text of MPNet, and beyond; at powers of two the rounding of a logarithm decides."""
    for num_buckets, max_distance in ((32, 128), (16, 64)):
        found = distance_buckets(RelativePositions(num_buckets, max_distance), 2000)
        distances = torch.arange(-2000, 2001)
        wanted = MPNetEncoder.relative_position_bucket(distances, num_buckets, max_distance)
        assert torch.equal(found, wanted)
