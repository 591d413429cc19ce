"""Loads a configuration from the entry point's defaults, `--config FILE`, the environment and `--set key=value`; later
sources override earlier ones.

Keys that start with `tls.` can also be in the file that `tls.config.file` names, which all other sources override.

The name of an environment variable is HA_ followed by the key, whose case, dots and underscores don't matter:
HA_listenPort, HA_LISTENPORT and HA_LISTEN_PORT are the same. Every HA_ variable must name a key, so that typing
mistakes are detected.

A RocketMQ key that halog does not use is checked against its Java type and reported in `Loaded.ignored`. An unknown key
is an error that suggests the most similar known key, if one is similar.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import inspect

from ha.errors import ConfigError

from .check import accepted, check_java, check_value, fields, parse, raise_errors
from .model import Config, NameServerConfig, ProxyConfig
from .properties_file import parse_properties

ENVIRONMENT_PREFIX = "HA_"
FILE_SIZE_MAX = 1 << 20
TLS_PREFIX = "tls."
TLS_CONFIG_FILE = "tls.config.file"

ALIASES = {"haSlaveFallbehindMax": "haMaxGapNotInSync", "useTLS": "tls.enable"}
"""Alternative name -> key: the name of haMaxGapNotInSync in RocketMQ 4.9, and the name in broker.conf of the system
property tls.enable."""

REFUSED_IF_TRUE = {
    "authenticationEnabled": "only brokers have users; a name server checks plain_acl.yml (aclEnable)",
    "authorizationEnabled": "only brokers have users; a name server checks plain_acl.yml (aclEnable)",
    "enableControllerMode": "halog uses elections instead of controllers: `python -m ha.member` (etcdEndpoints)",
    "enableDLegerCommitLog": "halog does not support DLedger's replication protocol",
    "duplicationEnable": "halog does not support it",
}
"""Key -> why it must not be true: RocketMQ's keys that halog can't ignore, because the node would not do what its
operator expects."""

REMOVED = frozenset(
    {
        "aclReloadInterval",
        "haHandshakeTimeout",
        "maxHeaderSize",
        "tlsHandshakeCountMax",
        "tlsHandshakeTimeout",
        "tlsReloadInterval",
    }
)
"""Keys of earlier releases; they are ignored, and docs/upgrading.md lists what replaced them."""

_SIMILARITY_MIN = 0.7
"""Minimum similarity, from 0 to 1, of a known key that is suggested for an unknown one."""
_KEYS_HINT = "the keys that --print-config and docs/configuration.md list"

STANDARD_VARIABLES = {"OTEL_EXPORTER_OTLP_ENDPOINT": "otelEndpoint"}
"""Environment variable that OpenTelemetry defines -> key."""

C = TypeVar("C", Config, NameServerConfig, ProxyConfig)


class Loaded(msgspec.Struct, Generic[C], frozen=True):
    """A configuration, and the given keys that have no effect, sorted."""

    config: C
    ignored: tuple[str, ...]


def load_config(
    struct: type[C],
    *,
    defaults: Mapping[str, str] = {},
    unconfigured: Mapping[str, str] = {},
    file: Path | None = None,
    environment: Mapping[str, str] = {},
    settings: Iterable[str] = (),
) -> Loaded[C]:
    """Loads and checks all sources. `environment` is os.environ; `settings` are the `key=value` pairs of `--set`.
    `unconfigured` are further defaults, used only if there is neither `file` nor any HA_ variable.

    Raises ConfigError for the first mistake, with the others in its `others`. Contradictions between keys are found
    only if each value is valid.
    """
    errors: list[ConfigError] = []
    texts: dict[str, str] = dict(defaults) | _from_standard_variables(environment, struct)
    given_as: dict[str, str] = {}
    from_environment = _from_environment(environment, struct, errors)
    if file is None and not from_environment:
        texts |= unconfigured
    for source in (_from_file(file), from_environment, _from_settings(settings, errors)):
        texts |= _without_aliases(source, errors, given_as)
    if tls_file := texts.get(TLS_CONFIG_FILE):
        texts = _from_tls_file(Path(tls_file), errors) | texts
    values: dict[str, Any] = {}
    ignored = []
    known = fields(struct)
    for key, text in texts.items():
        try:
            if key in known:
                if text == "" and (known[key].default is None or isinstance(known[key].type, inspect.StrType)):
                    continue  # an empty value unsets a key
                value = parse(given_as.get(key, key), known[key].type, text)
                errors += check_value(given_as.get(key, key), known[key].type, value)
                values[known[key].name] = value
            elif key in rocketmq_keys() or key in fields(Config) or key in REMOVED:
                _check_ignored(key, text)
                ignored.append(key)
            else:
                raise ConfigError(key, "is unknown", _nearest(key, struct))
        except ConfigError as error:
            errors.append(error)
    raise_errors(errors)
    return Loaded(struct(**values), tuple(sorted(ignored)))


def _from_standard_variables(environment: Mapping[str, str], struct: type[C]) -> dict[str, str]:
    """Reads STANDARD_VARIABLES. They override the entry point's defaults, and all other sources override them."""
    known = fields(struct)
    return {
        key: environment[variable]
        for variable, key in STANDARD_VARIABLES.items()
        if key in known and environment.get(variable)
    }


