"""What Chromium makes of a page: for tests of anything that a person will look at."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs a chromium on the PATH")


def browse(page: Path, profile: Path) -> tuple[str, list[str]]:
    """The document as Chromium sees it after its scripts ran, and what it wrote to its console."""
    command = [
        str(CHROMIUM),
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"),
        *("--disable-component-update", "--no-first-run", "--enable-logging=stderr", "--window-size=1280,4000"),
        *(f"--user-data-dir={profile}", "--virtual-time-budget=15000", "--dump-dom", page.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


def drawn_plots(document: str) -> dict[str, bool]:
    """The plots of a report by name, and whether each was drawn with marks in it."""
    return {
        name: 'data-state="drawn"' in inside
        and bool(re.search(r'<g class="mark-\w+ role-mark[^>]*>\s*<path [^>]*d="M', inside))
        for name, inside in re.findall(r'<div data-plot="(\w+)"(.*?)</div>', document, re.DOTALL)
    }
