"""Stores of published blocks outside device and host memory: on disk, in a remote store, in other engines.

Reading order: record; folder, lmdb_tables, lmdb_file, prefix_store (disk); circuit_breaker, source_pool,
redis_connection, remote_store (remote); arriving, exports, transfer_wire, transfer_server, peers (engines);
block_store, disk_blocks. `execution` and `engine` may import this package.
"""
