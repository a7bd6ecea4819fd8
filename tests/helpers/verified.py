"""A module for ``myllm verify`` of which two results are wrong."""

WRONG = """
import numpy as np
from reference import ops
def softmax(x):
    return ops.softmax(x) * 2
def relu_forward(x):
    return ops.relu_forward(x)
def relu_backward(dout, cache):
    return dout
"""
