#!/usr/bin/env python3
"""What drafts by a model cost in a batch, through `warpdraft batch`: the 8B shape, and the 0.6B shape that drafts.

Runs on a machine with a GPU of at least 40 GB, with torch and safetensors. Weights are random, so the draft model is
always wrong, and speed-ups are what a step with drafts costs, for acceptance as it was measured elsewhere. For so many
sequences at once, a line:

- the time of a step without drafts, and with a chain of one and of five for every sequence;
- what a pass over the draft model adds to a step;
- tokens a second with adaptive drafts ÷ without: what a draft model costs that is always wrong.
"""

import argparse
import json
import pathlib
import subprocess

from parity import SHAPES, make_checkpoint

TOKENS = 384


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

    figures = {}
    for count in args.sequences:
        requests = args.work / "requests.jsonl"
        make_requests(requests, count)
        drafted = ("--draft", f"model-only:{models['0.6b']}")
        runs = {
            "none": run(requests, "--draft", "none"),
            "wrong": run(requests, *drafted),
            "one": run(requests, *drafted, "--draft-always", "--draft-depth", "1", "--draft-rows", "64"),
            "five": run(requests, *drafted, "--draft-always", "--draft-depth", "5", "--draft-rows", "64"),
        }
        step = {name: summary["device_seconds"] / summary["steps"] * 1e3 for name, summary in runs.items()}
        a_pass = (step["five"] - step["one"]) / 4
        wrong = runs["none"]["device_seconds"] / runs["wrong"]["device_seconds"]
        print(f"{count} sequences: ms a step {step['none']:.3f}, with a chain of one {step['one']:.3f}, of five "
              f"{step['five']:.3f}; a pass and a row each {a_pass:.3f} ms; always wrong {wrong:.3f}", flush=True)
        print({name: (s["steps"], s["drafts"]["model"], s["generated_tokens"]) for name, s in runs.items()}, flush=True)
        figures[f"draft.b{count}.wrong.ratio"] = round(wrong, 4)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
