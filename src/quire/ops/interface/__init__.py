"""The interface of the kernels: operations, weights and steps as values."""
