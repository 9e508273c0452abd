"""The work of an encoder of images: its layers run between the steps of the decoder, in the engine's thread.

```
 thread    | step | layers of image 1 | step | layers of image 1 | step | layer of image 2 | ...
 gap       |<--------- a token of the sequences that decode ---->|
```

Layers of a large image run in pieces; what is said of layers here holds for pieces (`VisionEncoder.advance`).

A prompt is computed up to its first image whose features are not in memory, and others go on; see `MediaGate`. Images
are encoded in the order of the running sequences, one after the other. After a step in which sequences decode, layers
run for as long as it leaves of `max_inter_token_ms`, one at least; without that target, one runs. After other steps
they run on, and the engine handles its commands now and then.

Where several prompts wait, features may be made faster than the decoder reads them. So an image begins only if its
features and those that sequences before it in order still have to read fit into the memory for features.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from time import perf_counter
from typing import Final

from quire.engine.control.chunk_size import WEIGHT, moving_average
from quire.engine.control.step_recorder import StepRecorder
from quire.errors import DeviceFailed
from quire.execution.step.device_health import step_error
from quire.execution.step.image_features import ImageFeatures, ImageStats
from quire.models.modules.vision_encoder import ImagePatches
from quire.sequences.sequence import Sequence

# Time of the encoder, in seconds, after which commands of the engine are handled while no sequence runs.
ALONE_S: Final = 0.05
_ALL: Final = 1 << 62


class LayerCost:
    """An estimate of the seconds that a layer, or a piece of one kind, takes an image of some number of patches.

    Projections take a time that grows with the patches, and attention one that grows with their square; pieces are of
    fewer rows or heads, and take less. All layers of an image take the same time, so its own are measured; the first of
    another image is estimated, from above if that image is larger.
    """

    def __init__(self) -> None:
        # Kind -> patches of the image that was measured last, and seconds.
        self._measured: dict[str, tuple[int, float]] = {}

    def record(self, kind: str, num_patches: int, elapsed_s: float) -> None:
        """Record a time."""
        count, known_s = self._measured.get(kind, (0, 0.0))
        known = known_s if num_patches == count else None
        self._measured[kind] = num_patches, moving_average(known, elapsed_s, WEIGHT)

    def seconds(self, kind: str, num_patches: int) -> float:
        """Return the estimate; 0 before the first of a kind."""
        if kind not in self._measured:
            return 0.0
        count, known_s = self._measured[kind]
        growth = num_patches / count
        return known_s * max(growth, growth**2)


@dataclass(slots=True)
class _Wish:
    """An image that is to be encoded, and the sequences that have asked for it."""

    image: ImagePatches
    sequences: dict[Sequence, None]

    @property
    def is_alive(self) -> bool:
        return any(not sequence.is_finished for sequence in tuple(self.sequences))  # other threads read it as well


def _ignore(_: bytes) -> None:
    pass


class EncoderWork:
    """Decides which image goes through how many layers between two steps; a `MediaGate`.

    Args:
        features: features of images, and their encoder.
        max_inter_token_ms: target for the time between two tokens of a sequence; None without one.
        clock: clock in seconds.

    Attributes:
        cost: estimate of a layer's time.
        on_features: function that is called with the digest of each image whose features come to memory.
    """

    def __init__(
        self, features: ImageFeatures, max_inter_token_ms: float | None, clock: Callable[[], float] = perf_counter
    ) -> None:
        self.on_features: Callable[[bytes], None] = _ignore
        self.cost = LayerCost()
        self._features, self._limit_s, self._clock = features, (max_inter_token_ms or 0.0) / 1000, clock
        self._wishes: dict[bytes, _Wish] = {}
        # The image that has passed some layers, which may lose its place in the wishes while its sequence is preempted.
        self._begun: _Wish | None = None
        self._needed_bytes = 0
        self._is_closed = False
        self._encoder_s = 0.0

    # ---- features that sequences lack ----

    @property
    def is_closed(self) -> bool:
        """See `MediaGate`."""
        return self._is_closed

    def limits(self, running: Seq[Sequence]) -> dict[Sequence, int]:
        """See `MediaGate`."""
        self._wishes, self._needed_bytes, self._is_closed = {}, 0, False
        with_media = [
            sequence
            for sequence in running
            if sequence.request.media and sequence.num_computed < sequence.request.media[-1].span.end
        ]
        return {sequence: self.limit(sequence, sequence.num_computed) for sequence in with_media}

    def limit(self, sequence: Sequence, start: int) -> int:
        """See `MediaGate`."""
        for span, image, *_ in sequence.request.media:
            if span.end <= start or not isinstance(image, ImagePatches):
                continue
            num_bytes = image.num_bytes
            has_room = not self._needed_bytes or self._needed_bytes + num_bytes <= self._features.max_bytes
            if self._features.holds(image):
                self._needed_bytes += num_bytes
                continue
            self._is_closed = True
            if image.digest in self._wishes:
                self._wishes[image.digest].sequences[sequence] = None
            elif has_room:
                self._needed_bytes += num_bytes
                self._wishes[image.digest] = _Wish(image, {sequence: None})
            return max(0, span.start - start)
        return _ALL

    @property
    def stats(self) -> ImageStats:
        """Counters since the start, and the present number of images to encode."""
        num_waiting = sum(wish.is_alive for wish in tuple(self._wishes.values()))
        features = self._features
        return ImageStats(features.num_encoded, self._encoder_s, features.num_hits, features.num_loaded, num_waiting)

    # ---- between two steps ----

    def run(self, steps: StepRecorder) -> list[tuple[str, str]]:
        """Take images through layers, for as long as the last step leaves.

        Args:
            steps: duration of the last step, which is taken from it; its chunks leave time while there is work.

        Returns:
            The requests whose image could not be encoded, with the error.

        Raises:
            DeviceFailed: the device cannot be used any more.
        """
        step_s, steps.decoding_step_s = steps.decoding_step_s, None
        failed = self._run(ALONE_S if step_s is None else self._limit_s - step_s)
        if steps.chunk_size is not None:
            steps.chunk_size.reserve_s = self.next_layer_s()
        return failed

    def next_layer_s(self) -> float:
        """Return the time of the next layer, in seconds; 0 without work."""
        wish = self._next()
        return 0.0 if wish is None else self.cost.seconds(self._features.next_kind(wish.image), len(wish.image.values))

    def _run(self, left_s: float) -> list[tuple[str, str]]:
        """Take images through layers, one at least, for `left_s` seconds; see `run`."""
        wish, spent_s, is_first = self._next(), 0.0, True
        while wish is not None:
            kind = self._features.next_kind(wish.image)
            if not is_first and spent_s + self.cost.seconds(kind, len(wish.image.values)) > left_s:
                break
            started_s, is_first = self._clock(), False
            try:
                is_done = self._features.advance(wish.image)
            except Exception as error:
                return self._fail(wish, error)
            elapsed_s = self._clock() - started_s
            spent_s += elapsed_s
            self._encoder_s += elapsed_s
            self._begun = None if is_done else wish
            if is_done:
                self.on_features(wish.image.digest)
                self._wishes.pop(wish.image.digest, None)
                wish = self._next()
            else:
                self.cost.record(kind, len(wish.image.values), elapsed_s)
        return []

    def _next(self) -> _Wish | None:
        """Return the image to go on with: the one that has begun, or the first one; None without work."""
        begun = self._begun
        if begun is not None:
            begun = self._wishes.get(begun.image.digest, begun)
            if begun.is_alive:
                return begun
            self._begun = None
            self._features.drop_pass()
        return next((wish for wish in self._wishes.values() if wish.is_alive), None)

    def _fail(self, wish: _Wish, error: Exception) -> list[tuple[str, str]]:
        """Forget an image that could not be encoded; return the unfinished requests that have asked for it."""
        self._begun = None
        self._wishes.pop(wish.image.digest, None)
        failure = step_error("an image of the prompt could not be encoded", error)
        if isinstance(failure, DeviceFailed):
            raise failure from error
        waiting = dict.fromkeys(each.request.request_id for each in wish.sequences if not each.is_finished)
        return [(request_id, str(failure)) for request_id in waiting]
