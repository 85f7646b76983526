"""Messages between the processes of a run and the links that carry them. No torch, no policy."""