@cache
def rocketmq_keys() -> dict[str, str]:
    """Returns every key of RocketMQ 4.9.7 and 5.5.0 with its Java type."""
    text = Path(__file__).with_name("rocketmq_keys.txt").read_text()
    types = {}
    java_type = ""
    for line in text.splitlines():
        if line.startswith("["):
            java_type = line[1:].split()[0]
        elif not line.startswith("#"):
            types.update(dict.fromkeys(line.split(), java_type))
    return types


def shown(config: Config | NameServerConfig | ProxyConfig) -> dict[str, str]:
    """Returns all keys with their effective values, as in a properties file, without unset keys and with secrets
    hidden.
    """
    found = {}
    for key, field in fields(type(config)).items():
        value = getattr(config, field.name)
        if value is not None and value != "":
            found[key] = str(value).lower() if isinstance(value, bool) else str(value).replace("\\", "\\\\")
    return found


def render(config: Config | NameServerConfig | ProxyConfig) -> str:
    """Returns `shown` as the text of a properties file."""
    return "".join(f"{key}={value}\n" for key, value in shown(config).items())


def _from_file(file: Path | None, key: str = "--config") -> dict[str, str]:
    if file is None:
        return {}
    try:
        if file.stat().st_size > FILE_SIZE_MAX:
            raise ConfigError(key, f"{file} is larger than {FILE_SIZE_MAX} bytes", "a properties file")
        return dict(parse_properties(file.read_text("utf-8-sig", errors="surrogateescape")))
    except OSError as error:
        raise ConfigError(key, f"{file}: {error.strerror}", "a readable file") from None
    except ValueError as error:
        raise ConfigError(key, f"{file}: {error}", "Java's properties format") from None


def _from_tls_file(file: Path, errors: list[ConfigError]) -> dict[str, str]:
    """Reads RocketMQ's TLS file. Unlike in RocketMQ, it can also contain tls.server.mode and tls.enable."""
    try:
        found = _from_file(file, TLS_CONFIG_FILE)
    except ConfigError as error:
        errors.append(error)
        return {}
    for key in found:
        if not key.startswith(TLS_PREFIX):
            errors.append(ConfigError(key, f"in {file}, is not a TLS key", f"keys that start with {TLS_PREFIX}"))
    return {key: text for key, text in found.items() if key.startswith(TLS_PREFIX)}


def _from_environment(
    environment: Mapping[str, str], struct: type[Config | NameServerConfig | ProxyConfig], errors: list[ConfigError]
) -> dict[str, str]:
    keys = {_plain(key): key for key in _known_keys(struct)}
    found: dict[str, str] = {}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = _plain(variable.removeprefix(ENVIRONMENT_PREFIX))
        key = keys.get(name)
        if key is None:
            near = difflib.get_close_matches(name, keys, n=1, cutoff=_SIMILARITY_MIN)
            hint = f"{ENVIRONMENT_PREFIX}{keys[near[0]]}, which is the nearest" if near else _KEYS_HINT
            errors.append(ConfigError(variable, "does not name a key", hint))
        elif found.get(key, text) != text:
            errors.append(ConfigError(variable, f"{key} is set twice in the environment", "one variable for each key"))
        else:
            found[key] = text.strip()
    return found


def _from_settings(settings: Iterable[str], errors: list[ConfigError]) -> dict[str, str]:
    found = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if equals and key.strip():
            found[key.strip()] = text.strip()
        else:
            name = re.match(r"[\w.]*", setting)  # the rest may be a secret
            assert name is not None
            errors.append(ConfigError("--set", f"{name[0]!r} is not a key and a value", "key=value"))
    return found


def _without_aliases(source: dict[str, str], errors: list[ConfigError], given_as: dict[str, str]) -> dict[str, str]:
    """Replaces aliases with their keys. Records in `given_as`, by key, the alias that set the effective value, if one
    did."""
    for old, new in ALIASES.items():
        if new in source:
            given_as.pop(new, None)
        if old in source:
            given_as[new] = old
            text = source.pop(old)
            if source.setdefault(new, text) != text:
                errors.append(ConfigError(old, f"contradicts {new}, which means the same", "one of the two"))
    return source


def _check_ignored(key: str, text: str) -> None:
    java_type = rocketmq_keys().get(key)
    if java_type is not None and text:
        check_java(key, java_type, text)
    if key in REFUSED_IF_TRUE and text.lower() == "true":
        raise ConfigError(key, REFUSED_IF_TRUE[key], "false")


def _known_keys(struct: type[Config | NameServerConfig | ProxyConfig]) -> list[str]:
    """Returns all known keys; those to prefer as suggestions for an unknown key come first."""
    return list(dict.fromkeys([*fields(struct), *ALIASES, *fields(Config), *rocketmq_keys(), *REMOVED]))


def _nearest(key: str, struct: type[Config | NameServerConfig | ProxyConfig]) -> str:
    plain = {_plain(known): known for known in reversed(_known_keys(struct))}
    found = difflib.get_close_matches(_plain(key), plain, n=1, cutoff=_SIMILARITY_MIN)
    if not found:
        return _KEYS_HINT
    near = plain[found[0]]
    if near in ALIASES:
        return f"{near}, which is the nearest known key"
    field = fields(struct).get(near)
    return f"{near}, which is the nearest known key" + (f" ({accepted(field.type)})" if field else "")


def _plain(key: str) -> str:
    return re.sub(r"[_.]", "", key).lower()
