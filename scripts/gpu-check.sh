#!/usr/bin/env bash
# Runs on a machine with a GPU what dist/gpu holds (make gpu-check puts it there).
# Usage: scripts/gpu-check.sh [tests|sanitize|parity|all]...
# Results of the comparison are left in $OUT (default: dist/results).
set -uo pipefail
cd "$(dirname "$0")/.."
export WARPDRAFT_REPOSITORY=$PWD
OUT=${OUT:-dist/results}
mkdir -p "$OUT"
failed=0

tests() {
    # In each way to open a card: as it is, with decode steps in many launches, with the kernels that other cards run.
    dist/gpu/gpu-tests --test-threads=1 || failed=1
}

# Greedy with drafts, then sampled with penalties: together they run every kernel of the forward pass and the loop.
sanitize() {
    for tool in memcheck racecheck initcheck synccheck; do
        for flags in "--temperature 0" "--temperature 0.8 --top-k 20 --top-p 0.9 --repetition-penalty 1.1 --seed 1"; do
            # shellcheck disable=SC2086
            if compute-sanitizer --tool "$tool" --error-exitcode 9 dist/gpu/warpdraft generate --model model/demo \
                --device cuda --context 512 --max-tokens 24 --draft ngram $flags --file scripts/gpu-prompt.txt \
                >"$OUT/$tool.log" 2>&1; then
                echo "$tool ($flags): clean"
            else
                echo "$tool ($flags): FAILED, see $OUT/$tool.log"
                tail -5 "$OUT/$tool.log"
                failed=1
            fi
        done
    done
}

parity() {
    python3 benches/scripts/parity.py --work "${WORK:-/tmp/warpdraft-parity}" --out "$OUT/parity.json" || failed=1
}

for step in "${@:-all}"; do
    case $step in
        tests | sanitize | parity) "$step" ;;
        all) tests; sanitize; parity ;;
        *) echo "unknown step $step; one of tests, sanitize, parity, all" >&2; exit 2 ;;
    esac
done
exit $failed
