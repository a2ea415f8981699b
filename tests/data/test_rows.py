"""Values of rows that rollouts share."""

import numpy as np
import torch

from dualkv.data.rows import first_of_rows


def test_first_record_of_a_row():
    """The order of experts differs at row 0, an expert at row 1; nothing is recorded for row 3."""
    recorded = torch.tensor([[[0, 1]], [[2, 3]], [[1, 0]], [[3, 9]], [[4, 5]], [[2, 9]]], dtype=torch.int16)
    routes, differs = first_of_rows(np.array([0, 1, 0, 1, 2, 1]), recorded, 4)
    assert routes[:, 0].tolist() == [[0, 1], [2, 3], [4, 5], [-1, -1]]
    assert differs.tolist() == [False, False, False, True, False, True]
