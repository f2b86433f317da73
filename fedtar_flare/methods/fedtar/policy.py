"""The server's residual step, and the meta-learned alpha with its hypergradient from T numbers (FedTAR, Eq. 7, 8).

The paper's outer gradient uses ``S = dw/dpsi``, a matrix of (size of w) x (size of psi). Eq. 7 telescopes, so the same
gradient is, exactly and with wbar_t held fixed,

    dL/dalpha_t = prod_{y > t, y taken} (1 - alpha_y) * <g, Delta_t>,    Delta_t = (w_t - w_{t-1}) / alpha_t,

with g the gradient of the validation loss at w_T. A site knows w_0..w_T from the broadcasts, so it sends the T numbers
``<g, w_t - w_{t-1}>``; neither the gradient nor any data leaves it. autograd carries dL/dalpha on into psi.

wbar_t depends on w_{t-1}, though: local training keeps a share rho_t of its start, so that early steps count for more.
With ``hypergradient: corrected`` the factor is ``1 - alpha_y (1 - rho_y)``, with rho_y of :class:`RetainedShares`.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from fedtar_flare.core.errors import ConfigError, ExchangeError
from fedtar_flare.core.files import without_prefix
from fedtar_flare.learning.training import load_optimizer_state, optimizer_state
from fedtar_flare.methods.fedtar.config import AlphaConfig
from fedtar_flare.protocol.exchange import Tensors
from fedtar_flare.runtime.aggregation import TRIMMED
from fedtar_flare.runtime.training import ProductMean

ALPHA_FLOOR = 1e-5
"""A step whose alpha_t is below this leaves w unchanged, and its gradient is 0.

Much smaller alphas would change some float32 values and not others: sites refuse such a broadcast
(:func:`.release.require_spread`).
"""

RHO_START = 0.5
"""rho_t in the first round, about what 12 updates keep (.47 measured). With 0 the last step alone would count then."""

WORSE = 0.2
"""A step is dropped if its T number is, beyond doubt, above this share of the reports' validation loss (chosen in
docs/research/time.md)."""

APART = 3
"""In that loss no hospital's counts for more than so many times their median, or for less than that part of it."""

FIXED = ("uniform", "given")
"""Forms of alpha that are not learnt."""


def residual_step(w: Tensors, mean: Tensors, alpha: float) -> tuple[dict[str, torch.Tensor], float]:
    """One residual step of the server (Eq. 7): ``w_t = w_{t-1} + alpha_t (wbar_t - w_{t-1})``, in float64.

    Takes the master weights w_{t-1}, float32, and ``wbar_t - w_{t-1}`` (Eq. 6). Returns w_t, rounded once, and
    ``||w_t - w_{t-1}||`` as measured: alpha_t times the norm of the mean (Theorem 2) up to float32's rounding.
    """
    if isinstance(mean, ProductMean):
        return mean.step(w, alpha)
    moved: dict[str, torch.Tensor] = {}
    squares = []
    for name in sorted(w):
        before = w[name].double()
        moved[name] = (before + alpha * mean[name].double()).float()
        squares.append(float((moved[name].double() - before).square().sum()))
        if not math.isfinite(squares[-1]):
            raise ExchangeError(f"tensor '{name}' has values that are not finite after the step")
    return moved, math.sqrt(math.fsum(squares))


