"""Tasks: the reader of Harbor folders, verifiers and scores, and generated task families. No torch."""
