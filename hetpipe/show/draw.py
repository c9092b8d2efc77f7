"""A plan into a file: SVG and PNG hold the partition, HTML the whole report."""

from __future__ import annotations

from pathlib import Path

from hetpipe.files.writing import write_text
from hetpipe.show.page.report import report_page
from hetpipe.show.picture.file import check_picture, write_picture
from hetpipe.show.picture.partition import partition_canvas
from hetpipe.study.study import Study

PICTURES = (".svg", ".png", ".html")


def draw_plan(study: Study, path: str | Path) -> None:
    """Draw into `path`: .svg, .png (needs resvg_py) or .html, by its suffix. InputError for another suffix."""
    check_picture(path, *PICTURES)
    if Path(path).suffix.lower() == ".html":
        write_text(path, report_page(study))
    else:
        write_picture(path, partition_canvas(study.scene))
