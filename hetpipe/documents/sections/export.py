"""The section `export` of a job: where the weights go when the run has ended."""

from __future__ import annotations

from pathlib import Path

from hetpipe.documents.guesses import KeysOf
from hetpipe.files.formats import Flag, Name, Strict
from hetpipe.files.messages import InputError, shown
from hetpipe.files.writing import check_folder

MARK = "hetpipe_export.json"  # beside what a run has exported: which files these are


class ExportSection(Strict):
    """The folder into which weights are written when all steps are done, of the checkpoint of the best evaluation if
    evaluations were compared (`evaluate.every_steps`), else of the newest, as 'hetpipe export-weights' writes them. What a run
    has exported there before is replaced; a folder that holds anything else is refused. `merge`: of a model with adapters the
    whole, to which they are added."""

    guesses = KeysOf("export")
    folder: Name
    merge: Flag = False

    def place(self, *own: str) -> Path:
        """The folder, behind links. InputError where it cannot be written, where what it holds is of no run, or where one of a
        run's `own` folders lies in it. Makes nothing."""
        target, said = Path(self.folder).resolve(), f"export.folder is {shown(self.folder)}, which is replaced as a whole"
        check_folder(target.parent)
        if (inside := next((folder for folder in own if Path(folder).resolve().is_relative_to(target)), None)) is not None:
            raise InputError(f"{said}, but {inside}, which the run also writes, lies in it. Name a separate folder")
        if target.exists() and not target.is_dir():
            raise InputError(f"export.folder is {shown(self.folder)}, which is a file. Name a folder")
        names = sorted(path.name for path in target.iterdir()) if target.exists() else []
        if names and MARK not in names:
            raise InputError(
                f"{said}, but it holds {shown(names[0])} and no {MARK}, which a run leaves beside its export. "
                "Name another folder, or move its files away"
            )
        return target
