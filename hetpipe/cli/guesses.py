"""What to type in the place of commands and options that people try: said behind the error about the usage."""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe.documents.guesses import guesses


def instead(words: Sequence[str]) -> str:
    """What to type instead of this command line, which was refused; empty where nobody knows."""
    if not words:
        return ""
    command, rest = words[0], [word.partition("=")[0] for word in words[1:]]
    known = guesses().by_place.get(f"hetpipe {command}", {})
    tried = [known[word] for word in rest if word in known]
    if tried:
        return "; ".join(dict.fromkeys(tried))
    alone = len(rest) > (command == "what-if") and not rest[0].startswith("-")
    return guesses().by_place["hetpipe"].get(command) or (guesses().arguments.get(command, "") if alone else "")
