"""The section `export` of a job: where the weights go when the run has ended."""

from __future__ import annotations

from hetpipe.files.formats import Flag, Name, Strict
from hetpipe.spec import guesses


class ExportSection(Strict):
    """The folder into which the newest checkpoint's weights are written when all steps are done, as 'hetpipe export-weights'
    writes them; what is in it is replaced. `merge`: of a model with adapters the whole, to which they are added."""

    guesses = guesses.EXPORT
    folder: Name
    merge: Flag = False
