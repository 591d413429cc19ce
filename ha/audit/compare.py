"""Level 2 of an audit: compares a range of two copies whose bytes differ, record by record."""

from __future__ import annotations

import numpy as np

from ha.audit.examined import Examined
from ha.audit.findings import Finding, Findings
from ha.audit.walk import Walked, damage_at
from ha.errors import RemoteProtocolError


def compare(
    right: Examined, other: Examined, right_names: list[str], other_names: list[str], findings: Findings
) -> None:
    """Adds findings for the records and fillers in which two views of a range differ.

    `right_names` and `other_names` name the copies that have the bytes of `right` and of `other`. `right` is taken as
    correct, so findings are about the copies `other_names`. They are about `right_names` if `right` is damaged where
    `other` has a record, or if its record is bad (CRC or physical offset) and that of `other` is not.
    """
    in_right = np.isin(other.positions, right.positions)
    in_other = np.isin(right.positions, other.positions)
    is_damaged = damage_at(other.walked.damaged, right.positions) >= 0
    for row in np.flatnonzero(~in_other).tolist():
        for name in other_names:
            detail = f"{right_names[0]} has it" + ("; here its bytes are damaged" if is_damaged[row] else "")
            findings.add(right.finding("missing", name, row, detail))
    is_damaged = damage_at(right.walked.damaged, other.positions) >= 0
    for row in np.flatnonzero(~in_right).tolist():
        if is_damaged[row]:
            for name in right_names:
                detail = f"{other_names[0]} has it; here its bytes are damaged"
                findings.add(other.finding("missing", name, row, detail))
        else:
            for name in other_names:
                findings.add(other.finding("extra", name, row, f"{right_names[0]} has no record here"))
    rows = np.searchsorted(right.positions, other.positions[in_right])
    for right_row, other_row in zip(rows.tolist(), np.flatnonzero(in_right).tolist(), strict=True):
        if right.raw(right_row) != other.raw(other_row):
            is_right_bad = bool(right.is_bad[right_row]) and not bool(other.is_bad[other_row])
            detail = _difference(right, right_row, other, other_row)
            # The finding has the fields of the record that is taken as correct.
            blamed, view, row = (right_names, other, other_row) if is_right_bad else (other_names, right, right_row)
            against = other_names[0] if is_right_bad else right_names[0]
            for name in blamed:
                findings.add(view.finding("different", name, row, f"not as in {against}: {detail}"))
    _compare_padding(right.walked, other.walked, right_names[0], other_names, findings)


def _compare_padding(right: Walked, other: Walked, right_name: str, names: list[str], findings: Findings) -> None:
    for position, size in set(right.fillers) & set(other.fillers):
        at = position - right.begin
        mine, theirs = (np.frombuffer(walked.data[at : at + size], np.uint8) for walked in (right, other))
        width = min(len(mine), len(theirs))
        unequal = np.flatnonzero(mine[:width] != theirs[:width])
        if len(unequal):
            first = int(unequal[0])
            for name in names:
                detail = f"first of the bytes that differ from {right_name}"
                findings.add(Finding(kind="padding", copy=name, physical_offset=position + first, detail=detail))


def _difference(right: Examined, right_row: int, other: Examined, other_row: int) -> str:
    """Returns the names of the fields in which two records at the same physical offset differ; "unused bytes" if none
    does."""
    try:
        one, two = right.record(right_row), other.record(other_row)
    except RemoteProtocolError as error:  # pragma: no cover - the walk has checked both
        return str(error)
    names = [name for name in one.__struct_fields__ if getattr(one, name) != getattr(two, name)]
    return ", ".join(name.replace("_", " ") for name in names) or "unused bytes"
