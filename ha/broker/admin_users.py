"""Requests that create, change, delete and show users (3001 AUTH_CREATE_USER to 3005 AUTH_LIST_USER) and their policies
(3006 AUTH_CREATE_ACL to 3010 AUTH_LIST_ACL).

Refused unless authenticationEnabled=true. As in RocketMQ, only super users create, change and delete super users. Any
requester that `AclGuard.is_admin` accepts, for example one at a trusted address, counts as a super user. Stricter than
RocketMQ: only super users see passwords (in RocketMQ, the permission Get on the cluster is enough to read those of
super users), and AUTH_DELETE_ACL (3008) with a resource that can't be parsed is refused (RocketMQ deletes all
policies).

Sources: AdminBrokerProcessor, AuthenticationMetadataManagerImpl, AuthorizationMetadataManagerImpl; tests/fixtures/acl2
has a real broker's answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ha.acl.evaluation import PolicyError, canonical, parse_resource, policy_type
from ha.broker.admin_topics import NO_REMARK
from ha.broker.core import BrokerCore
from ha.broker.refused import RefusedError, refuse_if, refuse_on_slave
from ha.protocol import java_json
from ha.protocol.access_bodies import (
    CUSTOM,
    ENABLE,
    NORMAL,
    POLICY_TYPES,
    SUPER,
    USER_STATUSES,
    USER_TYPES,
    AclInfo,
    DeleteAclRequest,
    ListAclsRequest,
    ListUsersRequest,
    PolicyEntryInfo,
    PolicyInfo,
    SubjectRequest,
    UserConfig,
    UserInfo,
    UserRequest,
    known_name,
    subject_of,
    username_of,
)
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.headers import parse_header
from ha.protocol.remoting import RemotingCommand

if TYPE_CHECKING:
    from ha.remoting import RemotingConnection, RequestHandler

NAME_LENGTH_MAX = 255
"""Maximum characters of a user's name, and of its password."""
ENTRY_COUNT_MAX = 1000
"""Maximum entries of all policies of a user."""
SOURCE_COUNT_MAX = 100
"""Maximum source addresses of an entry."""
BODY_SIZE_MAX = 256 * 1024
"""Maximum bytes of a request's body."""


