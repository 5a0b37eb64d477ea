"""Where the golden vectors are: beside these tests, or in another directory of the same shape
(``DSPARK_GOLDEN=DIR``)."""

from pathlib import Path

import pytest

from tests.support import GOLDEN


@pytest.fixture(scope="session")
def golden() -> Path:
    return GOLDEN
