"""What a job names: something that is registered, or a function of one's own."""

from __future__ import annotations

from typing import Any, Self

from pydantic import model_validator

from hetpipe.documents.sections.torch_named import refuse_text
from hetpipe.files.formats import Name, Strict


class Named(Strict):
    """Something of the registry by `name`, or a function by `target` (`package.module:function`), with its `args`."""

    name: Name | None = None
    target: Name | None = None
    args: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _mapping(cls, data: Any) -> Any:
        return refuse_text(data)

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.name is None) == (self.target is None):
            raise ValueError("give either 'name' (from the registry) or 'target' (package.module:function), and not both")
        return self

    @property
    def label(self) -> str:
        """The name or the target."""
        return self.name or str(self.target)
