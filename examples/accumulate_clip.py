"""Gradient accumulation and clipping in DDP. The shares are those of an optimizer step; each is run in parts:

torchrun --nproc-per-node 2 examples/accumulate_clip.py --shares 6 2 --accumulate 2
torchrun --nproc-per-node 2 examples/accumulate_clip.py --plan plan.json    # both from a data-parallel plan
"""

from contextlib import nullcontext

import common
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hetpipe.uneven import ShareLoader, ShareSampler, global_count, global_mean, plan_shares, process_group, windows


@process_group()
def main() -> None:
    """Train as one rank of torchrun's."""
    parser = common.arguments("accumulation and clipping in DDP")
    parser.add_argument("--accumulate", type=int, default=2, help="batches of an optimizer step")
    parser.add_argument("--plan", help="take both from this plan.json")
    args = parser.parse_args()
    shares, accumulate = plan_shares(args.plan) if args.plan else (args.shares, args.accumulate)
    device = common.own_device()
    dataset = common.text_classification()
    model = DistributedDataParallel(common.build_model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=common.LEARNING_RATE, momentum=common.MOMENTUM)
    loader = ShareLoader(dataset, ShareSampler(len(dataset), shares, accumulate=accumulate))
    for epoch in range(args.epochs):
        loader.set_epoch(epoch)
        for batches in windows(loader, accumulate):
            count = global_count(*[label for _, label in batches])  # of the whole step, first of all
            for i, (text, label) in enumerate(batches):
                with nullcontext() if i == len(batches) - 1 else model.no_sync():
                    loss_sum = cross_entropy(model(text.to(device)), label.to(device), reduction="sum")
                    global_mean(loss_sum, count).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), common.MAX_NORM)  # once, after the last
            optimizer.step()
            optimizer.zero_grad()

    common.finish(model.module, dist.get_rank(), args.out)


if __name__ == "__main__":
    main()
