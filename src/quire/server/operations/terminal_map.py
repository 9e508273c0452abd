"""The block map in the terminal: `quire serve --watch`."""

from __future__ import annotations

import colorsys
import logging
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from quire.server.kv_views.block_map import BlockMapHub
from quire.server.kv_views.block_planes import HOLDER, PINNED, Planes

if TYPE_CHECKING:  # the server starts before the engine is imported
    from quire.engine.kv.block_map import BlockScan

logger = logging.getLogger(__name__)

# Lines of a frame besides the cells.
NUM_LINES_AROUND = 4
IDLE_S = 3600.0
GOLDEN = 0.618034


def colour(number: int) -> str:
    """Return the colour of a request, the same as on the page: from green over blue to red."""
    hue = (75 + 290 * (number * GOLDEN % 1)) / 360
    red, green, blue = (round(255 * part) for part in colorsys.hls_to_rgb(hue, 0.5, 0.55))
    return f"#{red:02x}{green:02x}{blue:02x}"


def cell(state: int, owner: int) -> tuple[str, str]:
    """Return the character and the style of a block."""
    if not state:
        return "\u00b7", "dim"
    if state < HOLDER:
        return "\u25aa", "yellow"
    mark = "\u25a3" if state >= 2 * HOLDER else "\u25a0"
    if owner:
        return mark, colour(owner)
    return mark, "bold yellow" if state & PINNED else "white"


def frame(scan: BlockScan, planes: Planes, width: int, height: int) -> Group:
    """Return a frame of at most `height` lines: counts, as many blocks as fit, and a legend."""
    usage, queue = scan.usage, scan.queue
    counts = f"{usage.used:,} used, {usage.idle:,} idle, {usage.free:,} free; "
    counts += f"{queue[0]:,} running, {queue[1]:,} queued, {queue[2]:,} swapped"
    room = max(1, height - NUM_LINES_AROUND) * width
    cells = Text(no_wrap=False, overflow="fold")
    num_left = 0
    start = 0
    for pool in scan.pools:
        size = len(pool.holders)
        # The null block and trailing free blocks are not shown.
        touched = len(planes.states[start + 1 : start + size].rstrip(b"\0"))
        shown = min(touched, room)
        for idx in range(start + 1, start + 1 + shown):
            cells.append(*cell(planes.states[idx], planes.owners[idx]))
        num_left += size - 1 - shown
        room -= shown
        start += size
    legend = Text.assemble(
        ("\u25a0", "cyan"), " one holder  ", ("\u25a3", "cyan"), " shared  ", ("\u25aa", "yellow"), " idle  "
    )
    return Group(Text(counts), cells, Text(f"and {num_left:,} more"), legend)


async def show_in_terminal(hub: BlockMapHub, console: Console | None = None) -> None:
    """Show the map until the server stops or the terminal is gone; frames follow its changes."""
    console = console or Console()
    watcher = hub.watch(None)
    try:
        with Live(console=console, auto_refresh=False) as live:
            async for _ in watcher.events(IDLE_S):
                current = hub.current()
                if current is not None:
                    live.update(frame(*current, console.width, console.height), refresh=True)
    except OSError as error:
        logger.warning("the block map cannot be shown any more: %s", error)
    finally:
        hub.leave(watcher)
