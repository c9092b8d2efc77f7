"""DistributedDataParallel started by torch.multiprocessing, one process a share:

python examples/spawn.py --shares 6 2
"""

import argparse
import contextlib
import os
import random
import socket

import common
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hetpipe.uneven import ShareLoader, ShareSampler, global_count, global_mean, process_group


def start(rank: int, port: int, args: argparse.Namespace) -> None:
    """One rank, with the environment that torchrun would give it."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": len(args.shares), "RANK": rank, "LOCAL_RANK": rank}
    os.environ |= {name: str(value) for name, value in place.items()}
    train(args)


@process_group()
def train(args: argparse.Namespace) -> None:
    """What each rank does."""
    device = common.own_device()
    dataset = common.text_classification()
    model = DistributedDataParallel(common.build_model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=common.LEARNING_RATE, momentum=common.MOMENTUM)
    loader = ShareLoader(dataset, ShareSampler(len(dataset), args.shares))
    for epoch in range(args.epochs):
        loader.set_epoch(epoch)
        for text, label in loader:
            text, label = text.to(device), label.to(device)
            loss_sum = cross_entropy(model(text), label, reduction="sum")
            global_mean(loss_sum, global_count(label)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), common.MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()

    common.finish(model.module, dist.get_rank(), args.out)


def free_port() -> int:
    """A port for the ranks to meet at, below those that the system gives to others until the ranks have started."""
    for port in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port
    raise OSError("none of 100 ports is free")


if __name__ == "__main__":
    given = common.arguments("DDP by torch.multiprocessing").parse_args()
    torch.multiprocessing.spawn(start, args=(free_port(), given), nprocs=len(given.shares))
