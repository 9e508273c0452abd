"""What the small world does and checks with a host tier: swaps, and what is published on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from quire.memory import Namespace, PrefixHit, Tier, Verdict
from quire.memory.invariants import snapshot
from quire.memory.prefix.radix_node import NodePosition
from tests.memory.host_twin import HostTwin
from tests.memory.media import words_of
from tests.memory.stored_slots import prefixes_of
from tests.memory.twin_pages import Page

if TYPE_CHECKING:
    from tests.memory.world import World


def swap_out(world: World, seq_ids: list[int]) -> Verdict:
    """Ask for room on the host and take it, or find that what is refused changes nothing."""
    before = snapshot(world.manager)
    status, size = world.manager.capacity.can_swap_out(seq_ids), world.manager.capacity.swap_size(seq_ids)
    assert snapshot(world.manager) == before, "a question changed the manager"
    if world.has_twin and world.twin.host is not None:
        num_pages, margin = world.twin.host.out_margin(seq_ids)
        expected = Verdict.NEVER if num_pages > world.twin.host.num_pages else Verdict.LATER
        assert status.verdict is (Verdict.OK if margin >= 0 else expected), "the twin decides otherwise"
        assert status.verdict is Verdict.NEVER or status.available - status.needed == margin
    _swap(world, seq_ids, world.manager.swap_out, status.verdict, size.num_blocks)
    if status.verdict is Verdict.OK and world.has_twin and world.twin.host is not None:
        world.twin.host.swap_out(seq_ids)
    world.verify()
    return status.verdict


def swap_in(world: World, seq_ids: list[int], goals: list[int], reserved: int = 0) -> Verdict:
    """Ask for room on the device to come back and grow, and come back unless that itself is too much."""
    manager, idle = world.manager, [0] * len(seq_ids)
    before = snapshot(manager)
    spare = (reserved,) * len(world.size.kinds)
    status, size = manager.capacity.can_swap_in(seq_ids, goals, None, spare), manager.capacity.swap_size(seq_ids)
    plain = manager.capacity.can_swap_in(seq_ids, idle)
    assert snapshot(manager) == before, "a question changed the manager"
    # What pins may fill nobody can count on, but it may have been had.
    is_never = plain.verdict is Verdict.NEVER
    assert not is_never or len(seq_ids) > 1 or world.size.pins, "NEVER was said of what was there"
    assert status.verdict is not Verdict.OK or plain.verdict is Verdict.OK
    is_alone = all(state.is_swapped for state in manager.sequences.values())
    if world.has_twin and world.twin.host is not None:
        watermark = 0 if is_alone else world.size.watermark
        num_pages, margin = world.twin.host.in_margin(seq_ids)
        assert is_never == (num_pages > world.twin.num_pages - world.size.pins)
        if not is_never:
            assert plain.available - plain.needed == margin - watermark, "the twin counts otherwise"
        if status.verdict is not Verdict.NEVER and all(kind.name == "full" for kind in world.size.kinds):
            margin -= world.twin.host.growth(seq_ids, goals) + (0 if is_alone else sum(spare)) + watermark
            assert status.available - status.needed == margin, "the twin counts otherwise"
    if plain.verdict is Verdict.OK or ((not world.size.watermark or is_alone) and not (is_never and world.size.pins)):
        _swap(world, seq_ids, manager.swap_in, plain.verdict, size.num_blocks)
        if plain.verdict is Verdict.OK and world.has_twin and world.twin.host is not None:
            world.twin.host.swap_in(seq_ids)
        world.verify()
    return status.verdict


def _swap(
    world: World, seq_ids: list[int], command: Callable[[list[int]], None], verdict: Verdict, num_blocks: int
) -> None:
    """Swap a family, and find it shared as before (M8) with as many blocks copied as was said."""
    if verdict is not Verdict.OK:
        world.refuses(ValueError, lambda: command(seq_ids))
        return
    sharing = _sharing(world, seq_ids)
    traffic = _num_swapped_blocks(world)
    command(seq_ids)
    assert _sharing(world, seq_ids) == sharing, "M8: what was shared is so no more"
    assert _num_swapped_blocks(world) - traffic == num_blocks, "another number of blocks was copied"
    for seq_id in seq_ids:
        if world.manager.sequences[seq_id].is_swapped:
            assert world.manager.take_table_deltas((seq_id,))[0] == (), "the worker hears of blocks on the host"
            world.worker_tables[seq_id] = [[] for _ in world.size.kinds]


def _num_swapped_blocks(world: World) -> int:
    host = world.manager.usage().host
    return 0 if host is None else host.num_swap_outs + host.num_swap_ins


def _sharing(world: World, seq_ids: list[int]) -> list[list[int]]:
    """Return the tables of a family with its blocks named in the order in which they are met."""
    names: dict[tuple[int, int], int] = {}
    states = [world.manager.sequences[seq_id] for seq_id in seq_ids]
    return [
        [names.setdefault((idx, block_id), len(names)) if block_id else -1 for block_id in table]
        for state in states
        for idx, table in enumerate(state.tables_on(Tier.HOST if state.is_swapped else Tier.DEVICE))
    ]


def path_to(place: NodePosition) -> tuple[bytes, list[bytes]]:
    """Return a place's namespace, and what the blocks up to it hold."""
    node, position = place
    contents: list[bytes] = []
    while node.parent is not None:
        contents[:0] = [node.content(idx) for idx in range(position + 1)]
        node, position = node.parent, node.first - node.parent.first - 1
    return node.name, contents


