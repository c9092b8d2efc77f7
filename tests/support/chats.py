"""Small tokenizers with the templates that people use, chats, and files of them."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hetpipe.files.messages import InputError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{{ '\n' }}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% if m.role == 'user' %}[INST] {{ m.content }}"
    " [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
THINKING = (  # leaves out what was thought before the last answer
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = [
    "<unk>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|endoftext|>",
]
WORDS = (
    "the quick brown fox jumps over the lazy dog and what does it see there: a river, a hill and 12 ducks. user assistant system "
    "model [INST] [/INST] Hello! How are you? I am well, thank you.\n\nYes. No. Übermut 🦆"
)


def tokenizer(
    folder: Path,
    template: str | None = CHATML,
    special: Sequence[str | AddedToken] = SPECIAL,
    plain: Sequence[str] = (),
    adds_bos: bool = False,
    **options: Any,
) -> str:
    """A byte-level tokenizer in a folder, by its path. `special` tokens are added, and `plain` ones that are not special;
    `adds_bos` puts bos_token before a text."""
    options = {"bos_token": "<s>", "eos_token": "</s>", **options}
    options = {key: value for key, value in options.items() if value is not None}
    named = [each.content if isinstance(each, AddedToken) else each for each in special]
    others = [each for each, name in zip(special, named, strict=True) if name not in options.values()]
    roles = [value for key, value in options.items() if key.endswith("_token") and value not in named]
    words, merges = _trained()
    numbers = {token: number for number, token in enumerate(dict.fromkeys([*named, *roles, *plain, *words]))}
    own = Tokenizer(models.BPE(numbers, merges))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    own.add_special_tokens([*special, *roles])
    own.add_tokens(list(plain))
    if adds_bos:
        bos = options["bos_token"]
        own.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, own.token_to_id(bos))])
    fast = PreTrainedTokenizerFast(tokenizer_object=own, additional_special_tokens=others, **options)
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(folder)
    return str(folder)


@functools.cache
def _trained() -> tuple[list[str], list[tuple[str, str]]]:
    """The tokens of the words, and of which two each is made."""
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    own.train_from_iterator([WORDS] * 3, trainers.BpeTrainer(vocab_size=385, initial_alphabet=alphabet, show_progress=False))
    model = json.loads(own.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [(one, other) for one, other in model["merges"]]


def chat_of(*turns: str, **more: Any) -> dict[str, Any]:
    """A record: what the user and the assistant say in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)], **more}


def lines(file: Path, records: Sequence[Any]) -> str:
    """A file with a line for each record (a text is a line as it is), by its path."""
    file.write_text("".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records))
    return str(file)


def refusal(function: Any, **arguments: Any) -> str:
    """What the InputError says that a function raises."""
    with pytest.raises(InputError) as caught:
        function(**arguments)
    return str(caught.value)
