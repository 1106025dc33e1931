#!/usr/bin/env python3
"""Runs files of requests with `warpdraft batch` and with vLLM, on one GPU, and prints how long both take.

    benches/scripts/beside_vllm.py make even > even.jsonl
    benches/scripts/beside_vllm.py compare even.jsonl --work /tmp/beside

`make` writes requests whose prompts are token ids, so that no tokenizer matters, and whose answers have a fixed number
of tokens. `compare` runs each file --runs times with each engine, one engine after the other; the best run of each
counts. Both get all requests at once and have their defaults, but vLLM does not cache prefixes: a second run would find
those of the first. Loading is not counted: warpdraft's time is the
`seconds` of its summary, from a file to a file, and vLLM's is that of one call of `LLM.generate`. A model of Qwen3-8B's
shape with random weights is made in the folder --work, unless --model names another.

vLLM must be installed in this Python's environment.
"""

import argparse
import json
import math
import pathlib
import random
import subprocess
import sys
import tempfile
import time

import start_bench

# Tokens of prompts are below this, as every tokenizer has them.
VOCAB = 4000


def even(chance: random.Random) -> list:
    """512 requests, 250 to 340 tokens in, 256 out."""
    return [(chance.randrange(250, 341), 256) for _ in range(512)]


def short(chance: random.Random) -> list:
    """1,024 requests, 48 to 80 tokens in, 128 out."""
    return [(chance.randrange(48, 81), 128) for _ in range(1024)]


def mixed(chance: random.Random) -> list:
    """2,000 requests, log-normal around 400 and at most 4,096 tokens in, 16 to 512 out."""
    def prompt() -> int:
        return min(4096, max(1, round(math.exp(chance.gauss(math.log(400), 0.6)))))
    return [(prompt(), chance.randrange(16, 513)) for _ in range(2000)]


def long(chance: random.Random) -> list:
    """48 requests, 6,000 to 8,000 tokens in, 512 out."""
    return [(chance.randrange(6000, 8001), 512) for _ in range(48)]


WORKLOADS = {workload.__name__: workload for workload in [even, short, mixed, long]}


def make(args: argparse.Namespace) -> None:
    chance = random.Random(f"{args.workload} {args.seed}")
    settings = dict(temperature=0.6, top_k=20, top_p=0.95, seed=1) if args.sampled else dict(temperature=0)
    for i, (prompt, answer) in enumerate(WORKLOADS[args.workload](chance)):
        tokens = [chance.randrange(VOCAB) for _ in range(prompt)]
        print(json.dumps(dict(custom_id=f"r{i}", prompt=tokens, max_tokens=answer, ignore_eos=True, **settings)))


def warpdraft(args: argparse.Namespace, file: pathlib.Path) -> tuple:
    """Seconds and generated tokens of one run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [args.binary, "batch", str(file), "-o", f"{folder}/results.jsonl", "--model", str(args.model), "--json",
                   "--quiet"]
        command += ["--weights", "fp8"] if args.fp8 else []
        command += ["--context", str(args.context)] if args.context else []
        summary = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    if summary["requests"]["refused"] > 0:
        sys.exit(f"{file}: {summary['first_error']}")
    return summary["seconds"], summary["generated_tokens"]


def vllm(args: argparse.Namespace) -> None:
    """Runs every file, and prints for each a line of JSON: seconds of each run, and generated tokens."""
    from vllm import LLM, SamplingParams
    options = dict(enable_prefix_caching=False)
    if args.fp8:
        options["quantization"] = "fp8"
    if args.context:
        options["max_model_len"] = args.context
    # Rates do not depend on the weights' values, so random ones need not be read.
    weights = "auto" if args.given else "dummy"
    llm = LLM(model=str(args.model), load_format=weights, skip_tokenizer_init=True, dtype="bfloat16", **options)
    for file in args.files:
        requests = [json.loads(line) for line in file.read_text().splitlines()]
        prompts = [dict(prompt_token_ids=request["prompt"]) for request in requests]
        settings = [SamplingParams(temperature=request["temperature"], top_k=request.get("top_k", 0),
                                   top_p=request.get("top_p", 1.0), seed=request.get("seed"),
                                   max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False)
                    for request in requests]
        llm.generate(prompts[:64], SamplingParams(temperature=0, max_tokens=8, detokenize=False), use_tqdm=False)
        seconds = []
        for _ in range(args.runs):
            begun = time.perf_counter()
            answers = llm.generate(prompts, settings, use_tqdm=False)
            seconds.append(time.perf_counter() - begun)
        tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
        print("\n" + json.dumps(dict(file=str(file), seconds=seconds, tokens=tokens)), flush=True)


def compare(args: argparse.Namespace) -> None:
    args.given = args.model is not None
    if not args.given:
        args.model = args.work / "8b"
        numbers = start_bench.pattern()
        start_bench.checkpoint(args.model, start_bench.SHAPES["8b"], start_bench.synthetic_tokenizer(), lambda: numbers)
    if args.only_vllm:
        return vllm(args)
    ours = {}
    for file in args.files:
        runs = [warpdraft(args, file) for _ in range(args.runs)]
        ours[str(file)] = ([seconds for seconds, _ in runs], runs[0][1])
    # A process of its own, so that its memory is free afterwards.
    again = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--only-vllm"], stdout=subprocess.PIPE, text=True)
    if again.returncode != 0:
        sys.exit(f"vLLM ended with {again.returncode}")
    lines = [json.loads(line) for line in again.stdout.splitlines() if line.startswith('{"file"')]
    print("| requests | warpdraft, s | vLLM, s | vLLM ÷ warpdraft | warpdraft, tokens/s |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for line in lines:
        seconds, tokens = ours[line["file"]]
        if tokens != line["tokens"]:
            sys.exit(f"{line['file']}: {tokens} tokens by warpdraft, {line['tokens']} by vLLM")
        best, theirs = min(seconds), min(line["seconds"])
        listed = [", ".join(f"{run:.2f}" for run in runs) for runs in [seconds, line["seconds"]]]
        name = pathlib.Path(line["file"]).name
        print(f"| {name} | {listed[0]} | {listed[1]} | {theirs / best:.3f} | {tokens / best:,.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    making = commands.add_parser("make", help="write requests to standard output")
    making.add_argument("workload", choices=WORKLOADS, help="; ".join(f"{w}: {WORKLOADS[w].__doc__}" for w in WORKLOADS))
    making.add_argument("--seed", type=int, default=1)
    making.add_argument("--sampled", action="store_true", help="temperature 0.6, top-k 20, top-p 0.95, not greedy")
    making.set_defaults(run=make)
    comparing = commands.add_parser("compare", help="run files with both engines")
    comparing.add_argument("files", nargs="+", type=pathlib.Path, metavar="FILE")
    comparing.add_argument("--binary", default="target/release/warpdraft")
    comparing.add_argument("--model", type=pathlib.Path, help="folder of a checkpoint")
    comparing.add_argument("--work", type=pathlib.Path, default=pathlib.Path("."), help="folder for the random model")
    comparing.add_argument("--context", type=int, help="context of both engines")
    comparing.add_argument("--fp8", action="store_true", help="weights and activations in FP8, rounded while loading")
    comparing.add_argument("--runs", type=int, default=2)
    comparing.add_argument("--only-vllm", action="store_true", help=argparse.SUPPRESS)
    comparing.set_defaults(run=compare)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
