"""Putting a bug in the place of halog's own code, and taking it out again.

    def skipped_fsync(plant: Planting) -> None:
        plant.replace(CommitLog.sync)(sync_nothing)

What is replaced is named by the function itself, not by a string: mypy then knows that it is there, and whether the
replacement can be called as it is. Planting checks the same at run time, parameter by parameter. A bug that can't be
planted must not look like one that is noticed: `PlantingError` is raised before anything runs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from tests.checkers.violation import Violation
from tests.sim.observer import CRASH
from tests.sim.scenario import GroupPlan, Plan

ParametersT = ParamSpec("ParametersT")
ResultT = TypeVar("ResultT")
PlanT = TypeVar("PlanT", Plan, GroupPlan)


class PlantingError(Exception):
    """What is to be replaced is not there, or what is to replace it can't be called as it is."""


class Place(NamedTuple):
    """Where something was replaced."""

    owner: object
    name: str


class Planting:
    """Replaces functions; whoever closes `undo` has them back."""

    def __init__(self, undo: ExitStack) -> None:
        self._undo = undo
        self.places: list[Place] = []

    def replace(self, original: Callable[ParametersT, ResultT]) -> Callable[[Callable[ParametersT, ResultT]], None]:
        """Have the next thing in parentheses be there instead of a method, or of the getter of a property (which is a
        function of the instance to mypy)."""
        function: Any = original.fget if isinstance(original, property) else original
        owner: Any = sys.modules[function.__module__]
        *path, name = function.__qualname__.split(".")
        for part in path:
            owner = getattr(owner, part)
        return partial(self._put, owner, name, original)

    def replace_in(
        self, module: ModuleType, original: Callable[ParametersT, ResultT]
    ) -> Callable[[Callable[ParametersT, ResultT]], None]:
        """The same with a function where `module` has imported it, and nowhere else."""
        return partial(self._put, module, original.__name__, original)

    def _put(self, owner: Any, name: str, original: object, replacement: Callable[..., object]) -> None:
        where = f"{getattr(owner, '__name__', owner)}.{name}"
        if vars(owner).get(name) is not original:
            raise PlantingError(f"{where} is not what is to be replaced")
        function: Any = original.fget if isinstance(original, property) else original
        expected, given = _parameters(function), _parameters(replacement)
        if expected != given:
            raise PlantingError(f"{where} has the parameters {expected}, and its replacement {given}")
        if inspect.iscoroutinefunction(function) != inspect.iscoroutinefunction(replacement):
            raise PlantingError(f"of {where} and its replacement one is async and one is not")
        self.places.append(Place(owner, name))
        self._undo.callback(setattr, owner, name, original)
        setattr(owner, name, property(replacement) if isinstance(original, property) else replacement)


def _parameters(function: Callable[..., object]) -> list[tuple[str, str, bool]]:
    """Name, kind and whether there is a default, of each."""
    parameters = inspect.signature(function).parameters.values()
    return [(each.name, each.kind.name, each.default is not each.empty) for each in parameters]


Plant = Callable[[Planting], None]


@contextmanager
def planted(plant: Plant) -> Iterator[Planting]:
    """Have a bug be there while the block runs."""
    with ExitStack() as undo:
        planting = Planting(undo)
        plant(planting)
        if not planting.places:
            raise PlantingError("nothing was replaced")
        yield planting


@dataclass(frozen=True)
class Bug(Generic[PlanT]):
    """One bug; calling it returns the context in which it is planted.

    `found_by`: the checker that has to notice, whatever others say. `can_show`: whether a scenario has what the bug
    needs to matter.
    """

    name: str
    says: str
    found_by: str
    can_show: Callable[[PlanT], bool]
    plant: Plant

    def __call__(self) -> AbstractContextManager[Planting]:
        return planted(self.plant)

    def noticed(self, violations: list[Violation]) -> Violation | None:
        """Return what the checker said that has to notice this bug; None if it said nothing.

        A run in which an unexpected exception ended a process shows nothing: the plant itself may have raised it. It
        counts only for bugs whose very effect that is.
        """
        if self.found_by != CRASH and any(violation.checker == CRASH for violation in violations):
            return None
        return next((violation for violation in violations if violation.checker == self.found_by), None)


def entered(bugs: dict[str, Bug[PlanT]], found_by: str, needs: Callable[[PlanT], bool]) -> Callable[[Plant], Plant]:
    """Enter a function that plants a bug into `bugs`."""

    def enter(plant: Plant) -> Plant:
        says = " ".join((plant.__doc__ or "").split())
        bugs[plant.__name__] = Bug(plant.__name__, says, found_by, needs, plant)
        return plant

    return enter
