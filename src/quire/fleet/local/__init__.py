"""`quire serve --replicas N`: servers of one model on this machine, each in its own process, with one proxy."""
