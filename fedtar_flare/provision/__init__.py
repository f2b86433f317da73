"""Provisioning: what a federation's kits need for this plugin, as one FLARE builder, and what runs from them."""
