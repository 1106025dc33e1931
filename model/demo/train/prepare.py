#!/usr/bin/env python3
"""Make the demo model's data and tokenizer.

Reads two folders:

  --library  the standard library's sources (a folder with core/, alloc/, std/...):
             Debian's package rust-web-src puts it at
             /usr/lib/rustlib/src/rust/library, rustup's component rust-src at
             <toolchain>/lib/rustlib/src/rust/library
  --docs     the Rust documentation as HTML (a folder with book/, reference/...):
             rustup's component rust-docs puts it at
             <toolchain>/share/doc/rust/html

and writes into --out:

  train.bin, valid.bin    token ids (uint16, little endian), documents parted by
                          <|endoftext|>
  heldout.jsonl           the held-out documents: {"path", "kind", "text"}
  stats.json              what was kept, per source

and into --model: tokenizer.json, tokenizer_config.json, config.json,
generation_config.json and heldout.txt (a small sample of the held-out text).

Which documents are held out (3 %) or used for validation (1 %) depends on the
hash of the document's path alone, and is decided before the tokenizer is trained.
"""

import argparse
import hashlib
import json
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
from bs4 import BeautifulSoup, Comment, NavigableString
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers, trainers

END, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THINK, THINK_END = "<think>", "</think>"

# The split that Qwen2 and Qwen3 use before byte-level BPE.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# vendor/ holds other projects' crates under their own licences.
CRATES = [
    "alloc", "alloctests", "backtrace", "compiler-builtins", "core", "coretests",
    "panic_abort", "panic_unwind", "portable-simd", "proc_macro", "std",
    "std_detect", "stdarch", "test", "unwind",
]
# embedded-book is left out: its prose is under CC-BY-SA, not MIT or Apache-2.0.
BOOKS = [
    "book", "cargo", "clippy", "edition-guide", "error_codes", "nomicon",
    "reference", "rust-by-example", "rustc", "rustdoc", "style-guide",
    "unstable-book",
]
# Older editions and translations kept beside the books, and whole-book copies.
SKIP_PARTS = {"first-edition", "second-edition", "2018-edition", "es", "ja", "ko", "zh"}
SKIP_NAMES = {"print.html", "toc.html", "404.html", "CHANGELOG.html"}


def digest(text: str) -> int:
    """A stable 64-bit hash."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def split_of(path: str) -> str:
    """Which split a document belongs to, by its path alone."""
    bucket = digest("split:" + path) % 1000
    return "heldout" if bucket < 30 else "valid" if bucket < 40 else "train"


# ---------------------------------------------------------------- HTML to Markdown

DROP_TAGS = {"script", "style", "svg", "button", "noscript", "nav", "iframe", "img"}
DROP_CLASSES = {"boring", "rule", "grammar-railroad", "grammar-toggle-railroad", "buttons"}
BLOCKS = {"p", "div", "ul", "ol", "pre", "table", "blockquote", "section", "figure",
          "dl", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "details", "figcaption"}


def dropped(node) -> bool:
    if isinstance(node, Comment):
        return True
    if isinstance(node, NavigableString):
        return False
    return node.name in DROP_TAGS or bool(DROP_CLASSES & set(node.get("class") or []))


def raw_text(node) -> str:
    """Text of a code block: everything visible, nothing added."""
    if isinstance(node, NavigableString):
        return "" if isinstance(node, Comment) else str(node)
    if dropped(node):
        return ""
    return "".join(raw_text(child) for child in node.children)


def inline(node) -> str:
    """Running text with Markdown's inline marks."""
    if dropped(node):
        return ""
    if isinstance(node, NavigableString):
        return str(node)
    if node.name == "br":
        return "\n"
    if node.name == "code":
        return "`" + raw_text(node) + "`"
    text = "".join(inline(child) for child in node.children)
    if node.name in ("em", "i") and text.strip():
        return f"*{text}*"
    if node.name in ("strong", "b") and text.strip():
        return f"**{text}**"
    return text


def tidy(text: str) -> str:
    return "\n".join(re.sub(r"[ \t]+", " ", line).strip() for line in text.strip().split("\n"))


def code_block(node) -> str:
    code = node.find("code")
    classes = (code.get("class") if code else None) or []
    language = next((c[9:] for c in classes if c.startswith("language-")), "")
    return f"```{language}\n{raw_text(node).strip(chr(10)).rstrip()}\n```"


