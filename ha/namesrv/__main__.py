"""`python -m ha.namesrv`: a name server as a process of its own."""

from __future__ import annotations

import argparse
import logging
import signal
import sys

import trio

from ha.errors import AddressInUse

from . import NameServerOptions, open_name_server

EXIT_UNAVAILABLE = 69


async def serve_until_told(options: NameServerOptions) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit code."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        try:
            async with open_name_server(options) as name_server:
                host, port = name_server.address
                print(f"READY role=NAMESRV remoting={host}:{port}", flush=True)
                async for _ in signals:
                    break
        except AddressInUse as error:  # raised before there is a nursery, so never in a group
            print(f"ha.namesrv: {error}", file=sys.stderr)
            return EXIT_UNAVAILABLE
    return 0


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m ha.namesrv", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=9876, help="0 lets the system choose")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    return trio.run(serve_until_told, NameServerOptions(host=arguments.host, port=arguments.port))


if __name__ == "__main__":
    sys.exit(main())
