"""Who may do what at this broker: RocketMQ 4.9's plain ACL (plain_acl.yml), checked for every request.

`AclGuard` stands before the handlers; `AclPolicy` is what the files say; `keep_loaded` takes changes of the files in.
"""

from .guard import AclGuard, AclGuardOptions, AclStatistics
from .policy import Account, AclPolicy
from .policy_files import AclPolicyFiles, keep_loaded

__all__ = [
    "Account",
    "AclGuard",
    "AclGuardOptions",
    "AclPolicy",
    "AclPolicyFiles",
    "AclStatistics",
    "keep_loaded",
]
