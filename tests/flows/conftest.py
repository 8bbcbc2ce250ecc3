"""A Prefect server for tests that run flows in their own process."""

from collections.abc import Iterator

import pytest

from flows.local_database import copy_empty_database


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Prefect's server for tests, with a copy of this user's empty database if there is one: creating it takes 10 s."""
    from prefect.testing import utilities  # seconds, which the collection of tests need not take

    home = tmp_path_factory.mktemp("prefect")
    if copy_empty_database(home):
        (home / "prefect.db").rename(home / "prefect-test.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utilities, "mkdtemp", lambda: str(home))
        with utilities.prefect_test_harness(server_startup_timeout=120):
            yield
