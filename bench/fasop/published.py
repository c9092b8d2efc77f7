"""What FASOP publishes of two of its searches (Hwang et al., HPDC '24; github.com/AvatarHwang/FASOP): the cluster, the models,
and plans with its estimates, from FASOP/main_logs/gpt2_heterogeneous.csv at commit 4a35d97 and T5_heterogeneous.csv at 63f8b8f.
The layer times that it computed from are NumPy files; `fit` finds those that give the estimates."""

from __future__ import annotations

from typing import NamedTuple

NODES, DEVICES_PER_NODE = 8, 4
BITS_PER_SECOND = {"A100": 1840e9, "A10": 252e9}  # inside a node
BETWEEN_BITS_PER_SECOND = 40e9
NUMBER_BITS = 16
MEMORY_GB = {"A100": 40, "A10": 24}


class Searched(NamedTuple):
    """A plan: micro-batch size, replicas, which of the nodes has the A100s, layers of each stage; and FASOP's seconds: of the
    pipeline, and of the step."""

    microbatch: int
    replicas: int
    a100_node: int
    layers: tuple[int, ...]
    pipeline_seconds: float
    step_seconds: float


class Model(NamedTuple):
    """Sizes, and the global batch. Layers are those of FASOP: embedding, blocks, head; T5: twice an embedding and blocks."""

    name: str
    hidden: int
    sequence: int
    heads: int
    vocabulary: int
    layers: int
    global_batch: int
    tied: bool  # whether the estimate has the sum of embedding and head
    searched: tuple[Searched, ...]

    @property
    def best(self) -> Searched:
        """FASOP's choice."""
        return min(self.searched, key=lambda plan: plan.step_seconds)


def _around(*parts: int | tuple[int, int]) -> tuple[int, ...]:
    """Layers of stages; (3, 11) is eleven times 3."""
    return tuple(x for part in parts for x in ([part] if isinstance(part, int) else [part[0]] * part[1]))


# gbs is 256 in the last version of model_config.py; only 64 gives the estimates of this log.
GPT2_XL = Model(
    "gpt2XL",
    1600,
    1024,
    16,
    50257,
    50,
    64,
    True,
    (
        Searched(1, 2, 0, _around(5, 4, 3, 3, 2, (3, 11)), 0.9917338597542238, 1.059599757194519),
        Searched(1, 2, 6, _around(4, (3, 3), 2, (3, 7), 4, 4, 3, 3), 0.9924620843274543, 1.0787127017974854),
        Searched(1, 2, 7, _around(4, (3, 3), 2, (3, 10), 5), 1.0049390604840742, 1.0911897420883179),
        Searched(1, 4, 0, _around(10, 5, 6, 5, (6, 4)), 1.0036344749554036, 1.136949896812439),
        Searched(1, 4, 6, _around(7, 6, 5, (6, 3), 8, 6), 0.9967589624554039, 1.1506412029266357),
        Searched(1, 4, 7, _around(7, 5, 6, 5, (6, 3), 9), 1.0020189499554035, 1.1559011936187744),
        Searched(1, 4, 5, _around(7, 6, 5, 6, 6, 8, 6, 6), 1.0061597874554036, 1.1600420475006104),
        Searched(
            1,
            1,
            7,
            (2, 2, 1, 2, 1, 2, 2, 2, 1, 2, 2, 2, 1, 2, 2, 2, 1, 2, *_around((1, 10)), 2, 2, 2, 3),
            1.143665661598127,
            1.1758301258087158,
        ),
        Searched(
            1,
            1,
            0,
            (3, 2, 2, 2, 1, 2, 1, 2, 1, 2, 2, 2, 1, 2, 2, 2, 1, 2, 2, 2, 1, 2, *_around((1, 9)), 2),
            1.1936331676626635,
            1.2257976531982422,
        ),
        Searched(2, 2, 7, _around(4, (3, 3), 2, (3, 10), 5), 1.2739944619030876, 1.3602451086044312),
        Searched(2, 2, 0, _around(5, 4, 3, 3, 2, (3, 11)), 1.296777874100006, 1.3646436929702759),
        Searched(2, 2, 6, _around(4, (3, 3), 2, (3, 7), 4, 4, 3, 3), 1.2987113232464675, 1.3849619626998901),
        Searched(2, 4, 0, _around(10, 5, 6, 5, (6, 4)), 1.2881897617174862, 1.4215052127838135),
        Searched(2, 4, 6, _around(7, 6, 5, (6, 3), 8, 6), 1.2856595367174863, 1.4395418167114258),
    ),
)
T5 = Model(
    "T5",
    1024,
    512,
    32,
    30522,
    50,
    128,
    False,
    (
        Searched(2, 2, 7, _around(4, (3, 14), 4), 0.6963834989856889, 0.7051537036895752),
        Searched(2, 2, 4, _around(4, (3, 7), 4, (3, 7)), 0.7025190106779087, 0.7112892270088196),
        Searched(2, 2, 0, _around(4, (3, 7), 4, (3, 7)), 0.7127418668276928, 0.7139430046081543),
        Searched(2, 4, 7, _around(7, (6, 6), 7), 0.7045583295675829, 0.714737057685852),
        Searched(2, 2, 6, _around(4, (3, 7), 4, (3, 7)), 0.7092425795510645, 0.718012809753418),
        Searched(2, 4, 0, _around(7, (6, 3), 7, (6, 3)), 0.7186378278046572, 0.7200318574905396),
        Searched(2, 4, 6, _around(7, (6, 3), 7, 5, 7, 6), 0.7105539961995826, 0.7207327485084534),
        Searched(2, 4, 4, _around(7, (6, 3), 7, (6, 3)), 0.7120339578255827, 0.7222127318382263),
        Searched(2, 2, 3, _around((3, 7), 4, 4, (3, 7)), 0.7156811704491611, 0.7228509783744812),
        Searched(4, 4, 0, _around(18, 7, 5, (4, 5)), 0.7722386294930793, 0.7754409909248352),
        Searched(4, 4, 1, _around(8, 17, 5, (4, 5)), 0.7700606058889592, 0.7814397215843201),
        Searched(4, 4, 2, _around(6, 5, 14, (5, 5)), 0.7839732052936595, 0.7929515838623047),
        Searched(4, 4, 7, _around((5, 5), 6, 5, 14), 0.8400170088667596, 0.8477950692176819),
        Searched(4, 2, 7, _around(4, (3, 14), 4), 0.8675196749396501, 0.8762899041175842),
        Searched(4, 4, 3, _around((6, 3), 7, 7, (6, 3)), 0.8940653935066595, 0.9030437469482422),
        Searched(4, 4, 4, _around(7, (6, 3), 7, (6, 3)), 0.8999937327207033, 0.9101724624633789),
    ),
)
