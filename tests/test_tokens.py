"""Of which tokens what is learned consists (hetpipe/language/tokenizer), whatever a tokenizer does with white space."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken
from torch import Tensor

from hetpipe.language.conversations import chat, instructions
from hetpipe.language.tokenizer import Tokenizer
from tests.support.chats import PHI, SPECIAL, chat_of, lines, tokenizer

from transformers import AutoTokenizer  # isort: skip  # offline, as tests.support.chats sets it


def learned(sample: tuple[Tensor, Tensor]) -> list[int]:
    return [number for number in sample[1].tolist() if number != -100]


def test_white_space_before_an_answer_is_learned_by_tokenizers_that_leave_it_out_of_their_places(tmp_path: Path) -> None:
    """Those of GPT-NeoX, OLMo and RoBERTa say of a token which characters it is of without the white space in it."""
    from tokenizers.processors import ByteLevel, Sequence

    folder = tokenizer(tmp_path / "tokenizer")
    its = AutoTokenizer.from_pretrained(folder)

    def numbers(text: str) -> list[int]:
        return list(its(text, add_special_tokens=False)["input_ids"])

    for number, trimming in enumerate((ByteLevel(trim_offsets=True), Sequence([ByteLevel(trim_offsets=True)]))):
        its.backend_tokenizer.post_processor = trimming
        its.save_pretrained(trimmed := str(tmp_path / f"trimmed {number}"))
        pairs = lines(tmp_path / "pairs.jsonl", [{"prompt": "def f():\n", "completion": "    return 1"}])
        assert learned(instructions(pairs, trimmed, test_fraction=0).train[0]) == numbers("    return 1</s>")
        talk = lines(tmp_path / "chat.jsonl", [chat_of("Hi", "  Yes.\n\n No. ")])
        assert learned(chat(talk, trimmed, test_fraction=0).train[0]) == numbers("  Yes.\n\n No. <|im_end|>")
        assert Tokenizer(trimmed).digest != Tokenizer(folder).digest, "of the tokenizer as it is"


@pytest.mark.parametrize("answer", ["Yes.", " Yes.", "\nYes.\n No."])
def test_a_token_that_takes_the_white_space_behind_it_is_not_learned_for_an_answer_that_begins_so(
    answer: str, tmp_path: Path
) -> None:
    """As Phi's do; behind the prompt at inference a model writes that white space itself."""
    special = [AddedToken(name, rstrip=name.startswith("<|"), special=True) for name in SPECIAL]
    folder = tokenizer(tmp_path / "phi", PHI, special)
    file = lines(tmp_path / "chat.jsonl", [chat_of("Hi", answer)])
    tokens, targets = chat(file, folder, test_fraction=0).train[0]
    its = AutoTokenizer.from_pretrained(folder)
    assert str(its.decode(tokens[targets == -100])).startswith("<|user|>Hi<|end|>")
    assert learned((tokens, targets)) == its(answer + "<|end|>", add_special_tokens=False)["input_ids"]
    assert its.convert_tokens_to_ids("<|assistant|>") in tokens.tolist()


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_completion_begins_with_a_token_as_behind_a_prompt(adds_bos: bool, tmp_path: Path) -> None:
    """And not with one that holds the end of the prompt, too, which no model is given so at inference."""
    folder = tokenizer(tmp_path / "words", adds_bos=adds_bos)
    its = AutoTokenizer.from_pretrained(folder)
    both = its("Who jumps? fox", add_special_tokens=False)["input_ids"]
    assert its.decode(both[-1]) == " fox"
    file = lines(tmp_path / "pairs.jsonl", [{"prompt": "Who jumps? ", "completion": "fox"}])
    tokens, targets = instructions(file, folder, test_fraction=0).train[0]
    asked, answered = (its(part, add_special_tokens=False)["input_ids"] for part in ("Who jumps? ", "fox</s>"))
    assert learned((tokens, targets)) == answered
    assert tokens.tolist() == [its.bos_token_id] * adds_bos + asked + answered[:-1]
