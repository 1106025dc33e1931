#!/usr/bin/env python3
"""Answers a file of requests on a Ray cluster, a share of it in each task, and puts the results together.

    pip install ray
    python3 batch.py requests.jsonl results.jsonl --shares 8 -- --model Qwen/Qwen3-8B

Every node sees the files under the same paths, and has the program. What stands behind `--` goes to `warpdraft batch`. A task
whose node is lost is started again elsewhere and goes on where it was, and so does the whole when this is called again. Where
the merged results are there already, it checks that every request has one, and does no more.
"""

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ray

# From <sys/prctl.h>.
PR_SET_PDEATHSIG = 1
# How long another run may hold on to a share before that is an error. The lock of a node that was lost lasts until the file
# server misses it (NFS 4: 90 seconds).
LOCK_SECONDS = 180


def answer(program: str, requests: str, part: str, share: int, shares: int, device: str, more: list[str]) -> str:
    """Answers one share of the requests. Returns the file with its results."""
    command = [program, "batch", requests, "-o", part, "--shard", f"{share}/{shares}", "--quiet", *more]
    # `--device` behind `--` goes first.
    environment = os.environ | {"WARPDRAFT_DEVICE": device}
    worker = os.getpid()
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def die_with_worker() -> None:
        # Else a worker that is killed leaves a program behind which holds the card and the share's lock. Results are appended
        # in whole lines, so nothing is lost.
        if prctl is not None and (prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0 or os.getppid() != worker):
            os._exit(1)

    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        done = subprocess.run(
            command, env=environment, preexec_fn=die_with_worker, stderr=subprocess.PIPE, text=True, check=False
        )
        if done.returncode == 0:
            return part
        if "another run is writing" not in done.stderr or time.monotonic() > deadline:
            raise RuntimeError(f"share {share}: {done.stderr.strip()} (code {done.returncode})")
        time.sleep(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--shares", type=int, default=8, help="tasks (8)")
    parser.add_argument("--gpus", type=float, default=1, help="cards of each task (1); 0: on the CPU")
    parser.add_argument("--cpus", type=float, default=1, help="cores of each task (1)")
    parser.add_argument("--program", default="warpdraft", help="the warpdraft binary")
    own, more = sys.argv[1:], []
    if "--" in own:
        cut = own.index("--")
        own, more = own[:cut], own[cut + 1 :]
    args = parser.parse_args(own)

    requests, results = str(args.requests.resolve()), str(args.results.resolve())
    merge = [args.program, "batch", "merge", "--requests", requests]
    if args.results.exists():
        sys.exit(subprocess.run([*merge, results, "-o", "-", "--quiet"], stdout=subprocess.DEVNULL).returncode)

    ray.init()
    # A share that fails, for whatever reason, is tried again: it costs only what is not done yet.
    task = ray.remote(num_cpus=args.cpus, num_gpus=args.gpus, max_retries=3, retry_exceptions=True)(answer)
    # Not `auto`: a node whose card cannot be used is to fail, not to answer on the CPU.
    device = "cuda" if args.gpus > 0 else "cpu"
    parts = [
        task.remote(args.program, requests, f"{results}.part-{share}.jsonl", share, args.shares, device, more)
        for share in range(args.shares)
    ]
    sys.exit(subprocess.run([*merge, *ray.get(parts), "-o", results]).returncode)


if __name__ == "__main__":
    main()
