"""`hetpipe finetune MODEL DATA`."""

from __future__ import annotations

import json
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetpipe.cli.terminal import Verbose, install_watching, nothing_else
from hetpipe.documents.sections.log import TOOLS
from hetpipe.files.limits import MOST_BATCH
from hetpipe.files.messages import InputError
from hetpipe.files.screen import Screen
from hetpipe.files.writing import check_output
from hetpipe.finetune.asked import Asked
from hetpipe.finetune.emulated import EXAMPLE
from hetpipe.finetune.kinds import PICTURES, Task, task_of
from hetpipe.finetune.looked import look
from hetpipe.processes.environment import check_environment, place
from hetpipe.processes.progress import Activity, say, show_with
from hetpipe.processes.ranks.launch import start_server
from hetpipe.processes.ranks.preload import modules_for
from hetpipe.processes.stopping import importing

if TYPE_CHECKING:
    from hetpipe.finetune.job import Made
    from hetpipe.finetune.program import Finetuned

Texts = list[str]
DATA = (
    "Chats, or questions with their answers (.jsonl, .json, .csv or .parquet), or plain text (.txt, .md, or records with a "
    "text). Give one or several files, a pattern, a folder, or a data set of the hub. For a diffusion transformer: a folder of "
    "cached latents (.safetensors)."
)
OUTPUT = "The folder for the run's job, checkpoints, log and adapter. A second run there resumes from the newest checkpoint."
LORA = (
    "Adapters beside linear layers: r=16, the default, or r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj. By default alpha is "
    "2 r, and targets are all linear layers but the last. With none, all parameters train."
)
ADAPTER = (
    "Train existing adapters further, instead of new ones: a folder of peft, such as that of an earlier run, or a name on "
    "Hugging Face."
)
BASE = (
    "How frozen weights are held: as-is, bf16, fp16, nf4, fp8 or int8. By default in half precision if all devices compute "
    "in it, else as-is."
)
LENGTH = (
    "Most tokens of a sample, or of a row of packed samples. By default 2048, but no more than the model has positions "
    "or the longest sample has tokens."
)
BATCH = "Samples of a step (rows, if samples are packed). By default 32 (of latents 4), or all if there are fewer."
RATE = (
    "Learning rate of AdamW after a warm-up over 3 % of the steps. From there it falls along a cosine. By default 2e-4 with "
    "adapters (on latents 1e-4), 1e-5 without."
)
PRECISION = (
    "Precision of matrix products: fp32, bf16, fp16, '3090=bf16,1080ti=fp16', or auto: the fastest that each device has. "
    "By default auto on GPUs, else fp32."
)
TOKENIZER = "Folder or name of the tokenizer. By default the model's."
TURNS = (
    "Which answers of a chat are learned: all (in one row), last, or auto. auto learns all: in one row if the template writes "
    "an answer the same whatever follows it, else each answer in a separate sample."
)
TEMPLATE = "A file with another template of chats (Jinja). With none, questions and answers are written without a template."
THINKING = (
    "For templates with a switch for thinking: on begins answers with a thought; off does not, and leaves thoughts out of "
    "answers. By default each answer decides by what it has."
)
COLUMNS = "The names of keys and roles in the data: prompt=question,completion=answer, or role=speaker,assistant=bot."
EVAL = (
    "Evaluate ten times in the run: a file, or the part of the data that is held out (0.1). The adapter is then that of the best "
    "evaluation. By default a tenth of the data is held out, and evaluated at the end."
)
EARLY_STOP = "End the run after so many evaluations without a better one. Evaluates as --eval does."
METHOD = (
    "What is learned: sft, the answers of the data; or of data with a better and a worse answer, dpo, simpo or orpo, to prefer "
    "the better one, or reward, to score answers."
)
LOG_TO = f"Send the curves to {', '.join(TOOLS[:-1])} or {TOOLS[-1]}, too. May be repeated."
TENSOR_PARALLEL = (
    "Let plans also split layers over so many equal devices of a machine: 2. May be repeated. Layers are then measured in such "
    "parts, too, before training."
)
CLUSTER = "The devices: cluster.yaml. By default all devices of this machine, or under torchrun of all machines."
OTHERS = "Set any other key of the job: adapter.targets=\\[q_proj,v_proj]. May be repeated."
EMULATE = f"Emulate these cards by CPU processes, each as name:memory:slowdown: '{EXAMPLE}'. Give it once for each machine."


