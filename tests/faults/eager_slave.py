"""`python -m tests.faults.eager_slave`: ha.slave that reconnects half a second after it lost its master, instead of
five.

That pause is RocketMQ's and not configurable; it would take most of the time of tests with faults.
"""

import sys

import msgspec

from ha.config import Config
from ha.node import options
from ha.replication.options import HAOptions
from ha.slave import ENTRY

RECONNECT_S = 0.5

_ha_options = options.ha_options


def eager_options(config: Config, open_files_max: int = options.OPEN_FILES_UNLIMITED) -> HAOptions:
    return msgspec.structs.replace(_ha_options(config, open_files_max), reconnect_interval_s=RECONNECT_S)


if __name__ == "__main__":
    options.ha_options = eager_options
    sys.exit(ENTRY.main())
