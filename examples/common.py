"""What the examples share: data, model, arguments, and how a run ends. Nothing here is special to unequal ranks."""

import argparse
import hashlib
import math
import os
import sysconfig
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

CLASSES = ("asyncio", "email", "unittest")  # packages of Python's standard library
BYTES = 128  # in a piece of source text
PIECES = 67  # of each class: 201 samples, 25 batches of 8 and a last one of 1
LEARNING_RATE = 0.1
MOMENTUM = 0.9
MAX_NORM = 1.0  # gradients are clipped to it
SEED = 0


def text_classification() -> TensorDataset:
    """Pieces of source text, and which package of the standard library each is from: int64 [128] and int64 []."""
    texts, labels = [], []
    for label, package in enumerate(CLASSES):
        files = sorted((Path(sysconfig.get_path("stdlib")) / package).glob("*.py"))
        source = b"".join(file.read_bytes() for file in files)
        spacing = len(source) // PIECES
        texts += [list(source[i * spacing : i * spacing + BYTES]) for i in range(PIECES)]
        labels += [label] * PIECES
    return TensorDataset(torch.tensor(texts), torch.tensor(labels))


class Classifier(nn.Module):
    """Bytes to logits: a convolution, and a smooth maximum over the positions. No dropout, so that runs can be compared."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.convolution = nn.Conv1d(16, width, kernel_size=5)
        self.head = nn.Linear(width, len(CLASSES))

    def forward(self, text: Tensor) -> Tensor:
        """Logits [b, classes] of int64 [b, positions] bytes."""
        features = self.convolution(self.embed(text).mT)  # [b, width, positions - 4]
        logits: Tensor = self.head(features.logsumexp(2) - math.log(features.shape[2]))
        return logits


def build_model() -> Classifier:
    """The same weights on every rank."""
    torch.manual_seed(SEED)
    return Classifier()


def arguments(description: str) -> argparse.ArgumentParser:
    """The arguments that all examples take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--shares", type=int, nargs="+", default=[6, 2], help="samples of each rank")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the final parameters to this .safetensors file")
    return parser


def own_device() -> torch.device:
    """This rank's GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())


def finish(model: nn.Module, rank: int, out: Path | None) -> None:
    """Rank 0 prints the loss over all samples and a hash of the parameters, and writes them to `out`."""
    if rank != 0:
        return
    texts, labels = text_classification().tensors
    device = next(model.parameters()).device
    with torch.no_grad():
        logits = model(texts.to(device)).cpu()
    loss = nn.functional.cross_entropy(logits, labels).item()
    accuracy = (logits.argmax(1) == labels).float().mean().item()
    parameters = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in parameters.values())).hexdigest()
    print(f"loss {loss:.6f}, accuracy {accuracy:.3f}, parameters {digest[:12]}")
    if out is not None:
        save_file(parameters, out)
