"""What ranks import beside what all of them do, by their job, before they are forked."""

from __future__ import annotations

from hetpipe.documents.job import Job


def modules_of(job: Job) -> list[str]:
    """Modules by their names: of the job's model, and of what is added to it."""
    found = [f"hetpipe.models.{job.model.name}"] if job.model.name is not None else []
    return [*found, "hetpipe.layers.adapters.ahead"] if job.adapter is not None else found
