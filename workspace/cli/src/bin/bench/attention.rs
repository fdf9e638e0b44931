//! `moh-bench attention`: measures the time that attention saves by skipping heads.
//!
//! The cases alternate after each run, so that other load on the machine affects all cases.

use moh_kernels::cases::AttentionCase;
use moh_kernels::router::query_norm::{QueryNormRouter, Selects};
use moh_kernels::{Backend, Element, ElementType, QkvShape, for_element};
use moh_model::{Active, HeadRequest, LayerHeads, SharedHeadSets};
use moh_program::arguments::{at_least, between, not_negative};
use moh_program::exit::Usage;
use moh_program::options;
use moh_program::table::aligned;
use serde_json::{Value, json};

use crate::device::{Bench, DeviceArguments, Measurement};
use crate::limits::MachineLimits;
use crate::timing::Times;

const MIN_RUNS: usize = 3;
/// Maximum tokens of a measurement. A larger number is probably a typing error.
const MAX_TOKENS: usize = 1 << 24;

#[derive(clap::Args)]
pub struct AttentionArguments {
    /// Query heads
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = count())]
    heads: usize,
    /// Key/value heads
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = count())]
    kv_heads: usize,
    /// Size of a head
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = count())]
    head_dim: usize,
    /// Tokens of a sequence
    #[arg(long, value_name = "TOKENS", default_value_t = 2048, value_parser = at_least::<usize>(0))]
    length: usize,
    /// Sequences
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least::<usize>(0))]
    batch: usize,
    /// Fractions of the heads that are active
    #[arg(long, value_name = "SHARES", value_delimiter = ',', allow_hyphen_values = true)]
    #[arg(default_value = "1.0,0.75,0.5")]
    active: Vec<f64>,
    /// Shared heads, active for every token: one count per fraction, or one for all; the default is
    /// half of the heads, or half of the active heads if at most half are active
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', allow_hyphen_values = true)]
    #[arg(value_parser = at_least::<usize>(0))]
    shared_heads: Vec<usize>,
    /// Type of queries, keys and values
    #[arg(long, value_parser = options::element_types(), default_value = "f32")]
    dtype: ElementType,
    #[command(flatten)]
    device: DeviceArguments,
    /// Minimum seconds of all runs together; every case runs at least three times
    #[arg(long, default_value_t = 10.0, value_parser = not_negative)]
    seconds: f64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn count() -> impl Fn(&str) -> Result<usize, String> + Clone + Send + Sync + 'static {
    between(1, 1 << 16)
}

pub struct AttentionRow {
    router: Option<QueryNormRouter>,
    active_heads: usize,
    /// The path of both passes, on a GPU.
    path: Option<&'static str>,
    forward: Times,
    backward: Times,
    /// Routing and RoPE of queries and keys, forward and backward.
    route: Times,
    /// Repetitions of forward, backward and routing within a timing.
    counts: [usize; 3],
    /// FLOPs of forward and backward.
    operations: (f64, f64),
}

impl AttentionRow {
    fn spent(&self) -> f64 {
        self.forward.total() + self.backward.total() + self.route.total()
    }

    fn time<B: Backend, T: Element>(
        &mut self,
        bench: &Bench<B>,
        case: &mut AttentionCase<B, T>,
    ) -> moh_kernels::Result<()> {
        let (backend, [forward, backward, route]) = (&bench.backend, self.counts);
        bench.time(&mut self.forward, forward, || case.forward(backend))?;
        bench.time(&mut self.backward, backward, || case.backward(backend))?;
        bench.time(&mut self.route, route, || {
            case.route(backend)?;
            case.route_backward(backend)
        })
    }

    fn seconds(&self) -> [f64; 3] {
        let (forward, backward) = (self.forward.median(), self.backward.median());
        [forward, backward, forward + backward]
    }
}

pub fn run(arguments: &AttentionArguments) -> anyhow::Result<()> {
    let shape = QkvShape {
        batch: arguments.batch,
        length: arguments.length,
        heads: arguments.heads,
        kv_heads: arguments.kv_heads,
        head_dim: arguments.head_dim,
    };
    let routers = routers(arguments)?;
    if !matches!(shape.batch.checked_mul(shape.length), Some(1..=MAX_TOKENS)) {
        let message = format!(
            "--batch {} --length {}: must be 1 to {MAX_TOKENS} tokens in all",
            shape.batch, shape.length
        );
        return Err(Usage(message).into());
    }
    let (rows, machine) = arguments.device.measure(Job { shape, routers, arguments })?;
    for &share in &arguments.active {
        if let Some(rounding) =
            request(share, None).rounding(arguments.heads, arguments.kv_heads, None)
        {
            moh_program::exit::stderr_line(format_args!("{rounding}"));
        }
    }
    crate::print(
        arguments.json,
        &as_json(arguments, &rows, &machine),
        &as_text(arguments, &rows, &machine),
    )
}

/// Returns dense attention as `None`, and then a router for each fraction.
fn routers(arguments: &AttentionArguments) -> anyhow::Result<Vec<Option<QueryNormRouter>>> {
    let AttentionArguments { heads, kv_heads, active, shared_heads, .. } = arguments;
    if !matches!(shared_heads.len(), 0 | 1) && shared_heads.len() != active.len() {
        let message = format!(
            "--shared-heads: {} counts for {} fractions of --active: give as many, or one",
            shared_heads.len(),
            active.len()
        );
        return Err(Usage(message).into());
    }
    let mut routers = vec![None];
    for (index, &share) in active.iter().enumerate() {
        let given = shared_heads.get(index.min(shared_heads.len().saturating_sub(1)));
        let request = request(share, given.copied());
        let moh = request
            .resolve(*heads, *kv_heads, 1, None)
            .map_err(|error| Usage(error.to_string()))?;
        let LayerHeads { shared, top_k } = moh.layer(0);
        routers.push(Some(QueryNormRouter { shared, top_k, selects: Selects::Heads }));
    }
    Ok(routers)
}

