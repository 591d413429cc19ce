"""Configuration with RocketMQ's keys, from file, environment and command line.

`Config` is for broker nodes, `NameServerConfig` for name servers, `ProxyConfig` for gRPC fronts. `load_config` reads
and checks any of them. docs/configuration.md lists the keys.
"""

from .check import accepted, fields
from .loading import ALIASES, REFUSED_IF_TRUE, Loaded, load_config, render, rocketmq_keys, shown
from .model import Config, NameServerConfig, OptionalPort, ProxyConfig, is_loopback
from .options import options_of
from .secret import SecretStr

__all__ = [
    "ALIASES",
    "REFUSED_IF_TRUE",
    "Config",
    "Loaded",
    "NameServerConfig",
    "OptionalPort",
    "ProxyConfig",
    "SecretStr",
    "accepted",
    "fields",
    "is_loopback",
    "load_config",
    "options_of",
    "render",
    "rocketmq_keys",
    "shown",
]
