#!/bin/bash
# Answers a file of requests as a job array, a share of it in each task:
#
#   sbatch --array=0-7 batch.sh requests.jsonl results.jsonl --model Qwen/Qwen3-8B
#
# A task that is preempted, runs out of time or loses its node is put back into the queue and goes on where it was.
#SBATCH --job-name=warpdraft
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=warpdraft-%A_%a.log
# A card for each task; on nodes without cards leave this out.
##SBATCH --gpus-per-task=1
set -euo pipefail

requests=$1 results=$2
shift 2
# Tasks may be any numbers; shares count from 0.
share=$((SLURM_ARRAY_TASK_ID - SLURM_ARRAY_TASK_MIN))
shares=$((SLURM_ARRAY_TASK_MAX - SLURM_ARRAY_TASK_MIN + 1))
exec "${WARPDRAFT:-warpdraft}" batch "$requests" -o "$results.part-$share.jsonl" --shard "$share/$shares" "$@"
