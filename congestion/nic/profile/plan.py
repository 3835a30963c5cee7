"""Plan of a profile: what exactly is written on each device, next to what is there. It changes nothing.

What a NIC cannot do stands in the plan with what comes nearest. Root is not needed, but for old values that only root
may read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from congestion.nic.hosts.inventory import Device
from congestion.nic.hosts.tree import Tree
from congestion.nic.profile.draft import Answers, Cannot, Draft
from congestion.nic.profile.file import Law, Profile
from congestion.nic.profile.steps import FileStep, Row, ToolStep, TriggerStep
from congestion.nic.vendors import (
    nvidia as surface_nvidia,
)
from congestion.nic.vendors import (
    nvidia_programmable as surface_nvidia_programmable,
)
from congestion.nic.vendors import (
    others as surface_others,
)
from congestion.nic.vendors.qos import draw_qos, draw_tos
from congestion.nic.vendors.tools import Tools


@dataclass(frozen=True)
class Plan:
    """Rows in the order in which they are done."""

    profile: Profile
    devices: tuple[Device, ...]
    rows: tuple[Row, ...]
    cannots: tuple[Cannot, ...]
    notes: tuple[str, ...]

    @property
    def changes(self) -> list[Row]:
        """Rows to change here: rows that differ, and triggers of groups in which one does."""
        return _changes([row for row in self.rows if row.runs])

    @property
    def changes_there(self) -> list[Row]:
        """Rows to change on the host itself: those too that cannot be changed here."""
        return _changes(self.rows)

    @property
    def differences(self) -> list[Row]:
        """Rows whose value is known, and another."""
        return [row for row in self.rows if row.old is not None and row.differs]

    @property
    def unknown(self) -> list[Row]:
        """Rows whose value nobody could read."""
        return [row for row in self.rows if row.old is None and not isinstance(row.step, TriggerStep)]

    def as_tree(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "profile": self.profile.name,
            "devices": [device.name for device in self.devices],
            "steps": [row_tree(row) for row in self.rows],
            "cannot": [vars(cannot) for cannot in self.cannots],
            "notes": list(self.notes),
        }


def _changes(rows: Sequence[Row]) -> list[Row]:
    # A trigger reads as nothing and so always differs: it counts only where a value of its folder changes.
    differing = [row for row in rows if row.differs and not isinstance(row.step, TriggerStep)]
    groups = {row.step.group for row in differing if isinstance(row.step, FileStep)}
    return [
        row for row in rows if row in differing or (isinstance(row.step, TriggerStep) and row.step.group in groups)
    ]  # fmt: skip


def row_tree(row: Row) -> dict[str, Any]:
    """A row as JSON values: a program's change as its arguments."""
    step = row.step
    values: dict[str, Any] = {
        "device": step.device,
        "surface": step.surface,
        "name": step.name,
        "old": row.old,
        "new": step.new,
        "unit": step.unit,
        "reason": step.reason,
        "warning": step.warning,
        "unknown": row.unknown,
        "action": row.action,
    }
    if isinstance(step, ToolStep):
        assert step.setting is not None
        # A change may need the old value (what to take away); where that is not known, 0 stands for it in the listing.
        return values | {"arguments": step.setting.change(row.old or "0", step.new), "query": step.setting.query()}
    assert isinstance(step, FileStep | TriggerStep)
    # Steps have paths below the root; a person reads them on the host, where the root is `/`.
    return values | {"path": f"/{step.path}"}


def make_plan(profile: Profile, devices: Sequence[Device], tree: Tree, tools: Tools) -> Plan:
    """
    Raises:
        ConfigError: a path leads out of the tree, or a value is out of the range of the device's way.
    """
    drafts = []
    # One for all devices: what two of them ask a program in the same words is asked once.
    answers: Answers = {}
    for device in devices:
        draft = Draft(profile, device, tree, tools, answers)
        drafts.append(draft)
        # Marks, PFC and these laws are Ethernet's: InfiniBand has congestion control of its own, which is not set here.
        if device.roce:
            _draw(draft)
        else:
            draft.cannot("everything", f"link layer {device.link_layer or 'unknown'}, no RoCE", "an Ethernet port")
    rows = {_key(row): row for draft in drafts for row in draft.rows}  # two ports may share a network device
    cannots = [cannot for draft in drafts for cannot in draft.cannots]
    notes: dict[str, list[str]] = {}
    for draft in drafts:
        for note in draft.notes:
            # Devices of a host are mostly alike: a note that several have is shown once, with all their names.
            notes.setdefault(note, []).append(draft.device.name)
    said_once = tuple(f"{', '.join(names)}: {note}" for note, names in notes.items())
    return Plan(profile, tuple(devices), tuple(rows.values()), tuple(cannots), said_once)


def _draw(draft: Draft) -> None:
    draw_qos(draft)
    draw_tos(draft)
    law = _draw_law(draft)
    retransmission = draft.profile.retransmission
    if draft.device.vendor == "nvidia":
        surface_nvidia_programmable.draw_programmable(draft, law)
        surface_nvidia.draw_retransmission(draft)
    else:
        # Switches alone: timeout and retry_cnt are numbers, belong to queue pairs, and are noted below for every NIC.
        switches = [name for name, value in retransmission.model_dump().items() if isinstance(value, bool)]
        switches += surface_nvidia_programmable.asked_switches(draft) + ["ppcc"] * bool(draft.profile.ppcc)
        if switches:
            draft.cannot(
                ", ".join(switches), "only NVIDIA's firmware has these switches", "what the NIC does by itself"
            )
    # A plan cannot set these: they are told to whoever starts the job.
    tos = draft.profile.traffic.tos
    draft.note(
        f"retransmission.timeout and retry_cnt belong to queue pairs, so does their TOS: NCCL_IB_TIMEOUT="
        f"{retransmission.timeout} NCCL_IB_RETRY_CNT={retransmission.retry_cnt} NCCL_IB_TC={tos} (netlayer nic env)"
    )


_Refusal = Callable[[Draft, Law], tuple[str, str] | None]
_WAYS: dict[str, tuple[_Refusal, Callable[[Draft, Law], None]]] = {
    "nvidia": (surface_nvidia.refuse_law, surface_nvidia.draw_law),
    "broadcom": (surface_others.refuse_broadcom, surface_others.draw_broadcom),
    "intel": (surface_others.refuse_intel, surface_others.draw_intel),
    "amd": (surface_others.refuse_amd, surface_others.draw_amd),
}


def _draw_law(draft: Draft) -> Law | None:
    """The first law of the profile that the device can run; where it can run none, that is said."""
    laws = draft.profile.laws
    if draft.device.vendor not in _WAYS:
        # As the last law, none is what such a device does anyway.
        if laws[-1] != "none":
            draft.cannot(f"law = {laws[0]}", "it has no congestion control that can be set", "law = none")
        return None
    refuse, draw = _WAYS[draft.device.vendor]
    refusals: list[tuple[str, str]] = []
    for law in laws:
        refused = refuse(draft, law)
        if refused is None:
            if refusals:
                draft.note(f"law = {law}, the profile's fallback: {laws[0]} cannot be had: {refusals[0][0]}")
            draw(draft, law)
            return law
        refusals.append(refused)
    # Only where no law is left: a refusal that the fallback makes good is a note, not something missing.
    for law, (why, nearest) in zip(laws, refusals, strict=True):
        draft.cannot(f"law = {law}", why, nearest)
    return None


def _key(row: Row) -> object:
    step = row.step
    # By what is set and not for which device, see `make_plan`.
    return step.setting if isinstance(step, ToolStep) else getattr(step, "path", step)
