#!/usr/bin/env python3
"""Makes tests/golden/eagle3: what EAGLE-3 heads compute, in numpy and f32, from the published definition.

    python3 -m venv .venv && .venv/bin/pip install numpy
    .venv/bin/python scripts/make_golden_eagle.py

The definition is the original's (github.com/SafeAILab/EAGLE, `Model.forward` and `topK_genrate` of
eagle/model/cnets.py), with the settings of github.com/vllm-project/speculators: no code of theirs is here, and torch is
not needed. The model that is drafted for is the golden checkpoint tied_bf16, computed here once more as Qwen3 is, for
its hidden states. A head's weights are pseudo-random numbers that the tests make in the same way
(`integration_tests::eagle`), so that no file holds them.

    cases.json    the prompt; of each case its name and the tokens that it drafts after the prompt
    states.f32    hidden states of the model, [cases, prompt, 3, hidden], little-endian f32
    logits.f32    logits of the head, [cases, prompt - 1 + drafts, draft_vocab]: of each row of the prompt and of each
                  draft's
"""

import json
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent / "tests" / "golden"
MODEL = ROOT / "tied_bf16"
F = np.float32

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, DRAFT_VOCAB = 288, 128, 128, 2, 1, 128, 96
THETA, EPS = 5e5, 1e-6
PROMPT = [(i * 37 + 5) % 250 for i in range(12)]
DRAFTS = 3

# name: (after how many layers hidden states are taken, whether the residual stream begins with the normed hidden state,
#        whether the head has an embedding of its own, seed)
CASES = {
    "original": ([1, 2, 2], False, False, 1),
    "speculators": ([0, 1, 2], True, True, 2),
}


def bf16(x: np.ndarray) -> np.ndarray:
    """The nearest bf16 to each, ties to even."""
    bits = x.astype(F).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(F)


def numbers(seed: int, tensor: int, shape: tuple[int, ...], mean: float, spread: float) -> np.ndarray:
    """Pseudo-random bf16 numbers from `mean - spread` up to `mean + spread`: hashes of their places."""
    h = np.arange(int(np.prod(shape)), dtype=np.uint32) * np.uint32(0x9E3779B9)
    h += np.uint32((seed * 0x85EBCA6B + tensor * 0xC2B2AE35) & 0xFFFFFFFF)
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x7FEB352D)
    h ^= h >> np.uint32(15)
    h *= np.uint32(0x846CA68B)
    h ^= h >> np.uint32(16)
    unit = (h >> np.uint32(8)).astype(F) / F(1 << 23) - F(1)
    return bf16(F(mean) + F(spread) * unit).reshape(shape)


