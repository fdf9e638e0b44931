//! `moh-bench operators`: measures every operator against the machine's limits.

use moh_kernels::cases::{self, Case, Work};
use moh_kernels::{Backend, Element, ElementType, for_element};
use moh_program::exit::Usage;
use moh_program::options;
use moh_program::table::aligned;
use serde_json::{Value, json};

use crate::device::{Bench, DeviceArguments, Measurement};
use crate::limits::MachineLimits;
use crate::timing::Times;

/// Minimum runs of a case, after a run to warm up.
const MIN_RUNS: usize = 3;

#[derive(clap::Args)]
pub struct OperatorsArguments {
    /// Only the operators whose names contain this text
    #[arg(value_name = "NAME")]
    filter: Option<String>,
    /// Type of weights and activations; both if omitted
    #[arg(long, value_parser = options::element_types())]
    dtype: Option<ElementType>,
    #[command(flatten)]
    device: DeviceArguments,
    /// Minimum seconds of each case; every case runs at least three times
    #[arg(long, default_value_t = 0.3, value_parser = moh_program::arguments::not_negative)]
    seconds: f64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub struct OperatorRow {
    name: String,
    dtype: ElementType,
    work: Work,
    times: Times,
}

impl OperatorRow {
    /// Returns the median rate, and the limit for comparison.
    fn rate_and_limit(&self, machine: &MachineLimits) -> (f64, f64) {
        let (work, limit) = match (self.work, self.dtype) {
            (Work::Operations(count), ElementType::F32) => (count, machine.f32_matmul),
            (Work::Operations(count), ElementType::BF16) => (count, machine.bf16_matmul),
            (Work::Bytes(count), _) => (count, machine.copy),
        };
        (self.times.rates(work as f64).median, limit)
    }
}

pub fn run(arguments: &OperatorsArguments) -> anyhow::Result<()> {
    let (rows, machine) = arguments.device.measure(arguments)?;
    crate::print(arguments.json, &as_json(&rows, &machine), &as_text(&rows, &machine))
}

impl Measurement for &OperatorsArguments {
    type Output = Vec<OperatorRow>;

    fn on<B: Backend + Clone>(self, bench: &Bench<B>) -> anyhow::Result<Self::Output> {
        let mut rows = Vec::new();
        for dtype in ElementType::ALL {
            if self.dtype.is_none_or(|only| only == dtype) {
                rows.extend(for_element!(T: dtype => self.measure_cases::<B, T>(bench))?);
            }
        }
        if rows.is_empty() {
            let filter = self.filter.as_deref().unwrap_or_default();
            return Err(Usage(format!("{filter}: no operator's name contains it")).into());
        }
        Ok(rows)
    }
}

impl OperatorsArguments {
    fn measure_cases<B: Backend, T: Element>(
        &self,
        bench: &Bench<B>,
    ) -> anyhow::Result<Vec<OperatorRow>> {
        let chosen = |name: &str| self.filter.as_ref().is_none_or(|part| name.contains(part));
        let cases = cases::all::<B, T>(bench.sizes).into_iter().filter(|case| chosen(&case.name));
        let measure = |case: Case<B>| {
            let mut run = case.prepare(&bench.backend)?;
            let times = bench.repeat(MIN_RUNS, self.seconds, || run(&bench.backend))?;
            Ok(OperatorRow { name: case.name, dtype: T::ELEMENT, work: case.work, times })
        };
        cases.map(measure).collect()
    }
}

fn as_json(rows: &[OperatorRow], machine: &MachineLimits) -> Value {
    let operators = rows.iter().map(|row| {
        let (rate, limit) = row.rate_and_limit(machine);
        let (work, unit) = match row.work {
            Work::Operations(count) => (count, "operations"),
            Work::Bytes(count) => (count, "bytes"),
        };
        json!({
            "operator": row.name,
            "dtype": row.dtype.name(),
            "runs": row.times.len(),
            "seconds": row.times.json(),
            "work": work,
            "unit": unit,
            "per_second": rate,
            "share_of_limit": rate / limit,
        })
    });
    json!({"machine": machine.json(), "operators": operators.collect::<Vec<_>>()})
}

fn as_text(rows: &[OperatorRow], machine: &MachineLimits) -> String {
    let table_rows = rows.iter().map(|row| {
        let (rate, limit) = row.rate_and_limit(machine);
        let unit = match row.work {
            Work::Operations(_) => "GFLOP/s",
            Work::Bytes(_) => "GB/s",
        };
        [
            row.name.clone(),
            row.dtype.name().to_owned(),
            format!("{:.3}", row.times.median() * 1e3),
            format!("{:.1} {unit:<7}", rate / 1e9),
            format!("{:.0}%", 100.0 * rate / limit),
        ]
    });
    let header = ["operator", "type", "ms", "rate        ", "of limit"];
    format!("{}\n\n{}", machine.line(), aligned(header, table_rows, &[0]))
}