def verify_host_index(world: World, spoken: Iterable[Namespace]) -> None:
    """Assert that what is published on the host is there, as if all copies were made already (M4)."""
    namespaces = {namespace.serialise(): namespace for namespace in spoken}
    for group_idx, group in enumerate(world.manager.host.groups if world.manager.host else ()):
        for block_id in group.pool.index.block_ids():
            place = group.pool.index.position_of(block_id)
            assert place is not None
            namespace, contents = path_to(place)
            words = [words_of(content, world.size.block_size) for content in contents]
            tokens = [token for block in words for token in block]
            prefixes = prefixes_of(namespaces[namespace], tokens, len(tokens))
            if world.size.kinds[group_idx].is_state:
                world.slots.state_holds(group_idx, (Tier.HOST, block_id), prefixes[-1])
                continue
            places = [(Tier.HOST, block_id)] * -(-len(tokens) // world.size.block_size)
            first = len(tokens) - len(words[-1])
            world.slots.positions_hold(group_idx, places, prefixes, range(first, len(tokens)))


def compare_hosts(world: World, theirs: HostTwin, block_of: dict[Page, int]) -> None:
    """Assert that the host holds what its twin holds, in the same order, and that as much was copied."""
    mine, host = world.manager.host, world.manager.usage().host
    assert mine is not None
    assert host is not None
    num_used, num_idle = len(theirs.held()), sum(len(group.idle) for group in theirs.groups)
    counts = (num_used, num_idle, theirs.num_pages - num_used - num_idle, len(theirs.tables), theirs.num_evictions)
    assert host[1:6] == counts, "the twin counts otherwise on the host"
    traffic = (theirs.num_swap_outs, theirs.num_swap_ins, theirs.num_demotions, theirs.num_promotions)
    assert host[6:10] == traffic, "the twin copies otherwise"
    if world.disk is not None:
        assert world.disk.archive.num_saves == theirs.num_evictions, "something was evicted and not saved"
    for seq_id, table in theirs.tables.items():
        for pages, block_ids in zip(table, world.manager.sequences[seq_id].tables_on(Tier.HOST), strict=True):
            for page, block_id in zip(pages, block_ids, strict=True):
                assert (page is None) == (block_id == 0)
                assert page is None or block_of.setdefault(page, block_id) == block_id, "M8: shared otherwise"
    for group, twins in zip(mine.groups, theirs.groups, strict=True):
        for page, block_id in zip(twins.by_turn, group.pool.idle, strict=True):
            assert block_of.setdefault(page, block_id) == block_id, "evicted from the host in another order"
        published = set(group.pool.index.block_ids())
        assert published == {block_of[page] for page in twins.published.values()}


def can_load(world: World, hit: PrefixHit) -> bool:
    """Say whether the device has room for the blocks of a hit that have no holders there."""
    needs = [0] * len(world.size.kinds)
    for load in hit.loads:
        needs[load.group_idx] += 1
    for idx, blocks in enumerate(hit.block_ids):
        ref_counts = world.manager.groups[idx].pool.ref_counts
        needs[idx] += sum(block_id != 0 and ref_counts[block_id] == 0 for block_id in blocks)
    return not hit.loads or world.manager.arena.fits(needs)
