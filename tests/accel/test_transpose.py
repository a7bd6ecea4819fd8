"""Transposes, of matrices that no band divides, too."""

import numpy as np
import pytest

from accel.transpose import BAND, transpose

SIZES = [0, 1, BAND - 1, BAND, 2 * BAND + 1]


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("columns", SIZES)
def test_a_transpose_is_numpy_s(rows: int, columns: int, dtype: type) -> None:
    wide = np.arange(rows * (columns + 5)).reshape(rows, columns + 5).astype(dtype)
    source = wide[:, 2 : 2 + columns]  # its rows lie apart
    assert np.array_equal(transpose(source), source.T)
    around = np.full((columns, rows + 3), 7, dtype)
    transpose(source, around[:, 1 : 1 + rows])
    assert np.array_equal(around[:, 1 : 1 + rows], source.T)
    assert (around[:, 0] == 7).all() and (around[:, 1 + rows :] == 7).all()


def test_a_target_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the transpose of \(3, 4\) is not of shape \(4, 2\)"):
        transpose(np.zeros((3, 4)), np.zeros((4, 2)))
