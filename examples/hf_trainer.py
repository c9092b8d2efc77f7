"""The Hugging Face Trainer. It counts the targets of a step over all ranks itself; what it needs is the loader, and a loss that
divides by that count:

torchrun --nproc-per-node 2 examples/hf_trainer.py --shares 6 2
"""

import tempfile

import common
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate
from transformers import Trainer, TrainingArguments

from hetpipe.uneven import ShareLoader, ShareSampler, process_group


class UnevenTrainer(Trainer):
    """A Trainer whose ranks have batches of different sizes."""

    def __init__(self, *args: object, shares: list[int], **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.shares = shares

    def get_train_dataloader(self) -> ShareLoader:
        """In place of the Trainer's own, in which all ranks have per_device_train_batch_size."""
        accumulate = self.args.gradient_accumulation_steps
        sampler = ShareSampler(len(self.train_dataset), self.shares, accumulate=accumulate)
        return ShareLoader(self.train_dataset, sampler, collate_fn=self.data_collator)


def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """A batch by the names of the model's arguments, with the targets as "labels"."""
    text, labels = default_collate(samples)
    return {"text": text, "labels": labels}


def loss_over_all_ranks(logits: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """The Trainer multiplies it by the number of ranks, over which DDP averages."""
    return cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


@process_group()
def main() -> None:
    """Train as one rank of torchrun's."""
    parser = common.arguments("the Hugging Face Trainer")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of an optimizer step")
    args = parser.parse_args()
    model = common.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=common.LEARNING_RATE, momentum=common.MOMENTUM)
    with tempfile.TemporaryDirectory() as folder:
        trainer = UnevenTrainer(
            model,
            TrainingArguments(
                folder,
                num_train_epochs=args.epochs,
                gradient_accumulation_steps=args.accumulate,
                max_grad_norm=common.MAX_NORM,
                lr_scheduler_type="constant",
                save_strategy="no",
                report_to="none",
                ddp_find_unused_parameters=False,
                use_cpu=not torch.cuda.is_available(),  # else ranks without GPUs do not average their gradients
                disable_tqdm=True,
            ),
            train_dataset=common.text_classification(),
            data_collator=collate,
            compute_loss_func=loss_over_all_ranks,
            optimizers=(optimizer, None),
            shares=args.shares,
        )
        trainer.train()
        common.finish(model, trainer.args.process_index, args.out)


if __name__ == "__main__":
    main()
