"""`hetpipe generate RUN "prompt"`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from hetpipe.cli.weights import of_job
from hetpipe.documents.job import Job
from hetpipe.files.messages import InputError, cut, shown
from hetpipe.language.records.source import HUB
from hetpipe.language.writing.template import SWITCHES, Thinking
from hetpipe.processes.progress import Activity, warn

TRUST = "trust_remote_code"
ENDINGS = (".yaml", ".yml", ".json")  # of a job's file

if TYPE_CHECKING:
    from torch import nn

    from hetpipe.checkpoints.stores.store import Stored


def generate(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="A job's file, a checkpoint, or a folder of checkpoints, of which the newest is taken. Or a model of "
            "transformers that was not trained here: its folder, or its name on Hugging Face.",
        ),
    ],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text that the model continues.")],
    tokens: Annotated[int, typer.Option(min=1, max=1 << 20, help="Most tokens that are written.")] = 40,
    temperature: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=100.0,
            help="How freely tokens are drawn. At 0 the likeliest token is always taken, whatever the model's settings say.",
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the drawn tokens, above temperature 0.")] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="Write the prompt as a message by the tokenizer's template of chats.")
    ] = False,
    thinking: Annotated[
        Thinking | None, typer.Option(help="With --chat: whether the answer begins with a thought. By default as the job says.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="A folder or a name on Hugging Face. By default the tokenizer of the job's data, or of its weights."),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code of the model's folder, if the training did.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Print how a trained language model (causal_lm, gpt2, llama) continues a prompt. The checkpoint of the best evaluation is
    read, or the newest, on one device."""
    from hetpipe.building.build import build_layers
    from hetpipe.checkpoints.trained import find_checkpoint
    from hetpipe.checkpoints.training_state import said_of
    from hetpipe.training.results.exported import best_of_job

    asked = Asked(prompt, tokenizer, tokens, temperature, seed, _switched(thinking, chat=chat))
    if (base := _base_in(run)) is not None:
        with Activity("reading the model"):
            _print(base, _of_base(base, asked, trusted=trust_remote_code), prompt, as_json=as_json)
        return
    job = Job.read(run) if not run.is_dir() else None
    found = best_of_job(job, of_job(job, run)) if job is not None else find_checkpoint(run)
    said = said_of(found) or (_keys(job) if job is not None else {})
    if job is not None:
        said = _with_base_of(job, said)
    if chat and thinking is None:
        asked = asked._replace(chat=_switched(said.get("data.args.thinking"), chat=True))
    _check_trust(said, job, found, trusted=trust_remote_code)
    _note_writing(found, chat=chat)
    with Activity("reading the checkpoint"):
        written = _written(build_layers(_job_of(said, found)), found, asked)
    _print(str(found), written, prompt, as_json=as_json)


def _print(source: str, written: tuple[str, int], prompt: str, *, as_json: bool) -> None:
    text, count = written
    shape = {"checkpoint": source, "prompt": prompt, "text": text, "tokens": count}
    sys.stdout.write(f"{json.dumps(shape, indent=1) if as_json else text}\n")


def _switched(thinking: Thinking | None, *, chat: bool) -> dict[str, bool] | None:
    """What a template of chats is told; None without one. InputError if it is to be told something, and there is none."""
    if thinking is not None and not chat:
        raise InputError(f"--thinking {thinking} is for a template of chats, so give --chat, too")
    if not chat:
        return None
    return dict.fromkeys(SWITCHES, thinking == "on") if thinking is not None else {}


def _base_in(run: Path) -> str | None:
    """The model of transformers that is named in the place of a run: by its folder, or by its name on Hugging Face."""
    if run.is_dir():
        return str(run) if (run / "config.json").is_file() else None
    return str(run) if not run.exists() and HUB.fullmatch(str(run)) and run.suffix not in ENDINGS else None


def _of_base(name: str, asked: Asked, *, trusted: bool) -> tuple[str, int]:
    """What a model writes that was not trained here. InputError if it is no causal language model."""
    from hetpipe.hf.folder import WeightFolder
    from hetpipe.hf.replay.classes import classes_of

    folder = WeightFolder(name, code=trusted)
    return _continued(folder.path, classes_of(folder, None, trusted).model, asked)


class Asked(NamedTuple):
    """What is to be written; `chat`: what the template of chats is given, if the prompt is a message."""

    prompt: str
    tokenizer: str | None
    tokens: int
    temperature: float
    seed: int
    chat: Mapping[str, Any] | None


