#!/bin/bash
# A `dml` command as a job of Slurm, on one node or several (docs/how-to/slurm.md). In the project, with its environment active:
#     sbatch OPTIONS infra/slurm/job.sh reproduce softtriple/table1 --seeds 5
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -eu

job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}    # the id alone may mean a whole array
nodes=
end() {  # the command and Ray end their processes, and remove their temporary files from the nodes
    for process in $(jobs -rp); do
        [ "$process" = "$nodes" ] || { kill -TERM "$process" && wait "$process"; } || true
    done
    [ -z "$nodes" ] || { scancel --signal=TERM "$job" 2>/dev/null && wait "$nodes"; } || true    # all steps, not this script
    nodes=
}
requeue() {  # the same job waits for its next turn
    end
    if [ "$SECONDS" -lt 300 ]; then
        echo "error: the time limit leaves less than five minutes for work; submit with a longer --time" >&2
        exit 1
    fi
    scontrol requeue "$job"
    exit
}
trap end EXIT
trap 'exit 143' TERM    # of scancel, and of a preemption
trap requeue USR1       # of the time limit

if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then    # Ray on the job's nodes, at free ports: other jobs may use a node, too
    address() { hostname --ip-address | cut -d ' ' -f 1; }
    export -f address
    RAY_ADDRESS=$(address):$(python -c 'import socket; print(socket.create_server(("", 0)).getsockname()[1])')
    RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
    export RAY_ADDRESS RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_worker_niceness=0 RAY_USAGE_STATS_ENABLED=0 RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
    srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --cpu-bind=none bash -c '
        is_asked=
        trap is_asked=1 TERM
        folder=$(mktemp -d "${RAY_TMPDIR:-/tmp}/dml-ray-XXXXXXXX") || exit
        joined=--address=$RAY_ADDRESS
        [ "$SLURM_NODEID" -gt 0 ] || joined="--head --port=${RAY_ADDRESS##*:} --include-dashboard=false"
        ray start $joined --node-ip-address="$(address)" --num-cpus="$SLURM_CPUS_ON_NODE" --temp-dir="$folder" --block >"$folder/log" 2>&1
        [ "$is_asked" ] || { echo "error: Ray on node $SLURM_NODEID ended; the end of its output:"; tail -n 20 "$folder/log"; } >&2
        rm -rf "$folder"
        [ "$is_asked" ]' &
    nodes=$!
    python -c '
import contextlib, os, sys, time, ray
from dml_core.errors import DmlError
from tasks.workers.connection import connect
joined, wanted, over = 0, int(os.environ["SLURM_JOB_NUM_NODES"]), time.monotonic() + 300
while joined < wanted:
    time.sleep(1) if time.monotonic() < over else sys.exit(f"error: Ray started on {joined} of {wanted} nodes within five minutes")
    with contextlib.suppress(DmlError):
        connect()
        joined = sum(node["Alive"] for node in ray.nodes())' &
    wait -n    # until all nodes have joined, or Ray has ended on all
fi

dml "$@" ${SLURM_ARRAY_TASK_ID:+--seed "$SLURM_ARRAY_TASK_ID"} &
wait "$!"