class AdminUsers:
    """Answers admin requests about users."""

    def __init__(self, core: BrokerCore) -> None:
        self._users = core.tables.users
        self._guard = core.guard
        self._standing = core.standing
        self._is_enabled = core.options.authentication_enabled

    def handlers(self) -> dict[int, RequestHandler]:
        """Returns the handlers by request code."""
        return {
            RequestCode.AUTH_CREATE_USER: self.create_user,
            RequestCode.AUTH_UPDATE_USER: self.update_user,
            RequestCode.AUTH_DELETE_USER: self.delete_user,
            RequestCode.AUTH_GET_USER: self.user,
            RequestCode.AUTH_LIST_USER: self.users,
            RequestCode.AUTH_CREATE_ACL: self.update_acl,
            RequestCode.AUTH_UPDATE_ACL: self.update_acl,
            RequestCode.AUTH_DELETE_ACL: self.delete_acl,
            RequestCode.AUTH_GET_ACL: self.acl,
            RequestCode.AUTH_LIST_ACL: self.acls,
        }

    async def create_user(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """AUTH_CREATE_USER (3001): creates a user, of type Normal and enabled unless the body says otherwise."""
        self._check_change()
        name, info = _user_of(command)
        kind = known_name(info.user_type, USER_TYPES) or NORMAL
        if kind == SUPER and not self._is_super(connection, command):
            raise RefusedError(ResponseCode.SYSTEM_ERROR, "The super user can only be create by super user")
        _refuse_denied("" if (info.password or "").strip() else "password can not be blank")
        await self._users.wait_written(name)
        _refuse_denied("The user is existed" if self._users.get(name) is not None else "")
        status = known_name(info.user_status, USER_STATUSES) or ENABLE
        await self._put(UserConfig(username=name, password=info.password or "", user_type=kind, user_status=status))
        return _done(command)

    async def update_user(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """AUTH_UPDATE_USER (3002): changes the password, type and status of a user. A value that the body
        lacks, or that is blank or unknown there, stays the same."""
        self._check_change()
        name, info = _user_of(command)
        kind = known_name(info.user_type, USER_TYPES)
        is_super = self._is_super(connection, command)
        if kind == SUPER and not is_super:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, "The super user can only be update by super user")
        await self._users.wait_written(name)
        user = self._users.get(name)
        if user is None:
            raise RefusedError(ResponseCode.NO_PERMISSION, "The user is not exist")
        _refuse_denied("The super user can only be update by super user" if user.is_super and not is_super else "")
        password = info.password if (info.password or "").strip() else None
        await self._put(
            msgspec.structs.replace(
                user,
                password=password or user.password,
                user_type=kind or user.user_type,
                user_status=known_name(info.user_status, USER_STATUSES) or user.user_status,
            )
        )
        return _done(command)

    async def delete_user(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """AUTH_DELETE_USER (3003): deletes a user with its policies; the answer is the same if it does not exist."""
        self._check_change()
        name = parse_header(UserRequest, command.ext_fields).username
        _refuse_denied("" if name.strip() else "username can not be blank")
        await self._users.wait_written(name)
        user = self._users.get(name)
        if user is not None and user.is_super and not self._is_super(connection, command):
            raise RefusedError(ResponseCode.NO_PERMISSION, "The super user can only be update by super user")
        refuse_if(await self._users.delete(name))
        return _done(command)

    async def user(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """AUTH_GET_USER (3004): answers with one user, or an empty body if it does not exist. Only super users get the
        password."""
        self._check_enabled()
        name = parse_header(UserRequest, command.ext_fields).username
        refuse_if("" if name.strip() else "The username is blank", ResponseCode.INVALID_PARAMETER)
        user = self._users.get(name)
        if user is None:
            return _done(command)
        shows_password = self._is_super(connection, command)
        return _done(command, java_json.dumps(_shown(user, shows_password=shows_password)))

    async def users(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """AUTH_LIST_USER (3005): answers with the users whose names contain the filter (all if it is blank), or an
        empty body if there are none."""
        self._check_enabled()
        part = parse_header(ListUsersRequest, command.ext_fields).filter
        shows_password = self._is_super(connection, command)
        found = [
            _shown(user, shows_password=shows_password)
            for name, user in sorted(self._users.table.items())
            if not part.strip() or part in name
        ]
        return _done(command, java_json.dumps(found) if found else b"")

    async def update_acl(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """AUTH_CREATE_ACL (3006) and AUTH_UPDATE_ACL (3007): adds entries to a user's policies, or replaces those of
        the same type and resource."""
        self._check_change()
        info = _acl_of(command)
        name = username_of(info.subject) or username_of(parse_header(SubjectRequest, command.ext_fields).subject)
        _refuse_denied("" if name else "The subject is null.")
        try:
            policies = [
                PolicyInfo(policy_type=policy_type(policy), entries=[canonical(entry) for entry in policy.entries])
                for policy in info.policies or ()
                if policy.entries
            ]
        except PolicyError as error:
            raise RefusedError(ResponseCode.NO_PERMISSION, str(error)) from None
        _refuse_denied("" if policies else "The policies is empty.")
        await self._users.wait_written(name)
        user = self._users.get(name)
        if user is None:
            raise RefusedError(ResponseCode.NO_PERMISSION, f"The subject of {subject_of(name)} is not exist.")
        await self._put(msgspec.structs.replace(user, policies=_merged(user.policies, policies)))
        return _done(command)

    async def delete_acl(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """AUTH_DELETE_ACL (3008): deletes all policies of a user or, if the request names a resource, only the entry
        for it in the policy of the requested type (by default Custom)."""
        self._check_change()
        request = parse_header(DeleteAclRequest, command.ext_fields)
        await self._users.wait_written(username_of(request.subject))
        user = self._user_of(request.subject)
        _refuse_denied("" if user.policies else "The acl is not exist.")
        left: list[PolicyInfo] = []
        if request.resource.strip():
            try:
                resource = parse_resource(request.resource).text
            except PolicyError as error:
                raise RefusedError(ResponseCode.NO_PERMISSION, str(error)) from None
            kind = known_name(request.policy_type, POLICY_TYPES) or CUSTOM
            left = _without(user.policies, kind, resource)
        await self._put(msgspec.structs.replace(user, policies=left))
        return _done(command)

    async def acl(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """AUTH_GET_ACL (3009): answers with a user's policies, or an empty body if it has none."""
        self._check_enabled()
        user = self._user_of(parse_header(SubjectRequest, command.ext_fields).subject)
        info = AclInfo(subject=subject_of(user.username), policies=user.policies)
        return _done(command, java_json.dumps(info) if user.policies else b"")

    async def acls(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """AUTH_LIST_ACL (3010): answers with the policy entries whose resource contains the resource filter, of the
        users whose subject contains the subject filter, or an empty body if there are none. A blank filter matches
        all."""
        self._check_enabled()
        request = parse_header(ListAclsRequest, command.ext_fields)
        found = []
        for name, user in sorted(self._users.table.items()):
            if request.subject_filter.strip() and request.subject_filter not in subject_of(name):
                continue
            policies = _about(user.policies, request.resource_filter.strip())
            if policies:
                found.append(AclInfo(subject=subject_of(name), policies=policies))
        return _done(command, java_json.dumps(found) if found else b"")

    def _check_enabled(self) -> None:
        refuse_if("" if self._is_enabled else "authenticationEnabled=false: this broker has no users")

    def _check_change(self) -> None:
        self._check_enabled()
        refuse_on_slave(self._standing, "Can't change users on a slave: it takes over its master's users")

    def _is_super(self, connection: RemotingConnection, command: RemotingCommand) -> bool:
        return self._guard is not None and self._guard.is_admin(connection, command)

    def _user_of(self, subject: str) -> UserConfig:
        name = username_of(subject)
        _refuse_denied("" if name else "The subject is null.")
        user = self._users.get(name)
        if user is None:
            raise RefusedError(ResponseCode.NO_PERMISSION, "The subject is not exist.")
        return user

    async def _put(self, user: UserConfig) -> None:
        refuse_if(_fault(user), ResponseCode.INVALID_PARAMETER)
        refuse_if(await self._users.put(user))


def _done(command: RemotingCommand, body: bytes = b"") -> RemotingCommand:
    return command.reply(ResponseCode.SUCCESS, NO_REMARK, body=body)


def _refuse_denied(fault: str) -> None:
    refuse_if(fault, ResponseCode.NO_PERMISSION)


def _user_of(command: RemotingCommand) -> tuple[str, UserInfo]:
    """Returns the username in the header, which takes precedence over the one in the body, and the decoded body."""
    name = parse_header(UserRequest, command.ext_fields).username
    refuse_if("" if name else "The username is blank", ResponseCode.INVALID_PARAMETER)
    _refuse_denied("" if name.strip() else "username can not be blank")
    _check_size(command)
    return name, java_json.read_as(UserInfo, command.body)


def _acl_of(command: RemotingCommand) -> AclInfo:
    _check_size(command)
    info = java_json.read_as(AclInfo, command.body) if command.body else AclInfo()
    refuse_if("" if info.policies else "The body of acl is null")
    return info


def _check_size(command: RemotingCommand) -> None:
    size = len(command.body)
    fault = f"a body of {size} bytes; at most {BODY_SIZE_MAX} are accepted" if size > BODY_SIZE_MAX else ""
    refuse_if(fault, ResponseCode.INVALID_PARAMETER)


def _fault(user: UserConfig) -> str:
    """Returns why a user is refused: it exceeds a limit, or its name is invalid; "" if it is accepted."""
    for what, text in (("username", user.username), ("password", user.password)):
        if len(text) > NAME_LENGTH_MAX:
            return f"the {what} has {len(text)} characters; at most {NAME_LENGTH_MAX} are accepted"
    if not user.username.isprintable():
        return "the username contains control characters"
    if user.username == "$ref":
        return "the username can't be $ref: as a key of the table of users, it would be read as a reference"
    entries = [entry for policy in user.policies for entry in policy.entries or ()]
    if len(entries) > ENTRY_COUNT_MAX:
        return f"the policies have {len(entries)} entries; at most {ENTRY_COUNT_MAX} are accepted"
    sources = max((len(entry.source_ips or ()) for entry in entries), default=0)
    if sources > SOURCE_COUNT_MAX:
        return f"an entry has {sources} source addresses; at most {SOURCE_COUNT_MAX} are accepted"
    return ""


def _shown(user: UserConfig, *, shows_password: bool) -> UserInfo:
    return UserInfo(
        username=user.username,
        password=user.password if shows_password else None,
        user_type=user.user_type,
        user_status=user.user_status,
    )


def _merged(policies: list[PolicyInfo], changes: list[PolicyInfo]) -> list[PolicyInfo]:
    """Returns `policies` with the entries of `changes`, each of which replaces the entry of the same policy type and
    resource, or is appended."""
    by_type: dict[str, dict[str | None, PolicyEntryInfo]] = {}
    for policy in (*policies, *changes):
        entries = by_type.setdefault(policy_type(policy), {})
        entries.update({entry.resource: entry for entry in policy.entries or ()})
    return [PolicyInfo(policy_type=kind, entries=list(entries.values())) for kind, entries in by_type.items()]


def _without(policies: list[PolicyInfo], kind: str, resource: str) -> list[PolicyInfo]:
    left = []
    for policy in policies:
        entries = [entry for entry in policy.entries or () if policy_type(policy) != kind or entry.resource != resource]
        if entries:
            left.append(PolicyInfo(policy_type=policy.policy_type, entries=entries))
    return left


def _about(policies: list[PolicyInfo], part: str) -> list[PolicyInfo]:
    """Returns `policies` with only the entries whose resource contains `part`; omits policies without such entries."""
    found = [
        PolicyInfo(
            policy_type=policy.policy_type,
            entries=[entry for entry in policy.entries or () if part in (entry.resource or "")],
        )
        for policy in policies
    ]
    return [policy for policy in found if policy.entries]
