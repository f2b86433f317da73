"""Settings of what is FedTAR's own at a site."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from fedtar_flare.settings import Settings

PROFILES = (("hash", "age", "sex"), ("age", "sex"))


class PatientConfig(Settings):
    """The patient-adaptive part, which never leaves the site (FedTAR, Eq. 2 to 4)."""

    enabled: bool = Field(True, description="False: the shared adapter alone (an ablation)")
    lr: float = Field(2e-3, gt=0, description="AdamW learning rate of the patient part")
    scale: float = Field(1.0, gt=0, description="s_p of Eq. 4; the paper's preset has alpha / rank")
    components: int = Field(16, ge=1, description="components of the Gaussian mixture")
    embedding_dim: int = Field(32, ge=1, description="width d of phi")
    time_conditioned: bool = Field(True, description="add a learned embedding of the time step to phi")
    profile: tuple[str, ...] = Field(
        PROFILES[0], description="fields of the profile; ('age', 'sex') leaves the hash out"
    )

    def misfits(self) -> Iterator[tuple[str, str]]:
        if self.profile not in PROFILES:
            yield "profile", " or ".join(map(str, PROFILES))
