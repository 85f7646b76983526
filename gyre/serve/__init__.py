"""The SGLang engine of a cell: token ids in, token ids and behaviour log-probs out, weights swapped by version."""
