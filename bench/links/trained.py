"""A rank of `bench.links.run`: measures once, then trains every plan for some steps, in one process group."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from hetpipe.building.build import build_model
from hetpipe.documents.job import Job
from hetpipe.documents.plan import Plan
from hetpipe.training.loop import Loop
from hetpipe.training.session import Request, join, obtain_profile, open_session


def main(folder: Path) -> None:
    """`folder` has job.yaml and plans.json (name → plan); profile.json and steps.json (name → seconds of steps) come to it."""
    job = Job.read(folder / "job.yaml")
    session = open_session(job)
    profile = obtain_profile(session, Request.by(job), fresh=True)
    found = {}
    for name, document in json.loads((folder / "plans.json").read_text()).items():
        model = build_model(job, session.data)  # as before the last plan trained
        session = replace(session, model=model)
        engine = join(session, Plan.parse(document, name), profile)
        assert engine is not None, f"{name} leaves a device out"
        found[name] = Loop(job, session, engine).run().steady_seconds
    if session.world.is_main:
        profile.save(folder / "profile.json")
        (folder / "steps.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
