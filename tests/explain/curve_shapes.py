"""Made curves of healthy runs and of broken ones, with noise of any size."""

import math
import random

from paceline.explain.series import GRADIENT, MEMORY, RATE, THROUGHPUT, VALIDATION, MetricSeries, SeriesTable

NOISE_LEVELS = (0.003, 0.01, 0.03, 0.1, 0.3)  # standard deviation, as a share of the level
EVERY = 10  # steps between points


def series(kind, values, *, name=None, times=None):
    steps = [EVERY * number for number in range(1, len(values) + 1)]
    return MetricSeries(name or kind, kind, "made", steps, list(values), times or [math.nan] * len(values))


class Noise:
    """Factors around 1; of every second seed with the heavy tails of Student's t of three degrees of freedom."""

    def __init__(self, seed, level):
        self.chance, self.level, self.is_heavy = random.Random(seed), level, seed % 2 == 0

    def factor(self, share=1.0):
        value = self.chance.gauss(0, 1)
        if self.is_heavy:
            value /= math.sqrt(sum(self.chance.gauss(0, 1) ** 2 for _ in range(3)))
        return max(0.02, 1 + share * self.level * value)


def falling(noise, points, *, scale=40.0):
    return [(2.6 + 7.9 * math.exp(-number / scale)) * noise.factor() for number in range(points)]


def healthy_run(seed, level):
    """All curves of a run that ends well: warm-up, cosine decay, spikes that recover, a resume, pauses, memory in waves."""
    noise = Noise(seed, level)
    chance = noise.chance
    points = chance.choice((30, 60, 120, 200, 400))
    floor, warmup = chance.uniform(0.3, 4), int(points * chance.choice((0, 0.02, 0.1)))
    fall, scale = chance.uniform(0.3, 8), points * chance.uniform(0.05, 0.4)

    def loss_at(share):
        return floor + fall * math.exp(-max(0, share * points - warmup / 2) / scale) - 0.1 * floor * share

    loss = [loss_at(number / points) * noise.factor() for number in range(points)]
    for _ in range(chance.choice((0, 0, 2, 6))):
        at, height = chance.randrange(points), chance.uniform(0.3, 5)
        for offset in range(min(chance.randrange(1, 6), points - at)):
            loss[at + offset] *= 1 + height * 0.6**offset
    times = [1.8e9 + 5 * number + chance.random() for number in range(points)]
    table = SeriesTable("made")
    resumed_at, redone = chance.randrange(points), chance.randrange(10)
    for number in [*range(resumed_at), *range(max(0, resumed_at - redone), points)]:
        table.add("loss", EVERY * (number + 1), loss[number] * noise.factor(0.1), times[number])
    highest = [1e10 * noise.factor() for _ in range(points)]
    evaluations = chance.choice((6, 10, 25))
    pace = [chance.choice((1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0.3)) for _ in range(points)]
    return [
        *table.take_series(),
        series(
            RATE,
            [
                min(1, (number + 1) / max(1, warmup)) * (1 + math.cos(math.pi * number / points))
                for number in range(points)
            ],
        ),
        series(GRADIENT, [(1 + 2 * math.exp(-number / scale)) * noise.factor() for number in range(points)]),
        series(
            MEMORY, [2e10 * (1 - 0.3 * math.exp(-number / 3)) * noise.factor(0.1) for number in range(points)], name="a"
        ),
        series(MEMORY, [max(highest[: number + 1]) for number in range(points)], name="highest"),
        series(
            MEMORY, [5e10 * (1 + 0.04 * math.sin(number / 9)) * noise.factor(0.2) for number in range(points)], name="w"
        ),
        series(
            THROUGHPUT, [1e5 * (0.2 if number == 0 else share) * noise.factor() for number, share in enumerate(pace)],
            times=times,
        ),
        series(
            VALIDATION, [loss_at(number / evaluations) * noise.factor(0.3) for number in range(evaluations)]
        ),
    ]  # fmt: skip
