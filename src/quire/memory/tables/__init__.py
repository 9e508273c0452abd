"""Block tables of sequences: appending, copy on write, publishing, snapshots of recurrent states, rollback.

Reading order: tables, append, publish, snapshots, publication, rollback. `tiers`, `capacity` and the manager may import
this package.
"""
