"""The time of a frame of the page's block map in a headless browser: `python -m benchmarks.map_frames`.

The page's own module draws pools of several sizes, all blocks in use, at 1,280 x 860 and as on a phone.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks import machine
from tests.server.browser import Browser, browsing
from tests.server.process import running

SCRIPT = """
const [size, done] = [arguments[0], arguments[arguments.length - 1]];
const { BlockMap } = await import("/page/map.js");
const canvas = document.getElementById("map"), map = new BlockMap(canvas, { onBlock() {}, onMove() {} });
map.layout({ pools: [{ tier: "device", group: 0, cells: size + 1 }] });
map.pools[0].touched = size;
const times = [];
for (let frame = 0; frame < 40; frame += 1) {
  for (let cell = 1; cell <= size; cell += 1) {
    map.states[cell] = [0, 1, 4, 5, 13][(cell * 7 + frame) % 5];
    map.owners[cell] = map.states[cell] > 3 ? (cell + frame) % 200 : 0;
  }
  const began = performance.now();
  map.draw();
  // Reading a pixel waits until the frame is drawn.
  canvas.getContext("2d").getImageData(0, 0, 1, 1);
  times.push(performance.now() - began);
}
times.sort((one, other) => one - other);
done({ median: times[20], worst: times[39], side: map.side });
"""


def measure(browser: Browser, size: int) -> dict[str, float]:
    """Return the milliseconds of a frame, and the pixels of a cell's side."""
    script = f"(async function () {{ {SCRIPT} }}).apply(null, arguments)"
    return dict(browser.post("/execute/async", script=script, args=[size]))


def main() -> None:
    """Measure, print and save."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        with (
            running(Path("bundled"), place / "log", "--num-kv-blocks", "100") as server,
            browsing(place / "p") as browser,
        ):
            for is_phone in (False, True):
                browser.show_as(is_phone=is_phone, is_dark=False)
                browser.post("/url", url=server.url)
                browser.wait("/free/.test(document.getElementById('counts').textContent)")
                browser.run("document.getElementById('show-memory').click()")
                for size in (600, 8_192, 65_536, 262_144):
                    found = measure(browser, size)
                    rows.append({"is_phone": is_phone, "blocks": size, **found})
                    where = "phone" if is_phone else "desktop"
                    print(
                        f"{where:7} {size:7,} blocks: {found['median']:5.1f} ms, at most {found['worst']:5.1f}",
                        flush=True,
                    )
    print(machine.save("map_frames", {"rows": rows}))


if __name__ == "__main__":
    main()
