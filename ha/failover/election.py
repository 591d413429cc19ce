"""Who may be master next, who goes first, and what the group's record says afterwards. Pure: views in, verdicts out.

A master is elected by one transaction, which the service decides; what is here decides who tries, and when:

- Only a member of the sync-state set, because only it has every acknowledged byte. Where a message is acknowledged by n
  of the set (`ack_count`) and not by all, so many of them have to stand that one surely has every byte, |set| - n + 1,
  and nobody may be elected who has less of the log than one of them.
- Only complete members count as having it (durable_state.py): one that may have lost the end of its log with the power
  is elected only if its log is as long as that of a complete member (where n acknowledge: of all that stand).
- If too few complete members are left, all of the set have to stand, as nothing more can be had by waiting. Then the
  longest log wins, that of a member outside of the set included: it holds all that the set's longest one does.
- Only with a log that stands still. A member first stops following anybody, then says how far it got and for which
  election (`MemberRecord.stands_for`): a figure that could still grow says nothing.
- In order: higher epoch of the log, higher offset, whoever was handed the office, lower priority number, lower id;
  members that drain come last. Each lets those before it go first by a delay, which is a courtesy: if two try, the
  transaction takes one. The confirmed offset plays no part: of two logs of one epoch the longer one contains the other,
  and where n acknowledge, the member that holds the last acknowledged byte may have been told of a lower one.
- Nobody while a member that lives knows a newer record of the group (`outdated_record`): the service was restored from
  an older state, in which the set may name members that were dropped since.
- Nobody whose log has a term that the group's record does not know: either the service has lost what it knew, or this
  is another group's store. Nobody of the set whose log knows no term at all: its disk has been replaced.

The set afterwards: where all of the set acknowledge, each complete member of it has every acknowledged byte, so whoever
of them lives stays, and messages go on waiting for it until replication drops it. All others stay only if they have the
same log as the winner.
"""

from __future__ import annotations

import msgspec

from ha.failover.agreement import GroupRecord, GroupView, MemberRecord, RecordAge, SwitchRequest
from ha.failover.options import MemberOptions
from ha.failover.role import LogPosition


class Candidacy(msgspec.Struct, frozen=True, kw_only=True):
    """This member may try."""

    delay_s: float
    """Counted from when it saw that there is no master."""
    group: GroupRecord
    """What it puts in the place of the present record."""
    is_unclean: bool = False
    """Acknowledged messages may be lost."""
    doubt: str = ""
    """Why acknowledged messages may be lost although all that could be asked were: the set lost its power."""


class Refusal(msgspec.Struct, frozen=True):
    """This member may not stand as things are."""

    reason: str
    is_wrong: bool = False
    """Nothing the group does by itself changes it: an operator has to look."""


def judge(view: GroupView, own_id: int, options: MemberOptions) -> Candidacy | Refusal:
    """Tell whether `own_id`, whose standing record is in `view`, may take the office that is vacant there."""
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
        before = _better(pool.eligible, own_id, group)
        awaited = [
            id_
            for id_ in view.members
            if id_ not in standing and (pool.is_in_doubt or not group.epoch or _in_set(group, id_))
        ]
        delay_s = len(before) * options.rank_delay_s
        if pool.is_in_doubt and awaited:
            delay_s += options.lease_ttl_s
        elif group.master_id in awaited:
            delay_s += options.appointed_delay_s
        elif awaited:
            delay_s += options.rank_delay_s
        return Candidacy(
            delay_s=delay_s,
            group=_next(group, own_id, own, view, options, keeps_complete=not pool.is_in_doubt),
            doubt=pool.why_not if pool.is_in_doubt else "",
        )
    if options.elects_unclean:
        before = _better(standing, own_id, group)
        # A log may know terms that the record does not: they must not be used again.
        epoch = max(group.epoch, *(max(each.epoch, each.known_epoch) for each in view.members.values())) + 1
        return Candidacy(
            delay_s=options.unclean_delay_s + len(before) * options.rank_delay_s,
            group=_record(epoch, own_id, frozenset({own_id}), options, group),
            is_unclean=True,
        )
    fault = outdated or fault_of(group, own_id, own)
    if fault:
        return fault
    if not pool.eligible:
        return Refusal(pool.why_not)
    longest = max(pool.eligible, key=lambda id_: _log(pool.eligible[id_]))
    doubt = "" if own.is_complete else ", and this one may lack acknowledged messages since its last stop"
    return Refusal(f"member {longest} has more of the log{doubt}")


