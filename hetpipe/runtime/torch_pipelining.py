"""Stages under torch.distributed.pipelining: our action table on its schedule runtime. What torch keeps private is used
here only."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from hetpipe.layers.model import Tensors, Wanted, as_tuple
from hetpipe.layers.split import Stage, TensorSpec
from hetpipe.processes.progress import debugging
from hetpipe.runtime.recorder import Recorder
from hetpipe.spec.schedule import Action, pipeline_actions

if not debugging():  # an error is told by the rank that has it, without a drawing of all
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)

_FORWARD = (_ComputationType.FORWARD, _ComputationType.SEND_F, _ComputationType.RECV_F)
Ends = tuple[
    Sequence[TensorSpec], Sequence[TensorSpec]
]  # what enters and what leaves a stage with one micro-batch
_KINDS = {"F": _ComputationType.FORWARD, "B": _ComputationType.FULL_BACKWARD}


class _UnevenStage(PipelineStage):
    """A stage whose micro-batches differ in size: receive buffers have each micro-batch's own shape."""

    def __init__(self, module: Stage, index: int, count: int, device: torch.device, group: dist.ProcessGroup, *,
                 sizes: Sequence[int], ends: Sequence[Ends], recorder: Recorder) -> None:  # fmt: skip
        inputs, outputs = ends[0]
        meta = torch.device("meta")
        super().__init__(module, index, count, device, input_args=tuple(s.empty(meta) for s in inputs),
                         output_args=tuple(s.empty(meta) for s in outputs), group=group)  # fmt: skip
        self.sizes, self.ends, self.recorder = sizes, ends, recorder
        self.received: list[Tensor] = []
        self._outputs: dict[int, list[object]] = {}

    def _resized(self, infos: tuple, specs: Sequence[TensorSpec]) -> tuple:  # type: ignore[type-arg]
        resized = []
        for info, spec in zip(infos, specs, strict=True):
            if info.buffer is not None:
                info.buffer = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
                info.tensor_meta = dataclasses.replace(
                    info.tensor_meta, shape=info.buffer.shape, stride=info.buffer.stride()
                )
                self.received.append(info.buffer)
                if self.recorder.meter is not None:
                    self.recorder.meter.own(info.buffer, "a receive buffer")
            resized.append(info)
        return tuple(resized)

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        if not self.is_first:
            for i, infos in self.args_recv_info.items():
                self.args_recv_info[i] = self._resized(infos, self.ends[i][0])

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        if not self.is_last:
            for i, infos in self.grad_recv_info.items():
                self.grad_recv_info[i] = self._resized(infos, self.ends[i][1])

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        for op in ops:
            op.tensor = op.tensor.contiguous()
        if not self.has_backward:
            del self.fwd_cache[fwd_chunk_id]
        return ops

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Tensor, ...],
        kwargs: dict[str, object] | None = None,
        save_forward_output: bool = True,
    ) -> Tensors:
        meter = self.recorder.meter
        self.recorder.begin(f"{self.stage_index}F{fwd_chunk_id}")
        if meter is None or not torch.is_grad_enabled():
            output: Tensors = super().forward_one_chunk(fwd_chunk_id, args, kwargs, False)
        else:
            with meter.hooks():
                output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, False)
            self._outputs[fwd_chunk_id] = [meter.hold(t) for t in as_tuple(output)]
        if not self.is_last:  # the last stage's forward goes on with the loss
            sent, received = self.fwd_cache[fwd_chunk_id]  # what nothing later uses takes no part in backward
            kept = tuple(
                t if spec.requires_grad else t.detach()
                for t, spec in zip(sent, self.ends[fwd_chunk_id][1], strict=True)
            )
            self.fwd_cache[fwd_chunk_id] = (kept, received)
            self.recorder.finish("F", fwd_chunk_id, self.sizes[fwd_chunk_id])
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        self.recorder.begin(f"{self.stage_index}B{bwd_chunk_id}")
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._outputs.pop(bwd_chunk_id, None)
        if not self.is_first:
            self._fill_gradients(bwd_chunk_id)
        self.recorder.finish("B", bwd_chunk_id, self.sizes[bwd_chunk_id])

    def _fill_gradients(self, i: int) -> None:
        """Zeros for an input that this micro-batch did not use: torch would send zeros of the first micro-batch's shape."""
        self.bwd_cache[i] = tuple(
            spec.empty(self.device).detach().zero_() if gradient is None and spec.requires_grad else gradient
            for gradient, spec in zip(self.bwd_cache[i], self.ends[i][0], strict=True)
        )


