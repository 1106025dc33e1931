#!/usr/bin/env python3
"""Answers a file of requests on a Ray cluster, a share of it in each task, and puts the results together.

    pip install ray
    python3 batch.py requests.jsonl results.jsonl --shares 8 --gpus 1 -- --model Qwen/Qwen3-8B

Every node sees the files under the same paths, and has the program. What stands behind `--` goes to `warpdraft batch`. A task
whose node is lost is started again elsewhere and goes on where it was, and so does the whole when this is called again.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import ray


def answer(program: str, requests: str, part: str, share: int, shares: int, more: list[str]) -> str:
    """Answers one share of the requests. Returns the file with its results."""
    command = [program, "batch", requests, "-o", part, "--shard", f"{share}/{shares}", "--quiet", *more]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"share {share}: {done.stderr.strip()} (code {done.returncode})")
    return part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--shares", type=int, default=8, help="tasks (8)")
    parser.add_argument("--gpus", type=float, default=0, help="cards of each task (0)")
    parser.add_argument("--cpus", type=float, default=1, help="cores of each task (1)")
    parser.add_argument("--program", default="warpdraft", help="the warpdraft binary")
    own, more = sys.argv[1:], []
    if "--" in own:
        cut = own.index("--")
        own, more = own[:cut], own[cut + 1 :]
    args = parser.parse_args(own)

    ray.init()
    requests, results = str(args.requests.resolve()), str(args.results.resolve())
    # A share that fails, for whatever reason, is tried again: it costs only what is not done yet.
    task = ray.remote(num_cpus=args.cpus, num_gpus=args.gpus, max_retries=3, retry_exceptions=True)(answer)
    parts = [
        task.remote(args.program, requests, f"{results}.part-{share}.jsonl", share, args.shares, more)
        for share in range(args.shares)
    ]
    merge = [args.program, "batch", "merge", *ray.get(parts), "-o", results, "--requests", requests]
    subprocess.run(merge, check=True)


if __name__ == "__main__":
    main()
