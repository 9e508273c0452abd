"""From logits to tokens: logits processing, filters, draws, log probabilities, candidates of beams.

Reading order: sampler, logits_processing, row_sampling, sampling. The model runner may import this package.
"""
