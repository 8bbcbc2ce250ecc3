#!/bin/bash
# A `dml` command as a job of Slurm, on one node or several (docs/how-to/slurm.md). In the project, with its environment active:
#     sbatch OPTIONS infra/slurm/job.sh reproduce softtriple/table1 --seeds 5
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -eu

end() {  # the command and Ray end their processes, and remove their temporary files from the nodes
    [ -z "$command" ] || { kill -TERM "$command" && wait "$command" || true; }
    [ -z "$nodes" ] || { scancel --signal=TERM "$SLURM_JOB_ID.0" 2>/dev/null; wait "$nodes" || true; }
}
command= nodes=
trap 'end; exit 143' TERM                                  # of scancel, and of a preemption
trap 'end; scontrol requeue "$SLURM_JOB_ID"; exit' USR1    # of the time limit: the same job waits for its next turn

if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then                  # Ray on the job's nodes, at free ports: other jobs may use a node, too
    address() { hostname --ip-address | cut -d ' ' -f 1; }
    export -f address
    RAY_ADDRESS=$(address):$(python -c 'import socket; print(socket.create_server(("", 0)).getsockname()[1])')
    RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
    export RAY_ADDRESS RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_worker_niceness=0 RAY_USAGE_STATS_ENABLED=0 RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
    srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --cpu-bind=none bash -c '
        trap : TERM
        folder=$(mktemp -d "${RAY_TMPDIR:-/tmp}/dml-ray-XXXXXXXX")
        joined=--address=$RAY_ADDRESS
        [ "$SLURM_NODEID" -gt 0 ] || joined="--head --port=${RAY_ADDRESS##*:} --include-dashboard=false"
        ray start $joined --node-ip-address="$(address)" --num-cpus="$SLURM_CPUS_ON_NODE" --temp-dir="$folder" --block >"$folder/log" 2>&1
        rm -rf "$folder"' &
    nodes=$!
    python -c '
import os, sys, time, ray
from tasks.workers.connection import connect
connect()
wanted, over = int(os.environ["SLURM_JOB_NUM_NODES"]), time.monotonic() + 300
while (joined := sum(node["Alive"] for node in ray.nodes())) < wanted:
    time.sleep(1) if time.monotonic() < over else sys.exit(f"error: Ray started on {joined} of {wanted} nodes")'
fi

dml "$@" ${SLURM_ARRAY_TASK_ID:+--seed "$SLURM_ARRAY_TASK_ID"} &
command=$!
code=0
wait "$command" || code=$?
command=
end
exit "$code"
