"""Published prefixes: the contents of blocks (token chains), and the radix tree in which they are looked up.

Reading order: token_chain, radix_node, radix_tree, published. Every other module of `memory` may import this package.
"""