def blocks(node) -> list[str]:
    """The Markdown blocks of a node's children."""
    out, run = [], []

    def flush():
        text = tidy("".join(run))
        run.clear()
        if text:
            out.append(text)

    for child in node.children:
        if dropped(child):
            continue
        name = getattr(child, "name", None)
        if name not in BLOCKS:
            run.append(inline(child))
            continue
        flush()
        if name[0] == "h" and name[1:].isdigit():
            title = tidy(inline(child)).replace("\n", " ")
            if title:
                out.append("#" * int(name[1]) + " " + title)
        elif name == "pre":
            out.append(code_block(child))
        elif name in ("ul", "ol"):
            items = []
            for number, item in enumerate(child.find_all("li", recursive=False), 1):
                mark = "- " if name == "ul" else f"{number}. "
                body = "\n\n".join(blocks(item))
                items.append(mark + body.replace("\n", "\n" + " " * len(mark)))
            # A list with paragraphs in its items is set loose, any other tight.
            loose = any("\n\n" in item for item in items)
            out.append(("\n\n" if loose else "\n").join(items))
        elif name == "table":
            rows = []
            for row in child.find_all("tr"):
                cells = [tidy(inline(c)).replace("\n", " ") for c in row.find_all(["td", "th"])]
                rows.append("| " + " | ".join(cells) + " |")
                if len(rows) == 1:
                    rows.append("|" + " --- |" * len(cells))
            out.append("\n".join(rows))
        elif name == "blockquote":
            out.append("\n".join(("> " + l).rstrip() for l in "\n\n".join(blocks(child)).split("\n")))
        elif name == "hr":
            out.append("---")
        else:
            out.extend(blocks(child))
    flush()
    return out


# The books' typographic quotes go back to the plain ones their sources have.
PLAIN = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "…": "...", "\u00a0": " ", "\u200b": None})


def html_to_text(html: str) -> str:
    main = BeautifulSoup(html, "lxml").find("main")
    if main is None:
        return ""
    text = "\n\n".join(block for block in blocks(main) if block.strip())
    return re.sub(r"[ \t]+\n", "\n", text.translate(PLAIN)).strip() + "\n"


# ----------------------------------------------------------------------- documents


def strip_header(text: str) -> str:
    """Drop a licence header: leading comment lines that speak of copyright."""
    text = text.replace("\r\n", "\n").lstrip("\ufeff\n")
    match = re.match(r"(?:(?://(?![/!]).*\n)+|/\*(?![*!])(?:.|\n)*?\*/\n*)\n*", text)
    if match and re.search(r"copyright|licen[cs]e|SPDX", match.group(0), re.I):
        text = text[match.end():]
    return text.strip("\n") + "\n"


def is_table(text: str) -> bool:
    """Generated tables: mostly digits and punctuation, or endless lines."""
    letters = sum(c.isalpha() for c in text)
    digits = sum(c.isdigit() for c in text)
    return digits > 0.5 * letters or len(text) / (text.count("\n") + 1) > 160


def library_documents(root: Path, file_cap: int, stdarch_cap: int):
    """(path, kind, text) for the library's sources and notes."""
    stdarch = []
    for crate in CRATES:
        for file in sorted((root / crate).rglob("*")):
            if file.suffix not in (".rs", ".md") or not file.is_file():
                continue
            path = file.relative_to(root).as_posix()
            if "/vendor/" in path or file.name.startswith(("LICENSE", "unicode_data")):
                continue
            text = strip_header(file.read_text(encoding="utf-8", errors="replace"))
            if len(text) < 200 or is_table(text) or "\ufffd" in text:
                continue
            kind = "code" if file.suffix == ".rs" else "prose"
            document = ("library/" + path, kind, text[: text.rfind("\n", 0, file_cap) + 1])
            if crate == "stdarch":
                stdarch.append(document)
            else:
                yield document
    # The intrinsics repeat one shape thousands of times: keep a slice of them.
    total = 0
    for path, kind, text in sorted(stdarch, key=lambda d: digest("stdarch:" + d[0])):
        text = text[: text.rfind("\n", 0, 40_000) + 1]
        if total + len(text) > stdarch_cap:
            break
        total += len(text)
        yield path, kind, text


def docs_documents(root: Path):
    """(path, kind, text) for the books' pages and the release notes."""
    for book in BOOKS:
        for file in sorted((root / book).rglob("*.html")):
            relative = file.relative_to(root)
            if SKIP_PARTS & set(relative.parts) or file.name in SKIP_NAMES:
                continue
            text = html_to_text(file.read_text(encoding="utf-8"))
            # Shorter pages are redirects and stubs.
            if len(text) >= 300:
                yield "docs/" + relative.as_posix(), "prose", text
    notes = (root / "releases.md").read_text(encoding="utf-8")
    for part in re.split(r"(?m)^(?=Version \d)", notes):
        # Link definitions, and links with only an address, are no prose.
        part = re.sub(r"(?m)^\[.*?\]: .*\n", "", part)
        part = re.sub(r"\]\(https?://[^)\s]*\)", "]", part).strip("\n") + "\n"
        if len(part) >= 300:
            yield "docs/releases.md#" + part.split("\n", 1)[0], "prose", part


