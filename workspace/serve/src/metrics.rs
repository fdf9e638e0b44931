//! What the server counts, in Prometheus's text format.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

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
    /// Those of them whose keys and values an earlier prompt had left.
    pub cached_tokens: Counter,
    /// Sequences that had to give up their blocks.
    pub preempted: Counter,
    /// Sequences whose clients left.
    pub cancelled: Counter,
    /// Sequences that were given up at their deadline.
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

impl Default for Metrics {
    fn default() -> Self {
        let histogram = || Histogram::new(SECONDS);
        let mut metrics = Metrics {
            registry: Registry::with_prefix("moh"),
            running: Gauge::default(),
            waiting: Gauge::default(),
            cache: Gauge::default(),
            heads: Family::default(),
            finished: Family::default(),
            first_token: histogram(),
            between_tokens: histogram(),
            generated_tokens: Counter::default(),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            preempted: Counter::default(),
            cancelled: Counter::default(),
            late: Counter::default(),
            failed: Counter::default(),
            refused: Counter::default(),
        };
        metrics.register();
        metrics
    }
}

impl Metrics {
    fn register(&mut self) {
        let registry = &mut self.registry;
        registry.register("requests_running", "Sequences that are computed", self.running.clone());
        registry.register(
            "requests_waiting",
            "Sequences that wait to be computed",
            self.waiting.clone(),
        );
        registry.register(
            "kv_cache_usage_ratio",
            "Share of the cache's blocks in use",
            self.cache.clone(),
        );
        registry.register(
            "heads_computed_ratio",
            "Share of the layer's heads that a token computes",
            self.heads.clone(),
        );
        registry.register(
            "requests_finished",
            "Sequences that have ended, by the reason",
            self.finished.clone(),
        );
        for (name, help, counter) in [
            ("requests_cancelled", "Sequences whose clients left", &self.cancelled),
            ("requests_late", "Sequences that were given up at --request-timeout", &self.late),
            ("requests_failed", "Sequences that could not be computed", &self.failed),
            ("requests_refused", "Requests that found the queue full", &self.refused),
            (
                "preemptions",
                "Sequences that gave up their blocks to be computed again",
                &self.preempted,
            ),
            ("prompt_tokens", "Tokens of prompts", &self.prompt_tokens),
            (
                "prompt_tokens_cached",
                "Tokens of prompts that an earlier prompt had left in the cache",
                &self.cached_tokens,
            ),
            ("generation_tokens", "Tokens generated", &self.generated_tokens),
        ] {
            registry.register(name, help, counter.clone());
        }
        registry.register_with_unit(
            "time_to_first_token",
            "Time from a request to its first token",
            Unit::Seconds,
            self.first_token.clone(),
        );
        registry.register_with_unit(
            "inter_token_latency",
            "Time between two tokens of a sequence",
            Unit::Seconds,
            self.between_tokens.clone(),
        );
    }

    /// The share of the heads that a token computes in each layer.
    pub fn set_heads(&self, shares: impl IntoIterator<Item = f64>) {
        for (layer, share) in shares.into_iter().enumerate() {
            self.heads.get_or_create(&Layer { layer }).set(share);
        }
    }

    /// A token, so many seconds after the last one, or after its request.
    pub fn token(&self, seconds: f64, is_first: bool) {
        self.generated_tokens.inc();
        match is_first {
            true => self.first_token.observe(seconds),
            false => self.between_tokens.observe(seconds),
        }
    }

    /// A sequence has ended.
    pub fn finished(&self, reason: FinishReason) {
        self.finished.get_or_create(&Finish { reason: reason.name() }).inc();
    }

    /// The state of the engine.
    pub fn observe(&self, running: usize, waiting: usize, cache: f64) {
        let whole = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.running.set(whole(running));
        self.waiting.set(whole(waiting));
        self.cache.set(cache);
    }

    /// All of it as text (OpenMetrics, which Prometheus reads).
    pub fn text(&self) -> String {
        let mut text = String::new();
        // A string can be written to.
        let _ = encode(&mut text, &self.registry);
        text
    }
}
