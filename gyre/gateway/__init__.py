"""The model API that harnesses speak to: wire forms, matching, rendering of what is new, the socket. No torch."""
