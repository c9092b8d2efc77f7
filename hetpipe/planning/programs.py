"""Linear and integer programs, by HiGHS (Huangfu and Hall, "Parallelizing the dual revised simplex method", Mathematical
Programming Computation 10, 2018)."""

from __future__ import annotations

from typing import NamedTuple

import highspy
import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
NODES = 200  # of the tree of an integer program; all that planners have were solved at the first
KNOWN = (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible)


class Optimum(NamedTuple):
    """The least cost, how much of each column, and what one more unit of each row's limit costs (of a linear program)."""

    cost: float
    x: Array
    prices: Array


class Program:
    """The least costs · x with low ≤ rows · x ≤ high and 0 ≤ x ≤ most, of `whole` numbers or not. rows [rows, columns]; `low`,
    `high` [rows] and `most` [columns] may be infinite. Other costs begin with the basis that the last ones ended with. `options`
    are those of HiGHS; where a limit ends an integer program, the best that it had is the answer. No limit is one of time, so the
    load of the machine does not decide what is found."""

    def __init__(self, rows: ArrayLike, low: ArrayLike, high: ArrayLike, *, whole: bool = False, **options: float) -> None:
        table = np.asarray(rows, dtype=np.float64)
        self.count, self.columns = table.shape
        self.every, self.none = np.arange(self.columns, dtype=np.int32), np.zeros(self.columns)
        self.known = True  # whether it is certain that no answer is better, or that there is none
        row, column = np.nonzero(table)
        program = highspy.HighsLp()
        program.num_row_, program.num_col_ = self.count, self.columns
        program.row_lower_, program.row_upper_ = (np.broadcast_to(x, self.count).astype(np.float64) for x in (low, high))
        program.col_cost_, program.col_lower_, program.col_upper_ = self.none, self.none, np.full(self.columns, np.inf)
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = np.searchsorted(row, np.arange(self.count + 1))
        program.a_matrix_.index_, program.a_matrix_.value_ = column, table[row, column]
        if whole:
            program.integrality_ = [highspy.HighsVarType.kInteger] * self.columns
        self.highs = highspy.Highs()
        for name, value in {"output_flag": False, "threads": 1, "mip_max_nodes": NODES, **options}.items():
            self.highs.setOptionValue(name, value)
        self.highs.passModel(program)

    def least(self, costs: ArrayLike, most: ArrayLike = np.inf) -> Optimum | None:
        """None where there is none, or none was found within the limits (see `known`)."""
        self.highs.changeColsCost(self.columns, self.every, np.asarray(costs, dtype=np.float64))
        upper = np.broadcast_to(most, self.columns).astype(np.float64)
        self.highs.changeColsBounds(self.columns, self.every, self.none, upper)
        self.highs.run()
        info = self.highs.getInfo()
        self.known = self.highs.getModelStatus() in KNOWN
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        found = self.highs.getSolution()
        return Optimum(info.objective_function_value, np.array(found.col_value), np.array(found.row_dual))
