"""The beam searches of a step: candidates become beams, stop strings end them, and complete searches have outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.engine.outputs.output_processor import OutputProcessor, RequestState
from quire.scheduling.beam_groups import beams_of
from quire.scheduling.plan import BeamGroup, Candidate
from quire.scheduling.scheduler import Scheduler
from quire.sequences.sequence import Sequence as Beam
from quire.sequences.status import FinishReason
from quire.sequences.strategy import Append


class AdvancedBeams(NamedTuple):
    """Result of the beam searches of a step.

    Args:
        num_generated: number of tokens appended to beams.
        exhausted: ids of the requests whose search ended without a hypothesis.
    """

    num_generated: int
    exhausted: list[str]


class BeamSteps:
    """Advances beam searches, in the scheduler and in the outputs."""

    def __init__(self, scheduler: Scheduler, outputs: OutputProcessor, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._outputs = outputs
        self._clock = clock

    def advance(self, groups: Sequence[BeamGroup], candidates: Sequence[tuple[Candidate, ...]]) -> AdvancedBeams:
        """Apply the candidates of a step after the results of its items."""
        beams = [beams_of(group, self._scheduler.sequences) for group in groups]
        with_stops = [self._with_stops(*pair) for pair in zip(beams, candidates, strict=True)]
        num_generated, ended = 0, dict[str, RequestState]()
        for _, beam, edit, _ in self._scheduler.advance_beams(groups, with_stops):
            request_id = beam.request.request_id
            state = self._outputs.states[request_id]
            if isinstance(edit, Append):
                num_generated += 1
                assert state.beams is not None, "a beam of a request without a search"
                state.beams.choose(edit.sample_idx, edit.draw_idx)
                if state.metrics.first_token_s is None:
                    state.metrics.first_token_s = self._clock()
            else:
                state.add_finish(beam)
                ended[request_id] = state
        exhausted = [name for name, state in ended.items() if state.beams and state.beams.reason is FinishReason.ERROR]
        for name in exhausted:
            del ended[name]
        self._outputs.updated |= ended
        return AdvancedBeams(num_generated, exhausted)

    def _with_stops(self, beams: list[Beam], candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        """Return the candidates of a group, each with the stop string that its text reaches, if any."""
        if not beams:  # the request has ended while the step ran
            return candidates
        texts = self._outputs.states[beams[0].request.request_id].beams
        assert texts is not None, "a beam of a request without a search"
        return texts.find_stops(beams, candidates)