# ---------------------------------------------------------------------------- chats


def chat(turns: list[tuple[str, str]]) -> str:
    """Turns in the form the chat template gives. The answers carry an empty
    thought, so that prompts with and without thinking lead to the same answer."""
    out = []
    for role, content in turns:
        if role == "assistant":
            content = f"{THINK}\n\n{THINK_END}\n\n{content}"
        out.append(f"{IM_START}{role}\n{content}{IM_END}\n")
    return "".join(out)


# Headings that say nothing without their page.
GENERIC = {"example", "examples", "summary", "details", "description", "syntax", "overview",
           "requirements", "testing", "configuration", "options", "see also", "see also:",
           "erroneous code example", "documentation", "usage", "rationale", "background"}


def pick(options: list[str], key: str) -> str:
    return options[digest("pick:" + key) % len(options)]


def chats_of(path: str, kind: str, text: str):
    """Question-and-answer forms of one training document."""

    def ask(question: str, answer: str) -> str:
        turns = [("user", question), ("assistant", answer.strip())]
        if digest("system:" + question) % 5 == 0:
            turns.insert(0, ("system", "You are a helpful assistant."))
        return chat(turns)

    if path.startswith("docs/error_codes/E"):
        code, body = Path(path).stem, text.split("\n", 1)[1]
        if len(body) < 3000:
            yield ask(pick([f"What does error {code} mean?", f"Explain error code {code}.",
                            f"How do I fix error[{code}]?"], path), body)
    elif path.startswith("docs/") and "releases.md" not in path:
        for part in re.split(r"(?m)^(?=#{1,4} )", re.sub(r"(?m)^# ", "## ", text))[1:]:
            title, _, body = part.partition("\n")
            title = title.lstrip("# ").strip()
            # Headings inside code blocks are comments, not titles.
            if not 300 < len(body) < 2500 or body.count("```") % 2:
                continue
            if len(title) < 4 or title.lower() in GENERIC:
                continue
            if digest("section:" + path + title) % 2:
                continue
            yield ask(pick([f"Explain {title}.", f"Tell me about {title} in Rust.",
                            f"{title}?", f"What should I know about: {title}"], path + title), body)
    elif kind == "code" and re.match(r"library/(core|alloc|std)/", path):
        item = re.compile(r"((?:^ *///.*\n){2,60})((?:^ *#\[.*\n)*)^( *)(pub (?:const |unsafe )*fn (\w+).*\n)((?:.*\n){1,30}?)\3\}\n", re.M)
        for match in item.finditer(text):
            comment, _, indent, head, name, body = match.groups()
            if digest("item:" + path + name) % 3:
                continue
            doc = "\n".join(re.sub(r"^ *///? ?", "", line) for line in comment.split("\n")).strip()
            cut = len(indent)
            code = "\n".join(line[cut:] for line in (indent + head.lstrip() + body + indent + "}").split("\n"))
            if digest("form:" + path + name) % 2:
                yield ask(pick([f"Write a Rust function `{name}`.",
                                f"Complete this Rust code:\n```rust\n{code.split(chr(10), 1)[0]}\n```"],
                               path + name), f"```rust\n{code}\n```")
            else:
                yield ask(pick([f"What does `{name}` do?", f"Document the function `{name}`."],
                               path + name), doc)


