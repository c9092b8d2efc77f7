"""Lightning. The Trainer is told to leave the sampler alone, and training_step returns the weighted loss:

python examples/with_lightning.py --shares 6 2
"""

import logging
import warnings

import common
import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from hetpipe.uneven import ShareLoader, ShareSampler, global_count, global_mean, process_group


class TextClassifier(pl.LightningModule):
    """The model, its data and its loss."""

    def __init__(self, shares: list[int]) -> None:
        super().__init__()
        self.model, self.shares = common.build_model(), shares

    def train_dataloader(self) -> ShareLoader:
        """Called on every rank, once there are ranks."""
        dataset = common.text_classification()
        return ShareLoader(dataset, ShareSampler(len(dataset), self.shares))

    def training_step(self, batch: list[Tensor], batch_index: int) -> Tensor:
        """The loss on which Lightning calls backward."""
        text, label = batch
        loss_sum = cross_entropy(self.model(text), label, reduction="sum")
        return global_mean(loss_sum, global_count(label))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer."""
        return torch.optim.SGD(self.parameters(), lr=common.LEARNING_RATE, momentum=common.MOMENTUM)


@process_group()
def main() -> None:
    """Train as one rank of Lightning's, which starts the others."""
    args = common.arguments("Lightning").parse_args()
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data are in memory
    warnings.filterwarnings("ignore", ".*LeafSpec.*")  # Lightning's use of torch
    module = TextClassifier(args.shares)
    trainer = pl.Trainer(
        devices=len(args.shares),
        strategy="ddp",
        use_distributed_sampler=False,  # ShareSampler is one
        max_epochs=args.epochs,
        gradient_clip_val=common.MAX_NORM,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    common.finish(module.model, trainer.global_rank, args.out)


if __name__ == "__main__":
    main()