def _note_writing(found: Stored, *, chat: bool) -> None:
    """What should be known of a prompt that is written otherwise than in training."""
    from hetpipe.checkpoints.training_state import read_saved

    data = read_saved(found).data
    if data is not None and data.tokenizer is not None and chat is not (data.template is not None):
        warn(
            "note: the run was trained without a template of chats, and --chat writes the prompt by one"
            if chat
            else "note: the run was trained on chats; --chat writes the prompt as one"
        )


def _check_trust(said: Mapping[str, Any], job: Job | None, found: Stored, *, trusted: bool) -> None:
    """InputError where a checkpoint, and nobody here, says that some code is to be run."""
    own, args = (job.model.target, job.model.args) if job is not None else (None, {})
    if (target := said.get("model.target")) is not None and target != own:
        raise InputError(
            f"checkpoint {found} names {cut(str(target), 200)} as the code that makes its model, which would run with your "
            "rights. To run it, give the job's file, which names it, too, instead of the checkpoint"
        )
    weights = [str(name).partition("@")[0] for name in (args.get("weights"), said.get("model.args.weights"))]
    ours = trusted or (args.get(TRUST) is True and weights[0] == weights[1])
    if said.get(f"model.args.{TRUST}") not in (None, False) and not ours:
        raise InputError(
            f"checkpoint {found} asks to run code in {cut(str(said.get('model.args.weights')), 200)} ({TRUST}), with your "
            "rights. Read the code. To run it, give the job's file, which asks for it, too, or --trust-remote-code"
        )


def _keys(job: Job) -> Mapping[str, Any]:
    from hetpipe.checkpoints.resume import identity

    return identity(job)


