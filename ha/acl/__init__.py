"""Access control: RocketMQ 4.9's plain ACL (plain_acl.yml), checked for every request.

`AclGuard` checks requests before the handlers; `AclPolicy` is the content of the files; requirements.py is the table of
permissions by request code. policy_files.py reads and reloads the files. It is only imported if there are files, as
importing YAML is slow.
"""

from .guard import AclGuard, AclGuardOptions, AclStatistics, guard_options
from .origins import AdminOrigins
from .policy import Account, AclPolicy, Right
from .requirements import BROKER_RULES, NAME_SERVER_RULES, Rule

__all__ = [
    "BROKER_RULES",
    "NAME_SERVER_RULES",
    "Account",
    "AclGuard",
    "AclGuardOptions",
    "AclPolicy",
    "AclStatistics",
    "AdminOrigins",
    "Right",
    "Rule",
    "guard_options",
]
