"""What every method shares of NVIDIA FLARE: task names and headers, the exchange and its guard, site state, record."""
