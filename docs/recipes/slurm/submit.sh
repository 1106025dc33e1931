#!/bin/bash
# Submits the array and, behind it, the job that puts its results together:
#
#   ./submit.sh 8 requests.jsonl results.jsonl --model Qwen/Qwen3-8B
#
# If a task fails, Slurm takes the merge out of the queue. The same command again does what is not done yet.
set -euo pipefail

shares=$1 requests=$2 results=$3
shift 3
here=$(cd "$(dirname "$0")" && pwd)
array=$(sbatch --parsable --array="0-$((shares - 1))" "$here/batch.sh" "$shares" "$requests" "$results" "$@")
merge=$(sbatch --parsable --dependency="afterok:$array" --kill-on-invalid-dep=yes \
    "$here/merge.sh" "$shares" "$requests" "$results")
echo "array $array, merge $merge"
