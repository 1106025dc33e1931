#!/bin/bash
# Puts the results of batch.sh together, and checks that every request has one:
#
#   sbatch merge.sh 8 requests.jsonl results.jsonl
#
# Run again, it checks what is there.
#SBATCH --job-name=warpdraft-merge
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=warpdraft-%j.log
set -euo pipefail

shares=$1 requests=$2 results=$3
if [ -e "$results" ]; then
    exec "${WARPDRAFT:-warpdraft}" batch merge "$results" -o - --requests "$requests" --quiet >/dev/null
fi
# By their numbers: an earlier run with more shares may have left others.
parts=()
for ((share = 0; share < shares; share++)); do
    parts+=("$results.part-$share.jsonl")
done
exec "${WARPDRAFT:-warpdraft}" batch merge "${parts[@]}" -o "$results" --requests "$requests"
