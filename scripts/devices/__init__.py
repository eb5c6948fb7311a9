"""What `scripts/check_device.py` checks: models, identities, timings."""
