"""Decides which member may become master, which one tries first, and what the group's record contains afterwards.

Only pure functions of a view of the group. A master is elected by one transaction of the service. These rules decide
which member tries it, and when:

- Normally only members of the sync-state set are candidates, because only they can be known to have every acknowledged
  byte. If a message is acknowledged by n members of the set (`ack_count`) and not by all, |set| - n + 1 members of the
  set have to stand, so that one of them has every byte, and only those with the longest log may be elected. In a group
  that never had a master, every member is a candidate.
- Only complete members count as having every byte (durable_state.py). A member that may have lost the end of its log in
  a power loss is elected only if its log is as long as a complete member's (with `ack_count`: as long as the longest
  log among the members of the set that stand). The same holds for a log without a term: its first records may have been
  lost, or it may have been deleted.
- If there are too few complete members, the whole set has to stand. Then the longest log wins, even that of a member
  outside the set: it holds everything that the set's longest log does. A member with a longer log may be restarting, so
  the election waits until no earlier lease can hold that member's key (campaign.py).
- A candidate's log must not change. A member first stops following, then publishes how much of the log it has and for
  which election (`MemberRecord.stands_for`): an offset that may still grow proves nothing.
- Candidates are ranked by higher epoch of the log, higher offset, being the member that the record names (the last
  master, or the one that it handed over to), lower priority number, lower id. Members whose nodes are stopping
  (`drains`) come last; with `ack_count`, only after those with an equal log. Each candidate waits for a delay according
  to its rank. That only avoids contention: if two try, only one transaction succeeds. The confirm offset isn't used: of
  two logs of one epoch the longer one contains the other, and with `ack_count` the member that holds the last
  acknowledged byte may know only a lower confirm offset.
- Nobody is elected while a live member knows a newer record of the group (`outdated_record`): the service was restored
  from an older state, whose set may contain members that were dropped since.
- A member whose log contains an unknown term is never elected: either the service lost data, or the store belongs to
  another group. Nor is a member of the set whose store is new (durable_state.py): the disk has been replaced.
- With enableElectUncleanMaster, a member that these rules exclude may be elected nevertheless, after a longer delay.
  Acknowledged messages may then be lost.

The sync-state set after an election: if messages are acknowledged by the whole set, each complete member has every
acknowledged byte. So all live complete members of the set stay, and messages wait for their acknowledgement until
replication removes them. Other members stay only if their log equals the winner's. An unclean election leaves only the
winner.
"""

from __future__ import annotations

import msgspec

from ha.failover.agreement import GroupRecord, GroupView, MemberRecord, RecordAge, SwitchRequest
from ha.failover.options import MemberOptions
from ha.failover.role import LogPosition


