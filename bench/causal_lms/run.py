"""Each type of causal language model that the installed transformers has: is a chain of it transformers' own, bit for bit?

python -m bench.causal_lms.run [--only llama,gpt2] [-o types.json] [--readme]
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import transformers
import typer
from rich.console import Console

from bench.tables import chosen, markdown, replace_table
from hetpipe.cli.exits import main
from hetpipe.files.messages import cut, one_line
from hetpipe.files.writing import check_output, write_text
from hetpipe.hf.replay.build import REPLAY_TOLERANCE
from hetpipe.hf.replay.classes import causal_lm_of
from hetpipe.hf.replay.compare import compare
from hetpipe.hf.replay.tiny import tiny
from hetpipe.hf.replay.trace import CannotCutError

README = Path(__file__).parent / "README.md"
KINDS = {
    "bits": "the same bits: logits and all gradients",
    "rounding": "equal but for the order of sums",
    "refused": "no chain of layers, and so refused",
    "untried": "no small configuration by the rule here, and so refused",
    "wrong": "something else, and so refused",
}
console = Console()


class Outcome(NamedTuple):
    """What came of a type: one of KINDS, and the reason."""

    kind: str
    reason: str = ""


def outcome(name: str) -> Outcome:
    """Of a type."""
    try:
        model_class, config = causal_lm_of(transformers.CONFIG_MAPPING[name]())
        if hasattr(config, "is_decoder"):
            config.is_decoder = True  # of an encoder's family the decoder
        small = tiny(model_class, config)
    except Exception as error:  # whatever transformers says of so small a configuration
        return Outcome("untried", cut(one_line(error), 200))
    try:
        found = compare(model_class, small)
    except CannotCutError as error:
        return Outcome("refused", cut(str(error), 200))
    except Exception as error:  # whatever transformers says
        return Outcome("untried", cut(one_line(error), 200))
    if found.none:
        return Outcome("bits")
    reason = f"logits differ by {found.logits:.0e}, gradients by {found.gradients:.0e}"
    return Outcome("rounding" if max(found) <= REPLAY_TOLERANCE else "wrong", reason)


def tables(found: dict[str, Outcome]) -> str:
    """Counts, names of what is equal, and the reasons of the rest."""
    counts = Counter(one.kind for one in found.values())
    parts = [markdown(["types", "that are"], [[str(counts[kind]), text] for kind, text in KINDS.items()], words=2)]
    parts += [", ".join(f"`{name}`" for name, one in found.items() if one.kind == "bits") + " are the same bits.\n"]
    rest = [[f"`{name}`", one.kind, one.reason] for name, one in found.items() if one.kind != "bits"]
    return "\n".join([*parts, markdown(["type", "outcome", "reason"], rest, words=3)])


def bench(
    only: Annotated[str, typer.Option(help="Types, with commas between them.")] = "",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write all outcomes as JSON.")] = None,
    readme: Annotated[bool, typer.Option("--readme", help="Put the tables into README.md.")] = False,
) -> None:
    """Compare a small chain of each type with transformers' own model."""
    if output is not None:
        check_output(output)
    transformers.logging.set_verbosity_error()
    known: Any = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    names = chosen("--only", only, list(known)) if only else list(known)
    found: dict[str, Outcome] = {}
    for number, name in enumerate(names, 1):
        found[name] = outcome(name)
        console.print(f"{number} of {len(names)}: {name}: {found[name].kind} {found[name].reason}", markup=False, soft_wrap=True)
    text = tables(found)
    console.print(text, markup=False, soft_wrap=True)
    if output is not None:
        write_text(output, json.dumps({name: one._asdict() for name, one in found.items()}, indent=1) + "\n")
    if readme:
        replace_table(README, "types", f"transformers {transformers.__version__}, {len(found)} types.\n\n{text}")


if __name__ == "__main__":
    main(lambda: typer.run(bench))
