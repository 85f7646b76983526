"""Sandboxes: bubblewrap, limits, the gateway socket as the only network, copies in and out, leases. No torch."""
