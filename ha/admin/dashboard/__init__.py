"""The dashboard: pages for people on the admin port. Knows none of the other rooms: what it shows is handed to it.

source.py     what is asked of the node, and the shapes of its answers
pages.py      addresses, and what each page needs; login.py: the form for adminToken
live.py       what changes on the overview, made once for all viewers; drawing.py: where everybody stands
bodies.py     strangers' bytes as text; formats.py: numbers and times
assets.py     style, scripts and pictures (static/), and the headers of every answer
"""

from .source import (
    Counts,
    DashboardSource,
    FoundMessages,
    Group,
    GroupDetail,
    GroupMember,
    GroupQueue,
    Groups,
    GroupTopic,
    MessageDetail,
    MessageLine,
    Missing,
    Queue,
    QueuePart,
    Topic,
    TopicDetail,
    Topics,
)

__all__ = [
    "Counts",
    "DashboardSource",
    "FoundMessages",
    "Group",
    "GroupDetail",
    "GroupMember",
    "GroupQueue",
    "GroupTopic",
    "Groups",
    "MessageDetail",
    "MessageLine",
    "Missing",
    "Queue",
    "QueuePart",
    "Topic",
    "TopicDetail",
    "Topics",
]