class _Runtime(_PipelineScheduleRuntime):
    """torch's schedule runtime; the loss belongs to the last stage's forward."""

    stage: _UnevenStage

    def _maybe_compute_loss(self, stage, output, target_mbs, mb_index, loss_kwargs=None):  # type: ignore[no-untyped-def]
        if not stage.is_last:
            return
        meter = stage.recorder.meter
        if meter is not None and torch.is_grad_enabled():
            with meter.hooks():
                super()._maybe_compute_loss(stage, output, target_mbs, mb_index, loss_kwargs)  # type: ignore[no-untyped-call]
        else:
            super()._maybe_compute_loss(stage, output, target_mbs, mb_index, loss_kwargs)  # type: ignore[no-untyped-call]
        if not self._has_backward:
            del stage.fwd_cache[mb_index]
            if self.on_output is not None:
                self.on_output(output, mb_index)
        stage.recorder.finish("F", mb_index, stage.sizes[mb_index])

    on_output: Callable[[Tensors, int], None] | None = None


def _table(actions: Sequence[Sequence[Action]]) -> dict[int, list[_Action | None]]:
    return {s: [_Action(a.stage, _KINDS[a.kind], a.microbatch) for a in row] for s, row in enumerate(actions)}


class StageRun:
    """One stage's part of a pipeline for one list of micro-batch sizes: train it (`loss` given) or only forward. `ranks` are the
    global ranks of all stages in order."""

    def __init__(self, module: Stage, *, index: int, ranks: Sequence[int], group: dist.ProcessGroup, sizes: Sequence[int],
                 depths: Sequence[int] | None, ends: Sequence[Ends], recorder: Recorder,
                 loss: Callable[[Tensors, Wanted], Tensor] | None) -> None:  # fmt: skip
        count = len(ranks)
        self.stage = _UnevenStage(
            module, index, count, recorder.device, group, sizes=sizes, ends=ends, recorder=recorder
        )
        m = len(sizes)
        actions = pipeline_actions([m] * count if depths is None else depths, m)
        self.runtime = _Runtime([self.stage], m, loss_fn=loss, scale_grads=False)  # type: ignore[no-untyped-call]
        place = [dist.get_group_rank(group, rank) for rank in ranks]  # torch sorts the ranks of a group
        table = {place[s]: row for s, row in _table(actions).items()}
        self.runtime.pipeline_order = table
        self.runtime._prepare_schedule_with_comms({s: list(row) for s, row in table.items()})
        if depths is None:  # torch refuses a table without backwards, so they are taken out of it here
            lowered = self.runtime.pipeline_order_with_comms
            self.runtime.pipeline_order_with_comms = {
                s: [a for a in row if a.computation_type in _FORWARD] for s, row in lowered.items()
            }

    def run(self, inputs: Sequence[Tensors] | None, targets: Sequence[Wanted] | None) -> list[Tensor]:
        """Run all micro-batches; the last stage gets their losses."""
        self.stage.clear_runtime_states()
        losses: list[Tensor] = []
        arguments = None if inputs is None else [as_tuple(x) for x in inputs]
        training = self.stage.has_backward = self.runtime._has_backward
        self.runtime._step_microbatches(
            arguments,
            None,
            list(targets) if targets is not None else None,
            losses if training else None,
            return_outputs=False,
        )
        return losses

    def release(self) -> None:
        """The receive buffers are no longer counted; drop the run."""
        if self.stage.recorder.meter is not None:
            for buffer in self.stage.received:
                self.stage.recorder.meter.disown(buffer)
