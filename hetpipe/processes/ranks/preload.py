"""What ranks import beside what all of them do, by their job, before they are forked."""

from __future__ import annotations

from hetpipe.documents.job import Job

ADAPTERS = "hetpipe.layers.adapters.ahead"
OF_MODELS = {"diffusion": "hetpipe.diffusion.ahead"}  # what they import when they are built


def modules_of(job: Job) -> list[str]:
    """Modules by their names: of the job's model, and of what is added to it."""
    return modules_for(job.model.name, adapted=job.adapter is not None)


def modules_for(model: str | None, *, adapted: bool) -> list[str]:
    """Return the modules of a model by its name, if it has one, and of adapters, if there are any."""
    own = [f"hetpipe.models.{model}", *([OF_MODELS[model]] if model in OF_MODELS else [])] if model is not None else []
    return [*own, ADAPTERS] if adapted else own
