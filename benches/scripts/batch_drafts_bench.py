#!/usr/bin/env python3
"""What drafts by a model or a head cost in a batch, through `warpdraft batch`: the 8B shape, and the 0.6B shape or an
EAGLE-3 head that drafts.

Runs on a machine with a GPU of at least 40 GB, with torch and safetensors. Weights are random, so drafts are always
wrong. For so many sequences at once, a line for each of both:

- the time of a step without drafts, and with a chain of one and of more for every sequence;
- what a pass, and a row for every sequence, adds to a step;
- the speed-up of the longer chain, if so many tokens a step were accepted;
- tokens a second with adaptive drafts ÷ without: what drafts cost that are always wrong.
"""

import argparse
import json
import pathlib
import subprocess

from eagle_bench import make_head
from parity import SHAPES, make_checkpoint

TOKENS = 384
# Tokens a step that a chain of so many is worth: 3.2 of a chain of five.
ACCEPTED = {5: 3.2, 3: 2.5, 1: 1.7}


def make_requests(path: pathlib.Path, count: int) -> None:
    """Writes so many requests, of prompts that differ."""
    lines = (dict(custom_id=str(i), method="POST", url="/v1/completions",
                  body=dict(prompt=f"The {i}. number is " * 24, max_tokens=TOKENS, temperature=0)) for i in range(count))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warpdraft", type=pathlib.Path, required=True, help="the binary")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("/tmp"), help="where checkpoints go")
    parser.add_argument("--sequences", type=int, nargs="*", default=[2, 4, 8], help="at once")
    args = parser.parse_args()
    tokenizer = pathlib.Path(__file__).resolve().parents[2] / "model/demo"
    models = {}
    for shape in ("8b", "0.6b"):
        models[shape] = args.work / f"random-{shape}"
        if not models[shape].exists():
            make_checkpoint(models[shape], SHAPES[shape], tokenizer)

    def run(requests: pathlib.Path, *options: str) -> dict:
        out = args.work / "answers.jsonl"
        out.unlink(missing_ok=True)
        command = [args.warpdraft, "batch", requests, "-o", out, "--model", models["8b"], "--ignore-eos", "--json",
                   "--context", "2048", *options]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    head = args.work / "random-head"
    if not head.exists():
        make_head(head, SHAPES["8b"])
    figures = {}
    for count in args.sequences:
        requests = args.work / "requests.jsonl"
        make_requests(requests, count)
        step = lambda summary: summary["device_seconds"] / summary["steps"] * 1e3
        none, ngrams = run(requests, "--draft", "none"), run(requests, "--draft", "ngram")
        print(f"{count} sequences: {step(none):.3f} ms a step; n-grams {step(none) / step(ngrams):.3f}", flush=True)
        # As many as fit into 16 rows.
        longest = max(depth for depth in ACCEPTED if count * (1 + depth) <= 16)
        for name, how in (("model", f"model-only:{models['0.6b']}"), ("eagle3", f"eagle3-only:{head}")):
            wrong = run(requests, "--draft", how)
            chains = {depth: run(requests, "--draft", how, "--draft-always", "--draft-depth", str(depth))
                      for depth in sorted({1, longest})}
            a_pass = (step(chains[longest]) - step(chains[1])) / max(longest - 1, 1)
            speedup = ACCEPTED[longest] * step(none) / step(chains[longest])
            ratio = none["device_seconds"] / wrong["device_seconds"]
            drafted = chains[longest]["drafts"]["model"]["drafted"]
            print(f"  {name}: a chain of one {step(chains[1]):.3f} ms, of {longest} {step(chains[longest]):.3f} "
                  f"({drafted} drafts), a pass {a_pass:.3f}; {ACCEPTED[longest]} tokens a step would be "
                  f"{speedup:.2f} times as fast; always wrong {ratio:.3f}", flush=True)
            figures[f"draft.b{count}.{name}.wrong.ratio"] = round(ratio, 4)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
