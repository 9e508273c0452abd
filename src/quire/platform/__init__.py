"""Interface to the operating system: cores and memory limits, the C library's allocator, page faults, threads.

`engine`, `structured`, `execution`, `bench` and `cli` may import this package; it imports `config` and `errors` only.
"""
