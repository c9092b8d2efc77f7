"""Accelerate. Model and optimizer are prepared; the loader is not, since it already gives each rank its own batches:

torchrun --nproc-per-node 2 examples/with_accelerate.py --shares 6 2
"""

import common
import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

from hetpipe.uneven import ShareLoader, ShareSampler, global_count, global_mean, process_group


@process_group()
def main() -> None:
    """Train as one rank of Accelerate's."""
    args = common.arguments("Accelerate").parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())  # cpu=True: a process group without GPUs
    dataset = common.text_classification()
    model = common.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=common.LEARNING_RATE, momentum=common.MOMENTUM)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = ShareLoader(dataset, ShareSampler(len(dataset), args.shares))
    for epoch in range(args.epochs):
        loader.set_epoch(epoch)
        for text, label in loader:
            text, label = text.to(accelerator.device), label.to(accelerator.device)
            loss_sum = cross_entropy(model(text), label, reduction="sum")
            accelerator.backward(global_mean(loss_sum, global_count(label)))
            accelerator.clip_grad_norm_(model.parameters(), common.MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()

    common.finish(accelerator.unwrap_model(model), accelerator.process_index, args.out)


if __name__ == "__main__":
    main()
