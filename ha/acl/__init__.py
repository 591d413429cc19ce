"""Who may do what: RocketMQ 4.9's plain ACL (plain_acl.yml), checked for every request.

`AclGuard` stands before the handlers; `AclPolicy` is what the files say; requirements.py is the table of what each
request code needs. policy_files.py reads the files and takes changes of them in: it is imported where there are some,
as that takes a while (YAML).
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
