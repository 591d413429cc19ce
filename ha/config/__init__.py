"""Configuration: RocketMQ's keys in one frozen struct, from file, environment and command line; mistakes are errors.

`Config` describes a broker node, `NameServerConfig` a name server; `load_config` reads either from its sources.
Knows no component: `ha/node.py` makes their options from a Config. Which keys there are: docs/configuration.md.
"""

from .check import accepted, fields
from .limit_keys import remoting_limits
from .loading import ALIASES, REFUSED_IF_TRUE, Loaded, load_config, render, rocketmq_keys, shown
from .model import Config, NameServerConfig, is_loopback
from .secret import SecretStr

__all__ = [
    "ALIASES",
    "REFUSED_IF_TRUE",
    "Config",
    "Loaded",
    "NameServerConfig",
    "SecretStr",
    "accepted",
    "fields",
    "is_loopback",
    "load_config",
    "remoting_limits",
    "render",
    "rocketmq_keys",
    "shown",
]
