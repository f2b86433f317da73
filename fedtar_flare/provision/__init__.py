"""Provisioning: what the kits of a federation need for this plugin, as one FLARE builder, and what runs from them."""