def finetune(
    model: Annotated[
        str,
        typer.Argument(help="A folder of save_pretrained with a tokenizer, or of a pipeline of diffusers, or a name on the hub."),
    ],
    data: Annotated[Texts, typer.Argument(help=DATA)],
    output: Annotated[str, typer.Option("-o", "--output", help=OUTPUT)] = "finetuned",
    lora: Annotated[str | None, typer.Option(help=LORA)] = None,
    adapter: Annotated[str | None, typer.Option(help=ADAPTER)] = None,
    base: Annotated[str | None, typer.Option(help=BASE)] = None,
    length: Annotated[int | None, typer.Option(min=1, help=LENGTH)] = None,
    global_batch: Annotated[int | None, typer.Option("--global-batch", min=1, max=MOST_BATCH, help=BATCH)] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="How often training goes through all data. By default once.")] = None,
    rate: Annotated[float | None, typer.Option("--lr", help=RATE)] = None,
    precision: Annotated[str | None, typer.Option(help=PRECISION)] = None,
    tokenizer: Annotated[str | None, typer.Option(help=TOKENIZER)] = None,
    turns: Annotated[str | None, typer.Option(help=TURNS)] = None,
    template: Annotated[str | None, typer.Option(help=TEMPLATE)] = None,
    thinking: Annotated[str | None, typer.Option(help=THINKING)] = None,
    columns: Annotated[str | None, typer.Option(help=COLUMNS)] = None,
    evaluated: Annotated[str | None, typer.Option("--eval", help=EVAL, metavar="FILE|PART")] = None,
    early_stop: Annotated[int | None, typer.Option("--early-stop", min=1, help=EARLY_STOP)] = None,
    method: Annotated[str, typer.Option(help=METHOD)] = "sft",
    log_to: Annotated[Texts | None, typer.Option("--log-to", help=LOG_TO)] = None,
    tensor_parallel: Annotated[list[int] | None, typer.Option("--tensor-parallel", min=2, help=TENSOR_PARALLEL)] = None,
    cluster: Annotated[str | None, typer.Option(help=CLUSTER)] = None,
    emulate: Annotated[Texts | None, typer.Option(help=EMULATE)] = None,
    write_job: Annotated[
        Path | None, typer.Option("--write-job", help="Also write the job to this file. The run's folder always has it.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Measure, plan, and print what a run would do, without training.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show how busy and how full each device is while it trains.")] = False,
    verbose: Verbose = False,
    settings: Annotated[Texts | None, typer.Option("--set", help=OTHERS)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Fine-tune a language model, or a transformer of diffusers, on unequal cards. The command measures, plans, prints what it
    will do and how long that takes, trains, and writes an adapter. It asks nothing. On one machine it starts the ranks itself; on
    several, start it under torchrun on each."""
    check_environment()
    asked = Asked(
        model=model,
        data=tuple(data),
        out=output,
        lora=lora,
        adapter=adapter,
        base=base,
        length=length,
        global_batch=global_batch,
        epochs=epochs,
        rate=rate,
        precision=precision,
        tokenizer=tokenizer,
        turns=turns,
        template=template,
        thinking=thinking,
        columns=columns,
        evaluated=evaluated,
        early_stop=early_stop,
        tensor_parallel=tuple(tensor_parallel or ()),
        method=method,
        log_to=tuple(log_to or ()),
        cluster=cluster,
        emulate=tuple(emulate or ()),
        settings=tuple(settings or ()),
    )
    is_main = place().rank == 0
    if is_main:
        check_output(write_job)
        say(f"{model} on {' '.join(data)}, into {output}")
    if watch:
        show_with(install_watching)
    with nothing_else(as_json):
        made, found = _run(asked, write_job if is_main else None, only_plan=dry_run)
    if found is not None:
        _tell(made, found, output, verbose=verbose, as_json=as_json)


def _run(asked: Asked, write_job: Path | None, *, only_plan: bool) -> tuple[Made, Finetuned | None]:
    looked = look(asked)
    task = task_of(looked.found.kind)
    start_server(modules_for(task.model, adapted=bool(asked.adapter_keys)))
    with importing(), Activity(f"starting: importing torch and {task.library}", shown=place().local_rank == 0):
        _import(task)
        from hetpipe.cli.finetune.table import print_statement
        from hetpipe.finetune import folder
        from hetpipe.finetune.job import make_job
        from hetpipe.finetune.program import Wanted, finetune_rank
        from hetpipe.planning import registry
        from hetpipe.training.start import train_everywhere
    made = make_job(asked, looked)
    registry.check_names(made.job)
    made = folder.continued(asked, made)
    folder.write_cluster(asked.out, made)
    made.job.check_files()
    if place().rank == 0:
        written = folder.write_job(asked.out, made, shlex.join(["hetpipe", *sys.argv[1:]]), write_job)
        say(f"the job is written to {written}")
    wanted = Wanted(out=asked.out, data=made.data, only_plan=only_plan, show=print_statement)
    return made, train_everywhere(made.job, partial(finetune_rank, wanted))


def _import(task: Task) -> None:
    """The library of the model. InputError where it is missing."""
    if task is PICTURES:
        from hetpipe.diffusion.folder import diffusers_of

        diffusers_of()
        return
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise InputError("fine-tuning needs transformers: pip install 'hetpipe[text,lora]'") from None


def _tell(made: Made, found: Finetuned, folder: str, *, verbose: bool, as_json: bool) -> None:
    from hetpipe.cli.finetune.table import how_to_load
    from hetpipe.finetune.draft import JOB_FILE
    from hetpipe.training.results.table import train_table

    job = f"{folder}/{JOB_FILE}"
    if as_json:
        result: dict[str, Any] = {"job": job, "statement": found.statement.plain()}
        if found.result is not None:
            result |= found.result.summary() | {"folder": str(found.folder) if found.folder is not None else None}
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
        return
    out = Screen()
    if found.result is None:
        out.print(
            f"nothing is trained yet. To train, give the same command without --dry-run, or: hetpipe train {job}", soft_wrap=True
        )
        return
    out.print(train_table(found.result, devices=verbose))
    if found.folder is not None:
        what = "the adapter" if made.job.adapter is not None else "the model"
        of = f" of step {found.result.exported_step}, the best evaluation," if found.result.best is not None else ""
        load = how_to_load(found, made.job)
        out.print(f"{what}{of} is in {found.folder}; to load it:\n\n{load}\n", soft_wrap=True, highlight=False)
    out.print(
        f"the job is {job}; its log and report are in {made.job.log.folder if made.job.log is not None else folder}",
        soft_wrap=True,
    )
