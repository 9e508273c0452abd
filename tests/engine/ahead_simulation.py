"""A simulated data plane whose steps are launched, and read later."""

from __future__ import annotations

from collections.abc import Sequence

from quire.errors import WorkerError
from quire.memory.results import Tier
from quire.memory.specs import KVCacheSpec
from quire.scheduling.decode_columns import DecodeItems, DecodeResults
from quire.scheduling.plan import ItemResult, LaunchedStep, ScheduledSequence, StepPlan, StepResult
from quire.sequences.decoding.drafting import UNKNOWN
from tests.engine.failing import FailingSimulation
from tests.scheduling.simulated_executor import _OpenSequence

NOTHING = StepResult(0, ())


def late_failure(error: WorkerError) -> LaunchedStep:
    """Return a step of which the host learns when it reads the tokens that it has failed."""
    return LaunchedStep.failed(error)._replace(has_failed=False)


class AheadSimulation(FailingSimulation):
    """Runs a step when it is launched, with the tokens that the one launched before it has drawn for its placeholders.

    Attributes:
        num_ahead: number of items with a placeholder.
        num_in_columns: number of steps with results in columns.
        num_unread: number of steps that were launched and not read.
        most_unread: the most of them at any time.
        launched: plans of all steps.
    """

    def __init__(self, block_size: int, vocab_size: int, specs: Sequence[KVCacheSpec] = ()) -> None:
        super().__init__(block_size, vocab_size, specs)
        self._drawn: dict[int, tuple[int, ...]] = {}
        self._before: dict[int, tuple[int, ...]] = {}
        self._is_broken = False
        self.launched: list[StepPlan] = []
        self.num_ahead = self.num_in_columns = self.num_unread = self.most_unread = 0

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Perform a step now, which may fail when it is read."""
        self.launched.append(plan)
        self.num_unread += 1
        self.most_unread = max(self.most_unread, self.num_unread)
        # A step that a GPU fails to run has drawn something too.
        self._before = self._drawn
        self._drawn = {item.seq_id: (item.seq_id % self.vocab_size,) for item in plan.items}
        if self._is_broken:
            # What it reads was to be written by the failed step: it computes garbage, and may fail too.
            self._write_garbage(plan)
            failure = WorkerError(f"step {plan.tick} follows one that failed")
            is_late = self.failures.rng.random() < 0.5
            return self._counted(
                late_failure(failure) if is_late else LaunchedStep(lambda: NOTHING), ends_fault=is_late
            )
        try:
            result = self.execute(plan)
        except WorkerError as error:
            self._is_broken = self.failures.rng.random() < 0.6
            step = late_failure(error) if self._is_broken else LaunchedStep.failed(error)
            return self._counted(step, ends_fault=self._is_broken)
        self._drawn = {item.seq_id: item.token_ids for item in result.items}
        in_columns = result._replace(items=self._in_columns(plan, result))
        return self._counted(LaunchedStep(lambda: in_columns))

    def _counted(self, step: LaunchedStep, *, ends_fault: bool = False) -> LaunchedStep:
        """Return a step that counts that it is read, once: then the host knows whether it has failed."""
        unread = [step]

        def result() -> StepResult:
            self.num_unread -= 1
            self._is_broken = self._is_broken and not ends_fault
            return unread.pop().result()

        return step._replace(result=result)

    def _in_columns(self, plan: StepPlan, result: StepResult) -> Sequence[ItemResult]:
        """Return results as the sampler does: in columns, where a step decodes, and no row has failed."""
        items = plan.items
        if not isinstance(items, DecodeItems) or any(item.error is not None for item in result.items):
            return result.items
        columns = DecodeResults(items.seq_ids, [item.token_ids[0] for item in result.items])
        assert list(columns) == list(result.items), "a decode has one token and nothing else"
        self.num_in_columns += 1
        return columns

    def _write_garbage(self, plan: StepPlan) -> None:
        """Do what a step does, without a check, and write what no sequence has."""
        for seq_id in plan.finished_ids:
            self._open.pop(seq_id, None)
        for copy in plan.ops.copies:
            self._copy_block(copy)
        for item in plan.items:
            if item.new_sequence is None and item.seq_id not in self._open:
                continue
            if item.new_sequence is not None:
                self._open[item.seq_id] = _OpenSequence(item.new_sequence, len(self.specs))
            for group_idx, start, block_ids in item.table_deltas:
                table = self._open[item.seq_id].tables[group_idx]
                table[start:] = block_ids
                for block_id in table[item.start // self.block_size :]:
                    self._states[Tier.DEVICE, group_idx, block_id] = (-1,)
            for group_idx, table in enumerate(self._open[item.seq_id].tables):
                for position in range(item.start, item.start + len(item.token_ids)):
                    if position // self.block_size < len(table) and not self.specs[group_idx].is_recurrent:
                        self._slots[group_idx, self._slot(table, position)] = (-1, -1)

    def _write(self, item: ScheduledSequence, written: dict[tuple[int, int], int]) -> ScheduledSequence:
        if item.token_ids[0] == UNKNOWN:
            assert len(item.token_ids) == item.num_samples == 1, "a placeholder is the only token, and one is drawn"
            (token_id,) = self._before[item.seq_id]
            item = item._replace(token_ids=(token_id,))
            self.num_ahead += 1
        return super()._write(item, written)
