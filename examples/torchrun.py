"""DistributedDataParallel under torchrun, with a batch size for each rank:

torchrun --nproc-per-node 2 examples/torchrun.py --shares 6 2
torchrun --nproc-per-node 2 examples/torchrun.py --measure 8    # 8 samples a step, in shares that are measured first
"""

import common
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hetpipe.uneven import ShareLoader, ShareSampler, global_count, global_mean, measured_shares, process_group


@process_group()
def main() -> None:
    """Train as one rank of torchrun's."""
    parser = common.arguments("DDP under torchrun")
    parser.add_argument("--measure", type=int, metavar="GLOBAL_BATCH", help="share it by measurement")
    args = parser.parse_args()
    device = common.own_device()
    dataset = common.text_classification()
    plain = common.build_model().to(device)

    def forward_and_backward(size: int) -> None:
        text, label = (tensor[:size].to(device) for tensor in dataset.tensors)
        cross_entropy(plain(text), label).backward()

    shares = measured_shares(plain, forward_and_backward, args.measure) if args.measure else args.shares
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=common.LEARNING_RATE, momentum=common.MOMENTUM)
    loader = ShareLoader(dataset, ShareSampler(len(dataset), shares))
    for epoch in range(args.epochs):
        loader.set_epoch(epoch)
        for text, label in loader:
            text, label = text.to(device), label.to(device)
            loss_sum = cross_entropy(model(text), label, reduction="sum")
            global_mean(loss_sum, global_count(label)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), common.MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()

    common.finish(plain, dist.get_rank(), args.out)


if __name__ == "__main__":
    main()
