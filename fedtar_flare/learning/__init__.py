"""How one site learns, without federation."""
