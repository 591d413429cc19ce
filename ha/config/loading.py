"""From where a configuration comes, the later winning: the entry point's own defaults, `--config FILE`, the
environment, `--set key=value`.

A key that begins with `tls.` may also stand in the file that `tls.config.file` names; elsewhere it wins.

Environment: HA_ and the key, without regard to case and dots, with underscores wherever one likes them; HA_listenPort,
HA_LISTENPORT and HA_LISTEN_PORT are one. Every HA_ variable must be a key, so that no typing mistake passes in silence.

A key of RocketMQ's that nothing here reads is checked against its Java type and reported in `Loaded.ignored`; a key of
neither is an error that names the nearest one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from ha.errors import ConfigError

from .check import accepted, check_java, check_value, fields, parse, raise_errors
from .model import Config, NameServerConfig
from .properties_file import parse_properties

ENVIRONMENT_PREFIX = "HA_"
FILE_SIZE_MAX = 1 << 20
TLS_PREFIX = "tls."
TLS_CONFIG_FILE = "tls.config.file"

ALIASES = {"haSlaveFallbehindMax": "haMaxGapNotInSync", "useTLS": "tls.enable"}
"""The name of 4.9 -> the name of 5.x; broker.conf's name -> that of the system property that sets the same."""

REFUSED_IF_TRUE = {
    "authenticationEnabled": "there is no authentication here, so everybody would be let in",
    "authorizationEnabled": "there is no authorization here, so everybody would be let in",
    "enableControllerMode": "RocketMQ's controllers are not asked here: `python -m ha.member` elects (etcdEndpoints)",
    "enableDLegerCommitLog": "DLedger's replication protocol is not spoken here",
    "duplicationEnable": "a log that is filled from elsewhere is not supported",
}
"""Keys that can't be dropped with a warning: who ignored them would not be what its operator asked for."""

STANDARD_VARIABLES = {"OTEL_EXPORTER_OTLP_ENDPOINT": "otelEndpoint"}
"""Variable -> key."""

C = TypeVar("C", Config, NameServerConfig)


class Loaded(msgspec.Struct, Generic[C], frozen=True):
    """A configuration, and the keys given that it has no use for (RocketMQ's names, sorted)."""

    config: C
    ignored: tuple[str, ...]


def load_config(
    struct: type[C],
    *,
    defaults: Mapping[str, str] = {},
    file: Path | None = None,
    environment: Mapping[str, str] = {},
    settings: Iterable[str] = (),
) -> Loaded[C]:
    """Read all sources and check them. `environment` is all of os.environ; `settings` are the `key=value` of `--set`.

    Raises ConfigError with everything that is wrong: the first mistake, the others in its `others`.
    """
    errors: list[ConfigError] = []
    texts: dict[str, str] = dict(defaults) | _from_standard_variables(environment, struct)
    given_as: dict[str, str] = {}
    for source in (_from_file(file), _from_environment(environment, struct, errors), _from_settings(settings, errors)):
        texts |= _without_aliases(source, errors, given_as)
    if tls_file := texts.get(TLS_CONFIG_FILE):
        texts = _from_tls_file(Path(tls_file), errors) | texts
    values: dict[str, Any] = {}
    ignored = []
    known = fields(struct)
    for key, text in texts.items():
        try:
            if key in known:
                if text == "" and known[key].default in ("", None):
                    continue  # `namesrvAddr=` is the way to say "unset"
                value = parse(given_as.get(key, key), known[key].type, text)
                errors += check_value(given_as.get(key, key), known[key].type, value)
                values[known[key].name] = value
            elif key in rocketmq_keys() or key in fields(Config):
                _check_ignored(key, text)
                ignored.append(key)
            else:
                raise ConfigError(key, "is unknown", _nearest(key, struct))
        except ConfigError as error:
            errors.append(error)
    raise_errors(errors)
    return Loaded(struct(**values), tuple(sorted(ignored)))


def _from_standard_variables(environment: Mapping[str, str], struct: type[C]) -> dict[str, str]:
    """What the environment says in other projects' words; whatever is said in ours wins."""
    known = fields(struct)
    return {
        key: environment[variable]
        for variable, key in STANDARD_VARIABLES.items()
        if key in known and environment.get(variable)
    }


@cache
def rocketmq_keys() -> dict[str, str]:
    """Every key of RocketMQ 4.9.7 and 5.5.0 -> its Java type."""
    text = Path(__file__).with_name("rocketmq_keys.txt").read_text()
    types = {}
    java_type = ""
    for line in text.splitlines():
        if line.startswith("["):
            java_type = line[1:].split()[0]
        elif not line.startswith("#"):
            types.update(dict.fromkeys(line.split(), java_type))
    return types


