"""Where the user keeps caches."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from netlayer.cache import cache_folder


def test_the_cache_is_where_the_user_keeps_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert cache_folder() == Path("/some/cache/netlayer")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/netlayer")


def test_who_has_no_home_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", mock.Mock(side_effect=RuntimeError("Could not determine home directory.")))
    with pytest.raises(OSError, match="there is no home folder"):
        cache_folder()
