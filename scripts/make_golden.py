#!/usr/bin/env python3
"""Makes the golden checkpoints of tests/golden with Hugging Face transformers, the independent implementation.

    python3 -m venv .venv && .venv/bin/pip install torch transformers numpy
    .venv/bin/python scripts/make_golden.py            all of them
    .venv/bin/python scripts/make_golden.py CASE…      some cases alone

Each case is a small random model of a family with its tokenizer, and beside it
    golden.json   prompt ids, shape of the logits, and the versions that made them; texts with the ids that transformers
                  gives them, and a conversation with its prompt and that one's ids
    logits.f32    logits of every prompt position, [rows, vocab], little-endian f32, computed in f32 from the stored weights
Also writes tests/golden/chat.json: conversations, and the prompts that transformers' apply_chat_template makes of them.

    .venv/bin/python scripts/make_golden.py TEMPLATE OUT

writes the prompts of another template alone; the tests compare them if the variable WARPDRAFT_CHAT_GOLDEN names OUT.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM,
                          Qwen3Config, Qwen3ForCausalLM)

ROOT = Path(__file__).resolve().parent.parent / "tests" / "golden"

PLAIN = {"rope_theta": 1e6, "rope_type": "default"}
# With so few positions to begin with, most pairs are slowed down, and some in part.
YARN = {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

# With the same few positions, pairs of all three kinds: as they are, slowed down, and between.
LLAMA3 = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}

FAMILIES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, dict(head_dim=128)),
    # The others' heads are the hidden size over their number, unless the config says more.
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, dict(head_dim=128)),
    "llama": (LlamaConfig, LlamaForCausalLM, dict(head_dim=128)),
}

# name: (sizes, stored dtype, prompt length, shards, rotation, family if it is not Qwen3)
CASES = {
    "tied_bf16": (
        dict(vocab_size=288, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
             num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True),
        torch.bfloat16, 13, 1, PLAIN,
    ),
    "separate_f16_sharded": (
        dict(vocab_size=272, hidden_size=128, intermediate_size=256, num_hidden_layers=1,
             num_attention_heads=4, num_key_value_heads=1, tie_word_embeddings=False),
        torch.float16, 7, 3, PLAIN,
    ),
    "tied_f32": (
        dict(vocab_size=272, hidden_size=128, intermediate_size=128, num_hidden_layers=1,
             num_attention_heads=1, num_key_value_heads=1, tie_word_embeddings=True),
        torch.float32, 5, 1, PLAIN,
    ),
    "yarn_bf16": (
        dict(vocab_size=272, hidden_size=128, intermediate_size=128, num_hidden_layers=1,
             num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True),
        torch.bfloat16, 40, 1, YARN,
    ),
    # Two layers: each has biases of its own.
    "tied_qwen2_bf16": (
        dict(vocab_size=272, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
             num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True),
        torch.bfloat16, 11, 1, PLAIN, "qwen2",
    ),
    "separate_llama_bf16": (
        dict(vocab_size=272, hidden_size=128, intermediate_size=256, num_hidden_layers=1,
             num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False),
        torch.bfloat16, 40, 1, LLAMA3, "llama",
    ),
}

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
THINK = ["<think>", "</think>"]


LLAMA_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
# In the manner of Llama 3's: the template writes the token that begins a text, which the tokenizer adds to other texts.
LLAMA_TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{- message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)


def byte_level_tokenizer(special: list[str] = SPECIAL, ignore_merges: bool = False) -> Tokenizer:
    """A byte-level BPE of 256 bytes, a few merges, and a family's control tokens: 270 tokens, some split characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ġ", "a"), ("e", "r"), ("Ã", "©"), ("ð", "Ł"), ("â", "Ĥ")]
    for a, b in merges:
        vocab[a + b] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in special])
    if special is SPECIAL:
        tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in THINK])
    return tokenizer


def llama_tokenizer() -> Tokenizer:
    """The same as Llama 3 has it: its control tokens, one of which begins every text, and its kind of pre-tokenizer."""
    tokenizer = byte_level_tokenizer(LLAMA_SPECIAL, ignore_merges=True)
    words = Regex(r"\p{N}{1,3}| ?\p{L}+|[^\p{L}\p{N}]")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    begin = LLAMA_SPECIAL[0]
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single=f"{begin} $A", pair=f"{begin} $A {begin} $B",
                                      special_tokens=[(begin, tokenizer.token_to_id(begin))])])
    return tokenizer


