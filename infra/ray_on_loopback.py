"""`ray` for a cluster whose nodes are all on 127.0.0.1: `python infra/ray_on_loopback.py start ...` instead of `ray start ...`.

Ray replaces 127.0.0.1 by the machine's own address unless its setting says that no cluster is intended, and then refuses a second node;
with other loopback addresses it listens on all interfaces. So the setting is made here, and only the refusal is disabled.

A raylet waits 15 seconds, a fixed time, for one of its agent's ports that `ray start` does not pass to it, and ends if a busy machine takes
longer (ray-project/ray#65983). Here the port is passed, so that there is no wait.

Both are private to Ray 2.60: check them when Ray is upgraded.
"""

import os
import sys
from typing import Any

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

from ray._private import ray_constants, services
from ray.scripts import scripts

AGENT_PORT = "--dashboard-agent-listen-port="
PORTS = [word.removeprefix(AGENT_PORT) for word in sys.argv if word.startswith(AGENT_PORT)]
start_process = services.start_ray_process


def start_with_known_ports(command: list[str], process_type: str, *arguments: Any, **options: Any) -> Any:
    """Start one of Ray's processes; a raylet also gets its agent's port."""
    if process_type == ray_constants.PROCESS_TYPE_RAYLET:
        command = [*command, *(f"--dashboard_agent_listen_port={port}" for port in PORTS)]
    return start_process(command, process_type, *arguments, **options)


ray_constants.ENABLE_RAY_CLUSTER = True
services.get_node_ip_address = lambda address=None: "127.0.0.1"
services.start_ray_process = start_with_known_ports
scripts.main()
