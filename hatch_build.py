"""Build hook: the front end of the page of a run, by npm into `netlayer/observe/page/web/dist`.

Without npm, or where the registry cannot be reached, the package is built without the page, in one line that says so:
one that was built of older sources is omitted. A source archive holds the built page, for who has no npm.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WEB = Path(__file__).parent / "netlayer" / "observe" / "page" / "web"
ARTIFACTS = "netlayer/observe/page/web/dist/*"  # in no repository
BUILT = ("index.html", "app.js", "app.css")
_NPM_S = 300
_INSTALL = ("ci", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1", "--fetch-timeout=30000")


def build_page(web: Path = WEB) -> str:
    """Build the front end where its sources are newer than what is built; return why it could not be, or nothing."""
    if is_current(web):
        return ""
    npm = shutil.which("npm")
    if npm is None:
        return "npm is not on the PATH"
    for arguments in (_INSTALL, ("run", "build")):
        try:
            done = subprocess.run(
                [npm, *arguments], cwd=web, capture_output=True, text=True, timeout=_NPM_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as exc:
            return f"npm {arguments[0]} failed ({exc})"
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            return f"npm {arguments[0]} failed ({lines[0] if lines else done.returncode})"
    return ""


def is_current(web: Path) -> bool:
    """Whether all built files are there, and none of the sources is newer."""
    built = [web / "dist" / name for name in BUILT]
    if not all(path.is_file() for path in built):
        return False
    sources = [*(web / "src").iterdir(), web / "package-lock.json", web / "package.json"]
    return min(path.stat().st_mtime for path in built) >= max(path.stat().st_mtime for path in sources)


class PageHook(BuildHookInterface):  # type: ignore[type-arg, misc]
    """Builds the front end before a wheel, a source archive, or an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002  (of hatchling)
        """Build it and have it packed, or say why `netlayer observe serve` will be missing."""
        if reason := build_page():
            self.app.display_warning(f"without the page of `netlayer observe serve`: {reason}")
        else:
            build_data["artifacts"].append(ARTIFACTS)


if __name__ == "__main__":
    failure = build_page()
    print(f"note: the page of `netlayer observe serve` is not built: {failure}" if failure else f"page: {WEB / 'dist'}")  # noqa: T201
    sys.exit(1 if failure and "--require" in sys.argv else 0)
