"""The section `log` of a job: where the numbers of a run go."""

from __future__ import annotations

from hetpipe.documents.guesses import KeysOf
from hetpipe.documents.sections.named import Named
from hetpipe.files.formats import Name, Positive, Strict

METRICS_FILE, SUMMARY_FILE, REPORT_FILE, LOSS_FILE = "metrics.jsonl", "summary.json", "report.html", "loss.svg"
PLAN_FILE, PROFILE_FILE, TRACE_FILE = "plan.json", "profile.json", "trace.json"
LOG_FILES = (REPORT_FILE, LOSS_FILE, PLAN_FILE, PROFILE_FILE, METRICS_FILE, TRACE_FILE, SUMMARY_FILE)  # of a log folder


class ObserverSection(Named):
    """A logger of `log.to` with its arguments: by its name, or an observer as `target: package.module:Class`."""


JSON_LINES = "jsonl"
TOOLS = ("tensorboard", "wandb", "mlflow", "trackio")  # that draw curves, besides


class LogSection(Strict):
    """Where results go (metrics, plan, profile, trace, summary, report), how often a line is written, and `to` which tools the
    same numbers go: jsonl (metrics.jsonl), tensorboard, wandb, mlflow, trackio, or an observer that a package or a file
    brings."""

    guesses = KeysOf("log")
    folder: Name
    every_steps: Positive = 10
    to: tuple[Name | ObserverSection, ...] = (JSON_LINES,)

    @property
    def loggers(self) -> list[ObserverSection]:
        """Return the tools that `to` names, each once."""
        found = [ObserverSection(name=each) if isinstance(each, str) else each for each in self.to]
        return [each for i, each in enumerate(found) if each not in found[:i]]

    @property
    def writes_lines(self) -> bool:
        """Whether metrics.jsonl is written."""
        return any(each.name == JSON_LINES for each in self.loggers)
