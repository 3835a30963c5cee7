"""What a user is told of a bad override."""

import pytest

from netlayer.config.file import load_config
from netlayer.errors import ConfigError


def refusal(override: str) -> str:
    """One line, and the exit code of bad usage."""
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    said = str(caught.value)
    assert "\n" not in said
    assert caught.value.exit_code == 2
    return said
