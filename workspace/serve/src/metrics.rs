//! The server's metrics, in Prometheus's text format.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry, Unit};

use crate::engine::FinishReason;

/// Upper bounds of the histograms' buckets, in seconds.
const SECONDS: [f64; 16] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
];

/// Counters, gauges and histograms.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    running: Gauge,
    waiting: Gauge,
    cache: Gauge<f64, AtomicU64>,
    heads: Family<Layer, Gauge<f64, AtomicU64>>,
    finished: Family<Finish, Counter>,
    first_token: Histogram,
    between_tokens: Histogram,
    generated_tokens: Counter,
    /// Tokens of prompts.
    pub prompt_tokens: Counter,
    /// Tokens of prompts with keys and values from an earlier prompt.
    pub cached_tokens: Counter,
    /// Sequences that had to give up their blocks.
    pub preempted: Counter,
    /// Sequences that were cancelled because their clients left.
    pub cancelled: Counter,
    /// Sequences that missed their deadline.
    pub late: Counter,
    /// Sequences that could not be computed.
    pub failed: Counter,
    /// Requests that found the queue full.
    pub refused: Counter,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Layer {
    layer: usize,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Finish {
    reason: &'static str,
}

/// Returns a new metric of the registry.
fn metric<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, help: &str) -> M {
    let metric = M::default();
    registry.register(name, help, metric.clone());
    metric
}

fn times(registry: &mut Registry, name: &str, help: &str) -> Histogram {
    let histogram = Histogram::new(SECONDS);
    registry.register_with_unit(name, help, Unit::Seconds, histogram.clone());
    histogram
}

impl Default for Metrics {
    fn default() -> Self {
        let mut all = Registry::with_prefix("moh");
        let to = &mut all;
        let help_of_cached = "Tokens of prompts that an earlier prompt had left in the cache";
        let help_of_preempted = "Sequences that gave up their blocks to be computed again";
        let help_of_heads = "Share of the layer's heads that a token computes";
        let help_of_latency = "Time between two tokens of a sequence";
        let help_of_late = "Sequences that were given up at --request-timeout";
        // In the order of the text.
        Metrics {
            running: metric(to, "requests_running", "Sequences that are computed"),
            waiting: metric(to, "requests_waiting", "Sequences that wait to be computed"),
            cache: metric(to, "kv_cache_usage_ratio", "Share of the cache's blocks in use"),
            heads: metric(to, "heads_computed_ratio", help_of_heads),
            finished: metric(to, "requests_finished", "Sequences that have ended, by the reason"),
            cancelled: metric(to, "requests_cancelled", "Sequences whose clients left"),
            late: metric(to, "requests_late", help_of_late),
            failed: metric(to, "requests_failed", "Sequences that could not be computed"),
            refused: metric(to, "requests_refused", "Requests that found the queue full"),
            preempted: metric(to, "preemptions", help_of_preempted),
            prompt_tokens: metric(to, "prompt_tokens", "Tokens of prompts"),
            cached_tokens: metric(to, "prompt_tokens_cached", help_of_cached),
            generated_tokens: metric(to, "generation_tokens", "Tokens generated"),
            first_token: times(to, "time_to_first_token", "Time from a request to its first token"),
            between_tokens: times(to, "inter_token_latency", help_of_latency),
            registry: all,
        }
    }
}

impl Metrics {
    /// Sets the share of the heads that a token computes, for each layer.
    pub fn set_heads(&self, shares: impl IntoIterator<Item = f64>) {
        for (layer, share) in shares.into_iter().enumerate() {
            self.heads.get_or_create(&Layer { layer }).set(share);
        }
    }

    /// Records a token, and the seconds since the last token or, for the first token, since the request.
    pub fn token(&self, seconds: f64, is_first: bool) {
        self.generated_tokens.inc();
        match is_first {
            true => self.first_token.observe(seconds),
            false => self.between_tokens.observe(seconds),
        }
    }

    /// Counts a sequence that has ended.
    pub fn finished(&self, reason: FinishReason) {
        self.finished.get_or_create(&Finish { reason: reason.name() }).inc();
    }

    /// Records the state of the engine.
    pub fn observe(&self, running: usize, waiting: usize, cache: f64) {
        let whole = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.running.set(whole(running));
        self.waiting.set(whole(waiting));
        self.cache.set(cache);
    }

    /// Returns all metrics as text (OpenMetrics, which Prometheus reads).
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}
