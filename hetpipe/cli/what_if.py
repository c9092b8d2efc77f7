"""`hetpipe what-if`: what a model would do on cards that one does not have yet."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from hetpipe.cli.pictures import counted_model, picture_model
from hetpipe.diffusion.popular import popular
from hetpipe.documents.cluster import Link
from hetpipe.documents.profile import Profile
from hetpipe.documents.profiles.counted import CountedModel
from hetpipe.files.formats import explained
from hetpipe.files.limits import MOST_BATCH
from hetpipe.files.messages import InputError, shown
from hetpipe.files.screen import Screen
from hetpipe.files.writing import check_output
from hetpipe.planning.partition import PartitionError
from hetpipe.processes.progress import Activity
from hetpipe.whatif.adapters.base import Base
from hetpipe.whatif.adapters.lora import lora_of
from hetpipe.whatif.cards import Cards, known_cards
from hetpipe.whatif.machine import SECONDS, Optimizer, parse_cards
from hetpipe.whatif.models import NamedModel, find_model
from hetpipe.whatif.precisions import parse_choice

Texts = list[str]


def what_if(
    model: Annotated[
        str,
        typer.Argument(
            help="The model: qwen3-8b, flux.1-dev, a Hugging Face config.json or name, a folder of diffusers, one of --profiles"
        ),
    ],
    gpus: Annotated[Texts, typer.Option(help="The cards of a machine: '3090,2x1080ti'. Give it once for each machine.")],
    add: Annotated[Texts | None, typer.Option(help="Cards to buy: '5060ti'. May be repeated; each makes a row.")] = None,
    without: Annotated[Texts | None, typer.Option(help="A card to leave out. May be repeated; each makes a row.")] = None,
    link: Annotated[str, typer.Option(help="Bandwidth between the cards of a machine.")] = "12 GB/s",
    network: Annotated[str | None, typer.Option(help="Bandwidth between machines, such as '10 Gbit/s'.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", "--length", min=1, max=1 << 20, help="Tokens of a sample.")] = 512,
    side: Annotated[int | None, typer.Option(min=16, help="Pixels of a side of the pictures, for models of such.")] = None,
    global_batch: Annotated[int, typer.Option(min=1, max=MOST_BATCH, help="Samples of one optimizer step.")] = 64,
    precision: Annotated[
        str,
        typer.Option(
            help="Precision of matrix products: fp32, fp16 or bf16 for all cards, '3090=bf16,p40=fp32', or auto, which is "
            "compared with each for all."
        ),
    ] = "auto",
    optimizer: Annotated[Optimizer, typer.Option(help="The optimizer, whose state takes memory.")] = "adamw",
    lora: Annotated[
        str | None,
        typer.Option(
            help="Train only adapters: 'r=16', or 'r=16,targets=q_proj+v_proj', as for hetpipe finetune. By default targets are "
            "all linear layers."
        ),
    ] = None,
    base: Annotated[Base, typer.Option(help="How the frozen weights beside adapters are held.")] = "as-is",
    price: Annotated[Texts | None, typer.Option(help="Price of a card, such as '5060ti=429'. May be repeated.")] = None,
    profiles: Annotated[
        list[Path] | None, typer.Option(help="A file that 'hetpipe profile --share' wrote. May be repeated.")
    ] = None,
    cards: Annotated[Path | None, typer.Option(help="A file with the data sheets of more cards.")] = None,
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds to search for each row.")] = SECONDS,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Where to write the profile of the model on these cards.")
    ] = None,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Before you buy: predict a model's tokens per second, memory and price on the cards that you name. The measurements come
    with hetpipe."""
    from hetpipe.whatif.answer import Question, answer  # and with it the planner
    from hetpipe.whatif.table import answer_table, as_json

    check_output(output)
    known = known_cards() if cards is None else known_cards().with_more(Cards.load(cards))
    machines = tuple(parse_cards(text, known) for text in gpus)
    own = tuple(dict.fromkeys(card for machine in machines for card in machine))
    added = tuple(parse_cards(text, known) for text in add or ()) or (tuple((card,) for card in own) if not without else ())
    adapters = lora_of(lora) if lora is not None else None
    question = Question(
        model=_model(model, profiles or (), lora if adapters is not None else None, base, side),
        machines=machines,
        cards=known.cards,
        link=_link(link, "--link"),
        network=_link(network, "--network") if network is not None else None,
        added=added,
        without=tuple(known.find(name) for name in without or ()),
        tokens=tokens,
        global_batch=global_batch,
        precision=parse_choice(precision, known),
        optimizer=optimizer,
        prices=_prices(price or (), known),
        seconds=time_limit,
        lora=adapters,
        base=base,
    )
    with Activity("planning") as activity:
        found = answer(question, activity.say)
    if output is not None:
        found.question.at(found.profile, {}).save(output)
    if json_wanted:
        sys.stdout.write(json.dumps(as_json(found), indent=1) + "\n")
    else:
        Screen().print(answer_table(found))
    if all(row.plan is None for row in found.rows):
        raise PartitionError(f"the model fits none of these machines: {found.rows[0].found.reason}")


def _model(
    name: str, files: list[Path] | tuple[Path, ...], lora: str | None, base: Base, side: int | None
) -> NamedModel | CountedModel | Profile:
    """A shared profile's model of this name, else one by name."""
    profiles = [Profile.load(path) for path in files]
    for profile in profiles:
        if profile.model == name:
            return profile
    if (picture := picture_model(name)) is not None:
        if lora is None and base != "as-is":
            raise InputError(
                f"--base {base} is for weights that are frozen beside adapters. Give --lora r=16, too, which adds adapters"
            )
        with Activity("counting the layers"):
            return counted_model(name, picture, lora, base, side)
    if side is not None:
        raise InputError(f"--side {side} is for models of pictures: {', '.join(popular())}, and folders of diffusers")
    try:
        return find_model(name)
    except InputError as error:
        shared = ", ".join(shown(profile.model) for profile in profiles)
        pictures = f"; models of pictures are {', '.join(popular())}"
        raise InputError(f"{error}{pictures}{f'; shared profiles have {shared}' if shared else ''}") from None


def _link(text: str, option: str) -> Link:
    try:
        return Link.model_validate({"bandwidth": text, "latency": 1e-5})
    except ValidationError as error:
        raise InputError(f"{option}: {'; '.join(explained(error))}") from None


def _prices(given: list[str] | tuple[str, ...], cards: Cards) -> dict[str, float]:
    found = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            found[cards.find(name)] = float(value)
        except ValueError as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"--price {shown(text)}: write a card and a number, such as '5060ti=429'") from None
        if not 0 <= found[cards.find(name)] < 1e9:
            raise InputError(f"--price {shown(text)}: a price is from 0 to a billion")
    return found
