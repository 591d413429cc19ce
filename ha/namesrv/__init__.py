"""The name server: brokers register their topics, clients ask where a topic is. RocketMQ: namesrv.

`open_name_server` runs one inside a program, `python -m ha.namesrv` as a process of its own.
"""

from .options import NameServerOptions
from .server import NameServer, NameServerStatistics, open_name_server

__all__ = ["NameServer", "NameServerOptions", "NameServerStatistics", "open_name_server"]
