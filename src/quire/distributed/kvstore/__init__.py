"""Stores of published blocks outside device and host memory: on disk, in a remote store, in other engines.

Reading order: record; counters, sources, write_queue; folder, lmdb_tables, lmdb_file, prefix_store (disk);
remote_store; exports, transfer (engines); disk_blocks. `execution` and `engine` may import this package.
"""
