"""Templates of chats that write answers in ways of their own."""

from __future__ import annotations

from typing import Any

from tests.support.chats import chat_of

SPECIAL = ["<|user|>", "<|assistant|>", "<|end|>", "<|im_start|>", "<|im_end|>", "</s>"]
GLM = (  # a turn ends with the token of the next role
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
BARE = (  # no token ends anything
    "{% for m in messages %}{{ 'Q' if m.role == 'user' else 'A' }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}A: {% endif %}"
)
SWITCHED = (  # begins each answer with a thought, unless it is told otherwise
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>{% if m.reasoning_content %}"
    "{{ '\n' + m.reasoning_content + '\n' }}{% endif %}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>"
    "{{ '</think>' if enable_thinking is defined and not enable_thinking else '\n' }}{% endif %}"
)
OPENED = (  # begins each answer with a thought, and cannot be told
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
PARTS = (  # takes contents as lists of parts, and writes nothing of texts
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLS = (  # writes calls, of arguments that are a mapping, and tools
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }}\n{% endfor %}{% endif %}{% for m in messages %}<|im_start|>"
    "{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LOST: list[tuple[str, str, Any, str]] = [
    ("a system", "{% for m in messages if m.role != 'system' %}", {"system": "Ho", **chat_of("Hi", "Yes.")}, "turn 1 (system)"),
    (
        "a system that stands in the question",
        "{% for m in messages if m.role != 'system' %}",
        {"system": "Hi", **chat_of("Hi you", "Yes.")},
        "turn 1 (system)",
    ),
    (
        "tool",
        "{% for m in messages if m.role != 'tool' %}",
        {"messages": [*chat_of("Hi", "Yes.")["messages"], {"role": "tool", "content": "Hi"}, *chat_of("Hi", "Yes.")["messages"]]},
        "turn 3 (tool)",
    ),
    ("an earlier question", "{% for m in messages[-2:] %}", chat_of("Hi", "Yes.", "Hi", "Yes."), "turn 1 (user)"),
]
ALWAYS = {  # templates that do not ask whether another answer is to be begun
    "llama3": (
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}<|user|>\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
            "{{ '<|im_start|>assistant<|user|>\n\n' }}"
        ),
        (
            "<|im_start|>user<|user|>\n\nHi<|im_end|><|im_start|>assistant<|user|>\n\n«Yes.<|im_end|>»<|im_start|>user<|user|>\n\n"
            "No?<|im_end|><|im_start|>assistant<|user|>\n\n«No.<|im_end|>»"
        ),
    ),
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}",
        (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Yes.<|im_end|>»\n<|im_start|>user\nNo?<|im_end|>\n"
            "<|im_start|>assistant\n«No.<|im_end|>»"
        ),
    ),
}
