#!/usr/bin/env bash
# Runs the recipes of docs/recipes with the demo model on the CPU: what the cluster does is stood in for by a few lines each.
# Usage: scripts/check-recipes.sh [PROGRAM]
# PROGRAM is target/release/warpdraft unless named. Takes seconds; needs python3, no network, no cluster and no card.
set -euo pipefail
cd "$(dirname "$0")/.."
program=$(realpath -e "${1:-target/release/warpdraft}")
slurm=$PWD/docs/recipes/slurm kubernetes=$PWD/docs/recipes/kubernetes ray=$PWD/docs/recipes/ray model=$PWD/model/demo

work=$(mktemp -d)
# What runs beside this has a process group of its own, so that nothing of it is left whatever fails.
beside=
clean() {
    [ -z "$beside" ] || kill -KILL -- "-$beside" 2>/dev/null || true
    rm -rf "$work"
}
trap clean EXIT
# Names that have to be quoted.
folder="$work/it's a folder"
mkdir "$folder" "$work/bin" "$work/python"
export PYTHONPYCACHEPREFIX=$work/pycache

fail() {
    echo "check-recipes: FAILED: $*" >&2
    exit 1
}
passed() { echo "check-recipes: $*"; }
# Whether a command does well, or fails as it should; what it says is shown only if it does not.
done_well() {
    if ! "$@" >"$work/said" 2>&1; then
        cat "$work/said" >&2
        fail "this was to work: $*"
    fi
}
refused() {
    if "$@" >"$work/said" 2>&1; then
        cat "$work/said" >&2
        fail "this was to be refused: $*"
    fi
}
same() { cmp -- "$1" "$2" || fail "$3"; }
# The shares 0 to N-1 have each request once between them. A merge would not tell: it takes what is there twice once.
each_once() {
    local results=$1 share parts=()
    for ((share = 0; share < $2; share++)); do
        parts+=("$results.part-$share.jsonl")
    done
    cmp <(sort -- "${parts[@]}") <(sort whole.jsonl) || fail "the shares of $results are not a run's results, each once"
}
# Lines of a share come as they are finished.
same_lines() { cmp <(sort -- "$1") <(sort -- "$2") || fail "$3"; }

scripts=("$slurm"/*.sh scripts/check-recipes.sh)
for script in "${scripts[@]}"; do
    bash -n "$script"
done
if command -v shellcheck >/dev/null; then
    shellcheck "${scripts[@]}"
else
    passed "no shellcheck here: skipped"
fi
passed "shell files parse"

ln -s "$program" "$work/bin/warpdraft"
# Runs a job at once, each task of an array, and fails with it. Of its options only the array and what a merge waits for matter.
cat >"$work/bin/sbatch" <<'SBATCH'
#!/usr/bin/env bash
set -euo pipefail
tasks=none
while [[ $1 == --* ]]; do
    case $1 in
        --array=*-*) tasks=$(seq "$(sed 's/.*=\(.*\)-.*/\1/' <<<"$1")" "${1##*-}") ;;
        --array=*) tasks=$(sed 's/.*=//; s/,/\n/g' <<<"$1") ;;
        --dependency=afterok:1 | --kill-on-invalid-dep=yes | --parsable) ;;
        *) echo "sbatch: unexpected $1" >&2; exit 2 ;;
    esac
    shift
done
# Slurm runs a copy.
copy=$(mktemp)
trap 'rm -f "$copy"' EXIT
cp "$1" "$copy"
shift
for task in $tasks; do
    [ "$task" = none ] || export SLURM_ARRAY_TASK_ID=$task
    SLURM_JOB_ID=4$task bash "$copy" "$@" >&2
done
echo 1
SBATCH
cat >"$work/bin/scontrol" <<'SCONTROL'
#!/usr/bin/env bash
echo "$*" >>"$REQUEUED"
SCONTROL
chmod +x "$work/bin/sbatch" "$work/bin/scontrol"
export PATH=$work/bin:$PATH REQUEUED=$work/requeued TMPDIR=$work
unset WARPDRAFT WARPDRAFT_MODEL WARPDRAFT_DEVICE SLURM_ARRAY_TASK_ID

cd "$folder"
for i in $(seq 24); do
    echo "{\"custom_id\": \"r$i\", \"prompt\": \"fn f$i(\", \"max_tokens\": 12, \"temperature\": $((i % 2))}"
done >requests.jsonl
warpdraft batch requests.jsonl -o whole.jsonl --ordered --model "$model" --device cpu --quiet
[ "$(wc -l <whole.jsonl)" = 24 ] || fail "the unsharded run has not answered all"
# What an earlier run over other requests has left.
head -3 requests.jsonl | sed 's/fn f/let x/' >others.jsonl
warpdraft batch others.jsonl -o left.jsonl --model "$model" --device cpu --quiet

