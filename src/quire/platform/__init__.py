"""Interface to the operating system: cores, memory limits, the C library's allocator, page faults, child processes.

`engine`, `structured`, `execution`, `bench` and `cli` may import this package; it imports `config` and `errors` only.
"""
