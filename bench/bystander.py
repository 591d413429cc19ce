"""Measures how long the event loop of an almost idle process is blocked: every 2 ms it fills 256 KiB of new memory.

It runs next to the nodes (stalls.py), so its stalls are those of the machine. Prints its measurements as JSON.
"""

from __future__ import annotations

import argparse

import msgspec
import trio

from ha.admin.loop_watch import LoopWatch

_FILLING = bytes(range(256)) * 1024
_REST_S = 0.002


async def stand_by(seconds: float) -> LoopWatch:
    """Fills memory and sleeps for this time, while its loop is watched."""
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
