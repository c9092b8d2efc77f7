"""Nothing of torch's that has no public name is used, so that any release from 2.8 on will do. Six exceptions, which torch's
documentation tells to use under these names: FakeTensorMode ("Fake tensor"), by which shapes are found without arithmetic,
TorchDispatchMode ("Extending PyTorch", modes), by which draws come out alike, a tensor's `_version` ("Autograd mechanics",
in-place correctness checks), the operator `aten._to_copy` ("Core ATen IR"), `torch.utils._pytree` ("torch.export"), in which
the outputs of transformers and diffusers are registered, and `torch._dynamo` ("torch.compiler"), of which only is asked whether
it was imported."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTED = (
    "torch._subclasses",
    "torch.utils._python_dispatch",
    "torch.utils._pytree",
    "._version",
    "torch._dynamo",
    "torch.ops.aten._to_copy",
)
OTHERS = ("._get_dtype_plan",)  # of transformers, which has no public name for what it keeps in float32
PRIVATE = re.compile(
    r"(?:torch|nn|dist|functional|autograd|optim|cuda)(?:\.\w+)*\._(?!_)\w+"  # torch.x._y
    r"|from torch[\w.]*\._\w+"
    r"|from torch[\w.]* import (?:\(?[\w, \n]*\b)?_\w+"
    r"|\._(?:version|schedulers|milestones|backward_hooks|get_|execution_engine)\w*"
)


def test_no_private_name_of_torch() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for folder in ("hetpipe", "partitioners", "models", "examples")
        for path in (ROOT / folder).rglob("*.py")
        for match in PRIVATE.finditer(path.read_text())
        if not match[0].endswith((*DOCUMENTED, *OTHERS))
    }
    assert found == set()


def test_the_pattern_finds_private_names() -> None:
    for line in (
        "from torch.distributed.pipelining.schedules import _Action, _ComputationType",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "x = torch.distributed.pipelining._backward",
        "isinstance(m, nn.modules.batchnorm._BatchNorm)",
        "scheduler._schedulers",
    ):
        assert PRIVATE.search(line), line
