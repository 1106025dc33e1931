#!/bin/bash
# Answers a file of requests as a job array, a share of it in each task. The first argument is the number of shares, and a
# task's number is its share, so that any of them can be run again by itself:
#
#   sbatch --array=0-7 batch.sh 8 requests.jsonl results.jsonl --model Qwen/Qwen3-8B
#   sbatch --array=3 batch.sh 8 requests.jsonl results.jsonl --model Qwen/Qwen3-8B
#
# A task goes back into the queue and goes on where it was when it is preempted or loses its node (Slurm does that), and when
# its time is nearly up (done below: Slurm would end it for good).
#SBATCH --job-name=warpdraft
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=warpdraft-%A_%a.log
# A minute before the time limit, or up to two: to this shell alone. It is not SIGTERM, which scancel sends, too.
#SBATCH --signal=B:USR1@60
# A card for each task. A trial without cards sets SBATCH_GRES=none and WARPDRAFT_DEVICE=cpu where it calls sbatch.
#SBATCH --gres=gpu:1
set -euo pipefail

shares=$1 requests=$2 results=$3
shift 3
share=${SLURM_ARRAY_TASK_ID:?a job array is needed, such as sbatch --array=0-7}
part=$results.part-$share.jsonl
# Not `auto`: a node whose card cannot be used is to fail, not to answer on the CPU. `--device` among the arguments goes first.
export WARPDRAFT_DEVICE=${WARPDRAFT_DEVICE:-cuda}

bytes() { stat --format=%s "$part" 2>/dev/null || echo 0; }
before=$(bytes)

# A shell takes a signal only while it waits, so the program runs beside it.
"${WARPDRAFT:-warpdraft}" batch "$requests" -o "$part" --shard "$share/$shares" "$@" &
program=$!
late=
trap 'late=yes; kill -TERM "$program" 2>/dev/null || true' USR1
code=0
wait "$program" || code=$?
if [ -n "$late" ]; then
    # The signal has ended the wait, the program ends now.
    code=0
    wait "$program" || code=$?
fi
if [ -n "$late" ] && [ "$code" = 130 ]; then
    if [ "$(bytes)" -le "$before" ]; then
        echo "share $share: the time limit is too short for a single result" >&2
        exit 1
    fi
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"
