"""What every tier needs: tests run from any folder, and property tests say the same on a slow machine.

No fixture patches anything; what tests share lies in tests/fakes.
"""

from hypothesis import HealthCheck, settings

# Cores are shared with engines: how long an example takes says nothing about the rule it checks.
settings.register_profile("gyre", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gyre")