class AlphaPolicy(nn.Module):
    """alpha_1..alpha_T from psi: a learnable table of time embeddings and one hidden ReLU layer (Eq. 8), in float64.

    ``embedding_dim`` is d_psi, of embeddings and layer. ``active`` (T,) is 1, and 0 for a step that :class:`StepTest`
    dropped, whose alpha is 0.
    """

    def __init__(self, time_steps: int, config: AlphaConfig, *, embedding_dim: int = 32, seed: int = 0):
        super().__init__()
        self.alpha_form, self.given = config.alpha_form, torch.tensor(config.alphas, dtype=torch.float64)
        if self.alpha_form == "given" and len(self.given) != time_steps:
            raise ConfigError(f"server.alphas: {len(self.given)} numbers for {time_steps} steps; give one for each")
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int, scale: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64) * scale)

        self.time_steps, d = time_steps, embedding_dim
        self.active = torch.ones(time_steps, dtype=torch.float64)
        self.embedding = draw(time_steps, d, scale=1.0)
        self.hidden_weight = draw(d, d, scale=math.sqrt(2 / d))
        self.hidden_bias = nn.Parameter(torch.zeros(d, dtype=torch.float64))
        self.output_weight = draw(d, scale=0.01 / math.sqrt(d))  # small: the alphas start near equal
        odds = config.initial_alpha / (1 - config.initial_alpha)
        start = math.log(odds) if self.alpha_form == "sigmoid" else 0.0
        self.output_bias = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def alphas(self, steps: int | None = None) -> torch.Tensor:
        """alpha_1..alpha_T (T,), or the first ``steps``; float64, differentiable in psi unless the form is fixed."""
        n = steps or self.time_steps
        if self.alpha_form in FIXED:
            fixed = self.given[:n] if self.alpha_form == "given" else torch.full((n,), 1 / n, dtype=torch.float64)
            return fixed * self.active[:n]
        hidden = torch.relu(self.embedding[:n] @ self.hidden_weight.T + self.hidden_bias)
        logits = hidden @ self.output_weight + self.output_bias
        return self.active[:n] * (torch.softmax(logits, 0) if self.alpha_form == "softmax" else torch.sigmoid(logits))


def pool_t_numbers(numbers: Mapping[str, Sequence[float]], reports: Mapping[str, int]) -> torch.Tensor:
    """Mean of the sites' T numbers (T of each), weighted by their counts of validation reports: (T,), float64."""
    total = sum(reports[site] for site in numbers)
    pooled = torch.zeros(len(numbers[min(numbers)]), dtype=torch.float64)
    for site in sorted(numbers):
        pooled += torch.tensor(numbers[site], dtype=torch.float64) * (reports[site] / total)
    return pooled


def hypergradient(
    numbers: torch.Tensor, alphas: torch.Tensor, taken: torch.Tensor, retained: Sequence[float] | None = None
) -> torch.Tensor:
    """dL/dalpha (T,), exact in float64, from the T numbers (see the module; supplement, Eq. 16 to 19).

    It is 0 at steps that were not ``taken`` (T,), which have no factor in the products, and below :data:`ALPHA_FLOOR`.
    ``retained`` are rho_1..rho_T; None: 0, the paper's form.
    """
    alphas, numbers = alphas.detach().double(), numbers.detach().double()
    gradient = torch.zeros_like(alphas)
    rest = 1.0
    for t in range(len(alphas), 0, -1):
        if taken[t - 1] and not alphas[t - 1] < ALPHA_FLOOR:  # a NaN stays seen
            gradient[t - 1] = rest * numbers[t - 1] / alphas[t - 1]
            rest *= 1.0 - float(alphas[t - 1]) * (1.0 - (retained[t - 1] if retained else 0.0))
    return gradient


