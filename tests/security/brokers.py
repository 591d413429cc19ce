"""A whole broker with a policy, over memory streams, and a client of it that signs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ha.acl import AclPolicy
from ha.acl.yaml_file import parse_acl_file
from ha.protocol.acl import AclCredentials
from ha.protocol.codes import LanguageCode
from ha.protocol.remoting import RemotingCommand
from tests.broker.node import CLIENT_VERSION, Node, open_node, text

SECRET = "the-secret-of-alice"
ACCOUNTS = f"""
accounts:
  - accessKey: alice-key
    secretKey: {SECRET}
    defaultTopicPerm: DENY
    defaultGroupPerm: DENY
    topicPerms: [TT=PUB|SUB, writable=PUB, readable=SUB, "%DLQ%g=SUB", C_REPLY_TOPIC=PUB]
    groupPerms: [g=SUB]
  - {{accessKey: admin-key, secretKey: the-secret-of-admin, admin: true}}
"""


def policy(accounts: str = ACCOUNTS) -> AclPolicy:
    """The policy of one file."""
    found = parse_acl_file(accounts.encode())
    return AclPolicy(found.accounts, found.global_white_hosts)


class Client:
    """Sends requests signed by one account."""

    def __init__(self, node: Node, credentials: AclCredentials | None) -> None:
        self.node = node
        self.credentials = credentials

    async def ask(
        self, code: int, body: bytes = b"", changed: dict[str, str] | None = None, **ext: Any
    ) -> RemotingCommand:
        """As Node.ask, signed; `changed`: fields changed after signing."""
        fields = {name: text(value) for name, value in ext.items() if value is not None}
        command = RemotingCommand(
            code, language=LanguageCode.JAVA, version=CLIENT_VERSION, ext_fields=fields, body=body
        )
        if self.credentials is not None:
            self.credentials.sign(command)
        command.ext_fields.update(changed or {})
        return await self.node.client.invoke(self.node.address, command, 10)


@asynccontextmanager
async def guarded_broker(folder: Path, accounts: str = ACCOUNTS) -> AsyncIterator[Node]:
    """A broker with access control."""
    async with open_node(folder, acl_policy=policy(accounts)) as node:
        yield node


def alice(node: Node) -> Client:
    """An account with a few rights."""
    return Client(node, AclCredentials("alice-key", SECRET))


def admin(node: Node) -> Client:
    """An admin."""
    return Client(node, AclCredentials("admin-key", "the-secret-of-admin"))
