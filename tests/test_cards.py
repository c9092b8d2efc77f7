"""hetpipe/processes/cards.py: a card that the installed torch cannot drive is told at start, with the wheel that can."""

from __future__ import annotations

import pytest
import torch

from hetpipe.files.messages import InputError
from hetpipe.processes import cards
from hetpipe.processes.cards import undriven

CU126 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((6, 1), CU126, True),  # a GTX 1080 Ti runs the kernels of 6.0
        ((6, 1), CU130, False),
        ((7, 0), CU130, False),
        ((7, 5), CU130, True),
        ((8, 9), CU130, True),  # an RTX 4090 runs those of 8.6
        ((12, 0), CU126, False),
        ((13, 0), CU130, True),  # compiled from compute_120 when first used
        ((9, 0), ["sm_90a"], True),
        ((6, 1), [], True),  # a build that does not say (ROCm)
        ((6, 1), ["gfx906"], True),
    ],
)
def test_which_cards_a_build_drives(capability: tuple[int, int], architectures: list[str], runs: bool) -> None:
    assert (undriven("a card", capability, architectures, "2.15.0+cu132") is None) == runs


def test_an_old_card_is_told_the_wheels_that_drive_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"NVIDIA GeForce GTX 1080 Ti #{index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: CU130)
    with pytest.raises(InputError) as caught:
        cards.check_card(1)
    assert str(caught.value) == (
        f"NVIDIA GeForce GTX 1080 Ti #1 has compute capability 6.1, and the installed torch {torch.__version__} has kernels for "
        "7.5 to 12.0; cards before Turing (7.5) are driven by the wheels for CUDA 12.6 (cu126), which torch has up to release "
        "2.14: install one of these, or hide the card (CUDA_VISIBLE_DEVICES)"
    )


def test_a_card_that_is_too_new_is_told_so() -> None:
    found = undriven("NVIDIA RTX 5090", (12, 0), CU126, "2.8.0+cu126")
    assert found is not None
    assert found.endswith(
        "has kernels for 5.0 to 9.0; install the wheel for the newest CUDA, or a newer torch, or hide the card "
        "(CUDA_VISIBLE_DEVICES)"
    )
