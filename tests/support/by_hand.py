"""Chats in templates, in pieces by hand: which of them are learned."""

from __future__ import annotations

from typing import Any

from tests.support import chats

TALK = ("What is 🦆?", "A duck, Übermut!", "And then?", " Yes.\n\nNo. ")
Segments = list[tuple[str, bool]]

BY_HAND: dict[str, tuple[str, dict[str, Any], Segments]] = {
    "chatml": (
        chats.CHATML,
        {},
        [
            ("<|im_start|>user\nWhat is 🦆?<|im_end|>\n<|im_start|>assistant\n", False),
            ("A duck, Übermut!<|im_end|>", True),
            ("\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n", False),
            (" Yes.\n\nNo. <|im_end|>", True),
            ("\n", False),
        ],
    ),
    "generation": (
        chats.GENERATION,
        {},
        [
            ("<|im_start|>user\nWhat is 🦆?<|im_end|>\n<|im_start|>assistant\n", False),
            ("A duck, Übermut!<|im_end|>", True),
            ("\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n", False),
            (" Yes.\n\nNo. <|im_end|>", True),
            ("\n", False),
        ],
    ),
    "llama3": (
        chats.LLAMA3,
        {"eos_token": "<|eot_id|>"},
        [
            ("<s><|start_header_id|>user<|end_header_id|>\n\nWhat is 🦆?<|eot_id|>", False),
            ("<|start_header_id|>assistant<|end_header_id|>\n\n", False),
            ("A duck, Übermut!<|eot_id|>", True),
            ("<|start_header_id|>user<|end_header_id|>\n\nAnd then?<|eot_id|>", False),
            ("<|start_header_id|>assistant<|end_header_id|>\n\n", False),
            ("Yes.\n\nNo.<|eot_id|>", True),
        ],
    ),
    "mistral": (
        chats.MISTRAL,
        {},
        [
            ("<s>[INST] What is 🦆? [/INST]", False),
            (" A duck, Übermut!</s>", True),
            ("[INST] And then? [/INST]", False),
            ("  Yes.\n\nNo. </s>", True),
        ],
    ),
    "gemma": (
        chats.GEMMA,
        {},
        [
            ("<s><start_of_turn>user\nWhat is 🦆?<end_of_turn>\n<start_of_turn>model\n", False),
            ("A duck, Übermut!<end_of_turn>", True),
            ("\n<start_of_turn>user\nAnd then?<end_of_turn>\n<start_of_turn>model\n", False),
            ("Yes.\n\nNo.<end_of_turn>", True),
            ("\n", False),
        ],
    ),
    "phi": (
        chats.PHI,
        {"eos_token": "<|endoftext|>"},
        [
            ("<|user|>\nWhat is 🦆?<|end|>\n<|assistant|>\n", False),
            ("A duck, Übermut!<|end|>", True),
            ("\n<|user|>\nAnd then?<|end|>\n<|assistant|>\n", False),
            (" Yes.\n\nNo. <|end|>", True),
            ("\n<|endoftext|>", False),
        ],
    ),
}
