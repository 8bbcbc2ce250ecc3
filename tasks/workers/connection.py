"""The connection to Ray: to the cluster of `RAY_ADDRESS`, or to a Ray that is started, watched and stopped here."""

import atexit
import logging
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from dml_core.errors import first_line
from tasks.environment import answers, num_cores, ray_address, ray_cluster, shown, without_secrets
from tasks.processes import kill_children, watch_children
from tasks.runs.specs import ScaleSpec
from tasks.workers.jobs import InfrastructureError
from tasks.workers.placement import Placement, choose, num_gpus

WAIT_SECONDS = 30.0  # for a cluster that is being started again; `ray.init` would try for minutes, for each run of a flow
RAY_PROCESSES = {"gcs_server": "Ray's GCS (gcs_server)", "raylet/raylet": "Ray's raylet"}


def start_ray(scale: ScaleSpec, num_runs: int | None = None) -> Placement:
    """Connect to the cluster of `RAY_ADDRESS`, or start Ray on this machine; return where the flow's runs train.

    A Ray that was started here is watched: when its GCS or its raylet dies the flow ends at once. `num_runs` is as in `choose`.

    Raises:
        InfrastructureError: Ray does not start, cannot be reached, or lacks the device that was requested by name.
    """
    import ray

    connect()
    return choose(scale, [node["Resources"] for node in ray.nodes() if node["Alive"]], num_runs)


def connect(attempts: int = 2) -> None:
    """Connect this process to the cluster of `RAY_ADDRESS`, or start Ray here; does nothing if it is connected.

    Ray gives a node 30 seconds to start, which a busy machine may miss; a second attempt finds it warm.

    Raises:
        ConfigError: the address is Ray Client's.
        InfrastructureError: it does not start or answer.
    """
    import ray

    if ray.is_initialized():
        return None
    address = ray_address()
    over = time.monotonic() + WAIT_SECONDS
    while not answers(address):
        if time.monotonic() < over:
            time.sleep(1)
            continue
        raise InfrastructureError(f"Ray at {shown(address)} does not answer; start it, or unset RAY_ADDRESS to use one on this machine")
    try:
        with _needed_processes() if address == "local" else nullcontext():
            own = {"num_cpus": num_cores(), "num_gpus": num_gpus()} if address == "local" else {}
            ray.init(address, logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False, **own)
    except Exception as error:  # Ray raises plain exceptions
        if address == "local":
            kill_children(RAY_PROCESSES)  # Ray leaves its GCS, which would be watched with the next one
        if attempts > 1:
            return connect(attempts - 1)
        where = "Ray on this machine" if address == "local" else f"Ray at {shown(address)}"
        raise InfrastructureError(f"{where} did not start or does not answer: {without_secrets(reason_of(error))}") from error
    if address == "local":
        _to_end.append(watch_children(RAY_PROCESSES))
        atexit.register(stop_ray)  # before Ray's own handler, which would stop the watched processes
    return None


@contextmanager
def _needed_processes() -> Iterator[None]:
    """Let Ray start without its dashboard, autoscaler and log monitor, which serve nothing here and delay its start and its end.

    Its agents get free ports: they would wait three seconds for a usual one that another Ray of this machine has. The raylet gets all of
    them: it would wait 15 seconds until its agents have started, which takes longer on a busy machine, and end (ray-project/ray#65983).
    Until Ray is stopped this process holds them: of a hundred starts one ended because one of Ray's servers had been given one meanwhile.

    This overrides what is private to Ray 2.60: tests/tasks/workers/test_group.py names the processes.
    """
    from ray._private import node, parameter, services

    default, start_api_server, start_process = parameter.RayParams, node.Node.start_api_server, services.start_ray_process
    names = ("dashboard_agent_listen_port", "metrics_agent_port", "metrics_export_port", "runtime_env_agent_port")
    with ExitStack() as held:
        ours: dict[str, Any] = {name: held.enter_context(_hold_port()).getsockname()[1] for name in names}
        if sys.platform != "linux":  # where Ray could not bind them then
            held.close()
        of_raylet = [f"--{names[0]}={ours[names[0]]}"]
        parameter.RayParams = lambda **options: default(**options | ours, no_monitor=True, include_log_monitor=False)
        node.Node.start_api_server = lambda *_, **__: None
        services.start_ray_process = lambda command, kind, *more, **options: start_process(
            command + of_raylet * (kind == "raylet"), kind, *more, **options
        )
        try:
            yield
        finally:
            parameter.RayParams, node.Node.start_api_server, services.start_ray_process = default, start_api_server, start_process
        _to_end.append(held.pop_all().close)


def _hold_port() -> socket.socket:
    """Bind a free port without listening: the system gives it to nobody else, and a server that names it can still bind it."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", 0))
    return bound


def is_one_machine() -> bool:
    """Return whether all nodes of Ray are on this machine: it was started here, or they have loopback addresses, as in the local stack."""
    import ray

    addresses = [str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]]
    return ray_cluster() is None or all(address.startswith(("127.", "::1")) for address in addresses)


def node_resources(is_free: bool = False) -> list[dict[str, float]]:
    """Return all or the free resources of each node except those that Ray is draining: nothing is started there."""
    from ray._private.state import available_resources_per_node, state, total_resources_per_node

    resources = available_resources_per_node() if is_free else total_resources_per_node()
    leaving = state.get_draining_nodes()
    return [amounts for node, amounts in resources.items() if node not in leaving]


def stop_ray() -> None:
    """Disconnect, and stop what `start_ray` started. Does nothing if Ray was never used."""
    while _to_end:
        _to_end.pop()()
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        sys.modules["ray"].shutdown()


_to_end: list[Callable[[], None]] = []  # watches of processes, and held ports


def reason_of(error: BaseException | None) -> str:
    """Return the first line of an error of Ray, without its full stop."""
    return first_line(error).rstrip(".") if error is not None and str(error).strip() else "no reason given; see Ray's logs"
