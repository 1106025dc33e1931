#!/usr/bin/env python3
"""Times how long warpdraft takes from its start to the first byte of text, on a machine with a GPU.

Makes checkpoints of Qwen3-8B's and Qwen3-0.6B's shapes with random weights (17 GB and 1.2 GB in the folder --work,
kept for the next time), and runs `warpdraft generate` on each with the files in the page cache:

- start.cold_s: 8B, with the driver's cache of compiled kernels empty
- start.warm_s: 8B, again with that cache
- start.small_cold_s: 0.6B, with that cache empty

Prints the medians of --rounds runs, and with --phases what the program says of each part of one start. Needs Python
alone.

    benches/scripts/start_bench.py --work /tmp/start --tokenizer Qwen3/tokenizer.json --out start.json

Without --tokenizer it makes one of the same size.
"""

import argparse
import array
import json
import os
import pathlib
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time

SHAPES = {
    "8b": dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
               num_key_value_heads=8, vocab_size=151936, tie_word_embeddings=False),
    "0.6b": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                 num_key_value_heads=8, vocab_size=151936, tie_word_embeddings=True),
}
MERGES = 151_387
# A prime, so that rows of a matrix do not repeat in step.
PATTERN = 1_048_573
PROMPT = "impl Add for Point { fn add(self, other: Point) -> Point { Point { x: self.x + other.x } } }\nimpl Sub for"


def bf16(number: float) -> int:
    return struct.unpack("<I", struct.pack("<f", number))[0] >> 16


def pattern() -> bytes:
    """Normal numbers of standard deviation 0.02, as bf16, which every matrix repeats from a place of its own."""
    numbers = random.Random(1)
    return array.array("H", (bf16(numbers.gauss(0, 0.02)) for _ in range(PATTERN))).tobytes()


def tensors(shape: dict) -> list:
    """Name, size and whether it is a norm of every tensor, in shards of a few layers."""
    hidden, inner, vocab = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    q, kv = shape["num_attention_heads"] * 128, shape["num_key_value_heads"] * 128
    first = [("model.embed_tokens.weight", [vocab, hidden]), ("model.norm.weight", [hidden])]
    if not shape["tie_word_embeddings"]:
        first.append(("lm_head.weight", [vocab, hidden]))
    shards, shard = [], first
    for i in range(shape["num_hidden_layers"]):
        shard += [(f"model.layers.{i}.{name}.weight", size) for name, size in [
            ("input_layernorm", [hidden]), ("post_attention_layernorm", [hidden]),
            ("self_attn.q_proj", [q, hidden]), ("self_attn.k_proj", [kv, hidden]), ("self_attn.v_proj", [kv, hidden]),
            ("self_attn.o_proj", [hidden, q]), ("self_attn.q_norm", [128]), ("self_attn.k_norm", [128]),
            ("mlp.gate_proj", [inner, hidden]), ("mlp.up_proj", [inner, hidden]), ("mlp.down_proj", [hidden, inner]),
        ]]
        if i % 9 == 8 or i + 1 == shape["num_hidden_layers"]:
            shards.append(shard)
            shard = []
    return shards


def write_shard(path: pathlib.Path, shard: list, numbers: bytes, turn: int) -> None:
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, size in shard:
        count = 2
        for n in size:
            count *= n
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [at, at + count]}
        at += count
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for i, (name, size) in enumerate(shard):
            begin, end = header[name]["data_offsets"]
            left = end - begin
            if len(size) == 1:
                file.write(struct.pack("<H", bf16(1.0)) * (left // 2))
                continue
            start = (turn * 1000 + i) * 12_346 % PATTERN * 2
            piece = numbers[start:start + left]
            while left > 0:
                file.write(piece[:left])
                left -= len(piece)
                piece = numbers


def byte_characters() -> list:
    """The characters that stand for the 256 bytes in a byte-level vocabulary."""
    printable = set(range(0x21, 0x7f)) | set(range(0xa1, 0xad)) | set(range(0xae, 0x100))
    others = iter(range(0x100, 0x200))
    return [chr(b if b in printable else next(others)) for b in range(256)]


def synthetic_tokenizer() -> str:
    """As many tokens and merges as Qwen3 has, with its regex."""
    chance = random.Random(2)
    alphabet = byte_characters()
    vocab = {token: i for i, token in enumerate(alphabet)}
    parts, merges = alphabet[0x61:0x7b] + [alphabet[0x20]], []
    # Tokens of two characters, then of four, then of eight.
    for count in [700, 30_000, MERGES]:
        made = []
        while len(merges) < count:
            a, b = chance.choice(parts), chance.choice(parts)
            if a + b not in vocab:
                merges.append([a, b])
                vocab[a + b] = len(vocab)
                made.append(a + b)
        parts = made
    regex = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
             r"|\s*[\r\n]+|\s+(?!\S)|\s+")
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
    split = dict(type="Split", pattern=dict(Regex=regex), behavior="Isolated", invert=False)
    plain = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    added = [dict(id=len(vocab) + i, content=text, **plain)
             for i, text in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])]
    return json.dumps(dict(
        version="1.0", truncation=None, padding=None, added_tokens=added, normalizer=dict(type="NFC"),
        pre_tokenizer=dict(type="Sequence", pretokenizers=[split, level]), post_processor=level, decoder=level,
        model=dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix="", end_of_word_suffix="",
                   fuse_unk=False, byte_fallback=False, ignore_merges=False, vocab=vocab, merges=merges)),
        ensure_ascii=False, indent=2)


