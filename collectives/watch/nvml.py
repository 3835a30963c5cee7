"""Power, clock, temperature, throttling and NVLink traffic of one GPU, by NVIDIA's management library (NVML).

The driver brings the library, so it is loaded by its name and nothing needs to be installed. What a GPU or a driver
does not know is omitted from then on. Not covered: MIG devices, whose counters are those of the whole GPU.

Functions, structures and numbers: nvml.h of the driver, "NVML API Reference Guide" (docs.nvidia.com/deploy/nvml-api).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from ctypes import byref, c_char_p, c_int, c_longlong, c_uint, c_ulonglong, c_void_p
from typing import Any

from netlayer.errors import HardwareMissing
from netlayer.observe.events.schema import Counter, Mark, Origin

LIBRARY = "libnvidia-ml.so.1"
_SUCCESS, _NOT_SUPPORTED, _NOT_FOUND = 0, 3, 6
_SM_CLOCK, _GPU_TEMPERATURE = 1, 0
_NVLINK_TX, _NVLINK_RX, _ALL_LINKS = 138, 139, 0xFFFFFFFF  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX: KiB
_SLOWED_BY = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Reasons for a lower clock than the GPU would have; idleness and settings are none."""


class _FieldValue(ctypes.Structure):
    """`nvmlFieldValue_t`."""

    _fields_ = (
        ("fieldId", c_uint),
        ("scopeId", c_uint),
        ("timestamp", c_longlong),
        ("latencyUsec", c_longlong),
        ("valueType", c_uint),
        ("nvmlReturn", c_int),
        ("value", c_ulonglong),
    )


class Nvml:
    """Readings of one GPU; a context of its own, which `close` ends.

    Args:
        uuid: of the GPU, `GPU-8f3c...`; None: the first one that the driver lists.
        name: of the GPU in the events, `GPU 3`.
        library: the loaded library, of a test; None: the driver's.

    Raises:
        HardwareMissing: there is no library, no driver, or no such GPU.
    """

    def __init__(self, uuid: str | None = None, name: str = "GPU", library: Any = None) -> None:
        self._library = library or _load()
        self._check("nvmlInit_v2")
        self._handle = c_void_p()
        try:
            if uuid is None:
                self._check("nvmlDeviceGetHandleByIndex_v2", c_uint(0), byref(self._handle))
            else:
                self._check("nvmlDeviceGetHandleByUUID", c_char_p(uuid.encode()), byref(self._handle))
        except HardwareMissing:
            self.close()
            raise
        self._port = name
        self._unknown: set[str] = set()
        self._link_bytes: dict[str, tuple[int, int]] = {}
        self._reasons: tuple[str, ...] = ()

    def sample(self, origin: Origin, now_ns: int, step: int | None) -> Iterator[Counter | Mark]:
        """Yield what the GPU says now; a mark where reasons for a lower clock have come or gone."""
        power_mw = self._number("power", "nvmlDeviceGetPowerUsage", c_uint())
        clock_mhz = self._number("clock", "nvmlDeviceGetClockInfo", c_uint(), c_int(_SM_CLOCK))
        celsius = self._number("temperature", "nvmlDeviceGetTemperature", c_uint(), c_int(_GPU_TEMPERATURE))
        for name, value, unit in (
            ("gpu.power", None if power_mw is None else power_mw / 1000, "W"),
            ("gpu.sm_clock", clock_mhz, "MHz"),
            ("gpu.temperature", celsius, "C"),
        ):
            if value is not None:
                yield Counter(origin, name, now_ns, now_ns, float(value), unit, step)
        yield from self._throttling(origin, now_ns, step, clock_mhz)
        for name, field in (("nvlink.tx_bytes", _NVLINK_TX), ("nvlink.rx_bytes", _NVLINK_RX)):
            total = self._field(name, field)
            if total is None:
                continue
            before_ns, before = self._link_bytes.get(name, (now_ns, total))
            self._link_bytes[name] = now_ns, total
            if now_ns > before_ns and total >= before:  # else it was reset
                facts = {"port": self._port}
                moved = float((total - before) * 1024)
                yield Counter(origin, name, before_ns, now_ns, moved, "bytes", step, attributes=facts)

    def close(self) -> None:
        """End the use of the library."""
        with contextlib.suppress(HardwareMissing):
            self._check("nvmlShutdown")

    def _throttling(self, origin: Origin, now_ns: int, step: int | None, clock_mhz: int | None) -> Iterator[Mark]:
        bits = self._number("reasons", "nvmlDeviceGetCurrentClocksThrottleReasons", c_ulonglong())
        if bits is None:
            return
        reasons = tuple(reason for bit, reason in _SLOWED_BY.items() if bits & bit)
        for reason in set(reasons) - set(self._reasons):
            facts = {"reason": reason, "sm_clock_mhz": clock_mhz}
            yield Mark(origin, "throttle", now_ns, step, f"the GPU lowers its clock: {reason}", attributes=facts)
        for reason in set(self._reasons) - set(reasons):
            yield Mark(origin, "throttle_end", now_ns, step, f"no longer: {reason}", attributes={"reason": reason})
        self._reasons = reasons

    def _number(self, what: str, function: str, into: Any, *arguments: Any) -> int | None:
        """Return a number that a function writes; None: it is not to be had, and where it never is, not asked again."""
        if what in self._unknown:
            return None
        try:
            code = self._function(function)(self._handle, *arguments, byref(into))
        except HardwareMissing:
            code = _NOT_SUPPORTED
        if code == _NOT_SUPPORTED:
            self._unknown.add(what)
        return int(into.value) if code == _SUCCESS else None

    def _field(self, what: str, field: int) -> int | None:
        """Return the sum over all links of a field; None as in `_number`."""
        if what in self._unknown:
            return None
        value = _FieldValue(fieldId=field, scopeId=_ALL_LINKS)
        try:
            code = self._function("nvmlDeviceGetFieldValues")(self._handle, c_int(1), byref(value))
        except HardwareMissing:
            code = _NOT_SUPPORTED
        if code == _NOT_SUPPORTED or value.nvmlReturn in (_NOT_SUPPORTED, _NOT_FOUND):
            self._unknown.add(what)
        return int(value.value) if code == _SUCCESS and value.nvmlReturn == _SUCCESS else None

    def _check(self, function: str, *arguments: Any) -> None:
        code = self._function(function)(*arguments)
        if code != _SUCCESS:
            raise HardwareMissing(f"{LIBRARY}: {function} failed with {code}; does nvidia-smi list the GPU?")

    def _function(self, name: str) -> Callable[..., int]:
        try:
            return getattr(self._library, name)  # type: ignore[no-any-return]
        except AttributeError:
            raise HardwareMissing(f"{LIBRARY}: has no {name}; update the driver") from None


def _load() -> Any:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as exc:
        raise HardwareMissing(f"{LIBRARY}: cannot be loaded ({exc}); install NVIDIA's driver") from exc


def uuid_of(device: int) -> str:
    """Return the UUID of a CUDA device of this process, as NVML names it."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