class RetainedShares:
    """rho_t, the share of a step's start that its training keeps, from starts and mean updates of successive rounds.

    Where the start w of step t moves by d from one round to the next, wbar_t(w) moves by rho_t d, and the update
    ``wbar_t(w) - w`` by ``(rho_t - 1) d``: least squares over all rounds so far give rho_t.
    """

    def __init__(self) -> None:
        self._before: dict[int, torch.Tensor] = {}
        self._sums: dict[int, torch.Tensor] = {}

    def add(self, t: int, start: Tensors, update: Tensors) -> None:
        """Take the start and the mean update of step t of a round."""
        now = torch.stack([torch.cat([w[name].flatten().float() for name in sorted(start)]) for w in (start, update)])
        if t in self._before:
            d, change = now.double() - self._before[t].double()
            self._sums[t] = self._sums.get(t, 0) + torch.stack([-d @ change, d @ d])
        self._before[t] = now

    def shares(self, steps: int) -> list[float]:
        """rho_1..rho_T, within 0 and 1; :data:`RHO_START` for a step whose start has not moved yet."""
        sums = [self._sums.get(t, torch.zeros(2)).tolist() for t in range(1, steps + 1)]
        return [min(1.0, max(0.0, 1 - lost / moved)) if moved else RHO_START for lost, moved in sums]

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint stores."""
        kinds = {"before": self._before, "sums": self._sums}
        return {f"retained/{kind}/{t}": value for kind, values in kinds.items() for t, value in values.items()}

    def load_state(self, state: Tensors) -> None:
        """Restore :meth:`state`."""
        for name, value in without_prefix(state, "retained/").items():
            kind, t = name.split("/")
            (self._before if kind == "before" else self._sums)[int(t)] = value


class StepTest:
    """Which time steps make drafts worse, by T numbers of rounds whose steps learn from their own visits.

    A T number estimates by how much its step raised a hospital's validation loss, to first order. A step is dropped,
    with alpha 0 from then on, if the hospitals' median less two standard errors is above :data:`WORSE` of the reports'
    mean validation loss. A single hospital that lies cannot have a step dropped that harmed no other, nor prevent a
    drop that the others agree on closely. At most half of the steps are dropped. Where validation reports are wrong
    like those of some steps, the right steps are dropped.
    """

    def __init__(self, time_steps: int):
        self._verdicts = torch.zeros(time_steps)  # 0: not tested yet, 1: kept, -1: dropped

    def passed(self, steps: int) -> bool:
        """Whether all of the first ``steps`` passed, so that the next round's may learn from each other's visits."""
        return bool((self._verdicts[:steps] > 0).all())

    @property
    def active(self) -> torch.Tensor:
        """1 for each step (T,), 0 for a dropped one; float64."""
        return (self._verdicts >= 0).double()

    def judge(self, numbers: torch.Tensor, losses: torch.Tensor) -> list[int]:
        """Test the steps of a round, and drop those that made drafts worse.

        Parameters
        ----------
        numbers : Tensor
            T numbers (K, T) of K >= 3 hospitals, float64, in nats per token.
        losses : Tensor
            The hospitals' validation losses (K,), of reports alone, float64, in nats per token.

        Returns
        -------
        list of int
            The steps that are dropped now, from 1.
        """
        # 1. The hospitals' distances from their median, the farthest fifth (one at least) cut to the next one's.
        median = numbers.median(0).values
        distances = numbers - median
        lengths = distances.norm(dim=1)
        most = lengths.sort().values[-1 - max(1, int(TRIMMED * len(lengths)))]
        far = lengths > most
        distances[far] *= (most / lengths[far])[:, None]
        # 2. One standard error for all steps that move w: a single step's is too uncertain where hospitals are few.
        before = self._verdicts[: numbers.shape[1]]
        least = median - 2 * (distances[:, before >= 0].var(0).mean() / len(numbers)).sqrt()
        # 3. What is beyond doubt too large is dropped.
        loss = losses.clamp(losses.median() / APART, APART * losses.median()).mean()
        now = torch.where((least > WORSE * loss) | (before < 0), -1.0, 1.0)
        if 2 * int((now < 0).sum()) > len(now):  # then it is the validation reports that are in doubt
            now = torch.where(before < 0, -1.0, 1.0)
        dropped = [t for t in range(1, len(now) + 1) if now[t - 1] < 0 <= before[t - 1]]
        self._verdicts[: len(now)] = now
        return dropped

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint stores."""
        return {"verdicts": self._verdicts}

    def load_state(self, state: Tensors) -> None:
        """Restore :meth:`state`; steps that were added to the run since, or never tested, are not tested yet."""
        if (verdicts := state.get("verdicts")) is not None:
            self._verdicts[: len(verdicts)] = verdicts


class OuterOptimizer:
    """AdamW on psi (weight decay .01, learning rate eta), one step a round."""

    def __init__(self, policy: AlphaPolicy, *, eta: float = 1e-2):
        self.policy, self.parameters, self.eta = policy, dict(policy.named_parameters()), eta
        self._adamw = torch.optim.AdamW(self.parameters.values(), lr=eta)

    def step(self, gradient: torch.Tensor, rate: float = 1.0) -> float:
        """``psi <- psi - rate eta grad_psi L``, given dL/dalpha (T,), or of the first steps; ``||grad_psi L||``."""
        self._adamw.param_groups[0]["lr"] = rate * self.eta
        self._adamw.zero_grad()
        self.policy.alphas(len(gradient)).backward(gradient.double())
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = math.sqrt(math.fsum(float(gradient.square().sum()) for gradient in gradients))
        self._adamw.step()
        return norm

    def state(self) -> dict[str, torch.Tensor]:
        """psi and AdamW's state, for a checkpoint."""
        return self.policy.state_dict() | optimizer_state(self._adamw, self.parameters)

    def load_state(self, state: Tensors) -> None:
        """Restore :meth:`state`, so that the next step is the same to the bit."""
        self.policy.load_state_dict({name: state[name] for name in self.parameters})
        load_optimizer_state(self._adamw, self.parameters, state)