fn request(share: f64, shared_heads: Option<usize>) -> HeadRequest {
    HeadRequest {
        router: None,
        shared_heads: shared_heads.map(SharedHeadSets::from),
        active: Some(Active::Share(share)),
    }
}

/// The measurement of attention with each router, and of dense attention as `None`.
struct Job<'a> {
    shape: QkvShape,
    routers: Vec<Option<QueryNormRouter>>,
    arguments: &'a AttentionArguments,
}

impl Measurement for Job<'_> {
    type Output = Vec<AttentionRow>;

    fn on<B: Backend + Clone>(self, bench: &Bench<B>) -> anyhow::Result<Self::Output> {
        for_element!(T: self.arguments.dtype => self.measure::<B, T>(bench))
    }
}

impl Job<'_> {
    fn measure<B: Backend, T: Element>(
        &self,
        bench: &Bench<B>,
    ) -> anyhow::Result<Vec<AttentionRow>> {
        let backend = &bench.backend;
        let mut cases = Vec::new();
        let mut rows = Vec::new();
        for &router in &self.routers {
            let mut case = AttentionCase::<B, T>::new(backend, self.shape, router)?;
            // A first pass of each case touches its buffers.
            case.backward(backend)?;
            let path = backend.last_path();
            case.route_backward(backend)?;
            backend.synchronize()?;
            let counts = [
                bench.count(|| case.forward(backend))?,
                bench.count(|| case.backward(backend))?,
                bench.count(|| case.route(backend))?,
            ];
            rows.push(AttentionRow {
                router,
                active_heads: router
                    .map_or(self.shape.heads, |router| router.shared.len() + router.top_k),
                path,
                forward: Times::default(),
                backward: Times::default(),
                route: Times::default(),
                counts,
                operations: (case.forward_operations() as f64, case.backward_operations() as f64),
            });
            cases.push(case);
        }
        backend.synchronize()?;
        let spent = |rows: &[AttentionRow]| -> f64 { rows.iter().map(AttentionRow::spent).sum() };
        while rows.iter().any(|row| row.forward.len() < MIN_RUNS)
            || spent(&rows) < self.arguments.seconds
        {
            for (case, row) in cases.iter_mut().zip(&mut rows) {
                backend.install(|| row.time(bench, case))?;
            }
        }
        Ok(rows)
    }
}

fn as_json(
    arguments: &AttentionArguments,
    rows: &[AttentionRow],
    machine: &MachineLimits,
) -> Value {
    let AttentionArguments { heads, kv_heads, head_dim, length, batch, .. } = arguments;
    let dense = rows.first().map_or([0.0; 3], AttentionRow::seconds);
    let cases = rows.iter().map(|row| {
        let [forward, backward, both] = row.seconds();
        let (f, b) = row.operations;
        json!({
            "attention": if row.router.is_none() { "dense" } else { "moh" },
            "path": row.path,
            "active": row.active_heads as f64 / *heads as f64,
            "shared_heads": row.router.map(|router| router.shared.len()),
            "routed_top_k": row.router.map(|router| router.top_k),
            "runs": row.forward.len(),
            "forward": {
                "seconds": row.forward.json(),
                "flops_per_second": f / forward,
                "ratio_to_dense": forward / dense[0],
            },
            "backward": {
                "seconds": row.backward.json(),
                "flops_per_second": b / backward,
                "ratio_to_dense": backward / dense[1],
            },
            "route": {"seconds": row.route.json()},
            "both": {
                "seconds": {"median": both},
                "flops_per_second": (f + b) / both,
                "ratio_to_dense": both / dense[2],
            },
        })
    });
    json!({
        "machine": machine.json(),
        "shape": {
            "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "length": length,
            "batch": batch, "dtype": arguments.dtype.name(),
        },
        "cases": cases.collect::<Vec<_>>(),
    })
}

fn as_text(
    arguments: &AttentionArguments,
    rows: &[AttentionRow],
    machine: &MachineLimits,
) -> String {
    let dense = rows.first().map_or([0.0; 3], AttentionRow::seconds);
    let table_rows = rows.iter().map(|row| {
        let [forward, backward, both] = row.seconds();
        let (f, b) = row.operations;
        let heads = match row.router {
            None => "dense".to_owned(),
            Some(QueryNormRouter { shared, top_k, .. }) => {
                format!("{} shared + {top_k} routed", shared.len())
            }
        };
        let active = 100.0 * row.active_heads as f64 / arguments.heads as f64;
        [
            heads,
            format!("{active:.0}%"),
            format!("{:.2}", forward * 1e3),
            format!("{:.2}", backward * 1e3),
            format!("{:.2}", both * 1e3),
            format!("{:.2}", row.route.median() * 1e3),
            format!("{:.1}", (f + b) / both / 1e9),
            format!("{:.3}", both / dense[2]),
        ]
    });
    let header = "heads,active,forward ms,backward ms,both ms,route ms,GFLOP/s,of dense".split(',');
    let AttentionArguments { heads, kv_heads, head_dim, length, batch, dtype, .. } = arguments;
    // All cases have the same shape, and so the same path.
    let path = rows.first().and_then(|row| row.path);
    format!(
        "{batch} x {length} tokens, {heads}/{kv_heads} heads of {head_dim}, {}{}\n{}\n\n{}",
        dtype.name(),
        path.map_or(String::new(), |path| format!(", path {path}")),
        machine.line(),
        aligned(header, table_rows, &[0])
    )
}
