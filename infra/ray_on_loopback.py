"""`ray` for a cluster whose nodes are all on 127.0.0.1: `python infra/ray_on_loopback.py start ...`, as `ray start ...` otherwise.

Ray replaces 127.0.0.1 by the machine's own address unless it is told that no cluster is meant, and then refuses a second node; with any
other loopback address it listens on all interfaces. So it is told that no cluster is meant, and its refusal alone is taken out. That is
private to Ray 2.60: look at it again when Ray moves.
"""

import os

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

from ray._private import ray_constants, services
from ray.scripts import scripts

ray_constants.ENABLE_RAY_CLUSTER = True
services.get_node_ip_address = lambda address=None: "127.0.0.1"
scripts.main()
