"""plain_acl.yml: bytes to accounts and address patterns. No I/O.

    globalWhiteRemoteAddresses: [pattern …]
    accounts:
      - accessKey, secretKey       text of more than six characters
        whiteRemoteAddress         an address pattern; from there, the access key suffices
        admin                      true, false
        defaultTopicPerm, defaultGroupPerm   DENY, PUB, SUB, PUB|SUB; absent: DENY
        topicPerms, groupPerms     [name=right …]

Refused, because RocketMQ silently misreads them: duplicate keys, and unquoted text that YAML reads as another type and
RocketMQ would convert (0123456 is octal, 1e5 a number with an exponent). Also refused: the key `<<`, with which YAML
adds the keys of another mapping. An unknown right means DENY, as in RocketMQ, and gives a warning; so does an unknown
key, which is ignored. Errors never quote a value or an unknown key, which may be a secret. Sources: PlainAccessConfig,
PlainPermissionManager, Permission.parseResourcePerms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import yaml

from .addresses import AddressPattern
from .policy import RIGHTS, Account
from .requirements import Right

FILE_SIZE_MAX = 1 << 20
KEY_LENGTH_MIN = 7

_STRING = "tag:yaml.org,2002:str"
_NULL = "tag:yaml.org,2002:null"
_MERGE = "tag:yaml.org,2002:merge"
_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+")
"""Words that are text for PyYAML but numbers for SnakeYAML, which RocketMQ uses."""
_SAME_EVERYWHERE = re.compile(r"0|[1-9][0-9]{0,17}|true|false")
_TOP_KEYS = frozenset({"globalWhiteRemoteAddresses", "accounts", "dataVersion", "date"})
_ACCOUNT_KEYS = frozenset(
    {
        "accessKey",
        "secretKey",
        "whiteRemoteAddress",
        "admin",
        "defaultTopicPerm",
        "defaultGroupPerm",
        "topicPerms",
        "groupPerms",
    }
)


class AclFileError(Exception):
    """A file is invalid; the text names the place, but no value."""


class PlainAccount(NamedTuple):
    """One account as written in the file. Its representation does not show the secret key."""

    access_key: str
    secret_key: str
    is_admin: bool
    white_host: AddressPattern | None
    default_topic: int
    default_group: int
    topics: dict[str, int]
    groups: dict[str, int]

    def __repr__(self) -> str:
        return f"PlainAccount({self.access_key!r})"

    def account(self) -> Account:
        """Returns the account for the guard."""
        return Account(
            self.access_key,
            self.secret_key,
            is_admin=self.is_admin,
            white_host=self.white_host,
            default_topic=self.default_topic,
            default_group=self.default_group,
            topics=self.topics,
            groups=self.groups,
        )


class AclFile(NamedTuple):
    """The content of one file. `warnings` are lines for the log."""

    plain_accounts: list[PlainAccount]
    global_white_hosts: list[AddressPattern]
    warnings: list[str]

    @property
    def accounts(self) -> list[Account]:
        """The accounts for the guard."""
        return [plain.account() for plain in self.plain_accounts]


def parse_acl_file(content: bytes) -> AclFile:
    """Parses a file, which may be empty. Raises AclFileError if it is invalid or larger than FILE_SIZE_MAX."""
    if len(content) > FILE_SIZE_MAX:
        raise AclFileError(f"it has {len(content)} bytes; at most {FILE_SIZE_MAX} are read")
    try:
        root = yaml.compose(content, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        # The text of `error` is not used: it quotes the lines around the place, which may contain secrets.
        mark = error.problem_mark
        where = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        raise AclFileError(f"it is not valid YAML{where}") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError):
        raise AclFileError("it is not valid YAML") from None
    if root is None:
        return AclFile([], [], [])
    return _Reader().read(root)


class _Reader:
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def read(self, root: yaml.Node) -> AclFile:
        top = self._mapping(root, "the file", _TOP_KEYS)
        patterns = [
            self._pattern(text, f"globalWhiteRemoteAddresses[{number}]")
            for number, text in enumerate(
                self._texts(top.get("globalWhiteRemoteAddresses"), "globalWhiteRemoteAddresses")
            )
        ]
        accounts: dict[str, PlainAccount] = {}
        for number, node in enumerate(self._items(top.get("accounts"), "accounts")):
            account = self._account(node, f"accounts[{number}]")
            if account.access_key in accounts:
                self.warnings.append(f"accessKey {account.access_key!r} is duplicated: the first one counts")
            accounts.setdefault(account.access_key, account)
        return AclFile(list(accounts.values()), [each for each in patterns if each is not None], self.warnings)

    def _account(self, node: yaml.Node, where: str) -> PlainAccount:
        fields = self._mapping(node, where, _ACCOUNT_KEYS)
        access_key = self._text(fields.get("accessKey"), f"{where}.accessKey")
        secret_key = self._text(fields.get("secretKey"), f"{where}.secretKey")
        if len(access_key or "") < KEY_LENGTH_MIN or len(secret_key or "") < KEY_LENGTH_MIN:
            raise AclFileError(f"{where}: accessKey and secretKey are needed, each longer than 6 characters")
        assert access_key is not None
        assert secret_key is not None
        return PlainAccount(
            access_key,
            secret_key,
            is_admin=self._bool(fields.get("admin"), f"{where}.admin"),
            white_host=self._pattern(
                self._text(fields.get("whiteRemoteAddress"), f"{where}.whiteRemoteAddress"),
                f"{where}.whiteRemoteAddress",
            ),
            default_topic=self._right(fields, "defaultTopicPerm", where),
            default_group=self._right(fields, "defaultGroupPerm", where),
            topics=dict(self._rights(fields.get("topicPerms"), f"{where}.topicPerms")),
            groups=dict(self._rights(fields.get("groupPerms"), f"{where}.groupPerms")),
        )

    def _mapping(self, node: yaml.Node, where: str, known: frozenset[str]) -> dict[str, yaml.Node]:
        if not isinstance(node, yaml.MappingNode):
            raise AclFileError(f"{where} is not a mapping")
        found: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if key.tag == _MERGE:
                raise AclFileError(f"{where}: << is not supported; repeat the keys that it would add")
            name = key.value if isinstance(key, yaml.ScalarNode) else ""
            if name not in known:
                line = key.start_mark.line + 1
                self.warnings.append(f"{where}: the key in line {line} is not a key of plain_acl.yml and is ignored")
            elif name in found:
                raise AclFileError(f"{where}: {name} is duplicated")
            found[name] = value
        return found

    def _items(self, node: yaml.Node | None, where: str) -> list[yaml.Node]:
        if node is None or node.tag == _NULL:
            return []
        if not isinstance(node, yaml.SequenceNode):
            raise AclFileError(f"{where} is not a list")
        items: list[yaml.Node] = node.value
        return items

    def _texts(self, node: yaml.Node | None, where: str) -> Iterator[str]:
        for number, item in enumerate(self._items(node, where)):
            text = self._text(item, f"{where}[{number}]")
            if text is not None:
                yield text

    def _text(self, node: yaml.Node | None, where: str) -> str | None:
        """Returns the text of a scalar as written; None if the node is missing or null."""
        if node is None or node.tag == _NULL:
            return None
        if not isinstance(node, yaml.ScalarNode):
            raise AclFileError(f"{where} is not text")
        text: str = node.value
        is_text = node.tag == _STRING and (node.style is not None or not _EXPONENT.fullmatch(text))
        if not is_text and not _SAME_EVERYWHERE.fullmatch(text):
            raise AclFileError(f"{where}: YAML takes this for something other than text; put it in quotes")
        if any(0xD800 <= ord(character) < 0xE000 for character in text):  # a surrogate can't be encoded
            raise AclFileError(f"{where} is not valid text")
        return text

    def _bool(self, node: yaml.Node | None, where: str) -> bool:
        text = None if node is None or node.tag == _NULL else str(node.value).lower()
        if text not in (None, "true", "false"):
            raise AclFileError(f"{where} is neither true nor false")
        return text == "true"

    def _pattern(self, text: str | None, where: str) -> AddressPattern | None:
        if text is None or not text.strip():
            return None
        try:
            return AddressPattern(text.strip())
        except ValueError:
            raise AclFileError(
                f"{where} is not an address pattern, such as 10.0.0.*, 10.0.1-9.* or 10.0.0.{{4,5}}"
            ) from None

    def _right(self, fields: dict[str, yaml.Node], key: str, where: str) -> int:
        text = self._text(fields.get(key), f"{where}.{key}")
        return Right.DENY if text is None else self._right_of(text, f"{where}.{key}")

    def _rights(self, node: yaml.Node | None, where: str) -> Iterator[tuple[str, int]]:
        for number, text in enumerate(self._texts(node, where)):
            words = [word for word in text.split("=") if word]
            if len(words) != 2:
                raise AclFileError(f"{where}[{number}] is not name=right")
            yield words[0].strip(), self._right_of(words[1], f"{where}[{number}]")

    def _right_of(self, text: str, where: str) -> int:
        right = RIGHTS.get(text.strip())
        if right is None:
            self.warnings.append(f"{where} is not one of DENY, PUB, SUB, PUB|SUB and means DENY")
            return Right.DENY
        return right