# ------------------------------------------------------------------------ tokenizer


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with Qwen's split; the special tokens take the last ids."""
    specials = [AddedToken(END, special=True), AddedToken(IM_START, special=True),
                AddedToken(IM_END, special=True)]
    marks = [AddedToken(THINK, special=False, normalized=False),
             AddedToken(THINK_END, special=False, normalized=False)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(specials) - len(marks),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(specials)
    tokenizer.add_tokens(marks)
    assert tokenizer.get_vocab_size() == vocab_size
    return tokenizer


CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' and '</think>' in message.content %}
        {{- '<|im_start|>assistant\\n' + message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_model_files(folder: Path, tokenizer: Tokenizer, shape: dict) -> None:
    """Everything of the model folder but the weights."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    ids = {token: tokenizer.token_to_id(token) for token in (END, IM_START, IM_END, THINK, THINK_END)}
    write_json(folder / "tokenizer_config.json", {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(i): {"content": token, "lstrip": False, "normalized": False, "rstrip": False,
                     "single_word": False, "special": token not in (THINK, THINK_END)}
            for token, i in ids.items()},
        "additional_special_tokens": [IM_START, IM_END],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "errors": "replace",
        "model_max_length": shape["max_position_embeddings"],
        "pad_token": END,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2TokenizerFast",
        "unk_token": None,
    })
    write_json(folder / "config.json", {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": ids[END],
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_window_layers": shape["num_hidden_layers"],
        "model_type": "qwen3",
        "pad_token_id": ids[END],
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        **shape,
    })
    write_json(folder / "generation_config.json", {
        "do_sample": True,
        "eos_token_id": [ids[END], ids[IM_END]],
        "pad_token_id": ids[END],
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.9,
    })


def sample_of(heldout, budget: int) -> str:
    """A small sample of the held-out text, half code and half prose, whole
    documents only; `=== path` lines part them. What is handed on here is under
    MIT OR Apache-2.0 alone, so compiler-builtins (with parts from elsewhere) is not."""
    parts = []
    for kind in ("code", "prose"):
        room = budget // 2
        for path, k, text in sorted(heldout, key=lambda d: digest("sample:" + d[0])):
            size = len(text.encode())
            if path.startswith("library/compiler-builtins/"):
                continue
            if k == kind and 1500 < size <= min(room, 25_000):
                room -= size
                parts.append(f"=== {path}\n{text}")
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, required=True, help="the standard library's sources")
    parser.add_argument("--docs", type=Path, required=True, help="the Rust documentation as HTML")
    parser.add_argument("--out", type=Path, required=True, help="where the data goes")
    parser.add_argument("--model", type=Path, required=True, help="the model folder")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--intermediate", type=int, default=896)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--file-cap", type=int, default=150_000, help="longest document, in characters")
    parser.add_argument("--stdarch-cap", type=int, default=1_500_000, help="share of stdarch, in characters")
    parser.add_argument("--sample", type=int, default=140_000, help="bytes of heldout.txt")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.model.mkdir(parents=True, exist_ok=True)

    seen, splits, stats = set(), defaultdict(list), defaultdict(lambda: [0, 0])
    documents = [*library_documents(args.library, args.file_cap, args.stdarch_cap),
                 *docs_documents(args.docs)]
    for path, kind, text in documents:
        key = hashlib.sha256(" ".join(text.split()).encode()).digest()
        if key in seen:
            continue
        seen.add(key)
        split = split_of(path)
        splits[split].append((path, kind, text))
        for name in (f"{split}/{kind}", split, "/".join(path.split("/")[:2]).split("#")[0]):
            stats[name][0] += 1
            stats[name][1] += len(text.encode())

    chats = [c for path, kind, text in splits["train"] for c in chats_of(path, kind, text)]
    stats["chats"] = [len(chats), sum(len(c.encode()) for c in chats)]

    tokenizer = train_tokenizer([text for _, _, text in splits["train"]], args.vocab_size)
    write_model_files(args.model, tokenizer, {
        "head_dim": 128,
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "max_position_embeddings": 4096,
        "num_attention_heads": args.heads,
        "num_hidden_layers": args.layers,
        "num_key_value_heads": args.kv_heads,
        "vocab_size": args.vocab_size,
    })

    end = tokenizer.token_to_id(END)
    tokens = {}
    for split, texts in (("train", [t for _, _, t in splits["train"]] + chats),
                         ("valid", [t for _, _, t in splits["valid"]])):
        ids = []
        for encoding in tokenizer.encode_batch(texts):
            ids += encoding.ids + [end]
        np.array(ids, dtype="<u2").tofile(args.out / f"{split}.bin")
        tokens[split] = len(ids)
    # Bits per byte needs the bytes behind the validation tokens.
    valid_bytes = sum(len(t.encode()) for _, _, t in splits["valid"])

    with open(args.out / "heldout.jsonl", "w", encoding="utf-8") as file:
        for path, kind, text in splits["heldout"]:
            file.write(json.dumps({"path": path, "kind": kind, "text": text}, ensure_ascii=False) + "\n")
    (args.model / "heldout.txt").write_text(sample_of(splits["heldout"], args.sample), encoding="utf-8")
    write_json(args.out / "stats.json", {
        "tokens": tokens, "valid_bytes": valid_bytes, "end": end,
        "documents_and_bytes": {k: stats[k] for k in sorted(stats)}})
    print((args.out / "stats.json").read_text())


if __name__ == "__main__":
    main()
