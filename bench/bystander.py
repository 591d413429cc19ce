"""How long an event loop is held on this machine that does almost nothing: every 2 ms it fills 256 KiB of fresh memory.

Runs beside nodes (stalls.py). What it is held for, the machine would hold anybody for. Prints its watch as JSON.
"""

from __future__ import annotations

import argparse

import msgspec
import trio

from ha.admin.loop_watch import LoopWatch

_FILLING = bytes(range(256)) * 1024
_REST_S = 0.002


async def stand_by(seconds: float) -> LoopWatch:
    """Fill and rest for so long, watched."""
    watch = LoopWatch()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.serve)
        watch.begin(seconds + 60)
        with trio.move_on_after(seconds):
            while True:
                bytearray(_FILLING)
                await trio.sleep(_REST_S)
        nursery.cancel_scope.cancel()
    return watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, required=True)
    watch = trio.run(stand_by, parser.parse_args().seconds)
    print(msgspec.json.encode(watch.report()).decode())


if __name__ == "__main__":
    main()
