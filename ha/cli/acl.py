"""`ha acl …`: lists and changes users of ACL 2.0 and their policies, and imports plain_acl.yml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import cyclopts
import msgspec
from cyclopts import Parameter
from rich.table import Table

from ha.cli.asking import Json, Yes, ask, print_dry_run_notice
from ha.cli.exits import UsageError
from ha.cli.flags import LOCAL_CLIENT, ClientFlags
from ha.cli.showing import notices, output, print_json, safe
from ha.client import Admin, Client
from ha.errors import HalogError
from ha.protocol.access_bodies import (
    ALLOW,
    CUSTOM,
    DEFAULT,
    DENY,
    NORMAL,
    SUPER,
    PolicyEntryInfo,
    PolicyInfo,
    UserConfig,
    UserInfo,
)

app = cyclopts.App(
    name="acl", help="List and change users and their policies, and import plain_acl.yml.", help_format="markdown"
)

_Default = Annotated[
    bool,
    Parameter(negative=(), help="Change the user's default policies, which apply only if no other policy matches."),
]


class Shown(msgspec.Struct, frozen=True):
    """A user with its policies, as `ha acl list` prints it."""

    user: str
    type: str
    status: str
    policies: list[PolicyInfo]


@app.command(name="list")
def list_users(*, json: Json = False, client: ClientFlags = LOCAL_CLIENT) -> None:
    """List users and their policies. Passwords are not shown."""

    async def question(admin: Admin, _: Client) -> list[Shown]:
        policies = await admin.policies()
        return [
            Shown(
                user.username or "", user.user_type or "", user.user_status or "", policies.get(user.username or "", [])
            )
            for user in await admin.users()
        ]

    users = ask(question, client)
    if json:
        print_json(users)
        return
    table = Table("user", "type", "status", "policy", "resource", "decision", "actions", "from", box=None)
    for user in users:
        head = (safe(user.user), safe(user.type), safe(user.status))
        entries = [(policy.policy_type, entry) for policy in user.policies for entry in policy.entries or ()]
        if not entries:
            table.add_row(*head)
        for kind, entry in entries:
            words = (kind or "", entry.resource or "", entry.decision or "", ", ".join(entry.actions or ()))
            table.add_row(*head, *(safe(word) for word in words), safe(", ".join(entry.source_ips or ())))
            head = ("", "", "")
    output().print(table)


@app.command
def create(
    user: str,
    /,
    *,
    password_file: Annotated[Path, Parameter(help="File with one line: the password, which is the secret key.")],
    super_: Annotated[bool, Parameter(name="--super", negative=(), help="Create a super user.")] = False,
    json: Json = False,
    client: ClientFlags = LOCAL_CLIENT,
) -> None:
    """Create a user on every master."""
    password = _text_of(password_file, "--password-file").rstrip("\r\n")
    if not password.strip() or "\n" in password:
        raise UsageError(f"--password-file {password_file}: a file with one line is accepted")
    info = UserInfo(username=user, password=password, user_type=SUPER if super_ else NORMAL)
    ask(lambda admin, _: admin.create_user(info), client)
    if json:
        print_json({"user": user, "type": info.user_type})
    else:
        print(f"{safe(user)}: created")


@app.command
def delete(user: str, /, *, yes: Yes = False, json: Json = False, client: ClientFlags = LOCAL_CLIENT) -> None:
    """Delete a user and its policies on every master."""

    async def question(admin: Admin, _: Client) -> None:
        if user not in {each.username for each in await admin.users()}:
            raise UsageError(f"no user {safe(user)}; ha acl list shows the users")
        if yes:
            await admin.delete_user(user)

    ask(question, client)
    if json:
        print_json({"user": user, "is_done": yes})
    else:
        print(f"{safe(user)}: {'deleted' if yes else 'would be deleted'}")
    if not yes:
        print_dry_run_notice()


@app.command
def grant(
    user: str,
    resource: str,
    actions: str,
    /,
    *,
    deny: Annotated[bool, Parameter(negative=(), help="Deny the actions instead of allowing them.")] = False,
    source: Annotated[
        tuple[str, ...], Parameter(negative=(), help="Only for requests from this address or network. Can be repeated.")
    ] = (),
    default: _Default = False,
    json: Json = False,
    client: ClientFlags = LOCAL_CLIENT,
) -> None:
    """Allow USER the ACTIONS (such as Pub,Get) on RESOURCE (such as Topic:orders or Topic:prefix*).

    Replaces the user's entry for this resource or, with --default, the user's default entry for it.
    """
    entry = PolicyEntryInfo(
        resource=resource,
        actions=[action.strip() for action in actions.split(",")],
        source_ips=list(source) or None,
        decision=DENY if deny else ALLOW,
    )
    policy = PolicyInfo(policy_type=DEFAULT if default else CUSTOM, entries=[entry])
    ask(lambda admin, _: admin.update_policies(user, [policy]), client)
    if json:
        print_json({"user": user, "entry": entry})
    else:
        print(f"{safe(user)}: {'denied' if deny else 'allowed'} {safe(actions)} on {safe(resource)}")


@app.command
def revoke(
    user: str,
    resource: str,
    /,
    *,
    default: _Default = False,
    json: Json = False,
    client: ClientFlags = LOCAL_CLIENT,
) -> None:
    """Delete the policy entry of USER for RESOURCE."""
    kind, other, flags = (DEFAULT, CUSTOM, "without --default") if default else (CUSTOM, DEFAULT, "with --default")

    async def work(admin: Admin, _: Client) -> tuple[list[str], list[str]]:
        resources = _resources(await admin.policies(), user, kind)
        await admin.delete_policy(user, resource, kind)
        return resources, _resources(await admin.policies(), user, other)

    before, others = ask(work, client)
    if json:
        print_json({"user": user, "resource": resource})
    else:
        print(f"{safe(user)}: no {kind} entry for {safe(resource)}")
    if resource in others:
        notices().print(f"ha: {safe(user)} still has a {other} entry for {safe(resource)}: repeat it {flags}")
    elif resource not in before:
        known = safe(", ".join(sorted(before)) or "nothing")
        notices().print(f"ha: no such entry was found; {kind} entries are for {known}")


def _resources(policies: Mapping[str, Sequence[PolicyInfo]], user: str, kind: str) -> list[str]:
    """Returns the resources for which a user has policy entries of type `kind`."""
    of_kind = (policy for policy in policies.get(user, ()) if policy.policy_type == kind)
    return [entry.resource or "" for policy in of_kind for entry in policy.entries or ()]


@app.command(name="import")
def import_file(file: Path, /, *, yes: Yes = False, json: Json = False, client: ClientFlags = LOCAL_CLIENT) -> None:
    """Create a user with policies for each account of FILE (plain_acl.yml). Existing users stay as they are.

    Lists the settings of FILE that users and policies can't express.
    """
    from ha.acl.conversion import users_of
    from ha.acl.yaml_file import AclFileError, parse_acl_file

    try:
        found = parse_acl_file(_text_of(file, "FILE").encode())
    except AclFileError as error:
        raise UsageError(f"{file}: {error}") from None
    conversion = users_of(found)

    async def question(admin: Admin, _: Client) -> set[str]:
        known = {user.username or "" for user in await admin.users()}
        for user in conversion.users if yes else ():
            if user.username not in known:
                await _create(admin, user)
        return known

    known = ask(question, client)
    losses = [*found.warnings, *conversion.losses]
    created = [user for user in conversion.users if user.username not in known]
    if json:
        names = [user.username for user in created]
        print_json({"users": names, "existing": sorted(known), "not_imported": losses, "is_done": yes})
    else:
        for user in created:
            entries = sum(len(policy.entries or ()) for policy in user.policies)
            done = "created" if yes else "would be created"
            print(f"{safe(user.username)}: {done}: {user.user_type}, {entries} policy entries")
        for user in conversion.users:
            if user.username in known:
                print(f"{safe(user.username)}: exists already")
        for line in losses:
            notices().print(f"ha: not imported: {safe(line)}", soft_wrap=True)
    if not yes:
        print_dry_run_notice()


async def _create(admin: Admin, user: UserConfig) -> None:
    info = UserInfo(username=user.username, password=user.password, user_type=user.user_type)
    try:
        await admin.create_user(info)
        if user.policies:
            await admin.update_policies(user.username, user.policies)
    except HalogError:
        # The next import would leave the user as it is.
        name = safe(user.username)
        notices().print(f"ha: {name} may be incomplete; before the next import: ha acl delete {name} --yes")
        raise


def _text_of(file: Path, flag: str) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {file}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