def head_weights(seed: int, own_embedding: bool) -> dict[str, np.ndarray]:
    """The weights of a head, by the names of the original."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = [
        ("fc", (HIDDEN, 3 * HIDDEN)), ("midlayer.self_attn.q_proj", (q, 2 * HIDDEN)),
        ("midlayer.self_attn.k_proj", (kv, 2 * HIDDEN)), ("midlayer.self_attn.v_proj", (kv, 2 * HIDDEN)),
        ("midlayer.self_attn.o_proj", (HIDDEN, q)), ("midlayer.mlp.gate_proj", (INNER, HIDDEN)),
        ("midlayer.mlp.up_proj", (INNER, HIDDEN)), ("midlayer.mlp.down_proj", (HIDDEN, INNER)),
        ("lm_head", (DRAFT_VOCAB, HIDDEN)), ("midlayer.input_layernorm", (HIDDEN,)),
        ("midlayer.hidden_norm", (HIDDEN,)), ("midlayer.post_attention_layernorm", (HIDDEN,)), ("norm", (HIDDEN,)),
        ("embed_tokens", (VOCAB, HIDDEN)),
    ]
    # Matrices keep activations of order one.
    spread = lambda shape: (3 / shape[-1]) ** 0.5
    found = {name: numbers(seed, i, shape, *((1, 0.3) if len(shape) == 1 else (0, spread(shape))))
             for i, (name, shape) in enumerate(shapes)}
    if not own_embedding:
        del found["embed_tokens"]
    return found


def stored(folder: Path) -> dict[str, np.ndarray]:
    """The bf16 tensors of a safetensors file, widened."""
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + length])
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["dtype"] == "BF16", name
            start, end = (8 + length + at for at in entry["data_offsets"])
            words = np.frombuffer(data[start:end], "<u2").astype(np.uint32) << np.uint32(16)
            found[name] = words.view(F).reshape(entry["shape"])
    return found


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """RMS norm over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True, dtype=F) + F(EPS)) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def rotate(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """The rotary embedding of heads, [rows, heads, head_dim]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = (f(angles).astype(F)[:, None, :] for f in (np.cos, np.sin))
    low, high = x[..., :half], x[..., half:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention of the last rows of a text, [rows, heads, head_dim], over all of it."""
    rows, heads, dim = q.shape
    k, v = (np.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / F(dim ** 0.5)
    hidden = np.arange(len(k))[None, :] > np.arange(len(k) - rows, len(k))[:, None]
    scores = np.where(hidden[None], F(-np.inf), scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v).reshape(rows, heads * dim)


def residual_streams(tokens: list[int]) -> list[np.ndarray]:
    """Qwen3's residual stream of a text after 0, 1, … layers, each [tokens, hidden]."""
    config = json.loads((MODEL / "config.json").read_text())
    w = stored(MODEL)
    heads = lambda x: x.reshape(len(tokens), -1, config["head_dim"])
    positions, theta = np.arange(len(tokens)), config["rope_parameters"]["rope_theta"]
    streams = [w["model.embed_tokens.weight"][tokens]]
    for i in range(config["num_hidden_layers"]):
        of = lambda name: w[f"model.layers.{i}.{name}.weight"]
        x = streams[-1]
        normed = norm(x, of("input_layernorm"))
        q, k, v = (heads(normed @ of(f"self_attn.{name}_proj").T) for name in "qkv")
        q, k = (rotate(norm(y, of(f"self_attn.{name}_norm")), positions, theta) for y, name in ((q, "q"), (k, "k")))
        x = x + attention(q, k, v) @ of("self_attn.o_proj").T
        normed = norm(x, of("post_attention_layernorm"))
        activation = silu(normed @ of("mlp.gate_proj").T) * (normed @ of("mlp.up_proj").T)
        streams.append(x + activation @ of("mlp.down_proj").T)
    return streams


class Head:
    """A head with the keys and values of the rows that it has run."""

    def __init__(self, weights: dict[str, np.ndarray], embedding: np.ndarray, norm_before_residual: bool):
        self.w, self.embedding, self.norm_before_residual = weights, embedding, norm_before_residual
        self.keys = np.zeros((0, KV_HEADS, HEAD_DIM), F)
        self.values = np.zeros((0, KV_HEADS, HEAD_DIM), F)

    def run(self, tokens: list[int], hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Runs rows after those before: of each the second token and the hidden state, [rows, hidden]; gives the
        head's own hidden states, [rows, hidden], and logits, [rows, draft_vocab]."""
        of = lambda name: self.w[f"midlayer.{name}"]
        first = len(self.keys)
        positions = np.arange(first, first + len(tokens))
        heads = lambda x: x.reshape(len(tokens), -1, HEAD_DIM)
        normed = norm(hidden, of("hidden_norm"))
        pairs = np.concatenate([norm(self.embedding[tokens], of("input_layernorm")), normed], axis=-1)
        q, k, v = (heads(pairs @ of(f"self_attn.{name}_proj").T) for name in "qkv")
        q, k = (rotate(x, positions, THETA) for x in (q, k))
        self.keys, self.values = np.concatenate([self.keys, k]), np.concatenate([self.values, v])
        x = normed if self.norm_before_residual else hidden
        x = x + attention(q, self.keys, self.values) @ of("self_attn.o_proj").T
        normed = norm(x, of("post_attention_layernorm"))
        activation = silu(normed @ of("mlp.gate_proj").T) * (normed @ of("mlp.up_proj").T)
        x = x + activation @ of("mlp.down_proj").T
        return x, norm(x, self.w["norm"]) @ self.w["lm_head"].T


def main() -> None:
    out = ROOT / "eagle3"
    out.mkdir(exist_ok=True)
    streams = residual_streams(PROMPT)
    all_states, all_logits, cases = [], [], []
    for name, (taps, norm_before_residual, own_embedding, seed) in CASES.items():
        weights = head_weights(seed, own_embedding)
        embedding = weights["embed_tokens"] if own_embedding else stored(MODEL)["model.embed_tokens.weight"]
        states = np.stack([streams[tap] for tap in taps], axis=1)
        head = Head(weights, embedding, norm_before_residual)
        # Each token's hidden states meet the token after it.
        own, logits = head.run(PROMPT[1:], states[:-1].reshape(len(PROMPT) - 1, -1) @ weights["fc"].T)
        rows, drafts = [logits], []
        for _ in range(DRAFTS):
            # Of every three tokens the head knows the first.
            drafts.append(3 * int(rows[-1][-1].argmax()))
            own, logits = head.run(drafts[-1:], own[-1:])
            rows.append(logits)
        all_states.append(states)
        all_logits.append(np.concatenate(rows))
        cases.append({"name": name, "drafts": drafts})
        print(f"{name}: drafts {drafts}, logits within ±{np.abs(all_logits[-1]).max():.2f}")
    (out / "states.f32").write_bytes(np.stack(all_states).astype("<f4").tobytes())
    (out / "logits.f32").write_bytes(np.stack(all_logits).astype("<f4").tobytes())
    (out / "cases.json").write_text(json.dumps({"prompt": PROMPT, "cases": cases, "numpy": np.__version__}) + "\n")


if __name__ == "__main__":
    main()