def checkpoint(folder: pathlib.Path, shape: dict, tokenizer: str, numbers) -> None:
    """Writes a checkpoint, unless there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", torch_dtype="bfloat16", head_dim=128,
        hidden_act="silu", attention_bias=False, rms_norm_eps=1e-6, rope_theta=1e6, max_position_embeddings=40960,
        use_sliding_window=False, eos_token_id=151_643, **shape)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "tokenizer.json").write_text(tokenizer)
    listing = folder / "model.safetensors.index.json"
    if listing.exists():
        return
    shards = tensors(shape)
    index = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        print(f"writing {folder / name}", file=sys.stderr)
        write_shard(folder / name, shard, numbers(), i)
        index |= {tensor: name for tensor, _ in shard}
    listing.write_text(json.dumps({"weight_map": index}))


def warm(folder: pathlib.Path) -> None:
    """Reads every file, so that all are in the page cache."""
    for path in folder.iterdir():
        with open(path, "rb", buffering=0) as file:
            while file.read(64 << 20):
                pass


def first_byte(binary: str, folder: pathlib.Path, cache: str, verbose: bool = False) -> tuple:
    """Seconds from the start to the first byte of text, and what was said on standard error."""
    command = [binary, "generate", "--model", str(folder), "--device", "cuda", "--temperature", "0",
               "--max-tokens", "16", "--ignore-eos", "--verbose" if verbose else "--quiet", PROMPT]
    environment = os.environ | {"CUDA_CACHE_PATH": cache}
    with tempfile.TemporaryFile() as errors:
        begun = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment)
        byte = process.stdout.read(1)
        seconds = time.perf_counter() - begun
        process.stdout.read()
        status = process.wait()
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    if status != 0 or not byte:
        sys.exit(f"{' '.join(command[:-1])} ended with {status}:\n{said}")
    return seconds, said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="target/release/warpdraft")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for the checkpoints")
    parser.add_argument("--tokenizer", type=pathlib.Path, help="a tokenizer.json, such as Qwen3's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--phases", action="store_true", help="show how long each part of one start takes")
    parser.add_argument("--out", type=pathlib.Path, help="file for the figures, as JSON")
    args = parser.parse_args()
    tokenizer = args.tokenizer.read_text() if args.tokenizer else synthetic_tokenizer()
    made = []

    def numbers() -> bytes:
        if not made:
            made.append(pattern())
        return made[0]

    figures = {}
    for shape in args.shapes:
        folder = args.work / shape
        checkpoint(folder, SHAPES[shape], tokenizer, numbers)
        warm(folder)
        cold, again = [], []
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory() as cache:
                cold.append(first_byte(args.binary, folder, cache)[0])
                again.append(first_byte(args.binary, folder, cache)[0])
                if args.phases and len(cold) == args.rounds:
                    print(f"{shape}, again:\n{first_byte(args.binary, folder, cache, verbose=True)[1]}")
        print(f"{shape}: cold {sorted(cold)}, again {sorted(again)}", file=sys.stderr)
        prefix = "start" if shape == "8b" else "start.small"
        separator = "." if shape == "8b" else "_"
        figures[f"{prefix}{separator}cold_s"] = round(statistics.median(cold), 3)
        figures[f"{prefix}{separator}warm_s"] = round(statistics.median(again), 3)
    print(json.dumps(figures, indent=2))
    if args.out:
        args.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