def make_case(name: str, sizes: dict, dtype: torch.dtype, length: int, shards: int, rope: dict,
              family: str = "qwen3") -> None:
    torch.manual_seed(len(name))
    out = ROOT / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)

    config_class, model_class, own = FAMILIES[family]
    is_llama = family == "llama"
    tokenizer = llama_tokenizer() if is_llama else byte_level_tokenizer()
    ends = ["<|eot_id|>", "<|end_of_text|>"] if is_llama else ["<|im_end|>", "<|endoftext|>"]
    ids = [tokenizer.token_to_id(t) for t in ends]
    config = config_class(**sizes, **own, max_position_embeddings=256, rms_norm_eps=1e-6, rope_parameters=dict(rope),
                          eos_token_id=ids[1], attn_implementation="eager")
    model = model_class(config)
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            if parameter_name.endswith("norm.weight"):
                p.copy_(1 + 0.2 * torch.randn_like(p))
            elif parameter_name.endswith("bias"):
                p.copy_(0.5 * torch.randn_like(p))
            elif "embed_tokens" in parameter_name:
                p.copy_(0.3 * torch.randn_like(p))
            else:
                # Keeps activations of order one, so that every operator shows in the logits.
                p.copy_(torch.randn_like(p) * p.shape[-1] ** -0.5)
    model = model.to(dtype)
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(out, max_shard_size=total // shards + 1024 if shards > 1 else "1GB")
    found = list(out.glob("*.safetensors"))
    assert (len(found) > 1) == (shards > 1), f"{name}: {len(found)} shards"
    for shard in found:
        shard.chmod(0o644)

    # In f32 from the stored weights.
    reference = model_class.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    prompt = torch.randint(0, tokenizer.get_vocab_size(), (length,)).tolist()
    with torch.no_grad():
        logits = reference(torch.tensor([prompt])).logits[0].numpy().astype("<f4")
    assert logits.shape == (length, sizes["vocab_size"]) and np.isfinite(logits).all()

    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    write_json(out / "generation_config.json", {"eos_token_id": ids,
                                                "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95})
    settings = {"eos_token": ends[0], "pad_token": ends[1]}
    if is_llama:
        settings |= {"bos_token": LLAMA_SPECIAL[0], "chat_template": LLAMA_TEMPLATE}
    write_json(out / "tokenizer_config.json", settings)
    (out / "logits.f32").write_bytes(logits.tobytes())
    write_json(out / "golden.json", {"prompt": prompt, "rows": length, "vocab": sizes["vocab_size"],
                                     "transformers": transformers.__version__, "torch": torch.__version__.split("+")[0],
                                     **texts_of(tokenizer, settings)})
    print(f"{name}: {sum(f.stat().st_size for f in out.iterdir())} bytes, logits within ±{np.abs(logits).max():.2f}")


def texts_of(tokenizer: Tokenizer, settings: dict) -> dict:
    """Texts with their ids, and a conversation with its prompt and that one's ids, if there is a template."""
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)
    texts = ("the sea, 1234 é🦀", "", f"a{settings['eos_token']}b")
    found = {"texts": [[text, fast(text)["input_ids"]] for text in texts]}
    if "chat_template" in settings:
        conversation = said(("system", " Be brief. "), ("user", "Hello the 日本"))
        text = fast.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        ids = fast.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        found["chat"] = {"messages": conversation, "text": text, "ids": ids}
    return found


# Our own template, with every construct that Qwen3's uses.
TEMPLATE = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- if messages[0]['content'] == 'refuse' %}
    {{- raise_exception('This conversation is refused.') }}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string and not (message.content.startswith('<tool>') and message.content.endswith('</tool>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or (not loop.last and reasoning)) %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\n' }}
                {%- endif %}
                {%- if call.function %}
                    {%- set call = call.function %}
                {%- endif %}
                {{- '<tool_call>' + call.name + ' ' }}
                {{- call.arguments if call.arguments is string else call.arguments | tojson }}
                {{- '</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool>\n' + content + '\n</tool>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
{#- A comment, and the kinds of line that trimming is about. #}
{% if messages|length > 4 %}
    {{ messages[-1] | tojson }}
    {% set parts = messages[0].content.upper().title().replace('A', 'b') %}
  {{ parts }} {{ eos_token }}
{% endif %}
"""

def said(*messages: tuple[str, str]) -> list[dict]:
    return [{"role": role, "content": content} for role, content in messages]


def call(name: str, arguments, number: int = 0) -> dict:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place: \"now\", <&>'é\n\t\u0001\u007f",
        "strict": True,
        "parameters": {
            "type": "object",
            # Not in alphabetical order, which must be kept.
            "properties": {"place": {"type": "string"}, "days": {"type": "integer", "minimum": -1, "maximum": 1e16},
                           "exact": {"enum": [0.1, 1.0, 1e-5, 1.5e300, 123456789012345680.0, True, None]}},
            "required": ["place"],
            "additionalProperties": {},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {}}}

# Conversations, each with the tools that the model is told of.
CONVERSATIONS = [
    (said(("user", "Hello")), None),
    (said(("system", "Be brief."), ("user", "Héllo \"wörld\" <&>'\n\n  日本 🦀")), None),
    (said(("user", "1+1?"), ("assistant", "<think>\nadd\n</think>\n\n2"), ("user", "And twice that?")), None),
    (said(("user", "1+1?"), ("assistant", "<think>\n\nadd\n\n</think>\n\n2")), None),
    (said(("system", "a banana"), ("user", "x"), ("assistant", "y"), ("tool", "one"), ("tool", "two"),
          ("user", "<tool>z</tool>")), None),
    (said(("user", "x"), ("system", "late"), ("user", "say {{ 'hi' }} {% raw %}")), None),
    (said(("user", "How is it outside?")), [WEATHER, CLOCK]),
    (said(("system", "Be brief."), ("user", "How is it outside?")), [CLOCK]),
    # As OpenAI's clients send them.
    ([{"role": "user", "content": "How is it in Ulm?", "name": "Ada"},
      {"role": "assistant", "content": None, "tool_calls": [call("weather", '{"place":"Ulm", "days" : 2}')]},
      {"role": "tool", "tool_call_id": "call_0", "content": '{"sky": "clear"}'}], [WEATHER]),
    ([{"role": "user", "content": "How is it, and how late?"},
      {"role": "assistant", "content": "I look.", "reasoning_content": "Both tools.",
       "tool_calls": [call("weather", {"place": "Ulm", "days": 1.0, "a": [1, {"b": "é"}]}), call("clock", "{}", 1)]},
      {"role": "tool", "tool_call_id": "call_0", "content": "clear"},
      {"role": "tool", "tool_call_id": "call_1", "content": "late"},
      {"role": "assistant", "content": "Clear and late.", "reasoning_content": "\nSay so.\n"},
      {"role": "user", "content": "Thanks"}], [WEATHER, CLOCK]),
    ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "reasoning_content": "z"}], None),
    ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call("clock", {})]}], None),
]


def make_chat(template: str, out: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), eos_token="<|im_end|>")
    cases = []
    for messages, tools in CONVERSATIONS:
        for thinking in (True, False):
            for generate in (True, False):
                text = tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False,
                                                     enable_thinking=thinking, add_generation_prompt=generate)
                cases.append({"messages": messages, "tools": tools or [], "enable_thinking": thinking,
                              "add_generation_prompt": generate, "text": text})
    write_json(out, {"template": template, "eos_token": "<|im_end|>", "cases": cases,
                     "transformers": transformers.__version__})
    print(f"{out.name}: {len(cases)} prompts")


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=None if "prompt" in value else 1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    chosen = sys.argv[1:]
    if chosen and all(name in CASES for name in chosen):
        for case in chosen:
            make_case(case, *CASES[case])
        sys.exit()
    if len(sys.argv) == 3:
        make_chat(Path(sys.argv[1]).read_text(encoding="utf-8"), Path(sys.argv[2]))
        sys.exit()
    ROOT.mkdir(parents=True, exist_ok=True)
    for case, settings in CASES.items():
        make_case(case, *settings)
    make_chat(TEMPLATE, ROOT / "chat.json")
