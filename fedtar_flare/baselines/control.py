"""SCAFFOLD's control variates as tensors that travel."""

from __future__ import annotations

from fedtar_flare.protocol.contract import LORA_NAMES, Group

PREFIX = "control."
"""Of a control variate's name, before that of the tensor that it belongs to."""

CONTROL = Group("control", "averaged", (rf"control\.{LORA_NAMES}",), "control variates: means of a site's gradients")
