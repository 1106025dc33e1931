#!/bin/bash
# Submits the array and, behind it, the job that puts its results together:
#
#   ./submit.sh 8 requests.jsonl results.jsonl --model Qwen/Qwen3-8B
set -euo pipefail

shares=$1 requests=$2 results=$3
shift 3
here=$(cd "$(dirname "$0")" && pwd)
array=$(sbatch --parsable --array="0-$((shares - 1))" "$here/batch.sh" "$requests" "$results" "$@")
merge=$(sbatch --parsable --dependency="afterok:$array" --job-name=warpdraft-merge --output=warpdraft-%j.log \
    --wrap "'${WARPDRAFT:-warpdraft}' batch merge '$results'.part-*.jsonl -o '$results' --requests '$requests'")
echo "array $array, merge $merge"
