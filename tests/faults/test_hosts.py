"""One run over two hosts that share nothing but an S3 server: the same as on one; a host dies and another joins; the cable is out for 30 s.

One story in order, on one cluster.
"""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.damage import contents
from tests.e2e.conftest import make_project
from tests.faults.cells import EPOCHS
from tests.faults.hosts import Host, Hosts
from tests.faults.record import keep_host_fact

pytestmark = [pytest.mark.slow, pytest.mark.proof]
PARTITION_SECONDS = 30.0


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "project").mkdir()
    project = make_project(folder / "project", ("softtriple",))
    project.change(comparison={"protocol": {"num_epochs": EPOCHS}, "datasets": {"synthetic": {"num_epochs": EPOCHS}}})
    project.run("dml", "run", "synthetic", "softtriple", DML_STATE=str(folder / "alone"))
    made = Hosts(folder, project)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def alone(hosts: Hosts) -> dict[str, bytes]:
    """What the run leaves on one machine with two workers."""
    return contents(hosts._folder / "alone" / "store")


def ends(process: subprocess.Popen[bytes], printed: Path) -> str:
    code = process.wait(timeout=500)
    assert code == 0, printed.read_text()
    return printed.read_text()


def standing(hosts: Hosts, process: subprocess.Popen[bytes], printed: Path) -> Host:
    """The host of the worker that writes checkpoints, once it stands after the second."""
    until = time.monotonic() + 300
    while (host := hosts.standing()) is None:
        assert process.poll() is None, printed.read_text()
        assert time.monotonic() < until, printed.read_text()
        time.sleep(0.1)
    return host


def test_a_run_over_two_hosts_has_the_bytes_of_one_machine(hosts: Hosts, alone: dict[str, bytes]) -> None:
    process, printed = hosts.run("undisturbed")
    said = ends(process, printed)
    assert "connecting to the Ray cluster" in said
    assert "training on 2 CPUs: 2 workers a run" in said
    assert hosts.left("undisturbed") == alone
    for node in hosts.nodes:  # each fetched the data for itself
        assert list((node.project / "state/undisturbed/cache/data").iterdir())
    keep_host_fact("a run over two hosts", "the bytes of the same run on one machine")


def test_the_cable_of_a_host_is_out_for_30_seconds(hosts: Hosts, alone: dict[str, bytes]) -> None:
    hosts.arm()
    process, printed = hosts.run("partition")
    struck = standing(hosts, process, printed)
    struck.unplug()
    hosts.go()
    time.sleep(PARTITION_SECONDS)
    struck.plug()
    began = time.monotonic()
    said = ends(process, printed)
    seconds = time.monotonic() - began
    assert hosts.left("partition") == alone
    how = "another group of workers took it up" if "other workers take it up" in said else "the same workers went on"
    keep_host_fact("a partition of 30 s", f"{how}; ended {seconds:.0f} s after the cable was back, with the bytes of an undisturbed run")


def test_a_host_is_killed_and_another_joins(hosts: Hosts, alone: dict[str, bytes]) -> None:
    hosts.arm()
    process, printed = hosts.run("killed")
    struck = standing(hosts, process, printed)
    began = time.monotonic()
    struck.kill()
    hosts.go()
    time.sleep(5)
    hosts.nodes.append(hosts.add_node("third", 4))
    said = ends(process, printed)
    seconds = time.monotonic() - began
    assert "other workers take it up" in said
    assert hosts.left("killed") == alone
    assert list((hosts.nodes[-1].project / "state/killed/cache/data").iterdir()), "the third host trained"
    keep_host_fact("a host is killed, another joins", f"ended {seconds:.0f} s after, with the bytes of an undisturbed run")