class Candidacy(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an evaluation: the member may try to become master after a delay."""

    delay_s: float
    """Seconds to wait after the earliest time for an election (campaign.py), so that better candidates go first."""
    group: GroupRecord
    """The record that replaces the present one if the member becomes master."""
    is_unclean: bool = False
    """Whether the member may try only because of enableElectUncleanMaster; acknowledged messages may be lost."""
    doubt: str = ""
    """Why acknowledged messages may be lost although all members of the set stand for election; otherwise ""."""


class Refusal(msgspec.Struct, frozen=True):
    """Result of an evaluation: a member may not become master now, or a record may not be created or used."""

    reason: str
    needs_operator: bool = False
    """Whether only an operator can resolve it."""


def evaluate(view: GroupView, own_id: int, options: MemberOptions) -> Candidacy | Refusal:
    """Returns how `own_id` may become master, or why it may not now. `view` must have no master."""
    assert view.master is None, view.master
    group = view.group
    if group is None:
        return Refusal("the group has no record yet")
    election = group.epoch + 1
    own = view.members.get(own_id)
    if own is None or own.stands_for != election:
        return Refusal(f"this member does not stand in the election of epoch {election} yet")
    standing = {id_: member for id_, member in view.members.items() if member.stands_for == election}
    pool = _pool(group, standing)
    outdated = outdated_record(view)
    if own_id in pool.eligible and outdated is None:
        before = _ranked_before(pool.eligible, own_id, group)
        awaited = [id_ for id_ in view.members if id_ not in standing and (not group.epoch or _in_set(group, id_))]
        delay_s = len(before) * options.rank_delay_s
        if group.master_id in awaited:
            delay_s += options.appointed_delay_s
        elif awaited:
            delay_s += options.rank_delay_s
        return Candidacy(
            delay_s=delay_s,
            group=_next(group, own_id, own, view, options, keeps_complete=not pool.is_in_doubt),
            doubt=pool.why_not if pool.is_in_doubt else "",
        )
    if options.elects_unclean:
        before = _ranked_before(standing, own_id, group)
        # Logs may contain terms that the record doesn't know: those must not be reused.
        epoch = max(group.epoch, *(max(each.epoch, each.known_epoch) for each in view.members.values())) + 1
        return Candidacy(
            delay_s=options.unclean_delay_s + len(before) * options.rank_delay_s,
            group=_record(epoch, own_id, frozenset({own_id}), options, group),
            is_unclean=True,
        )
    refusal = outdated or _refusal_of(group, own_id, own)
    if refusal:
        return refusal
    if not pool.eligible:
        return Refusal(pool.why_not)
    longest = max(pool.eligible, key=lambda id_: _log(pool.eligible[id_]))
    doubt = "" if _is_complete(own) else ", and this one may lack acknowledged messages since its last stop"
    return Refusal(f"member {longest} has more of the log{doubt}")


class _Pool(msgspec.Struct, frozen=True, kw_only=True):
    """The members that stand and may be elected."""

    eligible: dict[int, MemberRecord]
    is_in_doubt: bool = False
    """Whether too few members of the set are complete, so that all of them had to stand for election."""
    why_not: str = ""
    """Why nobody may be elected, or why there is doubt."""


def _pool(group: GroupRecord, standing: dict[int, MemberRecord]) -> _Pool:
    sound = {id_: member for id_, member in standing.items() if not _refusal_of_log(group, id_, member)}
    if not group.epoch:
        return _Pool(eligible=sound)
    entitled = {id_: member for id_, member in sound.items() if _in_set(group, id_)}
    complete = {id_: member for id_, member in entitled.items() if _is_complete(member)}
    needed = candidates_needed(group)
    if len(complete) >= needed:
        by_count = acknowledges_by_count(group)
        least = max(map(_log, entitled.values())) if by_count else min(map(_log, complete.values()))
        return _Pool(eligible={id_: member for id_, member in entitled.items() if _log(member) >= least})
    members = sorted(group.sync_state_set)
    incomplete = sorted(entitled.keys() - complete.keys())
    why_not = f"{len(entitled)} of the sync-state set {members} stand, {needed} have to"
    if incomplete:
        why_not = (
            f"{len(complete)} of the sync-state set {members} stand and are known to have every message that they "
            f"acknowledged, {needed} have to; {incomplete} may have lost the end of their logs"
        )
        missing = sorted(group.sync_state_set - entitled.keys())
        if not missing:
            longest = max(map(_log, sound.values()))
            eligible = {id_: member for id_, member in sound.items() if _log(member) == longest}
            return _Pool(eligible=eligible, is_in_doubt=True, why_not=why_not)
        why_not += (
            f"; waiting for {missing}. If those are lost for good, set enableElectUncleanMaster=true on the member "
            "with the longest log"
        )
    return _Pool(eligible={}, why_not=why_not)


def appointed_candidacy(view: GroupView, own_id: int, own: MemberRecord, options: MemberOptions) -> Candidacy | None:
    """Returns the candidacy of `own_id` if it may become master without an election, otherwise None.

    Only the member that the group's record names as last or next master may. If the whole set acknowledges each
    message, a complete member has every acknowledged byte, so it need not compare its log with the others'. `own`: the
    record of `own_id`, which need not be in `view` yet.
    """
    group = view.group
    if group is None or group.master_id != own_id or acknowledges_by_count(group) or _refusal_of(group, own_id, own):
        return None
    if not _is_complete(own) or outdated_record(view, own.known_age) is not None:
        return None
    return Candidacy(delay_s=0.0, group=_next(group, own_id, own, view, options, keeps_complete=True))


def outdated_record(view: GroupView, own_known: RecordAge = (0, 0)) -> Refusal | None:
    """Returns a Refusal if a live member knows a newer record of the group than the one in `view`, otherwise None.

    `own_known`: epoch and version of the newest record that this member knows, which need not be in `view` yet.
    """
    group = view.group
    if group is None:
        return None
    known = {f"member {id_}": member.known_age for id_, member in view.members.items()}
    known["this member"] = own_known
    who = max(known, key=lambda name: known[name])
    if known[who] <= group.age:
        return None
    (epoch, version), (known_epoch, known_version) = group.age, known[who]
    return Refusal(
        f"the group's record is of epoch {epoch}, version {version}, and {who} knows one of epoch {known_epoch}, "
        f"version {known_version}: the service was restored from an older state; put the newer record back from that "
        "member's file memberstate (docs/failover.md)",
        needs_operator=True,
    )


def _refusal_of(group: GroupRecord, id_: int, member: MemberRecord) -> Refusal | None:
    """Returns why a member may not be elected, None if it may."""
    refusal = _refusal_of_log(group, id_, member)
    if refusal or not group.epoch or _in_set(group, id_):
        return refusal
    return Refusal(f"member {id_} is not in the sync-state set {sorted(group.sync_state_set)}")


def _refusal_of_log(group: GroupRecord, id_: int, member: MemberRecord) -> Refusal | None:
    """Returns why a member's log excludes the member from the election, whether or not it is in the sync-state set;
    None if it does not."""
    if member.epoch > group.epoch:
        return Refusal(
            f"member {id_}'s log has epoch {member.epoch}, the group's record only knows of {group.epoch}: has the "
            "service lost data, or is this the store of another group?",
            needs_operator=True,
        )
    if group.epoch and _in_set(group, id_) and member.is_new:
        return Refusal(
            f"member {id_} is in the sync-state set, but there has never been a log on its disk: has the disk been "
            "replaced?",
            needs_operator=True,
        )
    return None


def why_not_create(view: GroupView, own: LogPosition, options: MemberOptions) -> Refusal | None:
    """Returns why the first record of a group may not be written, None if it may."""
    known = max([own.epoch, *(member.epoch for member in view.members.values())])
    if known and not options.elects_unclean:
        return Refusal(
            f"the group has no record, but a log has epoch {known}: has the service lost data?", needs_operator=True
        )
    return None


NEW_GROUP = GroupRecord(epoch=0, master_id=None, sync_state_set=frozenset())
"""The record of a group that never had a master."""


def candidates_needed(group: GroupRecord) -> int:
    """Returns the number of members of the sync-state set that have to stand so that one of them has every acknowledged
    byte.

    If the master acknowledges alone (ack_count 1), no other member is sure to have every byte; 1 is returned
    nevertheless.
    """
    if not acknowledges_by_count(group):
        return 1
    assert group.ack_count is not None
    return max(1, len(group.sync_state_set) - group.ack_count + 1)


def choose_target(view: GroupView, own_id: int, request: SwitchRequest) -> int | str:
    """Returns the id of the member that the master `own_id` should hand over to, or why it should not hand over."""
    assert view.group is not None
    if request.epoch not in (None, view.group.epoch):
        return f"it was requested in epoch {request.epoch}, this is {view.group.epoch}: request it again"
    if request.to == own_id:
        return f"member {own_id} is the master"
    fit = {
        id_: member
        for id_, member in view.members.items()
        if id_ != own_id and _in_set(view.group, id_) and not member.drains
    }
    if request.to is None:
        best = min(fit, key=lambda id_: (fit[id_].priority, id_), default=None)
        return "no other member of the sync-state set is live" if best is None else best
    if request.to in fit:
        return request.to
    if request.to not in view.members:
        return f"member {request.to} is not live"
    if not _in_set(view.group, request.to):
        return f"member {request.to} is not in the sync-state set {sorted(view.group.sync_state_set)}"
    return f"member {request.to} drains"


def _ranked_before(candidates: dict[int, MemberRecord], own_id: int, group: GroupRecord) -> list[int]:
    own = _rank(own_id, candidates[own_id], group)
    return [id_ for id_, member in candidates.items() if _rank(id_, member, group) < own]


def _rank(id_: int, member: MemberRecord, group: GroupRecord) -> tuple[int | bool, ...]:
    """Returns the rank of a candidate; the lowest goes first."""
    log = (-member.epoch, -member.max_offset)
    rest = (id_ != group.master_id, member.priority, id_)
    # With ack_count only the longest log is sure to have every acknowledged byte, so `drains` comes second.
    return (*log, member.drains, *rest) if acknowledges_by_count(group) else (member.drains, *log, *rest)


def acknowledges_by_count(group: GroupRecord) -> bool:
    """Returns whether a fixed number of members acknowledges each message (`ack_count` above 1), rather than the whole
    set or the master alone."""
    return group.ack_count is not None and group.ack_count > 1


def _next(
    group: GroupRecord,
    own_id: int,
    own: MemberRecord,
    view: GroupView,
    options: MemberOptions,
    *,
    keeps_complete: bool,
) -> GroupRecord:
    """Returns the record after the election of `own_id`. `keeps_complete`: complete members stay in the set."""
    kept = {own_id}
    for id_, member in view.members.items():
        is_equal = member.stands_for == group.epoch + 1 and _log(member) == _log(own)
        has_all = keeps_complete and _is_complete(member) and not acknowledges_by_count(group)
        if _in_set(group, id_) and (is_equal or has_all):
            kept.add(id_)
    return _record(group.epoch + 1, own_id, frozenset(kept), options, group)


def _is_complete(member: MemberRecord) -> bool:
    """Returns whether a member of a group that has had a master is known to have every byte that it acknowledged.

    A log without a term is never known to be complete: it may have been deleted. `MemberRecord.is_complete` alone does
    not exclude that: a member that has no state file when it starts (durable_state.py), or that runs release 0.1.0,
    does not detect a deleted log.
    """
    return member.is_complete and member.epoch > 0


def _log(member: MemberRecord) -> tuple[int, int]:
    return member.epoch, member.max_offset


def _record(
    epoch: int, master_id: int, sync_state_set: frozenset[int], options: MemberOptions, before: GroupRecord
) -> GroupRecord:
    return GroupRecord(
        epoch=epoch,
        master_id=master_id,
        sync_state_set=sync_state_set,
        ack_count=options.ack_count,
        version=before.version + 1,
    )


def _in_set(group: GroupRecord, id_: int) -> bool:
    return id_ in group.sync_state_set
