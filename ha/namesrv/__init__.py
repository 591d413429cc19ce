"""The name server: brokers register their topics, and clients look up the brokers of a topic. RocketMQ: namesrv.

`open_name_server` runs one inside a program, `python -m ha.namesrv` as a process.
"""

from .options import NameServerOptions
from .server import NameServer, NameServerStatistics, open_name_server

__all__ = ["NameServer", "NameServerOptions", "NameServerStatistics", "open_name_server"]
