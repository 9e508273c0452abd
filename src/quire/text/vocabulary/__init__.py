"""Parts of tokenizers: pieces, control tokens, cuts of long texts."""
