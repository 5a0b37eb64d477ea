"""Where the golden vectors are: beside these tests, or in another directory of the same shape
(``DSPARK_GOLDEN=DIR``)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime import Engine
from tests.golden import real_pair
from tests.support import GOLDEN


@pytest.fixture(scope="session")
def golden() -> Path:
    return GOLDEN


@pytest.fixture(scope="session")
def real_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The real pair, proposing the whole block by default."""
    path = real_pair.target()
    if path is None:
        pytest.skip("the real pair's target is not here: `make target` fetches it, or set DSPARK_DEMO_TARGET")
    out = real_pair.build_real_pair(path, tmp_path_factory.mktemp("real") / "bundle")
    with Engine(out, check="quick") as engine:
        yield engine
