"""Files that drivers of tests leave open are closed, and nothing is synced: no test cuts the power."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from trainer.resilience.driver import Driver


@pytest.fixture(autouse=True)
def _closed_drivers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    drivers: list[Driver] = []
    begin = Driver.__init__

    def noted(driver: Driver, *arguments: object, **options: object) -> None:
        drivers.append(driver)
        begin(driver, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Driver, "__init__", noted)
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
    yield
    for driver in drivers:
        if hasattr(driver, "_marks"):
            driver._marks.close()
        if hasattr(driver, "journal"):
            driver.journal.close()
