"""Conversion of a client's prompt and parameters to a `Request`: token ids, validation, embeddings, namespaces.

Reading order: prompts, tokenized_params, request_builder, tokenizer_pool. Every module of `engine` but `outputs`,
`control` and `metrics` may import this package.
"""
