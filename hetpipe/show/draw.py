"""A plan into a file: SVG and PNG hold the partition, HTML the whole report."""

from __future__ import annotations

from pathlib import Path

from hetpipe.files.writing import check_output, write_bytes, write_text
from hetpipe.show.page.report import report_page
from hetpipe.show.picture.partition import partition_canvas
from hetpipe.study.study import Study

PICTURES = (".svg", ".png", ".html")


def draw_plan(study: Study, path: str | Path) -> None:
    """Draw into `path`: .svg, .png (needs matplotlib) or .html, by its suffix. InputError for another suffix."""
    check_output(path, *PICTURES)
    suffix = Path(path).suffix.lower()
    if suffix == ".html":
        write_text(path, report_page(study))
    elif suffix == ".svg":
        write_text(path, partition_canvas(study.scene).to_svg())
    else:
        write_bytes(path, partition_canvas(study.scene).to_png())