class _Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Who may be elected of those that stand."""

    eligible: dict[int, MemberRecord]
    is_in_doubt: bool = False
    """Too few of the set are complete, so all of it had to stand."""
    why_not: str = ""
    """Why nobody is, or why there is doubt."""


def _pool(group: GroupRecord, standing: dict[int, MemberRecord]) -> _Pool:
    sound = {id_: member for id_, member in standing.items() if not _fault_of_log(group, id_, member)}
    if not group.epoch:
        return _Pool(eligible=sound)
    entitled = {id_: member for id_, member in sound.items() if _in_set(group, id_)}
    complete = {id_: member for id_, member in entitled.items() if member.is_complete}
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
            f"acknowledged, {needed} have to; {incomplete} may have lost the end of their logs with the power"
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


def appointed(view: GroupView, own_id: int, own: MemberRecord, options: MemberOptions) -> Candidacy | None:
    """Return the candidacy of whoever is to be the next master, or was the last one, by the group's record; else None.

    Where all of the set acknowledge, a complete member of it has every acknowledged byte whatever the others have, so
    it need not ask them. `own` is its record, which need not have been written yet.
    """
    group = view.group
    if group is None or group.master_id != own_id or acknowledges_by_count(group) or fault_of(group, own_id, own):
        return None
    if not own.is_complete or outdated_record(view, own.known_age) is not None:
        return None
    return Candidacy(delay_s=0.0, group=_next(group, own_id, own, view, options, keeps_complete=True))


def outdated_record(view: GroupView, own_known: RecordAge = (0, 0)) -> Refusal | None:
    """Return why the group's record is not the newest one, None if nobody knows of a newer one.

    `own_known`: what this member knows, which need not be in `view` yet.
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
        is_wrong=True,
    )


def fault_of(group: GroupRecord, id_: int, member: MemberRecord) -> Refusal | None:
    """Return why a member may not be elected, None if it may."""
    fault = _fault_of_log(group, id_, member)
    if fault or not group.epoch or _in_set(group, id_):
        return fault
    return Refusal(f"member {id_} is not in the sync-state set {sorted(group.sync_state_set)}")


def _fault_of_log(group: GroupRecord, id_: int, member: MemberRecord) -> Refusal | None:
    """Return what is wrong with a member's log, whether or not it is in the set."""
    if member.epoch > group.epoch:
        return Refusal(
            f"member {id_}'s log has epoch {member.epoch}, the group's record only knows of {group.epoch}: has the "
            "service lost what it knew, or is this the store of another group?",
            is_wrong=True,
        )
    # A master that was killed before the first byte of its first term knows of no epoch either.
    is_replaced = member.is_new or (not member.epoch and group.sync_state_set != {id_})
    if group.epoch and _in_set(group, id_) and is_replaced:
        return Refusal(
            f"member {id_} is in the sync-state set, but its log knows of no epoch: has its disk been replaced?",
            is_wrong=True,
        )
    return None


def may_found(view: GroupView, own: LogPosition, options: MemberOptions) -> Refusal | None:
    """Return why no record may be written for a group that has none, None if it may."""
    known = max([own.epoch, *(member.epoch for member in view.members.values())])
    if known and not options.elects_unclean:
        return Refusal(
            f"the group has no record, but a log has epoch {known}: has the service lost what it knew?", is_wrong=True
        )
    return None


FOUNDED = GroupRecord(epoch=0, master_id=None, sync_state_set=frozenset())
"""The record of a group that never had a master."""


def candidates_needed(group: GroupRecord) -> int:
    """Return how many of the set have to stand so that one of them surely has every acknowledged byte.

    Where the master alone acknowledges, nobody else has them for sure; that has been told at its start.
    """
    if not acknowledges_by_count(group):
        return 1
    assert group.ack_count is not None
    return max(1, len(group.sync_state_set) - group.ack_count + 1)


def choose_target(view: GroupView, own_id: int, request: SwitchRequest) -> int | str:
    """Return the id of the member that the master `own_id` is to hand over to, or in words why it is to do nothing."""
    assert view.group is not None
    if request.epoch not in (None, view.group.epoch):
        return f"it was asked for in epoch {request.epoch}, this is {view.group.epoch}: ask again"
    if request.to == own_id:
        return f"member {own_id} is the master"
    fit = {
        id_: member
        for id_, member in view.members.items()
        if id_ != own_id and _in_set(view.group, id_) and not member.drains
    }
    if request.to is None:
        best = min(fit, key=lambda id_: (fit[id_].priority, id_), default=None)
        return "no other member of the sync-state set is there" if best is None else best
    if request.to in fit:
        return request.to
    if request.to not in view.members:
        return f"member {request.to} is not there"
    if not _in_set(view.group, request.to):
        return f"member {request.to} is not in the sync-state set {sorted(view.group.sync_state_set)}"
    return f"member {request.to} drains"


def _better(candidates: dict[int, MemberRecord], own_id: int, group: GroupRecord) -> list[int]:
    own = _rank(own_id, candidates[own_id], group)
    return [id_ for id_, member in candidates.items() if _rank(id_, member, group) < own]


def _rank(id_: int, member: MemberRecord, group: GroupRecord) -> tuple[int | bool, ...]:
    """Lower goes first."""
    log = (-member.epoch, -member.max_offset)
    rest = (id_ != group.master_id, member.priority, id_)
    # Where n acknowledge, only the longest log has every acknowledged byte, whatever its member would like.
    return (*log, member.drains, *rest) if acknowledges_by_count(group) else (member.drains, *log, *rest)


def acknowledges_by_count(group: GroupRecord) -> bool:
    """Tell whether some of the set acknowledge a message, more than the master and fewer than all."""
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
    """The record after the election of `own_id`. `keeps_complete`: complete members have all that it has to have."""
    kept = {own_id}
    for id_, member in view.members.items():
        is_equal = member.stands_for == group.epoch + 1 and _log(member) == _log(own)
        has_all = keeps_complete and member.is_complete and not acknowledges_by_count(group)
        if _in_set(group, id_) and (is_equal or has_all):
            kept.add(id_)
    return _record(group.epoch + 1, own_id, frozenset(kept), options, group)


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