def shown(config: Config | NameServerConfig) -> dict[str, str]:
    """All keys and what is in force, as a properties file has it. Keys that are unset are left out, secrets hidden."""
    found = {}
    for key, field in fields(type(config)).items():
        value = getattr(config, field.name)
        if value is not None and value != "":
            found[key] = str(value).lower() if isinstance(value, bool) else str(value).replace("\\", "\\\\")
    return found


def render(config: Config | NameServerConfig) -> str:
    """The same as the text of a properties file."""
    return "".join(f"{key}={value}\n" for key, value in shown(config).items())


def _from_file(file: Path | None, key: str = "--config") -> dict[str, str]:
    if file is None:
        return {}
    try:
        if file.stat().st_size > FILE_SIZE_MAX:
            raise ConfigError(key, f"{file} is larger than {FILE_SIZE_MAX} bytes", "a properties file")
        return dict(parse_properties(file.read_text("utf-8-sig", errors="surrogateescape")))
    except OSError as error:
        raise ConfigError(key, f"{file}: {error.strerror}", "a file that can be read") from None
    except ValueError as error:
        raise ConfigError(key, f"{file}: {error}", "Java's properties format") from None


def _from_tls_file(file: Path, errors: list[ConfigError]) -> dict[str, str]:
    """RocketMQ's file for everything about TLS but tls.server.mode and tls.enable; here for these two as well."""
    try:
        found = _from_file(file, TLS_CONFIG_FILE)
    except ConfigError as error:
        errors.append(error)
        return {}
    for key in found:
        if not key.startswith(TLS_PREFIX):
            errors.append(ConfigError(key, f"in {file}, is no key of TLS", f"keys that begin with {TLS_PREFIX}"))
    return {key: text for key, text in found.items() if key.startswith(TLS_PREFIX)}


def _from_environment(
    environment: Mapping[str, str], struct: type[Config | NameServerConfig], errors: list[ConfigError]
) -> dict[str, str]:
    keys = {_plain(key): key for key in _known_keys(struct)}
    found: dict[str, str] = {}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = _plain(variable.removeprefix(ENVIRONMENT_PREFIX))
        key = keys.get(name)
        if key is None:
            near = difflib.get_close_matches(name, keys, n=1, cutoff=0.0)
            errors.append(
                ConfigError(variable, "names no key", f"{ENVIRONMENT_PREFIX}{keys[near[0]]}, which is the nearest")
            )
        elif found.get(key, text) != text:
            errors.append(
                ConfigError(variable, f"{key} is given twice in the environment", "one variable for each key")
            )
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
            name = re.match(r"[\w.]*", setting)  # behind it a secret may follow
            assert name is not None
            errors.append(ConfigError("--set", f"{name[0]!r} has no key and value", "key=value"))
    return found


def _without_aliases(source: dict[str, str], errors: list[ConfigError], given_as: dict[str, str]) -> dict[str, str]:
    """Replace old names by new ones; `given_as` keeps by which name the value that counts was given."""
    for old, new in ALIASES.items():
        if new in source:
            given_as.pop(new, None)
        if old in source:
            given_as[new] = old
            text = source.pop(old)
            if source.setdefault(new, text) != text:
                errors.append(ConfigError(old, f"contradicts {new}, which is the same", "one of the two"))
    return source


def _check_ignored(key: str, text: str) -> None:
    java_type = rocketmq_keys().get(key)
    if java_type is not None and text:
        check_java(key, java_type, text)
    if key in REFUSED_IF_TRUE and text.lower() == "true":
        raise ConfigError(key, REFUSED_IF_TRUE[key], "false")


def _known_keys(struct: type[Config | NameServerConfig]) -> list[str]:
    """Most useful first: the nearest key is looked for in this order."""
    return list(dict.fromkeys([*fields(struct), *ALIASES, *fields(Config), *rocketmq_keys()]))


def _nearest(key: str, struct: type[Config | NameServerConfig]) -> str:
    plain = {_plain(known): known for known in reversed(_known_keys(struct))}
    near = plain[difflib.get_close_matches(_plain(key), plain, n=1, cutoff=0.0)[0]]
    if near in ALIASES:
        return f"{near}, which is the nearest known key"
    field = fields(struct).get(near)
    return f"{near}, which is the nearest known key" + (f" ({accepted(field.type)})" if field else "")


def _plain(key: str) -> str:
    return re.sub(r"[_.]", "", key).lower()
