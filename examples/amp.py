"""Mixed precision in DDP: autocast, a GradScaler where gradients could underflow, and clipping of the unscaled gradients:

torchrun --nproc-per-node 2 examples/amp.py --shares 6 2 --precision bfloat16

With --precision float32 autocast is off and the scaler (powers of two) changes nothing: the same parameters as everywhere.
"""

import common
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hetpipe.uneven import ShareLoader, ShareSampler, global_count, global_mean, process_group


@process_group()
def main() -> None:
    """Train as one rank of torchrun's."""
    parser = common.arguments("mixed precision in DDP")
    parser.add_argument("--precision", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    args = parser.parse_args()
    device = common.own_device()
    dataset = common.text_classification()
    model = DistributedDataParallel(common.build_model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=common.LEARNING_RATE, momentum=common.MOMENTUM)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision != "bfloat16")
    dtype, mixed = getattr(torch, args.precision), args.precision != "float32"
    loader = ShareLoader(dataset, ShareSampler(len(dataset), args.shares))
    for epoch in range(args.epochs):
        loader.set_epoch(epoch)
        for text, label in loader:
            text, label = text.to(device), label.to(device)
            with torch.autocast(device.type, dtype if mixed else None, enabled=mixed):
                loss_sum = cross_entropy(model(text), label, reduction="sum")
            loss = global_mean(loss_sum, global_count(label))
            scaler.scale(loss).backward()  # DDP averages scaled gradients: all ranks see an overflow
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), common.MAX_NORM)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    common.finish(model.module, dist.get_rank(), args.out)


if __name__ == "__main__":
    main()
