"""Access control: RocketMQ 4.9's plain ACL (plain_acl.yml) and the users of 5.x's ACL 2.0, for every request.

`AclGuard` checks requests before the handlers; requirements.py is the table of the permissions that each request code
needs, for both kinds of access control. source.py is the interface of a source of accounts, of which there are two:
`AclPolicy`, the content of the plain ACL's files, and `UserAccounts`, the users of ACL 2.0, whose policies
evaluation.py evaluates. policy_files.py reads and reloads the files; it is imported only if there are files, because
importing YAML is slow.
"""

from .guard import AclGuard, AclGuardOptions, AclRefusal, AclStatistics, guard_options
from .origins import AdminOrigins
from .policy import Account, AclPolicy
from .requirements import BROKER_RULES, NAME_SERVER_RULES, Right, Rule
from .users import UserAccounts

__all__ = [
    "BROKER_RULES",
    "NAME_SERVER_RULES",
    "Account",
    "AclGuard",
    "AclGuardOptions",
    "AclPolicy",
    "AclRefusal",
    "AclStatistics",
    "AdminOrigins",
    "Right",
    "Rule",
    "UserAccounts",
    "guard_options",
]
