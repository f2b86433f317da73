"""FedTAR's own settings."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from fedtar_flare.core.settings import Settings

PROFILES = (("hash", "age", "sex"), ("age", "sex"))
EMBEDDING_DIM = 32
"""d, length of phi."""


class PatientConfig(Settings):
    """The patient-adaptive part, which stays at the site (FedTAR, Eq. 2 to 4)."""

    enabled: bool = Field(True, description="False: the shared adapter alone (an ablation)")
    lr: float = Field(2e-3, gt=0, description="AdamW learning rate of the patient part")
    scale: float = Field(1.0, gt=0, description="s_p of Eq. 4; the paper's preset has alpha / rank")
    mixture: bool = Field(True, description="False: phi is made of the profile in place of q (the paper's ablation)")
    components: int = Field(16, ge=1, description="components of the Gaussian mixture, and length of q")
    patients_per_component: int = Field(
        10, ge=1, description="training patients for each of the components that a site fits; 1 in the paper's preset"
    )
    time_conditioned: bool = Field(True, description="add a learned embedding of the time step to phi")
    common_start: bool = Field(
        True, description="phi of all patients starts near one random vector; in the paper's preset b_proj starts at 0"
    )
    local_adapter: bool = Field(
        False, description="write with the shared adapter as this site last trained it; the paper's: the server's"
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="share of an update's visits that are trained without their patients' adapters"
    )
    constant_q: bool = Field(False, description="ablation: the same q for every patient, so that none is told apart")
    profile: tuple[str, ...] = Field(PROFILES[1], description="fields of the profile; the paper adds a hash of the id")

    def validation_errors(self) -> Iterator[tuple[str, str]]:
        if self.profile not in PROFILES:
            yield "profile", " or ".join(map(str, PROFILES))

    @property
    def q_length(self) -> int:
        """Length of the input of W_proj: q, or the profile."""
        return self.components if self.mixture else len(self.profile)

    def components_for(self, patients: int) -> int:
        """The number of components that a site fits."""
        return min(self.components, max(1, round(patients / self.patients_per_component)))


class AlphaConfig(Settings):
    """The weights alpha_t of the residuals, at the server (FedTAR, Eq. 7 and 8)."""

    alpha_form: Literal["softmax", "sigmoid", "uniform", "given"] = Field(
        "softmax",
        description="softmax over the steps (the paper: the alphas of a round sum to one), or sigmoid of each; not "
        "learnt: 'uniform', 1/T (the paper's ablation without temporal weighting), and 'given', those of alphas",
    )
    alphas: tuple[float, ...] = Field((), description="for 'given': alpha_1 to alpha_T, each from 0 to 1")
    initial_alpha: float = Field(0.7, gt=0, lt=1, description="start of each alpha_t (sigmoid); softmax: near 1/T")
    eta: float = Field(1e-2, gt=0, description="rate of the outer step, AdamW's")
    eta_schedule: Literal["constant", "inverse_sqrt"] = Field(
        "constant", description="of eta over rounds: 'inverse_sqrt' is eta / sqrt(r), as the paper's analysis has it"
    )
    hypergradient: Literal["first_order", "corrected"] = Field(
        "first_order",
        description="of the outer step: 'first_order' takes the sites' means as if they did not depend on earlier "
        "steps (the paper); 'corrected' knows that training keeps a share of the weights that it starts from, "
        "estimated from the updates of successive rounds; it helps where reports of some steps are wrong",
    )

    def validation_errors(self) -> Iterator[tuple[str, str]]:
        if (self.alpha_form == "given") != bool(self.alphas) or any(not 0 <= alpha <= 1 for alpha in self.alphas):
            yield "alphas", "numbers from 0 to 1 with alpha_form 'given', else empty"


class TemporalConfig(Settings):
    """The visits that a time step learns from, and what it moves."""

    replay: Literal["none", "seen", "tested"] = Field(
        "none",
        description="which visits a step trains on: 'none': its own (the paper), 'seen': of every step so far, "
        "'tested': its own in the first round, in which the server, for three hospitals or more, finds steps that make "
        "most of them worse; then those of every step where none is, else its own, and such steps are dropped. Where "
        "validation reports are wrong too, right steps are dropped",
    )
    personal: Literal["whole", "alpha"] = Field(
        "whole",
        description="how much of a step's training enters what stays at the site (patient part, own head, "
        "patient.local_adapter): 'whole' (the paper), or 'alpha': alpha_t of it, as of the shared adapter, which helps "
        "where reports of some steps are wrong",
    )
    validation: Literal["reports", "findings"] = Field(
        "reports",
        description="the loss that alpha is learnt from: 'reports' (the paper), or 'findings': also that of a shared "
        "diagnosis head, which tells steps with wrong reports where validation patients' reports are right",
    )