def _with_base_of(job: Job, said: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace the base's name by the job's, since the base may have been moved. Whether it is the same is compared later."""
    from hetpipe.checkpoints.origin.revision import KEY, WEIGHTS

    own = job.model.args.get("weights")
    if own is None or own == said.get(WEIGHTS) or job.model.label != said.get("model.name"):
        return said
    return {key: value for key, value in said.items() if key != KEY} | {WEIGHTS: own}


def _job_of(said: Mapping[str, Any], found: Stored) -> Job:
    """A job with the model of what a checkpoint says. InputError where it says none."""
    from hetpipe.checkpoints.origin.base import KEY as BASE
    from hetpipe.checkpoints.origin.configured import CONFIG
    from hetpipe.checkpoints.origin.revision import KEY, WEIGHTS

    job: dict[str, Any] = {}
    for key, value in said.items():
        first, *path = key.split(".")
        if first in ("model", "adapter") and path and key not in (KEY, BASE) and value is not None and not key.startswith(CONFIG):
            place = job.setdefault(first, {})
            for part in path[:-1]:
                place = place.setdefault(part, {})
            place[path[-1]] = value
    if (model := job.get("model")) is None:
        raise InputError(
            f"checkpoint {found} does not name its model, because it comes from a loop of your own. To write its weights, use "
            "hetpipe export-weights --checkpoint"
        )
    if KEY in said:
        model["args"]["weights"] = f"{str(said[WEIGHTS]).partition('@')[0]}@{said[KEY]}"
    train = {"global_batch": 1, "steps": 1, "seed": said.get("train.seed", 0), "dtype": said.get("train.dtype", "float32")}
    if (half := said.get("adapter.base")) in ("bf16", "fp16"):
        train["precision"] = half
    return Job.parse({"format": "hetpipe.job/1", **job, "data": {"name": "text"}, "train": train}, str(found))


def _written(layers: nn.Sequential, found: Stored, asked: Asked) -> tuple[str, int]:
    """What the model adds, and how many tokens that is."""
    from hetpipe.hf.chain import HFLayer
    from hetpipe.hf.exports.export import export_weights
    from hetpipe.layers.adapters.adapt import adapter_of
    from hetpipe.layers.transforms import uncompiled

    first = uncompiled(layers[0])
    model: Any = first.origin.model if isinstance(first, HFLayer) else first
    if not isinstance(first, HFLayer) or not model.can_generate() or model.config.is_encoder_decoder:
        raise InputError(
            f"the model of checkpoint {found} is a {type(model).__name__} and no causal language model, so it writes no text"
        )
    with TemporaryDirectory(prefix="hetpipe-") as place:
        folder = export_weights(layers, found, Path(place, "model"), merge=adapter_of(layers) is not None)
        return _continued(folder, type(model), asked)


def _continued(folder: Path, model_class: Any, asked: Asked) -> tuple[str, int]:
    """What the model in a folder adds to the prompt, and how many tokens that is."""
    import torch

    words = _tokenizer(asked.tokenizer, folder)
    ids = _ids(words, asked)
    config = model_class.config_class.from_pretrained(folder)
    _check_ids(ids, asked.tokens, config.get_text_config())
    model = model_class.from_pretrained(folder, dtype="auto").eval()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(asked.seed)
    given = torch.tensor([ids], device=device)
    model.generation_config = _drawing(model.generation_config, asked, words.pad_token_id)
    try:
        out = model.to(device).generate(given, attention_mask=torch.ones_like(given))
    except Exception as error:  # whatever transformers says of a model that it cannot let write
        raise InputError(f"a {type(model).__name__} cannot write with these settings: {_line(error)}") from error
    new, ends = out[0, len(ids) :].tolist(), model.generation_config.eos_token_id
    told = new[:-1] if new and new[-1] in (ends if isinstance(ends, list) else [ends]) else new
    return str(words.decode(told, skip_special_tokens=True)), len(new)


def _drawing(its: Any, asked: Asked, pad: int | None) -> Any:
    """The model's own settings for what is drawn; at temperature 0 of these only what ends a text, so that nothing but the
    likeliest token is written."""
    import transformers

    if asked.temperature:
        its.update(do_sample=True, temperature=asked.temperature, max_new_tokens=asked.tokens, max_length=None)
        its.pad_token_id = pad if pad is not None else its.pad_token_id
        return its
    kept = {key: getattr(its, key) for key in ("bos_token_id", "eos_token_id", "decoder_start_token_id")}
    return transformers.GenerationConfig(do_sample=False, num_beams=1, max_new_tokens=asked.tokens, pad_token_id=pad, **kept)


def _tokenizer(name: str | None, folder: Path) -> Any:
    """Of this name, or of the folder that was written. InputError where there is none. No code of it is run."""
    from hetpipe.hf.hub import COMPANIONS, folder_of

    import transformers  # isort: skip

    transformers.utils.logging.disable_progress_bar()
    if name is not None:
        folder, _ = folder_of(name)
    if not any(path for pattern in COMPANIONS for path in folder.glob(pattern) if path.name != "generation_config.json"):
        where = "the model's weights came from no folder with a tokenizer" if name is None else f"{folder} holds no tokenizer"
        raise InputError(f"{where}. Name one with --tokenizer: a folder, or a name on Hugging Face")
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever transformers and tokenizers say
        where = "beside the model's weights" if name is None else f"of {folder}"
        raise InputError(f"the tokenizer {where} cannot be read: {_line(error)}") from error


def _ids(words: Any, asked: Asked) -> list[int]:
    if asked.chat is None:
        found: list[int] = words(asked.prompt)["input_ids"]
        return found[:-1] if len(found) > 1 and found[-1] == words.eos_token_id else found  # some end every text
    if not words.chat_template:
        raise InputError(
            "this tokenizer has no template of chats. Leave --chat out, or name a tokenizer that has one with --tokenizer"
        )
    try:
        message = [{"role": "user", "content": asked.prompt}]
        found = words.apply_chat_template(message, add_generation_prompt=True, return_dict=True, **asked.chat)["input_ids"]
    except Exception as error:  # whatever the template says
        raise InputError(f"the tokenizer's template of chats does not take the prompt: {_line(error)}") from error
    return found


def _check_ids(ids: list[int], tokens: int, config: Any) -> None:
    """InputError where they are not of this model."""
    if not ids:
        raise InputError("the prompt has no tokens: write some words")
    if max(ids) >= config.vocab_size:
        raise InputError(
            f"the tokenizer belongs to another model: the prompt has token {max(ids)}, and the model knows {config.vocab_size} "
            "tokens. Name the right tokenizer with --tokenizer"
        )
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and 0 < longest < len(ids) + tokens:
        raise InputError(
            f"the prompt has {len(ids)} tokens, and --tokens is {tokens}. Together they are more than the model's {longest} "
            f"positions (max_position_embeddings). Set --tokens to at most {shown(max(longest - len(ids), 0))}"
        )


def _line(error: Exception) -> str:
    return cut(" ".join(str(error).split()) or type(error).__name__, 400)