more=(--model "$model" --quiet)
# Tasks without a word about the device are for cards.
cat >"$work/bin/device" <<'DEVICE'
#!/usr/bin/env bash
echo "$WARPDRAFT_DEVICE"
DEVICE
chmod +x "$work/bin/device"
[ "$(WARPDRAFT=device SLURM_ARRAY_TASK_ID=0 bash "$slurm/batch.sh" 1 requests.jsonl slurm.jsonl)" = cuda ] ||
    fail "batch.sh does not insist on a card"
grep -q '^#SBATCH --gres=gpu:1$' "$slurm/batch.sh" || fail "batch.sh asks for no card"
export WARPDRAFT_DEVICE=cpu

cp left.jsonl slurm.jsonl.part-3.jsonl
done_well "$slurm/submit.sh" 3 requests.jsonl slurm.jsonl "${more[@]}"
each_once slurm.jsonl 3
same slurm.jsonl whole.jsonl "Slurm: the merged file is not that of a run with --ordered"
done_well "$slurm/submit.sh" 3 requests.jsonl slurm.jsonl "${more[@]}"
same slurm.jsonl whole.jsonl "Slurm: a second merge has changed the results"
head -20 slurm.jsonl >fewer.jsonl
refused "$slurm/merge.sh" 3 requests.jsonl fewer.jsonl

# One share by itself, from nothing, from where it was, and when it is done.
cp slurm.jsonl.part-1.jsonl part-1.jsonl
[ "$(wc -l <part-1.jsonl)" -gt 2 ] || fail "share 1 has too few requests"
for lines in 0 2 100; do
    head -"$lines" part-1.jsonl >slurm.jsonl.part-1.jsonl
    done_well sbatch --array=1 "$slurm/batch.sh" 3 requests.jsonl slurm.jsonl "${more[@]}"
    same_lines slurm.jsonl.part-1.jsonl part-1.jsonl "Slurm: share 1, run again after $lines results, is another"
done
refused sbatch --array=3 "$slurm/batch.sh" 3 requests.jsonl slurm.jsonl "${more[@]}"
rm slurm.jsonl slurm.jsonl.part-2.jsonl
refused "$slurm/merge.sh" 3 requests.jsonl slurm.jsonl
[ ! -e slurm.jsonl ] || fail "Slurm: a merge without a share has left results"
passed "Slurm: shares, one of them again, and the merge"

# The time limit: work for minutes, stopped after the first result.
for i in $(seq 1000); do
    echo "{\"custom_id\": \"r$i\", \"prompt\": \"fn f$i(\", \"max_tokens\": 200, \"ignore_eos\": true}"
done >long.jsonl
# Runs batch.sh, and sends it the signal that it asks Slurm for, once `ready` says so.
near_the_limit() {
    local ready=$1 code=0
    shift
    set -m
    SLURM_ARRAY_TASK_ID=0 SLURM_JOB_ID=17 bash "$slurm/batch.sh" 1 long.jsonl late.jsonl "$@" &
    beside=$!
    set +m
    for _ in $(seq 300); do
        "$ready" && break
        sleep 0.1
    done
    kill -USR1 "$beside"
    wait "$beside" || code=$?
    return "$code"
}
has_a_result() { [ -s late.jsonl.part-0.jsonl ]; }
grep -q '^#SBATCH --signal=B:USR1@' "$slurm/batch.sh" || fail "batch.sh asks for no signal"
done_well near_the_limit has_a_result --model "$model" --quiet --sequences 1
[ "$(cat "$REQUEUED")" = "requeue 17" ] || fail "Slurm: a task whose time was up was not put back"
lines=$(wc -l <late.jsonl.part-0.jsonl)
[ "$lines" -lt 1000 ] || fail "Slurm: the task was not stopped"
# It let go of its share.
(
    flock --nonblock 9
) 9<>late.jsonl.part-0.jsonl || fail "Slurm: the program outlived its task"
# One that gets nowhere is not to go round for ever.
rm "$REQUEUED"
cat >"$work/bin/slow" <<'SLOW'
#!/usr/bin/env bash
trap 'kill $!; exit 130' TERM
touch slow-is-up
sleep 30 &
wait
SLOW
chmod +x "$work/bin/slow"
is_up() { [ -e slow-is-up ]; }
WARPDRAFT=slow refused near_the_limit is_up
grep -q "time limit is too short" "$work/said" || fail "Slurm: $(cat "$work/said")"
[ ! -e "$REQUEUED" ] || fail "Slurm: a task that got nowhere was put back"
passed "Slurm: the time limit"

python3 -m py_compile "$ray/batch.py"
# Ray, with one task after the other in this process; a task that fails is tried once more.
cat >"$work/python/ray.py" <<'RAY'
def init():
    pass


def remote(**options):
    assert options["num_gpus"] == 0, options

    def task(function):
        def run(*arguments):
            try:
                return function(*arguments)
            except RuntimeError:
                return function(*arguments)

        return type("Task", (), {"remote": staticmethod(run)})

    return task


