"""What test_transparency.py trains: plans, optimizers, batches, boundaries and parameters of every kind."""

from __future__ import annotations

from tests.support.transparency import Case

THREE = {"cuts": [4, 3, 3], "sizes": [4] * 6}  # 24 samples over three devices
TWO = {"cuts": [6, 4], "sizes": [4, 4]}  # beside 8 over two
ONE = {"cuts": [10], "sizes": [3, 3, 2]}  # or 8 on one
BOTH = (THREE, TWO)
SPLIT = {"cuts": [6, 4], "sizes": [4] * 3, "widths": [2, 1]}  # the first stage over two devices
MIDDLE = {"cuts": [3, 4, 3], "sizes": [4] * 3, "widths": [1, 2, 1]}
ENDS = {"cuts": [10], "sizes": [4, 3], "widths": [3]}
UNEVEN = ({"cuts": [4, 3, 3], "sizes": [5, 4, 3, 2]}, {"cuts": [6, 4], "sizes": [2, 3, 5, 4, 1]})

CASES = {
    "plans": [
        Case(name="[4,3,3] x 24 beside [6,4] x 8", plan=BOTH),
        Case(name="three stages beside one rank", plan=(THREE, ONE)),
        Case(name="replicas of 3, 2 and 1 stages", plan=({"cuts": [2, 3, 5], "sizes": [4, 4, 1]}, TWO, ONE)),
        Case(name="one pipeline", plan=({"cuts": [1, 8, 1], "sizes": [2, 2, 2, 2]},)),
        Case(name="one rank", plan=(ONE,)),
        Case(
            name="devices out of order",
            plan=({**THREE, "devices": ["n2/0", "n0/2", "n1/0"]}, {**TWO, "devices": ["n1/1", "n0/0"]}),
        ),
        Case(name="gpipe", plan=BOTH, schedule="gpipe"),
        Case(name="depths 5,3,1", plan=({**THREE, "warmup": [5, 3, 1]}, TWO)),
        Case(name="depths 5,3,1 beside one rank", plan=({**THREE, "warmup": [5, 3, 1]}, ONE)),
        Case(name="fewer micro-batches than stages", plan=({"cuts": [4, 3, 3], "sizes": [5, 1]}, {"cuts": [6, 4], "sizes": [2]})),
        Case(name="unequal micro-batches", plan=UNEVEN),
        Case(name="unequal micro-batches, gpipe", plan=UNEVEN, schedule="gpipe"),
        Case(name="recompute", plan=({**THREE, "recompute": True}, TWO)),
        Case(
            name="recompute everywhere, depths 5,3,1",
            plan=({**THREE, "recompute": True, "warmup": [5, 3, 1]}, {**ONE, "recompute": True}),
        ),
        Case(name="offload", plan=({**THREE, "offload": True}, TWO)),
        Case(
            name="offload everywhere, depths 5,3,1",
            plan=({**THREE, "offload": True, "warmup": [5, 3, 1]}, {**ONE, "offload": True}),
        ),
        Case(name="offload, gpipe", plan=({**THREE, "offload": True}, {**TWO, "offload": True}), schedule="gpipe"),
    ],
    "optimizers": [
        Case(name="AdamW", plan=BOTH, optimizer="AdamW"),
        Case(name="clipped", plan=BOTH, clip=0.05),
        Case(name="AdamW, clipped, three replicas", plan=(THREE, TWO, ONE), optimizer="AdamW", clip=0.05),
        Case(name="a limit above the norm", plan=BOTH, clip=1e6),
        Case(name="zero_grad by the user", plan=BOTH, zero_grad=True),
    ],
    "batches": [
        Case(
            name="a replica without samples",
            plan=BOTH,
            optimizer="AdamW",
            clip=0.05,
            shares=((24, 8), (24, 8), (20, 0), (24, 8), (24, 8)),
        ),
        Case(name="only the small replica has samples", plan=BOTH, shares=((24, 8), (0, 3), (24, 8))),
        Case(name="a batch cut short", plan=UNEVEN, shares=((14, 15), (10, 6), (13, 1), (14, 15), (1, 0))),
        Case(
            name="a batch cut short, gpipe, three replicas",
            plan=(THREE, TWO, ONE),
            schedule="gpipe",
            shares=((24, 8, 8), (11, 0, 3)),
        ),
    ],
    "tokens": [
        Case(name="tied", net="tied", plan=BOTH),
        Case(name="tied beside one rank", net="tied", plan=(THREE, ONE)),
        Case(name="tied, clipped, AdamW", net="tied", plan=(THREE, ONE), clip=0.05, optimizer="AdamW"),
        Case(
            name="tied, three replicas, cut short",
            net="tied",
            plan=(THREE, TWO, ONE),
            clip=0.05,
            shares=((24, 8, 8), (9, 8, 3), (24, 0, 8)),
        ),
        Case(name="tied, all targets of a replica ignored", net="tied", plan=(THREE, {"cuts": [6, 4], "sizes": [3]})),
        Case(name="tied, unequal micro-batches, recompute", net="tied", plan=tuple({**row, "recompute": True} for row in UNEVEN)),
        Case(
            name="class weights, three replicas, cut short",
            net="tied",
            class_weights=True,
            plan=(THREE, TWO, ONE),
            clip=0.05,
            shares=((24, 8, 8), (9, 8, 3), (24, 0, 8)),
            evaluate=(13, 0, 5),
        ),
        Case(name="class weights, unequal micro-batches, AdamW", net="tied", class_weights=True, plan=UNEVEN, optimizer="AdamW"),
        Case(
            name="class weights, micro-batches without weight",
            net="tied",
            class_weights=True,
            plan=({"cuts": [4, 3, 3], "sizes": [1] * 12}, {"cuts": [10], "sizes": [1, 2, 1]}),
            shares=((12, 4), (1, 0), (9, 3)),
        ),
    ],
    "boundaries": [
        Case(name="tuples", net="tuples", plan=BOTH),
        Case(name="tuples, unequal micro-batches", net="tuples", plan=UNEVEN, optimizer="AdamW"),
        Case(name="tuples, recompute", net="tuples", plan=({**THREE, "recompute": True}, ONE)),
        Case(name="unused output", net="unused output", plan=BOTH),
        Case(name="unused output, unequal micro-batches, AdamW", net="unused output", plan=UNEVEN, optimizer="AdamW"),
        Case(name="output used in some micro-batches", net="sometimes used output", plan=UNEVEN, reference_in_microbatches=True),
        Case(
            name="not contiguous",
            net="transposed",
            plan=({"cuts": [3, 4, 3], "sizes": [4] * 3}, {"cuts": [5, 5], "sizes": [3, 2]}),
        ),
        Case(name="not contiguous, gpipe", net="transposed", plan=({"cuts": [1, 2, 7], "sizes": [1, 2]}, ONE), schedule="gpipe"),
        Case(name="in place", net="in place", plan=({"cuts": [4, 3, 3], "sizes": [4, 4]}, TWO)),
        Case(
            name="in place, recompute", net="declared in place", plan=({**THREE, "recompute": True}, {**TWO, "recompute": True})
        ),
        Case(
            name="stages without parameters",
            net="identities",
            plan=({"cuts": [4, 3, 3], "sizes": [4, 4]}, {"cuts": [1, 9], "sizes": [2]}),
        ),
    ],
    "pairs": [
        Case(name="pairs", net="pairs", plan=BOTH),
        Case(
            name="pairs, unequal micro-batches, recompute", net="pairs", plan=tuple({**row, "recompute": True} for row in UNEVEN)
        ),
        Case(
            name="pairs, three replicas, cut short, clipped",
            net="pairs",
            plan=(THREE, TWO, ONE),
            optimizer="AdamW",
            clip=0.01,
            shares=((24, 8, 8), (9, 8, 3), (24, 0, 8)),
            evaluate=(13, 0, 5),
        ),
        Case(name="pairs, LoRA, emulated", net="pairs, LoRA", plan=(THREE, ONE), emulated=True),
    ],
    "parameters": [
        Case(name="first stage frozen", net="first stage frozen", plan=BOTH, optimizer="AdamW", clip=0.05),
        Case(name="first stage frozen, beside one rank", net="first stage frozen", plan=(THREE, ONE), emulated=True, clip=0.05),
        Case(
            name="first two stages frozen",
            net="first two stages frozen",
            plan=(THREE, TWO, ONE),
            optimizer="AdamW",
            clip=0.05,
            shares=((24, 8, 8), (11, 0, 3)),
        ),
        Case(
            name="first two stages frozen, recompute, depths 5,3,1",
            net="first two stages frozen",
            evaluate=(13, 5),
            plan=({**THREE, "recompute": True, "warmup": [5, 3, 1]}, ONE),
        ),
        Case(name="first stage and a part frozen, unequal", net="first stage and a part frozen", plan=(*UNEVEN, ONE), clip=0.05),
        Case(name="first stage and a part frozen, gpipe", net="first stage and a part frozen", schedule="gpipe", plan=BOTH),
        Case(name="layer frozen", net="layer frozen", plan=BOTH, optimizer="AdamW"),
        Case(name="middle stage frozen", net="middle stage frozen", plan=(THREE, ONE)),
        Case(name="last stage frozen", net="last stage frozen", plan=BOTH),
        Case(name="unused parameter", net="unused parameter", plan=BOTH, optimizer="AdamW", clip=0.05),
        Case(
            name="unused parameter, a replica without samples",
            net="unused parameter",
            plan=BOTH,
            optimizer="AdamW",
            shares=((24, 8), (5, 0)),
        ),
        Case(name="few bits of its own", net="few bits of its own", plan=(THREE, TWO, ONE), optimizer="AdamW", clip=0.05),
        Case(
            name="few bits of its own, emulated, recompute",
            net="few bits of its own",
            emulated=True,
            plan=({**THREE, "recompute": True}, ONE),
        ),
        Case(name="shared modules", net="shared modules", plan=BOTH),
        Case(name="shared modules, clipped", net="shared modules", plan=(THREE, TWO, ONE), optimizer="AdamW", clip=0.05),
    ],
    "adapters": [
        Case(name="LoRA", net="LoRA", plan=BOTH, optimizer="AdamW", clip=0.05),
        Case(name="LoRA beside one rank, recompute", net="LoRA", plan=({**THREE, "recompute": True}, ONE)),
        Case(name="LoRA in the upper half", net="LoRA in the upper half", plan=(THREE, TWO, ONE), optimizer="AdamW"),
        Case(name="LoRA in the lower half", net="LoRA in the lower half", plan=(THREE, ONE)),
        Case(name="DoRA and norms", net="DoRA and norms", plan=(THREE, ONE), optimizer="AdamW", clip=0.05),
        Case(name="tied, LoRA, embedding and head train", net="tied, LoRA", plan=(THREE, ONE), optimizer="AdamW", clip=0.05),
        Case(name="nf4, rsLoRA", net="nf4, rsLoRA", plan=(THREE, ONE), optimizer="AdamW"),
        Case(name="nf4, rsLoRA, recompute, three replicas", net="nf4, rsLoRA", plan=({**THREE, "recompute": True}, TWO, ONE)),
        Case(name="int8, DoRA", net="int8, DoRA", plan=(THREE, ONE), clip=0.05, evaluate=(7, 3)),
        Case(name="emulated, nf4, rsLoRA", net="nf4, rsLoRA", plan=(THREE, ONE), emulated=True),
    ],
    "emulated": [
        Case(name="emulated", plan=BOTH, emulated=True, clip=0.05),
        Case(name="emulated, evaluate between steps", plan=UNEVEN, emulated=True, evaluate=(7, 11)),
        Case(name="emulated, recompute", net="tied", plan=({**THREE, "recompute": True}, ONE), emulated=True),
        Case(name="emulated, offload", net="tied", plan=({**THREE, "offload": True}, ONE), emulated=True),
        Case(name="emulated, offload, tuples", net="tuples", plan=({**THREE, "offload": True}, ONE), emulated=True),
        Case(name="emulated, offload, in place", net="in place", plan=({**THREE, "offload": True}, TWO), emulated=True),
        Case(name="emulated, unused output", net="unused output", plan=UNEVEN, emulated=True),
        Case(name="emulated, in place", net="in place", plan=(THREE, TWO), emulated=True),
    ],
    "lengths": [
        Case(name="lengths", net="tied", plan=BOTH, lengths=(6, 2, 5, 6, 1)),
        Case(
            name="lengths, recompute, AdamW, evaluate",
            net="tied",
            plan=({**THREE, "recompute": True}, ONE),
            optimizer="AdamW",
            lengths=(3, 6, 2),
            clip=0.05,
            evaluate=(13, 5),
        ),
        Case(
            name="lengths, three replicas, cut short",
            net="tied",
            plan=(THREE, TWO, ONE),
            lengths=(2, 6, 4, 3),
            shares=((24, 8, 8), (9, 8, 3), (24, 0, 8)),
            evaluate=(13, 0, 5),
        ),
        Case(
            name="lengths, unequal micro-batches, class weights, gpipe",
            net="tied",
            plan=UNEVEN,
            class_weights=True,
            lengths=(5, 6, 3),
            schedule="gpipe",
        ),
        Case(name="lengths, emulated", net="tied", plan=BOTH, emulated=True, lengths=(6, 2, 5), evaluate=(7, 11)),
        Case(name="lengths of pictures", net="pictures", plan=({**THREE, "sizes": [4, 4]}, ONE), lengths=(7, 5, 8)),
    ],
    "evaluation": [
        Case(name="evaluate between steps", plan=BOTH, evaluate=(37, 12)),
        Case(name="evaluate tokens, one replica without samples", net="tied", plan=BOTH, evaluate=(13, 0), clip=0.05),
        Case(name="evaluate tuples, unequal micro-batches", net="tuples", plan=UNEVEN, evaluate=(7, 11)),
        Case(name="evaluate dropout and BatchNorm", net="dropout and BatchNorm", plan=BOTH, evaluate=(24, 9), steps=0),
    ],
    "split": [
        Case(name="split first stage beside two stages", net="splittable", plan=(SPLIT, TWO)),
        Case(name="split last stage, alone", net="splittable", plan=({"cuts": [4, 6], "sizes": [4, 3, 2], "widths": [1, 2]},)),
        Case(name="split middle stage, AdamW, clipped", net="splittable", plan=(MIDDLE, ONE), optimizer="AdamW", clip=0.05),
        Case(
            name="widths 3 and 2 and 1",
            net="splittable",
            plan=({"cuts": [10], "sizes": [4, 4], "widths": [3]}, {"cuts": [10], "sizes": [5], "widths": [2]}, ONE),
            optimizer="AdamW",
            clip=0.05,
        ),
        Case(name="split, recomputed, gpipe", net="splittable", plan=({**SPLIT, "recompute": True}, TWO), schedule="gpipe"),
        Case(name="split, LoRA", net="splittable, LoRA", plan=(SPLIT, TWO), clip=0.05),
        Case(name="split, DoRA, widths 3 and 2", net="splittable, DoRA", plan=(ENDS, {**ENDS, "widths": [2]})),
        Case(name="split, fp8", net="splittable, fp8", plan=(ENDS, {**ENDS, "widths": [2]}), clip=0.05),
        Case(name="split, nf4", net="splittable, nf4", plan=(SPLIT, TWO), clip=0.05, optimizer="AdamW"),
        Case(name="split on both sides, tied ends", net="tied, splittable", plan=(ENDS, ONE), clip=0.05),
        Case(
            name="split, a replica without samples",
            net="splittable",
            plan=(SPLIT, TWO),
            shares=((12, 8), (0, 3), (7, 0)),
            evaluate=(5, 3),
        ),
    ],
    "split further": [
        Case(name="one split stage", net="splittable", plan=({"cuts": [10], "sizes": [3, 3], "widths": [3]},), clip=0.05),
        Case(name="split, offloaded", net="splittable", plan=({**SPLIT, "offload": True}, TWO)),
        Case(name="split, partly frozen", net="splittable, partly frozen", plan=(SPLIT, TWO), clip=0.05),
        Case(name="split, LoRA, widths 3 and 2", net="splittable, LoRA", plan=(ENDS, {**ENDS, "widths": [2]}), optimizer="AdamW"),
        Case(name="split, DoRA", net="splittable, DoRA", plan=(SPLIT, TWO), clip=0.05, optimizer="AdamW"),
        Case(name="split, int8", net="splittable, int8", plan=(ENDS, {**ENDS, "widths": [2]}), clip=0.05),
        Case(name="split, int8, DoRA", net="splittable, int8, DoRA", plan=(SPLIT, TWO), optimizer="AdamW"),
        Case(name="split, nf4, DoRA, widths 3 and 2", net="splittable, nf4, DoRA", plan=(ENDS, {**ENDS, "widths": [2]})),
        Case(name="split, tied ends", net="tied, splittable", plan=(SPLIT, TWO), clip=0.05, optimizer="AdamW"),
        Case(name="split, evaluated", net="tied, splittable", plan=(MIDDLE, TWO), evaluate=(7, 3)),
    ],
}
