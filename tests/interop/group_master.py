"""`python -m tests.interop.group_master`: like `python -m ha.master`, but with topics, groups and offsets in the log.

Members of a failover group keep them there, but need an etcd; the tests that use this need none.
"""

import sys

import msgspec

from ha.broker.options import BrokerOptions
from ha.config import Config
from ha.master import ENTRY
from ha.node import options
from ha.protocol.access_bodies import UserConfig

_as_configured = options.broker_options


def with_tables_in_log(
    config: Config, advertised: options.Advertised, initial_users: tuple[UserConfig, ...] = ()
) -> BrokerOptions:
    return msgspec.structs.replace(_as_configured(config, advertised, initial_users), keeps_tables_in_log=True)


if __name__ == "__main__":
    options.broker_options = with_tables_in_log
    sys.exit(ENTRY.main())
