"""Replaces parts of halog's code by a bug, and restores them.

    def skipped_fsync(plant: Planting) -> None:
        plant.replace(CommitLog.sync)(sync_nothing)

The replaced function is given itself, not by name: mypy then checks that it exists and that the replacement has a
compatible signature. Planting checks the same at run time, parameter by parameter. A bug that can't be planted must not
look like one that is caught: `PlantingError` is raised before anything runs.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from tests.checkers.violation import Violation
from tests.sim.observer import CRASH, SIMULATOR
from tests.sim.scenario import GroupPlan, Plan

ParametersT = ParamSpec("ParametersT")
ResultT = TypeVar("ResultT")
PlanT = TypeVar("PlanT", Plan, GroupPlan)


class PlantingError(Exception):
    """The function to replace does not exist, or the replacement has another signature."""


class Place(NamedTuple):
    """Where a function was replaced."""

    owner: object
    name: str


class Planting:
    """Replaces functions; closing `undo` restores them."""

    def __init__(self, undo: ExitStack) -> None:
        self._undo = undo
        self.places: list[Place] = []

    def replace(self, original: Callable[ParametersT, ResultT]) -> Callable[[Callable[ParametersT, ResultT]], None]:
        """Replaces a method, or the getter of a property (which is a function of the instance to mypy), by the function
        passed next."""
        function: Any = original.fget if isinstance(original, property) else original
        owner: Any = sys.modules[function.__module__]
        *path, name = function.__qualname__.split(".")
        for part in path:
            owner = getattr(owner, part)
        return partial(self._put, owner, name, original)

    def replace_in(
        self, module: ModuleType, original: Callable[ParametersT, ResultT]
    ) -> Callable[[Callable[ParametersT, ResultT]], None]:
        """Replaces a function where `module` has imported it, and nowhere else."""
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
    """Name, kind and presence of a default, for each parameter."""
    parameters = inspect.signature(function).parameters.values()
    return [(each.name, each.kind.name, each.default is not each.empty) for each in parameters]


Plant = Callable[[Planting], None]


@contextmanager
def planted(plant: Plant) -> Iterator[Planting]:
    """Plants a bug while the block runs."""
    with ExitStack() as undo:
        planting = Planting(undo)
        plant(planting)
        if not planting.places:
            raise PlantingError("nothing was replaced")
        yield planting


@dataclass(frozen=True)
class Bug(Generic[PlanT]):
    """One bug; calling it returns the context in which it is planted.

    `found_by`: the checker that must notice it, whatever others report. `can_show`: whether a scenario has what the bug
    needs to have an effect.
    """

    name: str
    says: str
    found_by: str
    can_show: Callable[[PlanT], bool]
    plant: Plant

    def __call__(self) -> AbstractContextManager[Planting]:
        return planted(self.plant)

    def noticed(self, violations: list[Violation]) -> Violation | None:
        """Returns the report of the checker that must notice this bug; None if there is none.

        A run in which an unexpected exception ended a process, or the run itself, proves nothing: the plant itself may
        have raised it. It counts only for bugs whose effect is just that.
        """
        if self.found_by != CRASH and any(violation.checker in (CRASH, SIMULATOR) for violation in violations):
            return None
        return next((violation for violation in violations if violation.checker == self.found_by), None)


def entered(bugs: dict[str, Bug[PlanT]], found_by: str, needs: Callable[[PlanT], bool]) -> Callable[[Plant], Plant]:
    """Registers a function that plants a bug in `bugs`."""

    def enter(plant: Plant) -> Plant:
        says = " ".join((plant.__doc__ or "").split())
        bugs[plant.__name__] = Bug(plant.__name__, says, found_by, needs, plant)
        return plant

    return enter
