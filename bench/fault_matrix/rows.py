"""The row of `bench.fault_matrix`: one fault that was injected into a run, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class FaultRow:
    """One fault of a run; `None` in a field that is not known: it has no column in a record then.

    Args:
        kind: a key of `KINDS`.
        run: number of the run, which has several faults in a row.
        handled: the run got past the fault by itself.
        right: exactly the nodes with the fault were blamed.
        nodes, blamed: nodes with the fault, and those that the incidents blame.
        error: why it was not handled.
        step: last step before the fault.
        actions, incidents, found_as: of each incident of the fault: what was decided, its number, its kind.
        detect_s, diagnose_s, resume_s: seconds from the fault to its detection, to the decision, to the next step.
        catch_up_s: seconds from the fault to the first step that is new.
        exit_code: of the run.
        unasked: decisions of the run that no fault accounts for.
        effective_share: time of the run's steps over the time that it took.
        losses_equal, losses: steps of the run with the loss of a run without faults, and all its steps.
    """

    kind: str
    handled: bool = False
    right: bool = False
    nodes: list[str] = field(default_factory=list)
    blamed: list[str] = field(default_factory=list)
    error: str = ""
    step: int | None = None
    actions: list[str] | None = None
    incidents: list[int] | None = None
    found_as: list[str] | None = None
    detect_s: float | None = None
    diagnose_s: float | None = None
    resume_s: float | None = None
    catch_up_s: float | None = None
    run: int = 0
    exit_code: int | None = None
    unasked: list[dict[str, Any]] | None = None
    effective_share: float | None = None
    losses_equal: int | None = None
    losses: int | None = None

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> FaultRow:
        """Read a row of a record, of an earlier version too; columns that are not known are passed over."""
        names = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in row.items() if name in names})

    def to_row(self) -> dict[str, Any]:
        """Return the columns of a record."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def has_equal_losses(self) -> bool:
        """Whether the run of this fault has the losses of a run without faults, in every step."""
        return self.losses is not None and self.losses_equal == self.losses
