"""Values behind the metrics, and how prometheus_client reads them.

Plain numbers instead of prometheus_client's own metrics: a step of 256 sequences observes 256 latencies, most of them
equal, and here equal ones are observed together, without a lock.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from octavo.observe.catalogue import BY_NAME, METRICS

Labels = tuple[str, ...]


class Histogram:
    """Observations by bucket; the last bucket has no upper bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """A value equal to a bound belongs below it."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        total, rows = 0, []
        for bound, count in zip((*map(str, map(float, self.bounds)), "+Inf"), self.counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        return rows


class Store:
    """All values by metric name and own labels."""

    def __init__(self, model_len_buckets: Sequence[float]) -> None:
        self.numbers: dict[str, dict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        self.histograms: dict[str, dict[Labels, Histogram]] = {}
        self._model_len_buckets = model_len_buckets
        for metric in METRICS:
            if metric.kind == "histogram":
                self.histograms[metric.name] = {}
                if not metric.labels:
                    self.histogram(metric.name)
            elif not metric.labels:
                self.numbers[metric.name][()] = 0.0

    def histogram(self, name: str, *labels: str) -> Histogram:
        by_labels = self.histograms[name]
        if labels not in by_labels:
            by_labels[labels] = Histogram(BY_NAME[name].buckets or self._model_len_buckets)
        return by_labels[labels]

    def add(self, name: str, amount: float = 1, *labels: str) -> None:
        self.numbers[name][labels] += amount

    def put(self, name: str, value: float, *labels: str) -> None:
        self.numbers[name][labels] = value

    def get(self, name: str, *labels: str) -> float:
        return self.numbers[name].get(labels, 0.0)


class Exposition:
    """A store as Prometheus text, every prefixed metric once under each prefix."""

    def __init__(self, store: Store, prefixes: Iterable[str], own: Labels, info: Mapping[str, str]) -> None:
        self.store, self.prefixes, self.own = store, tuple(prefixes), own
        self.info = dict(info)  # labels of cache_config_info
        self.registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.registry.register(self)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for metric in METRICS:
            for prefix in self.prefixes if metric.prefixed else ("",):
                yield self._family(metric.name, f"{prefix}:{metric.name}" if prefix else metric.name)

    def _family(self, name: str, shown: str) -> Metric:
        metric = BY_NAME[name]
        own = self.own if metric.prefixed else ()
        names = metric.all_labels
        if name == "cache_config_info":
            family = GaugeMetricFamily(shown, metric.help, labels=(*names[:-1], *self.info))
            family.add_metric((*own, *self.info.values()), 1.0)
            return family
        if metric.kind == "histogram":
            histogram = HistogramMetricFamily(shown, metric.help, labels=names)
            for labels, values in self.store.histograms[name].items():
                histogram.add_metric((*own, *labels), values.cumulative(), values.sum)
            return histogram
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        numbers = kind(shown, metric.help, labels=names)
        for labels, value in self.store.numbers[name].items():
            numbers.add_metric((*own, *labels), value)
        return numbers
