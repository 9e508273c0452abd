"""The prefix cache on disk: published blocks kept in an LMDB file between runs, with their digests and checksums.

Reading order: record, folder, lmdb_tables, lmdb_file, prefix_store, disk_blocks. `execution` and `engine` may import this
package.
"""
