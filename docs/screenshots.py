"""Screenshots of reports and of TensorBoard for the documentation, and the demo's plan as a picture.

    make demo screenshots    # or: python docs/screenshots.py [FOLDER], the demo's log folder (runs/demo)

Needs Chromium. Look at what it made before you commit it.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.files.messages import InputError
from hetpipe.planning.planner import make_plan
from hetpipe.show.draw import draw_plan
from hetpipe.show.trace import load_measured
from hetpipe.study.make import make_study
from hetpipe.study.rules import rule_names
from hetpipe.study.study import Study

ROOT = Path(__file__).resolve().parent.parent
PICTURES, EXAMPLE = ROOT / "docs" / "pictures", ROOT / "configs" / "bert-large"
JOB = ROOT / "configs" / "jobs" / "demo.yaml"
CURVES = ("train.steps=40", "train.evaluate_samples=", "evaluate={every_steps: 5, samples: 48}")  # what the page says of them
CARDS = "loss|memory_bytes/n0/0"  # a pattern of TensorBoard's tags: four cards
DRAWN_MILLISECONDS = 8000  # TensorBoard has no sign that its cards are drawn
WIDTHS, SCHEMES = (1280, 400), ("light", "dark")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)  # nothing but the page is asked for


def chromium() -> str | None:
    """Where Chromium, or Chrome, is on this machine."""
    return shutil.which("chromium") or shutil.which("google-chrome")


studied = partial(make_study, rules=rule_names(), changes=True, cuts=True)


def shown(demo: Path) -> Iterator[tuple[str, Study]]:
    """What is drawn, by name: BERT-large on three devices and on 64, and the demo as it was measured."""
    profile, cluster = Profile.load(EXAMPLE / "profile.json"), Cluster.load(EXAMPLE / "cluster.yaml")
    yield "three-devices", studied(Plan.load(EXAMPLE / "plan.json"), profile=profile, cluster=cluster)
    fast, slow = cluster.device_types
    link = {"bandwidth": "12 GB/s", "latency": "10 us"}
    many = Cluster.parse(
        {
            "format": "hetpipe.cluster/1",
            "device_types": cluster.model_dump(mode="json", exclude_none=True)["device_types"],
            "nodes": [{"name": f"n{i}", "devices": {fast if i < 8 else slow: 4}, "link": link} for i in range(16)],
            "link": {"bandwidth": "6 GB/s", "latency": "20 us"},
        },
        "64 devices",
    )
    yield "64-devices", studied(make_plan(profile, many, 1024), profile=profile, cluster=many)
    yield (
        "demo",
        studied(
            Plan.load(demo / "plan.json"),
            profile=Profile.load(demo / "profile.json"),
            cluster=Cluster.load(ROOT / "configs" / "clusters" / "three-types.yaml"),
            measured=load_measured(demo / "trace.json"),
        ),
    )


def small(taken: bytes, picture: Path) -> None:
    """Keep a screenshot with few colours, and so few bytes."""
    image = Image.open(io.BytesIO(taken)).convert("RGB")
    image.quantize(128, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(picture, optimize=True)


def curves(browser: Any, folder: Path) -> None:
    """Train the demo's job with a log for TensorBoard, start TensorBoard on it, and take its cards."""
    log = f"log={{folder: {folder}, every_steps: 1, to: [tensorboard]}}"
    words = [word for setting in (*CURVES, log) for word in ("--set", setting)]
    subprocess.run([sys.executable, "-m", "hetpipe", "train", str(JOB), *words], cwd=ROOT, check=True)
    board = import_module("tensorboard.program").TensorBoard()
    board.configure(argv=[None, "--logdir", str(folder), "--host", "127.0.0.1", "--port", "0", "--load_fast", "false"])
    page = browser.new_page(viewport={"width": 1280, "height": 1040})
    page.goto(f"{board.launch()}?darkMode=false&smoothing=0&tagFilter={CARDS}#timeseries")
    page.get_by_role("button", name="Close").first.click()  # the settings, which cover a fifth
    page.wait_for_timeout(DRAWN_MILLISECONDS)
    small(page.screenshot(), PICTURES / "tensorboard.png")
    page.close()


def main(demo: Path) -> None:
    """Draw, and take them."""
    found = chromium()
    if found is None:
        raise InputError("screenshots need a browser: install chromium")
    with TemporaryDirectory() as folder, import_module("playwright.sync_api").sync_playwright() as running:
        browser = running.chromium.launch(executable_path=found, args=FLAGS)
        for name, one in shown(demo):
            if name == "demo":
                draw_plan(one, PICTURES / "demo-plan.svg")
            report = Path(folder) / f"{name}.html"
            draw_plan(one, report)
            for width in WIDTHS:
                for scheme in SCHEMES:
                    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
                    page.goto(report.as_uri())
                    small(page.screenshot(full_page=True), PICTURES / f"report-{name}-{width}-{scheme}.png")
                    page.close()
        curves(browser, Path(folder) / "curves")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "runs" / "demo")
