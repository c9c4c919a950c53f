"""Gamma distributions of an event rate, and mixtures of them: what is known of a rate, and how counts change it.

A mixture of gammas is conjugate to Poisson counts as one gamma is, so the update is exact. Standard library alone: a
plan is made without numpy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

MANY = 1_000
"""Events from which chance is left out of a forecast of their number: 3% beside the error of the rate."""
_STEPS = 200
"""Of Newton's method and of bisection; both end long before."""


@dataclass(frozen=True)
class Gamma:
    """Density ∝ x^(shape-1) exp(-x exposure). As a prior of a rate: `shape` events seen in `exposure` units of time."""

    shape: float
    exposure: float

    @property
    def mean(self) -> float:
        return self.shape / self.exposure

    def cdf(self, x: float) -> float:
        return _lower_gamma(self.shape, x * self.exposure)

    def pdf(self, x: float) -> float:
        scaled = x * self.exposure
        return math.exp(self.shape * math.log(scaled) - scaled - math.lgamma(self.shape)) / x

    def log_evidence(self, count: int, exposure: float) -> float:
        """Logarithm of the probability of `count` events in `exposure` (negative binomial), without its terms that do
        not depend on the distribution."""
        return (
            math.lgamma(self.shape + count)
            - math.lgamma(self.shape)
            + self.shape * math.log(self.exposure)
            - (self.shape + count) * math.log(self.exposure + exposure)
        )


@dataclass(frozen=True)
class GammaMixture:
    """Weighted gammas; the weights sum to 1."""

    weights: tuple[float, ...]
    parts: tuple[Gamma, ...]

    @property
    def mean(self) -> float:
        return sum(weight * part.mean for weight, part in self)

    def __iter__(self) -> Iterator[tuple[float, Gamma]]:
        return zip(self.weights, self.parts, strict=True)

    def cdf(self, x: float) -> float:
        return sum(weight * part.cdf(x) for weight, part in self)

    def scaled(self, factor: float) -> GammaMixture:
        """Of the rate × `factor`: of many hosts, from that of one."""
        return GammaMixture(self.weights, tuple(Gamma(part.shape, part.exposure / factor) for part in self.parts))

    def updated(self, count: int, exposure: float) -> GammaMixture:
        """After `count` events were seen in `exposure`: Bayes' rule, exact. Every gamma gets the counts, and those
        that had foreseen them get weight."""
        if exposure == 0:
            return self
        logs = [math.log(weight) + part.log_evidence(count, exposure) for weight, part in self]
        highest = max(logs)
        raw = [math.exp(value - highest) for value in logs]
        # A gamma that is a hundred orders of magnitude off has no weight left, and no logarithm for the next update.
        kept = [(value, part) for value, part in zip(raw, self.parts, strict=True) if value > 1e-100]
        total = sum(value for value, _ in kept)
        return GammaMixture(
            tuple(value / total for value, _ in kept),
            tuple(Gamma(part.shape + count, part.exposure + exposure) for _, part in kept),
        )

    def quantile(self, probability: float) -> float:
        """The rate below which the true one lies with `probability`, which is inside (0, 1): Newton's method on the
        logarithm of the rate, kept inside a bracket that shrinks."""
        low = min(part.mean for part in self.parts)
        while self.cdf(low) > probability:
            low /= 4
        high = max(part.mean for part in self.parts)
        while self.cdf(high) < probability:
            high *= 4
        x = math.sqrt(low * high)
        for _ in range(_STEPS):
            error = self.cdf(x) - probability
            low, high = (low, x) if error > 0 else (x, high)
            slope = x * sum(weight * part.pdf(x) for weight, part in self)
            step = x * math.exp(max(-5.0, min(5.0, -error / slope))) if slope > 0 else 0.0
            nearer = step if low < step < high else math.sqrt(low * high)
            if abs(nearer - x) <= 1e-9 * x:
                return nearer
            x = nearer
        return x

    def count_quantile(self, probability: float, exposure: float) -> int:
        """How many events `exposure` will have at most, with `probability`: the error of the rate and chance together
        (a mixture of negative binomials)."""
        if self.mean * exposure > MANY:
            return round(self.quantile(probability) * exposure)
        below, count = 0.0, -1
        while below < probability and count < 100 * MANY:
            count += 1
            chance = count * math.log(exposure) - math.lgamma(count + 1) if count else 0.0
            below += sum(weight * math.exp(part.log_evidence(count, exposure) + chance) for weight, part in self)
        return count


def _lower_gamma(shape: float, x: float) -> float:
    """The regularised lower incomplete gamma function: its series below the mean, and its continued fraction (Lentz)
    above, where each converges fast (Numerical Recipes, 6.2)."""
    if x <= 0:
        return 0.0
    scale = math.exp(shape * math.log(x) - x - math.lgamma(shape))
    if x < shape + 1:
        term = total = 1 / shape
        n = shape
        while term > total * 1e-15:
            n += 1
            term *= x / n
            total += term
        return min(1.0, total * scale)
    tiny = 1e-300
    b = x + 1 - shape
    c, d = 1 / tiny, 1 / b
    fraction = d
    i = 0
    while True:
        i += 1
        numerator = -i * (i - shape)
        b += 2
        d = 1 / (numerator * d + b or tiny)
        c = b + numerator / c or tiny
        fraction *= d * c
        if abs(d * c - 1) < 1e-14:
            return 1 - scale * fraction
