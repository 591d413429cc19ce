"""The interface of a source of accounts: plain_acl.yml (policy.py) and the users of ACL 2.0 (users.py) implement it.

The guard asks each source for the account of an access key; the first one that has it decides. An account verifies
signatures with its key and decides which requests are denied; `Dialect` holds the codes and texts of RocketMQ's
refusals.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ha.protocol.acl import SigningKey
from ha.protocol.codes import ResponseCode
from ha.protocol.remoting import RemotingCommand

from .requirements import Rule


class Dialect(NamedTuple):
    """Response code and texts of refusals. `prefix` precedes each text; `{}` in a text stands for the access key."""

    code: int
    prefix: str
    no_key: str
    unknown_key: str
    wrong_signature: str


PLAIN = Dialect(
    ResponseCode.SYSTEM_ERROR,
    "org.apache.rocketmq.acl.common.AclException: ",
    "No accessKey is configured",
    "No acl config for {}",
    "Check signature failed for accessKey={}",
)
"""The response code and the remarks of RocketMQ 4.9's refusals. Its remarks also name the class and the line that threw
the exception; these don't."""

ACL2 = Dialect(
    ResponseCode.NO_PERMISSION,
    "",
    "username cannot be null.",
    "User:{} is not found.",
    "check signature failed.",
)
"""The response code and the remarks of RocketMQ 5's refusals."""
ACL2_DISABLED = "User:{} is disabled."
"""RocketMQ 5's remark to a disabled user. `{}` is the user's name."""


def refuses_user(answer: RemotingCommand, access_key: str) -> bool:
    """Returns whether `answer` of a broker with ACL 2.0 refuses the user `access_key` itself, and not only one request
    for lack of a permission."""
    texts = ACL2.unknown_key, ACL2.wrong_signature, ACL2_DISABLED
    return answer.code == ACL2.code and answer.remark in [text.format(access_key) for text in texts]


class Account(Protocol):
    """One access key with its rights."""

    @property
    def access_key(self) -> str:
        """The access key, by which requests name the account."""
        ...

    @property
    def key(self) -> SigningKey:
        """The key that verifies the account's signatures."""
        ...

    @property
    def is_admin(self) -> bool:
        """Whether the account may do everything that needs an admin."""
        ...

    @property
    def dialect(self) -> Dialect:
        """Response code and texts with which the account's requests are refused."""
        ...

    @property
    def fault(self) -> str:
        """Why the account can't be used at present; "" if it can."""
        ...

    def trusts(self, host: str) -> bool:
        """Returns whether the account's requests from `host` need no signature and no rights."""
        ...

    def denial(self, rule: Rule, command: RemotingCommand, host: str) -> str:
        """Returns why `command`, to which `rule` applies, is denied; "" if it is allowed. Raises RemoteProtocolError if
        it is malformed."""
        ...

    def denial_of(self, resource: str | None, actions: int, host: str) -> str:
        """Returns why `actions` (bits of `Right`, any of which suffices) on `resource` are denied; "" if they are
        allowed.

        `resource` None: the cluster, for settings and whole tables.
        """
        ...


class PolicySource(Protocol):
    """A source of accounts, found by their access keys."""

    def __len__(self) -> int: ...

    def account(self, access_key: str) -> Account | None:
        """Returns the account, or None if this source has none."""
        ...

    def admits(self, host: str) -> bool:
        """Returns whether everything is allowed from `host`, without an account."""
        ...
