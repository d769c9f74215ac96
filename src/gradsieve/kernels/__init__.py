"""Which elements: selection and summation on whatever device the tensors live on.

`reference.py` says what each kernel means, `fast.py` computes the same with fewer passes over memory.
"""

from gradsieve.kernels.fast import above, candidates, is_finite, largest, largest_of_each, sum_by_index

__all__ = ["above", "candidates", "is_finite", "largest", "largest_of_each", "sum_by_index"]
