"""What mkdocs does beside its own: pages that lie elsewhere in the repository, with links as they stand in the files."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from docs.generate import filled

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
ROOTS = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
HOME = {"README.md": "index.md", "hetpipe/show/glossary.md": "glossary.md"}


def beside() -> dict[str, str]:
    """Pages of the site that lie outside of docs/: their path in the repository, and in the site."""
    found = [ROOT / name for name in (*HOME, *ROOTS, "models/README.md", "examples/README.md")]
    found += sorted(ROOT.glob("bench/*/README.md"))
    names = [path.relative_to(ROOT).as_posix() for path in found]
    return {name: HOME.get(name, name) for name in names}


def on_files(files: Files, config: Any) -> Files:
    """Add them."""
    for name, place in beside().items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Fill what is generated, and turn links between files of the repository into links between pages."""
    places = beside()
    own = page.file.src_uri
    source = next((name for name, place in places.items() if place == own), f"docs/{own}")

    def linked(found: re.Match[str]) -> str:
        text, path, anchor = found[1], found[2], found[3] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        place = places.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(place) is None:
            return f"{text} (`{target}`)" if (ROOT / target).exists() else found[0]  # a file of the repository that is no page
        return f"[{text}]({posixpath.relpath(place, posixpath.dirname(own) or '.')}{anchor})"

    return LINK.sub(linked, filled(markdown))