def get(values):
    return values
RAY
export PYTHONPATH=$work/python${PYTHONPATH:+:$PYTHONPATH}
run_ray() { env -u WARPDRAFT_DEVICE python3 "$ray/batch.py" "$@"; }
cp left.jsonl ray.jsonl.part-3.jsonl
done_well run_ray requests.jsonl ray.jsonl --shares 3 --gpus 0 -- --model "$model"
each_once ray.jsonl 3
same ray.jsonl whole.jsonl "Ray: the merged file is not that of a run with --ordered"
done_well run_ray requests.jsonl ray.jsonl --shares 3 --gpus 0 -- --model "$model"
same ray.jsonl whole.jsonl "Ray: a second call has changed the results"
refused run_ray requests.jsonl fewer.jsonl --shares 3 --gpus 0 -- --model "$model"
if ! grep -q "have no result" "$work/said" || grep -q Traceback "$work/said"; then
    fail "Ray: $(cat "$work/said")"
fi

# A worker that is killed takes its program along, so that the share can be done again at once.
cat >"$work/worker.py" <<'WORKER'
import importlib.util
import sys

spec = importlib.util.spec_from_file_location("recipe", sys.argv[1])
recipe = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recipe)
recipe.answer("warpdraft", "long.jsonl", "killed.jsonl", 0, 1, "cpu", ["--sequences", "1", "--model", sys.argv[2]])
WORKER
set -m
python3 "$work/worker.py" "$ray/batch.py" "$model" &
beside=$!
set +m
for _ in $(seq 300); do
    [ -s killed.jsonl ] && break
    sleep 0.1
done
[ -s killed.jsonl ] || fail "Ray: no result within half a minute"
kill -KILL "$beside"
wait "$beside" 2>/dev/null || true
(
    flock --timeout 5 9
) 9<>killed.jsonl || fail "Ray: the program outlived its worker"
beside=
passed "Ray: shares, a second call, and a worker that is killed"

if ! python3 -c 'import yaml' 2>/dev/null; then
    passed "Kubernetes: python3 has no yaml here: skipped"
    exit 0
fi
mkdir data
cp requests.jsonl data/
cp left.jsonl data/results.part-8.jsonl
ln -s "$program" data/warpdraft
cat >"$work/pods.py" <<'PODS'
"""Runs the pods of both Jobs here, one after the other."""

import os
import re
import subprocess
import sys

import yaml

kubernetes, data, model = sys.argv[1:]


def load(name):
    with open(f"{kubernetes}/{name}") as file:
        spec = yaml.safe_load(file)["spec"]
    [container] = spec["template"]["spec"]["containers"]
    [mount] = container["volumeMounts"]
    assert mount["mountPath"] == "/data", mount
    return spec, container


def run(container, **variables):
    """As the cluster does: $(NAME) is put in where NAME is known."""
    for variable in container["env"]:
        variables.setdefault(variable["name"], variable.get("value"))
    words = container["command"] + container["args"]
    words = [re.sub(r"\$\((\w+)\)", lambda name: variables.get(name[1], name[0]), word) for word in words]
    # Here the volume is elsewhere, and the model is the demo. The folder's name need not be fit for a shell.
    words = [model if word == "MODEL" else word.replace("/data", ".") for word in words]
    return subprocess.run(words, cwd=data, env=os.environ | variables).returncode


batch, pod = load("batch.yaml")
shares = batch["completions"]
assert batch["completionMode"] == "Indexed"
assert pod["resources"]["limits"] == {"nvidia.com/gpu": "1"}, "no card is asked for"
for flag, here in ("--device=cuda", ["--device=cpu"]), ("--model=/data/models/Qwen3-8B", ["--model", "MODEL"]):
    at = pod["args"].index(flag)
    pod["args"][at : at + 1] = here
for share in range(shares):
    assert run(pod, JOB_COMPLETION_INDEX=str(share)) == 0, f"share {share}"
assert sorted(os.listdir(data)) == sorted(
    ["requests.jsonl", "warpdraft"] + [f"results.part-{share}.jsonl" for share in range(shares + 1)]
), "the pods' outputs have other names"

_, merge = load("merge.yaml")
assert merge["workingDir"] == "/data"
assert run(merge) == 0, "the merge"
assert run(merge) == 0, "the merge, started again"
os.rename(f"{data}/results.jsonl", f"{data}/merged.jsonl")
with open(f"{data}/merged.jsonl") as merged, open(f"{data}/results.jsonl", "w") as fewer:
    fewer.writelines(merged.readlines()[:-1])
assert run(merge) != 0, "the merge takes results that lack some for all"
PODS
done_well python3 "$work/pods.py" "$kubernetes" "$folder/data" "$model"
each_once data/results 8
same data/merged.jsonl whole.jsonl "Kubernetes: the merged file is not that of a run with --ordered"
passed "Kubernetes: pods and the merge"
